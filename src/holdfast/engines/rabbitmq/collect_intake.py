"""Payloads pushed by RabbitMQ, as many at a time as their size allows: AMQP's prefetch counts messages, not bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pamqp import commands as amqp

from holdfast.engines.rabbitmq.broker import RabbitIntake
from holdfast.engines.rabbitmq.connection import Channel
from holdfast.engines.rabbitmq.consumer import Consumer
from holdfast.engines.rabbitmq.declare import QueueFamily
from holdfast.engines.rabbitmq.publisher import Publisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BrokerError, NotOurs
from holdfast.ports.broker import Incoming, Subscription
from holdfast.ports.clock import Clock

#: How many are pushed before it is known how large they are.
FIRST_COUNT = 1


class FittedConsumer(Consumer):
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
        publisher: Publisher,
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
