"""What everybody who works on one transaction shares: limits, waits, its queues and what is published for it.

What fails for now is tried again, with growing waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from msgspec import Struct

from holdfast.core.collect import DEAD_QUEUE, SeriesState, Transaction, queue_names
from holdfast.core.letter import DeathStory
from holdfast.core.message import Address, Delivery, Message, OutcomeKind, Outgoing
from holdfast.core.moments import SECOND_US, Backoff
from holdfast.core.policy import Failure, Park
from holdfast.errors import (
    BrokerError,
    Invalid,
    MessageRefused,
    NotOurs,
    QueueMissing,
    ShuttingDown,
    TryAgain,
    Unreachable,
)
from holdfast.ports.blobs import Blobs
from holdfast.ports.broker import Broker, Consumer, Subscription, check_settled
from holdfast.stores.collect import CollectStore
from holdfast.telemetry.events import emit

P = ParamSpec("P")
T = TypeVar("T")
COLLECTOR = "collector"
REASON, ERROR_TYPE = "contradiction", "Contradiction"
#: The broker will never take this message as it is.
PRECONDITION_FAILED = 406
#: The waits before what failed for now is tried again.
BACKOFF = Backoff(first_s=0.05, delay_s_max=5.0)
#: What another attempt may cure.
FOR_NOW = (TryAgain, Unreachable, BrokerError, ShuttingDown)


class CollectLimits(Struct, frozen=True, kw_only=True):
    """Every number with its unit. Uploads are counted over the whole collector, messages held per transaction."""

    uploads_max: int = 16
    uploads_bytes_max: int = 64 * 2**20
    transactions_max: int = 64  #: worked on at a time
    lease_us: int = 30 * SECOND_US  #: how long a dead owner's transactions stay his
    abandon_after_us: int = 24 * 3600 * SECOND_US
    abandon_check_us: int = 60 * SECOND_US
    gap_after_us: int = 300 * SECOND_US
    keep_blobs: bool = False  #: of a transaction that failed or was abandoned
    inline_bytes_max: int = 256 * 2**10

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "keep_blobs" and getattr(self, name) <= 0:
                raise Invalid(f"{name} is invalid; it must be more than nothing")


class CollectContext:
    """The collector's means; `uploads` is shared by all its transactions."""

    def __init__(self, store: CollectStore, broker: Broker, blobs: Blobs, *, limits: CollectLimits) -> None:
        self.store = store
        self.broker = broker
        self.blobs = blobs
        self.limits = limits
        self.uploads = UploadSlots(limits.uploads_max)


class OwnedTransaction:
    """One transaction that is ours, under one fence."""

    def __init__(
        self, context: CollectContext, transaction: Transaction, *, on_move: Callable[[], None] = lambda: None
    ) -> None:
        self.on_move = on_move
        self.context = context
        self.transaction = transaction
        self.id = transaction.id
        self.fence = transaction.fence
        self.header_queue, self.payload_queue = queue_names(transaction.id)
        self.stand: Mapping[str, SeriesState] = {}
        self.progress_s = time.monotonic()

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat while it fails for now; everything else is raised."""
        failures = 0
        while True:
            try:
                return await work()
            except FOR_NOW as error:
                failures += 1
                await self.wait(error, failures)

    async def wait(self, error: Exception, failures: int) -> None:
        """Say what is wrong and wait, the longer the more often it was."""
        emit("collect.waits", transaction=self.id, error=str(error))
        await asyncio.sleep(BACKOFF.delay_s(failures, spread=1.0))

    async def ask(self, call: Callable[Concatenate[str, P], Awaitable[T]], *given: P.args, **named: P.kwargs) -> T:
        """Call a method of the store about this transaction, again while it fails for now."""
        return await self.until_done(lambda: call(self.id, *given, **named))

    def subscription(self, queue: str, *, count_max: int) -> Subscription:
        """To one of its queues: so many messages may be ours at a time, and fewer when they are large."""
        return Subscription(
            queue=queue,
            prefetch=count_max,
            bytes_max=self.context.limits.uploads_bytes_max,
            consumer=COLLECTOR,
            dead_queue=DEAD_QUEUE,
        )

    async def declare(self) -> None:
        """Make its queues and the dead queue; what is there stays as it is."""
        for queue in (self.header_queue, self.payload_queue):
            subscription = self.subscription(queue, count_max=1)
            await self.until_done(partial(self.context.broker.declare, subscription))

    async def send(self, address: str, body: bytes, *, message_id: str, attributes: Mapping[str, object]) -> None:
        """Returns when it is stored there. Raises MessageRefused."""
        broker = self.context.broker
        outgoing = broker.write(Message(body=body, id=message_id, headers=attributes), address_of(address, broker))
        await self.until_done(lambda: publish(broker, outgoing))

    async def ask_producer(self, kind: str, body: bytes, *, message_id: str) -> None:
        """Send the producer a request that says where its answers are to go."""
        attributes = {
            "transaction-id": self.id,
            "kind": kind,
            "header-queue": self.header_queue,
            "payload-queue": self.payload_queue,
            "dead-queue": DEAD_QUEUE,
        }
        await self.send(self.transaction.producer, body, message_id=message_id, attributes=attributes)

    async def park(self, body: bytes, *, queue: str, reason: str, **told: str | int) -> None:
        """Put a message of a queue that was taken in before into the dead queue, with what it told. Raises as `send`,
        and QueueMissing."""
        broker = self.context.broker
        death = DeathStory(queue=queue, reason=REASON, error_type=ERROR_TYPE, error_message=reason)
        message = Message(body=body, headers={"transaction-id": self.id, **told, "source-queue": queue})
        outgoing = broker.write(message, Address(routing_key=DEAD_QUEUE), death=death, by=COLLECTOR)
        await self.until_done(lambda: publish(broker, outgoing))
        self.parked(reason)

    async def ack(self, consumer: Consumer, delivery: Delivery) -> None:
        """It is stored, or needed no more: the message may go. One that is not ours any more comes a second time."""

        async def once() -> None:
            check_settled(await consumer.ack([delivery]))

        with suppress(NotOurs):
            await self.until_done(once)

    async def park_delivery(self, consumer: Consumer, delivery: Delivery, reason: str) -> None:
        """Put the offending message into the dead queue, with the reason."""
        failure = Failure(type=ERROR_TYPE, message=reason)
        with suppress(NotOurs):  # it comes a second time
            await self.until_done(lambda: consumer.park(delivery, Park(reason=REASON, failure=failure)))
        self.parked(reason)

    def learn(self, stand: Mapping[str, SeriesState]) -> None:
        """How the series stand as of a commit. Commits are answered in order, so the last one is the newest."""
        self.stand = stand
        self.progress_s = time.monotonic()

    def count_of(self, series: str) -> int | None:
        """How many ordinals a series has, as far as is known."""
        known = self.stand.get(series)
        return None if known is None else known.count

    def parked(self, reason: str) -> None:
        """A message was parked."""
        emit("collect.parked", transaction=self.id, reason=reason)


def address_of(text: str, broker: Broker) -> Address:
    """An address is a queue, or `exchange/key` where there are exchanges."""
    exchange, slash, key = text.partition("/")
    return (
        Address(exchange=exchange, routing_key=key) if slash and broker.origin != "queue" else Address(routing_key=text)
    )


async def publish(broker: Broker, outgoing: Outgoing) -> None:
    """Returns when it is stored. Raises QueueMissing when the dead queue is gone, MessageRefused, BrokerError."""
    (outcome,) = await broker.publisher.publish([outgoing])
    if outcome.stored:
        return
    exchange, key = outgoing.exchange, outgoing.routing_key
    if outcome.kind is OutcomeKind.RETURNED and not exchange and key == DEAD_QUEUE:
        raise QueueMissing(key)
    text = f"publish to '{exchange or key}' is {outcome.kind.value}; {outcome.text or outcome.code}"
    if outcome.kind is OutcomeKind.REFUSED and outcome.code == PRECONDITION_FAILED:
        raise MessageRefused(text)
    raise BrokerError(text)


class UploadSlots:
    """So many at a time, taken several at once; whoever came first is served first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._freed = asyncio.Event()
        self._first = asyncio.Lock()  # held by whoever is next

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Hold so many until the end of the block; at most as many as there are."""
        async with self._first:
            while self._free < count:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._freed.set()
