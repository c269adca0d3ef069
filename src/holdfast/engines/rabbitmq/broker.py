"""RabbitMQ for consumers: a retry is a publish to a wait queue, a parking one to the dead queue's exchange.

Publish first, ack second: the delivery is acked when the broker has confirmed the copy and has not returned it. One
connection consumes and acks, another publishes. What the publish changes of a message is said in `core.death`; every
other byte of its properties, headers and body goes on as it came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from holdfast.core.death import HeaderChange, attempts_used, is_of_cycle, parked, retried, returns
from holdfast.core.message import Address as Destination
from holdfast.core.message import Delivery, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import moment
from holdfast.core.policy import Park, Wait, step_for
from holdfast.core.topology.layouts import TopologyFile
from holdfast.core.topology.model import Version
from holdfast.engines.rabbitmq.backoff import retry_call
from holdfast.engines.rabbitmq.consumer import RabbitConsumer
from holdfast.engines.rabbitmq.declare import Declarer, QueueFamily, surroundings
from holdfast.engines.rabbitmq.letters import read_message
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.starts import AttemptLog
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.errors import BrokerError, NotOurs, StorageFailed
from holdfast.ports.broker import Incoming, Subscription
from holdfast.ports.clock import Clock
from holdfast.ports.starts import Starts
from holdfast.proof import crash_point

#: Left out when a message is too large with them: without its story it can still be kept.
DISPENSABLE = ("x-error-stack", "x-error-message", "x-kept-death")

#: From the one version on, a quorum queue's count of returns has its rejections in it; from the other on no longer.
COUNTS_REJECTIONS, COUNTS_FAILURES = Version(4, 0), Version(4, 3)


class RabbitBroker:
    """`async with RabbitBroker(url, clock=clock) as broker:`; all consumers publish on one connection."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        management: str | None = None,
        topology: TopologyFile | None = None,
        starts: Starts | None = None,
    ) -> None:
        """`topology` names the wait queues and dead queues; without it the layouts do.

        `starts` keeps which messages were begun, for queues that do not count how often a message came.
        """
        self._address = BrokerUrl.parse(url)
        self._topology = topology
        self._clock = clock
        self._starts = starts
        self._setup = Declarer(self._address, management=management)
        self._publisher = RabbitPublisher(self._address)

    async def __aenter__(self) -> Self:
        await retry_call(self._publisher.__aenter__, address=self._address, is_met=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._setup.close()
        await self._publisher.close()

    async def missing(self, subscription: Subscription) -> list[str]:
        """What keeps a retry or a parking from being safe. Raises BrokerError."""
        return await self._setup.missing(subscription, self._around(subscription))

    async def declare(self, subscription: Subscription) -> None:
        """Make the queue, its wait queues and its dead queue, as far as they are not there."""
        await self._setup.declare(self._around(subscription))

    @asynccontextmanager
    async def open(self, subscription: Subscription) -> AsyncIterator[RabbitIntake]:
        """Consume. At the end everything unsettled is given back."""
        await self._setup.close()  # it was for the start
        login, around = self._address.login, self._around(subscription)
        consuming = RabbitConsumer(self._address, subscription.queue, prefetch=subscription.prefetch, on_start="resume")
        async with consuming as consumer:
            starts = None
            if self._starts is not None and around.main.type != "quorum":
                starts = AttemptLog(self._starts, f"{login.vhost} {subscription.queue}", holds=consumer.holds)
            yield RabbitIntake(
                consumer, self._publisher, around, subscription, user=login.user, clock=self._clock, starts=starts
            )

    def _around(self, subscription: Subscription) -> QueueFamily:
        return surroundings(subscription, Version.parse(self._publisher.version), self._topology)


class RabbitIntake:
    """Deliveries of one queue."""

    def __init__(
        self,
        consumer: RabbitConsumer,
        publisher: RabbitPublisher,
        around: QueueFamily,
        subscription: Subscription,
        *,
        user: str,
        clock: Clock,
        starts: AttemptLog | None = None,
    ) -> None:
        self._consumer = consumer
        self._starts = starts
        self._publisher = publisher
        self._around = around
        self._subscription = subscription
        self._user = user
        self._clock = clock
        self._counts_rejections = COUNTS_REJECTIONS <= Version.parse(publisher.version) < COUNTS_FAILURES

    @property
    def trouble(self) -> str:
        if self._publisher.blocked:
            return f"the broker takes no publishes; {self._publisher.blocked}"
        if not self._publisher.connected or not self._consumer.connected:
            return "no connection to the broker"
        return ""

    async def take(self, count_max: int) -> Sequence[Incoming]:
        """Wait for deliveries. Raises ConsumerLost."""
        return [self._incoming(delivery) for delivery in await self._consumer.batch(count_max=count_max)]

    async def stop(self) -> None:
        try:
            await self._consumer.stop()
        except BrokerError:
            pass  # no connection: nothing comes either

    async def begin(self, incoming: Incoming) -> None:
        delivery = self._ours(incoming)
        if self._starts is not None:
            self._starts.begin(delivery)

    async def ack(self, incoming: Incoming) -> None:
        delivery = self._ours(incoming)
        in_vain = self._consumer.counts["settled_in_vain"]
        self._consumer.ack([delivery])
        self._check(in_vain)
        self._ended(delivery)

    async def wait(self, incoming: Incoming, wait: Wait) -> None:
        delivery = self._ours(incoming)
        names = self._around.wait_names
        message = incoming.message
        # A rejection carries no count of ours: attempts that ended with their process would be forgotten by it.
        is_told = incoming.used == attempts_used(message)
        if self._subscription.policy.by == "broker" and is_told and is_of_cycle(message.headers, message.queue, names):
            in_vain = self._consumer.counts["settled_in_vain"]
            self._consumer.dead_letter([delivery])
            self._check(in_vain)
            self._ended(delivery)
            return
        change = retried(incoming.message, wait.failure, user=self._user, wait_queues=names)
        place = self._around.waits[step_for(wait.delay_us, self._around.steps_us)]
        # Straight into the queue: an exchange on the way could lose its binding.
        await self._publish(Destination(routing_key=place.queue), delivery, change)
        crash_point("rabbitmq.after_wait_confirm")
        await self.ack(incoming)

    async def park(self, incoming: Incoming, park: Park) -> None:
        delivery = self._ours(incoming)
        change = parked(
            incoming.message,
            park.failure,
            used=incoming.used,
            reason=park.reason,
            at=moment(self._clock.now_us()),
            by=self._subscription.consumer,
            user=self._user,
            wait_queues=self._around.wait_names,
        )
        dead = self._around.dead
        await self._publish(Destination(exchange=dead.exchange, routing_key=dead.key), delivery, change)
        crash_point("rabbitmq.after_park_confirm")
        await self.ack(incoming)

    async def give_back(self, incoming: Incoming) -> None:
        delivery = self._ours(incoming)
        in_vain = self._consumer.counts["settled_in_vain"]
        self._consumer.give_back([delivery])
        if self._starts is not None:
            self._starts.leave(delivery)
        self._check(in_vain)

    # Inside.

    def _incoming(self, delivery: Delivery) -> Incoming:
        message = read_message(delivery, self._subscription.queue, attempts_max=self._subscription.policy.attempts)
        returned = returns(message, with_rejections=self._counts_rejections)
        if message.redelivered and returned is None:
            returned = self._begun_before(delivery)
        used = attempts_used(message) + (returned or 0)
        return Incoming(
            message=replace(message, attempt=used + 1),
            used=used,
            step_aside=message.redelivered and returned is None,
            tag=delivery,
        )

    def _begun_before(self, delivery: Delivery) -> int | None:
        """How often it was begun and not settled, by our own books; None where there are none, or none to be read."""
        try:
            return None if self._starts is None else self._starts.charge(delivery)
        except StorageFailed:
            return None

    def _ended(self, delivery: Delivery) -> None:
        if self._starts is not None:
            self._starts.end(delivery)

    def _ours(self, incoming: Incoming) -> Delivery:
        """The delivery, while it can be settled. After that it is delivered again, and a copy would be one more."""
        delivery = incoming.tag
        if not isinstance(delivery, Delivery) or not self._consumer.holds(delivery):
            raise NotOurs(f"the channel has ended; the message is in queue '{self._subscription.queue}' again")
        return delivery

    def _check(self, in_vain_before: int) -> None:
        if self._consumer.counts["settled_in_vain"] > in_vain_before:
            raise NotOurs(f"the channel has ended; the message is in queue '{self._subscription.queue}' again")

    async def _publish(self, destination: Destination, delivery: Delivery, change: HeaderChange) -> None:
        """Returns when the broker has it. Raises BrokerError: then it may have it or not."""
        outcome = await self._sent(destination, delivery, change)
        if outcome.kind is OutcomeKind.REFUSED and any(name in change.put for name in DISPENSABLE):
            shorter = {name: value for name, value in change.put.items() if name not in DISPENSABLE}
            less = HeaderChange(put=shorter, drop=(*change.drop, *DISPENSABLE), drop_properties=change.drop_properties)
            outcome = await self._sent(destination, delivery, less)
        if not outcome.stored:
            raise BrokerError(f"publish to {destination} is {outcome.kind.value}; {outcome.text or outcome.code}")

    async def _sent(self, destination: Destination, delivery: Delivery, change: HeaderChange) -> Outcome:
        try:
            raw = properties.splice(delivery.properties, drop=change.drop_properties)
            raw = properties.splice_headers(raw, put=dict(change.put), drop=change.drop)  # type: ignore[arg-type]
        except properties.Unreadable as error:
            return Outcome(OutcomeKind.REFUSED, 0, f"its properties cannot be read: {error}")
        return (
            await self._publisher.publish([Outgoing(destination.exchange, destination.routing_key, raw, delivery.body)])
        )[0]
