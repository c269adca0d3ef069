"""RabbitMQ as a broker: see `ports.broker`.

Publish first, ack second: a retry is a publish to a wait queue and a parking one to the dead queue's exchange, and the
delivery is acked when the broker has confirmed the copy and has not returned it. One connection consumes and acks,
another publishes. What the publish changes of a message is said in `core.death`; every other byte of its properties,
headers and body goes on as it came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cached_property
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.death import (
    DEAD_QUEUES,
    DEATH,
    HeaderChange,
    QueueNames,
    RedriveStamp,
    as_first_seen,
    attempts_used,
    is_of_cycle,
    parked,
    retried,
    returns,
)
from holdfast.core.letter import Content, DeathStory, Fingerprinter, Kinds, NewLetter, Origin, fingerprint
from holdfast.core.message import Address, Delivery, Message, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import moment
from holdfast.core.plan import Retries
from holdfast.core.policy import Park, Wait, step_for
from holdfast.core.topology.layouts import TopologyFile
from holdfast.core.topology.model import Version
from holdfast.engines.rabbitmq.connection import NOT_FOUND, Connection, retry_call
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.inspector import RabbitInspector
from holdfast.engines.rabbitmq.letters import digest, kinds_of, new_letter, read_message
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.redriver import Rewriter
from holdfast.engines.rabbitmq.topology import Declarer, QueueFamily, family_for
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.errors import BrokerError, BrokerRefused, Invalid, MessageRefused, NotOurs, QueueMissing, StorageFailed
from holdfast.ports.broker import Starts, Subscription, Unsettled, check_settled
from holdfast.ports.clock import Clock
from holdfast.proof import crash_point

#: Left out when a message is too large with them: without its story it can still be kept.
DISPENSABLE = ("x-error-stack", "x-error-message", "x-kept-death")

#: From the one version on, a quorum queue's count of returns has its rejections in it; from the other on no longer.
COUNTS_REJECTIONS, COUNTS_FAILURES = Version(4, 0), Version(4, 3)
CUT_SHORT_COUNT_MAX = 10_000
#: The properties of what we write, by the fields of a message.
_TOLD = {
    "message_id": "id",
    "correlation_id": "correlation_id",
    "type": "type",
    "content_type": "content_type",
    "content_encoding": "content_encoding",
    "reply_to": "reply_to",
    "priority": "priority",
}
PEEK_TIMEOUT_S = 5.0
PEEK_MORE_TIMEOUT_S = 0.3


class RabbitOptions(Struct, frozen=True, kw_only=True):
    """What is told of a broker beside its address."""

    management: str | None = None
    topology: TopologyFile | None = None  #: names the wait queues and dead queues; without it the layouts do
    starts: Starts | None = None  #: keeps what was begun, for queues that do not count how often a message came
    known: Sequence[str] = ()  #: dead-letter queues, by name
    patterns: Sequence[str] = DEAD_QUEUES  #: and by pattern
    names: QueueNames = QueueNames()  #: in which of the queues that a letter tells of nothing fails
    grouped: Fingerprinter = fingerprint
    retries: Retries = Retries()
    quorum: bool = False  #: queues of our own are quorum queues
    insists: bool = False  #: a broker that hangs up at the start is asked again
    waits: bool = False  #: one that is away at the start is waited for, beside everything else


class RabbitBroker:
    """`async with RabbitBroker(url, clock=clock) as broker:`; all consumers publish on one connection."""

    origin: Origin = "rabbitmq"

    def __init__(self, url: str, *, clock: Clock, options: RabbitOptions | None = None) -> None:
        self._url = BrokerUrl.parse(url)
        self._clock = clock
        self._options = options = options or RabbitOptions()
        self._declarer = Declarer(self._url, management=options.management, quorum=options.quorum)
        self._rewriter = Rewriter(self._url.login.user)
        self.publisher = RabbitPublisher(self._url, waits=options.waits)
        self.inspector = RabbitInspector(
            self._url, options.management, known=options.known, patterns=options.patterns, retries=options.retries
        )

    async def __aenter__(self) -> Self:
        if self._options.insists:
            await retry_call(self.publisher.__aenter__, url=self._url, is_met=False)
        else:
            await self.publisher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._declarer.close()
        await self.publisher.close()

    async def missing(self, subscription: Subscription) -> list[str]:
        return await self._declarer.missing(subscription, self._family(subscription))

    async def declare(self, subscription: Subscription) -> None:
        if subscription.dead_queue:
            await self._declarer.declare_own((subscription.dead_queue, subscription.queue))
        else:
            await self._declarer.declare(self._family(subscription))

    async def delete_empty(self, queue: str) -> bool:
        return await self._declarer.delete_empty(queue)

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[RabbitConsumer]:
        queue = subscription.queue
        if not subscription.dead_queue:
            await self._declarer.close()  # it was for the start
        consumer = ResumingConsumer(
            self._url,
            queue,
            prefetch=subscription.prefetch,
            bytes_max=subscription.bytes_max,
            on_start="resume" if self._options.insists else "raise",
        )
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(consumer)
            except BrokerRefused as error:
                if subscription.dead_queue and error.reply_code == NOT_FOUND:
                    raise QueueMissing(queue) from error
                raise
            starts = None
            if self._options.starts is not None and self._family(subscription).main.type != "quorum":
                starts = AttemptLog(self._options.starts, f"{self._url.login.vhost} {queue}", holds=consumer.holds)
            yield RabbitConsumer(
                consumer,
                self.publisher,
                subscription,
                family=lambda: self._family(subscription),
                user=self._url.login.user,
                clock=self._clock,
                starts=starts,
            )

    async def peek(self, queue: str, *, count_max: int) -> Sequence[NewLetter]:
        """Letters that are unreadable are left out."""
        found: list[NewLetter] = []
        async with await Connection.open(self._url.named("holdfast custody")) as connection:
            is_empty = not (
                await connection.depth(queue)
            ).ready  # or busy: then it is looked at for a moment all the same
        async with ResumingConsumer(self._url, queue, prefetch=count_max) as consumer:
            while len(found) < count_max:
                timeout_s = PEEK_MORE_TIMEOUT_S if found or is_empty else PEEK_TIMEOUT_S
                batch = await consumer.batch(count_max=count_max - len(found), timeout_s=timeout_s)
                if not batch:
                    break
                for delivery in batch:
                    with suppress(MessageRefused):
                        found.append(self.letter(delivery, queue))
        return found

    def letter(self, delivery: Delivery, queue: str) -> NewLetter:
        return new_letter(delivery, queue, self._options.grouped, self._options.names)

    def kinds(self, properties: bytes) -> Kinds:
        return kinds_of(properties)

    def write(self, message: Message, to: Address, *, death: DeathStory | None = None, by: str = "") -> Outgoing:
        told = {name: getattr(message, field) for name, field in _TOLD.items()}
        values: dict[str, Any] = {name: value for name, value in told.items() if value not in ("", None)}
        if message.headers or death is not None:
            values["headers"] = dict(message.headers)
        if death is not None:
            values["headers"] |= {
                "x-parked-reason": death.reason,
                "x-error-type": death.error_type,
                "x-error-message": death.error_message,
                "x-parked-by": by,
                "x-parked-at": moment(self._clock.now_us()).isoformat(),
            }
        return Outgoing(to.exchange, to.routing_key, properties.encode(values), message.body)

    def outgoing(self, message: Message, to: Address, *, at_us: int = 0) -> Outgoing:
        if at_us:
            raise Invalid(
                "publish cannot wait; RabbitMQ has no schedule, leave out in_= and at=, or use an embedded queue"
            )
        try:
            return self.write(message, to)
        except (ValueError, TypeError, OverflowError) as error:
            raise Invalid(f"message is invalid; it cannot be written: {error}, give what AMQP has") from error

    def rewrite(self, content: Content, to: Address, stamp: RedriveStamp, redrive_id: str) -> Outgoing:
        try:
            raw = self._rewriter.properties(content, stamp, redrive_id, at=moment(self._clock.now_us()))
        except (properties.Unreadable, ValueError, TypeError) as error:
            raise MessageRefused(f"it cannot be written: {error}") from error
        return Outgoing(to.exchange, to.routing_key, raw, content.body)

    def _family(self, subscription: Subscription) -> QueueFamily:
        return family_for(subscription, Version.parse(self.publisher.version), self._options.topology)


class RabbitConsumer:
    """Deliveries of one queue; see `ports.broker.Consumer`. A delivery keeps its message as the broker's own."""

    def __init__(
        self,
        consumer: ResumingConsumer,
        publisher: RabbitPublisher,
        subscription: Subscription,
        *,
        family: Callable[[], QueueFamily],
        user: str,
        clock: Clock,
        starts: AttemptLog | None = None,
    ) -> None:
        self._consumer = consumer
        self._publisher = publisher
        self._subscription = subscription
        self._find_family = family
        self._user = user
        self._clock = clock
        self._starts = starts
        self._begun: dict[Delivery, int] = {}  # by attempt
        self._cut_short: dict[bytes, int] = {}  # of those that an interruption took away, by their digests
        consumer.on_interrupted = self._interrupted
        self._counts_rejections = COUNTS_REJECTIONS <= Version.parse(publisher.version) < COUNTS_FAILURES

    @property
    def trouble(self) -> str:
        if self._subscription.letters:
            connected = self._consumer.connected
            return "" if connected else "its broker cannot be reached, the connection is tried again"
        if self._publisher.blocked:
            return f"the broker takes no publishes; {self._publisher.blocked}"
        if not self._publisher.connected or not self._consumer.connected:
            return "no connection to the broker"
        return ""

    async def take(self, count_max: int, *, timeout_s: float | None = None) -> Sequence[Delivery]:
        """Raises ConsumerLost."""
        return await self._consumer.batch(count_max=count_max, timeout_s=timeout_s)

    def message(self, delivery: Delivery) -> Message:
        message = read_message(delivery, self._subscription.queue, attempts_max=self._subscription.policy.attempts)
        used = 0
        if DEATH in message.headers:
            used = attempts_used(message, self._family.wait_names)
            message = as_first_seen(message, self._family.wait_names)
        returned = returns(message, with_rejections=self._counts_rejections)
        if returned is None:
            returned = self._charged(delivery, used)
        is_certain = not message.redelivered or returned is not None
        delivery.own = message = replace(message, attempt=used + (returned or 0) + 1, attempt_is_certain=is_certain)
        return message

    async def stop(self) -> None:
        with suppress(BrokerError):  # no connection: nothing comes either
            await self._consumer.stop()

    async def begin(self, delivery: Delivery) -> None:
        self._check_ours(delivery)
        self._begun[delivery] = self._message_of(delivery).attempt
        if self._starts is not None:
            self._starts.begin(delivery)

    async def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Unsettled]:
        missed = self._consumer.ack(deliveries)
        if self._subscription.letters:
            self._consumer.flush()
        return self._ended(deliveries, missed)

    async def retry(self, delivery: Delivery, wait: Wait) -> None:
        self._check_ours(delivery)
        names = self._family.wait_names
        message = self._message_of(delivery)
        # A rejection carries no count of ours: attempts that ended with their process would be forgotten by it.
        is_told = message.attempt - 1 == attempts_used(message, names)
        if self._subscription.policy.by == "broker" and is_told and is_of_cycle(message.headers, message.queue, names):
            check_settled(self._ended([delivery], self._consumer.dead_letter([delivery])))
            return
        dead_queue = self._family.dead.queue
        change = retried(message, wait.failure, dead_queue=dead_queue, user=self._user, wait_queues=names)
        step = self._family.waits[step_for(wait.delay_us, self._family.steps_us)]
        # Straight into the queue: an exchange on the way could lose its binding.
        await self._publish(Address(routing_key=step.queue), delivery, change)
        crash_point("rabbitmq.after_wait_confirm")
        check_settled(await self.ack([delivery]))

    async def park(self, delivery: Delivery, park: Park) -> None:
        self._check_ours(delivery)
        message, dead = self._message_of(delivery), self._family.dead
        change = parked(
            message,
            park.failure,
            used=message.attempt - 1,
            reason=park.reason,
            at=moment(self._clock.now_us()),
            by=self._subscription.consumer,
            dead_queue=dead.queue,
            user=self._user,
            wait_queues=self._family.wait_names,
        )
        await self._publish(Address(exchange=dead.exchange, routing_key=dead.key), delivery, change)
        crash_point("rabbitmq.after_park_confirm")
        check_settled(await self.ack([delivery]))

    async def give_back(self, delivery: Delivery) -> None:
        missed = self._consumer.give_back([delivery])
        self._begun.pop(delivery, None)
        if self._starts is not None and self._consumer.holds(delivery):
            self._starts.leave(delivery)
        if missed:
            raise self._not_ours()

    # Inside.

    @cached_property
    def _family(self) -> QueueFamily:
        return self._find_family()

    def _charged(self, delivery: Delivery, used: int) -> int | None:
        """Where the broker counts no returns: how many attempts at a message that came again ended with their process
        or connection; None where nobody can say."""
        stood = self._consumer.stood_count > 0
        self._consumer.stood_count -= stood
        if not delivery.redelivered:
            return None
        if self._starts is not None:
            with suppress(StorageFailed):  # what cannot be read is not certain
                return self._starts.charge(delivery)
        if self._cut_short and (reached := self._cut_short.pop(digest(delivery.properties, delivery.body), 0)):
            return reached - used
        # The kill of a broker makes all that stands in a classic queue look as if it had been delivered before; and
        # what this process had did not end it.
        return 0 if stood else None

    def _interrupted(self) -> None:
        """What was begun comes again: that attempt counts, for nobody will hear how it ends."""
        for delivery, attempt in self._begun.items():
            self._cut_short[digest(delivery.properties, delivery.body)] = attempt
        self._begun.clear()
        while len(self._cut_short) > CUT_SHORT_COUNT_MAX:
            del self._cut_short[next(iter(self._cut_short))]

    def _message_of(self, delivery: Delivery) -> Message:
        return delivery.own if isinstance(delivery.own, Message) else self.message(delivery)

    def _ended(self, deliveries: Sequence[Delivery], missed: Sequence[Delivery]) -> list[Unsettled]:
        """They are settled, but for those that were missed: these are answered."""
        for delivery in deliveries:
            self._begun.pop(delivery, None)
            if self._starts is not None and delivery not in missed:
                self._starts.end(delivery)
        return [Unsettled(delivery, self._not_ours()) for delivery in missed]

    def _check_ours(self, delivery: Delivery) -> None:
        """While it can be settled. After that it is delivered again, and a copy would be one more."""
        if not self._consumer.holds(delivery):
            raise self._not_ours()

    def _not_ours(self) -> NotOurs:
        return NotOurs(f"the channel has ended; the message is in queue '{self._subscription.queue}' again")

    async def _publish(self, to: Address, delivery: Delivery, change: HeaderChange) -> None:
        """Returns when the broker has it. Raises BrokerError: then it may have it or not."""
        outcome = await self._sent(to, delivery, change)
        if outcome.kind is OutcomeKind.REFUSED and any(name in change.put for name in DISPENSABLE):
            shorter = {name: value for name, value in change.put.items() if name not in DISPENSABLE}
            less = replace(change, put=shorter, drop=(*change.drop, *DISPENSABLE))
            outcome = await self._sent(to, delivery, less)
        if not outcome.stored:
            raise BrokerError(f"publish to {to} is {outcome.kind.value}; {outcome.text or outcome.code}")

    async def _sent(self, to: Address, delivery: Delivery, change: HeaderChange) -> Outcome:
        try:
            raw = properties.splice(delivery.properties, drop=change.drop_properties)
            raw = properties.splice_headers(raw, put=dict(change.put), drop=change.drop)  # type: ignore[arg-type]
        except properties.Unreadable as error:
            return Outcome(OutcomeKind.REFUSED, 0, f"its properties cannot be read: {error}")
        (outcome,) = await self._publisher.publish([Outgoing(to.exchange, to.routing_key, raw, delivery.body)])
        return outcome


class AttemptLog:
    """The starts of one queue's messages: which attempts ended with their process, or with their connection.

    `charge` when a message came again, `begin` before its handler runs, `end` when it is settled. A message is told by
    its bytes. Of twins it cannot be said which of them was begun, so each start is charged to one.
    """

    def __init__(self, starts: Starts, queue: str, *, holds: Callable[[Delivery], bool]) -> None:
        self._starts = starts
        self._queue = queue
        self._holds = holds
        self._of: dict[Delivery, list[int]] = {}

    def charge(self, delivery: Delivery) -> int:
        """How many starts of it nobody has settled; they are its own from now on. Raises StorageFailed."""
        left = self._starts.left(self._queue, digest(delivery.properties, delivery.body))
        # What came on a channel that has ended is the broker's again, and this may be it.
        self._of = {other: numbers for other, numbers in self._of.items() if self._holds(other)}
        taken = {number for numbers in self._of.values() for number in numbers}
        own = [number for number in left if number not in taken]
        if own:
            self._of[delivery] = own
        return len(own)

    def begin(self, delivery: Delivery) -> None:
        """Its handler is about to run. Raises StorageFailed."""
        number = self._starts.begin(self._queue, digest(delivery.properties, delivery.body))
        self._of.setdefault(delivery, []).append(number)

    def leave(self, delivery: Delivery) -> None:
        """It goes back to the queue: what was begun stays written down for whoever gets it next."""
        self._of.pop(delivery, None)

    def end(self, delivery: Delivery) -> None:
        """It is settled."""
        if numbers := self._of.pop(delivery, None):
            self._starts.end(numbers)
