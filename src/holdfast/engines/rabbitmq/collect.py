"""The collector's queues on RabbitMQ: durable, acked after the work; requests, notices and parked messages confirmed.

Queues are classic on a broker of one node. A quorum queue that is declared within a second before a single node is
killed loses confirmed messages, and a transaction's queues are always young; so they are quorum queues only where the
caller says that the cluster has three nodes or more. None has `x-expires`: it drops messages.

Payloads pushed by RabbitMQ, as many at a time as their size allows: AMQP's prefetch counts messages, not bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

from pamqp import base
from pamqp import commands as amqp

from holdfast.core.collect import DEAD_QUEUE
from holdfast.core.message import OutcomeKind, Outgoing
from holdfast.core.moments import moment
from holdfast.core.policy import RetryPolicy
from holdfast.core.topology.model import FamilyQueue, Queue
from holdfast.engines.rabbitmq.broker import RabbitIntake
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection
from holdfast.engines.rabbitmq.consumer import RabbitConsumer
from holdfast.engines.rabbitmq.declare import QueueFamily
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Event
from holdfast.errors import BrokerError, BrokerRefused, Invalid, MessageRefused, NotOurs, QueueMissing
from holdfast.ports.broker import Incoming, Subscription
from holdfast.ports.clock import Clock
from holdfast.ports.collect import GroupIntake

#: How many are pushed before it is known how large they are.
FIRST_COUNT = 1


class FittedConsumer(RabbitConsumer):
    """A consumer whose prefetch can be changed: it is begun anew on its channel, and keeps what it has."""

    @property
    def prefetch(self) -> int:
        return self._prefetch

    async def fit(self, prefetch: int) -> None:
        """From now on so many; those that are here already are not counted. A lost channel is begun with it anew."""
        self._prefetch = prefetch
        channel, tag = self._channel, self._consumer_tag
        if channel is None or not tag:
            return
        self._consumer_tag = ""
        with suppress(BrokerError):  # the channel is gone: consuming is taken up again with the new number
            await channel.call(amqp.Basic.Cancel(tag))
            if self._has_left(channel):
                return
            await channel.call(amqp.Basic.Qos(prefetch_count=prefetch))
            answer = await channel.call(methods.Consume(queue=self.queue))
            tag = str(getattr(answer, "consumer_tag", ""))
            if self._has_left(channel):  # it was stopped while there was nothing to cancel
                await channel.call(amqp.Basic.Cancel(tag))
            else:
                self._consumer_tag = tag

    def _has_left(self, channel: Channel) -> bool:
        return self._stopping or channel is not self._channel


class FittedIntake(RabbitIntake):
    """Takes deliveries, and fits the prefetch to the largest one so far."""

    def __init__(
        self,
        consumer: FittedConsumer,
        publisher: RabbitPublisher,
        around: QueueFamily,
        subscription: Subscription,
        *,
        user: str,
        clock: Clock,
        bytes_max: int,
    ) -> None:
        super().__init__(consumer, publisher, around, subscription, user=user, clock=clock)
        self._fitted = consumer
        self._bytes_max = bytes_max
        self._largest_bytes = 0

    async def take(self, count_max: int) -> Sequence[Incoming]:
        batch = await super().take(count_max)
        largest = max((len(incoming.message.body) for incoming in batch), default=0)
        if batch and (largest > self._largest_bytes or not self._largest_bytes):
            is_first, self._largest_bytes = not self._largest_bytes, max(largest, 1)
            wanted = max(1, min(self._subscription.prefetch, self._bytes_max // self._largest_bytes))
            if is_first or wanted < self._fitted.prefetch:
                await self._fitted.fit(wanted)
        return batch

    async def ack_all(self, incoming: Sequence[Incoming]) -> Sequence[Incoming]:
        rest = []
        for each in incoming:
            try:
                await self.ack(each)
            except NotOurs:
                rest.append(each)
        return rest


def fitted(address: BrokerUrl, queue: str) -> FittedConsumer:
    """A consumer that begins with one message."""
    return FittedConsumer(address, queue, prefetch=FIRST_COUNT)


NOT_FOUND = 404
PRECONDITION_FAILED = 406


class RabbitTransport:
    """`async with RabbitTransport(url, clock=clock) as transport:`. An address is a queue, or `exchange/key`."""

    def __init__(self, url: str, *, clock: Clock, quorum: bool = False) -> None:
        self._address = BrokerUrl.parse(url)
        self._clock = clock
        self._quorum = quorum
        self._publisher = RabbitPublisher(self._address)
        self._connection: Connection | None = None
        self._channel: Channel | None = None

    async def __aenter__(self) -> Self:
        await self._publisher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.close()
        await self._publisher.close()

    async def check(self, address: str) -> None:
        exchange, key = _place(address)
        asked = (
            methods.ExchangeDeclare(exchange=exchange, passive=True)
            if exchange
            else methods.QueueDeclare(queue=key, passive=True)
        )
        try:
            await self._call(asked)
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                raise Invalid(f"address does not exist; there is no '{address}' on the broker, declare it") from error
            raise

    async def declare(self, queues: Sequence[str]) -> None:
        for queue in (DEAD_QUEUE, *queues):
            arguments: dict[str, Any] = {"x-queue-type": "quorum"} if self._quorum else {}
            if not await self._is_there(queue):
                await self._call(methods.QueueDeclare(queue=queue, durable=True, arguments=arguments))

    async def _is_there(self, queue: str) -> bool:
        try:
            await self._call(methods.QueueDeclare(queue=queue, passive=True))
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return False
            raise
        return True

    @asynccontextmanager
    async def open(self, queue: str, *, count_max: int, bytes_max: int) -> AsyncIterator[GroupIntake]:
        subscription = Subscription(queue=queue, policy=RetryPolicy(), prefetch=count_max, consumer="collector")
        around = QueueFamily(
            main=Queue(name=queue),
            waits=(),
            dead=FamilyQueue(queue=DEAD_QUEUE, exchange="", key=DEAD_QUEUE),
            exchanges=(),
            queues=(),
            bindings=(),
        )
        consumer = fitted(self._address, queue)
        try:
            await consumer.__aenter__()
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                raise QueueMissing(queue) from error
            raise
        try:
            user = self._address.login.user
            yield FittedIntake(
                consumer,
                self._publisher,
                around,
                subscription,
                user=user,
                clock=self._clock,
                bytes_max=bytes_max,
            )
        finally:
            await consumer.close()

    async def send(self, address: str, body: bytes, *, message_id: str, attributes: Mapping[str, object]) -> None:
        exchange, key = _place(address)
        await self._publish(exchange, key, body, message_id=message_id, headers=attributes)

    async def park(self, body: bytes, *, attributes: Mapping[str, object], reason: str) -> None:
        headers = {
            **attributes,
            "x-parked-reason": "contradiction",
            "x-error-type": "Contradiction",
            "x-error-message": reason,
            "x-parked-by": "collector",
            "x-parked-at": moment(self._clock.now_us()).isoformat(),
        }
        await self._publish("", DEAD_QUEUE, body, message_id="", headers=headers)

    async def _publish(
        self, exchange: str, key: str, body: bytes, *, message_id: str, headers: Mapping[str, object]
    ) -> None:
        values: dict[str, Any] = {"headers": dict(headers), **({"message_id": message_id} if message_id else {})}
        outcome = (await self._publisher.publish([Outgoing(exchange, key, properties.encode(values), body)]))[0]
        if outcome.stored:
            return
        text = f"publish to '{exchange or key}' is {outcome.kind.value}; {outcome.text or outcome.code}"
        if outcome.kind is OutcomeKind.REFUSED and outcome.code == PRECONDITION_FAILED:
            raise MessageRefused(text)
        raise BrokerError(text)

    async def delete(self, queue: str) -> bool:
        """The broker itself looks whether it is empty, in the moment in which it deletes it.

        For a quorum queue it cannot: one that is empty is left standing, because a message that came between a look and
        the deletion would be gone without a trace.
        """
        try:
            if self._quorum:
                answer = await self._call(methods.QueueDeclare(queue=queue, passive=True))
                return not getattr(answer, "message_count", 0)
            await self._call(methods.QueueDelete(queue=queue, if_empty=True))
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return True
            if error.reply_code == PRECONDITION_FAILED:
                return False
            raise
        return True

    # What the channel calls: nothing comes unasked.

    def on_events(self, events: list[Event]) -> None:
        """Nobody consumes here."""

    def on_closed(self, error: BrokerError, close: Close) -> None:
        """Whoever waits for an answer is told by the channel."""

    def on_writable(self) -> None:
        """Questions are small."""

    async def _call(self, method: base.Frame) -> base.Frame:
        if self._connection is None or not self._connection.is_open:
            self._connection = await Connection.open(self._address.named("holdfast collector"))
            self._channel = None
        if self._channel is None or not self._channel.is_open:
            self._channel = await self._connection.channel(self)
        return await self._channel.call(method)


def _place(address: str) -> tuple[str, str]:
    exchange, slash, key = address.partition("/")
    return (exchange, key) if slash else ("", address)
