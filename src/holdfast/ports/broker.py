"""What we need of a broker: messages of its queues and the settling of each, publishes with their outcomes, answers.

A retry or a park returns when the broker has the message durably; an ack returns when it is on its way, since a lost
one costs a second delivery at the most. If settling fails, the message is still ours, unsettled, and settling it may be
tried again; it may then exist twice, never not at all. NotOurs alone says that it is the broker's again and will be
delivered a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from holdfast.core.death import QueueNames, RedriveStamp
from holdfast.core.letter import Content, DeathStory, Kinds, NewLetter, Origin
from holdfast.core.message import Address, Delivery, Message, Outcome, Outgoing
from holdfast.core.policy import Park, RetryPolicy, Wait
from holdfast.core.recovery import Depth, Preflight, RunLetter
from holdfast.core.routes import RouteTable
from holdfast.errors import HoldfastError

#: Called with messages that share an outcome.
OnOutcome: TypeAlias = Callable[[Sequence[Outgoing], Outcome], None]
Layout: TypeAlias = Literal["per-consumer", "quorum", "shared-dlq"]


class Subscription(Struct, frozen=True, kw_only=True):
    """What a consumer asks of a broker."""

    queue: str
    policy: RetryPolicy = RetryPolicy()
    prefetch: int = 1  #: how many messages may be ours at a time
    #: Where messages are pushed: so few of them that they weigh at most this, or one at a time; as far as the largest
    #: one so far can tell. 0 is no limit.
    bytes_max: int = 0
    consumer: str = ""  #: who parks, for the letter
    layout: Layout = "per-consumer"  #: on RabbitMQ: how wait queues and dead queue are laid out
    #: The queue is ours alone and has this dead queue and no wait queues; nothing in it dies of its age.
    dead_queue: str = ""
    #: What comes are dead letters, to be taken over: they come with their story, and acks are written at once.
    letters: bool = False


class Unsettled(Struct, frozen=True):
    """A message whose ack failed. NotOurs: it comes again. Anything else: it is still ours."""

    delivery: Delivery
    error: HoldfastError


def check_settled(unsettled: Sequence[Unsettled]) -> None:
    """Raises the error of the first that is not settled."""
    for one in unsettled:
        raise one.error


class Consumer(Protocol):
    """An open subscription. When it is interrupted it resumes by itself."""

    @property
    def trouble(self) -> str:
        """Why no messages come at the moment; the empty text while they can."""

    async def take(self, count_max: int, *, timeout_s: float | None = None) -> Sequence[Delivery]:
        """Wait for messages; none means that it was stopped, or that none came in time.

        Raises HoldfastError when consuming ended for good; with a time limit also where it fails for now.
        """

    def message(self, delivery: Delivery) -> Message:
        """For handlers and policies, with its attempt. Asked once for each that is to be begun."""

    async def stop(self) -> None:
        """No new messages. What is ours can still be settled."""

    async def begin(self, delivery: Delivery) -> None:
        """Its handler is about to run; where the broker does not count attempts, that is noted. Raises as settling."""

    async def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Unsettled]:
        """They are done. Each has an outcome of its own: those for which it did not work are answered."""

    async def retry(self, delivery: Delivery, wait: Wait) -> None:
        """It comes again after its delay, with one more attempt on its count."""

    async def park(self, delivery: Delivery, park: Park) -> None:
        """It goes to the dead queue, with the story of its death."""

    async def give_back(self, delivery: Delivery) -> None:
        """It goes back to the queue as it is, now."""


class Starts(Protocol):
    """Which messages a handler has begun and nobody has settled, kept where the end of a process does not reach: a
    classic queue of RabbitMQ says that a message came before, and neither how often nor whether a handler ever saw it.

    One entry for each start. Several processes of one machine may share it.
    """

    def begin(self, queue: str, key: bytes) -> int:
        """A handler is about to run; the number of this start. Raises StorageFailed: then it must not run."""

    def end(self, numbers: Iterable[int]) -> None:
        """Their message is settled: they are forgotten, soon."""

    def left(self, queue: str, key: bytes) -> Sequence[int]:
        """The starts of such a message that were not ended, oldest first. Raises StorageFailed."""

    def close(self) -> None:
        """Forget what was ended, and let go of the store."""


class Publisher(Protocol):
    """Publishes with confirms; what no queue has is a failure. Only *confirmed* allows a source to be settled.

    Connects again by itself, and sends again what was in flight: so that may arrive twice. Every message gets an
    outcome, *unknown* when nobody can say.
    """

    @property
    def trouble(self) -> str:
        """Why nothing can be published at the moment (an alarm, no connection); the empty text while it can."""

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        """Publish and wait; outcomes in the same order. Raises BrokerLost only when the publisher is closed."""


class RunPublisher(Publisher, Protocol):
    """As a recovery needs it."""

    @property
    def sent_again(self) -> int:
        """How many publishes were repeated because the outcome of the first was unknown."""

    def send(self, messages: Sequence[Outgoing], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """As `publish`, without waiting: `on_outcome` hears of every message once, as soon as its outcome is known."""


class QueueFacts(Struct, frozen=True, kw_only=True):
    """A dead-letter queue as its broker knows it."""

    queue: str
    source_queue: str = ""
    ready: int = 0
    consumers: int = 0
    #: Whether reading it without taking costs nothing: no finite delivery limit.
    peek_is_free: bool = False
    note: str = ""


class Reach(Struct, frozen=True, kw_only=True):
    """What is known of an address before anything is sent to it."""

    why: str = ""  #: why nothing would arrive; empty when it would, as far as can be told
    queues: tuple[str, ...] | None = None  #: every queue that gets a copy; None when nobody can say
    note: str = ""  #: what could not be looked at


class Inspector(Protocol):
    """Answers questions before anything is taken or sent, and changes nothing. Raises BrokerError."""

    async def queues(self) -> Sequence[QueueFacts]:
        """The dead-letter queues that are known."""

    async def queue(self, name: str) -> QueueFacts | None:
        """One of them, or None when it is not known or not there."""

    async def sources(self, queue: str, names: QueueNames) -> frozenset[str]:
        """The queues whose letters come into a dead-letter queue, as far as anything tells but the letters."""

    async def reach(self, addresses: Sequence[Address]) -> Mapping[Address, Reach]:
        """Where each leads now."""

    async def ladder_s(self, addresses: Sequence[Address]) -> float | None:
        """How long a letter that goes there and fails every attempt takes until it is dead again, of all the longest;
        None when nothing tells of one of them."""


class DrainConsumer(Protocol):
    """Consumes one dead-letter queue to empty it, under the lock of a run; it never gets more letters than are wanted.

    It does not connect again by itself: when the connection is lost `take` raises BrokerLost, every delivery is the
    broker's again, and `open` begins anew. Raises BrokerError throughout when the broker is gone or says no.
    """

    queue: str
    warnings: list[str]  #: what could not be made as safe as it should be

    @property
    def is_lost(self) -> bool:
        """Whether consuming was interrupted and not taken up again: what was acked last may still be in the queue."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection is there, as far as anybody knows: consuming was not interrupted, and it is open."""

    async def open(self) -> str:
        """Take the lock and consume; again after a loss, one try. Answers the consumer's tag. Raises RecoveryLocked."""

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        """Have `wanted` more letters delivered beside those that were taken, and no others; None: whatever there is. As
        many are in hand as fit the window, beside `held_count` that are only held."""

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery] | None:
        """Wait for letters. Empty when none came in time; None when no more will ever come. Raises BrokerLost: nothing
        that was in hand still is."""

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Settle those that are in hand; answers those that are not."""

    def forget_body(self, delivery: Delivery) -> None:
        """The letter is only held from now on: its body and properties may be dropped."""

    async def stop(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        """No new letters. Answers those that were delivered and not taken, as far as they are wanted."""

    async def give_back_all(self, *, others_count: int) -> int:
        """Everything that is unsettled goes back, in order, by as few frames as keep it; only after `stop`. Answers
        how many. `others_count` others consume the queue as well."""

    async def abandon(self) -> None:
        """End the connection at once: everything unsettled goes back by itself."""

    async def depth(self) -> Depth:
        """How many letters the queue says it has."""


class Redriver(Protocol):
    """From a delivery to what is published in its place."""

    def tick(self) -> None:
        """A new batch begins: what is redriven in it carries this moment."""

    def letter(self, delivery: Delivery) -> RunLetter:
        """With its route and the properties of its copy. Never raises: what cannot be read has no route."""

    def read(self, delivery: Delivery) -> Message:
        """The letter for filters and people."""

    def put_back(self, letter: RunLetter) -> Outgoing:
        """Into its own queue: all as it came, but nothing that expires."""


class RunInspector(Protocol):
    """What a recovery asks of a broker. Changes nothing."""

    async def preflight(self, table: RouteTable) -> Preflight:
        """Look at the broker, the queue and the targets."""

    async def alarm(self) -> str:
        """Why the broker takes no publishes, asked anew; the empty text when it does, or nobody can say."""

    async def refusal(self, exchange: str) -> str:
        """Why every publish to this exchange would be refused; the empty text when not, or nobody can say."""


class RecoveryBroker(Struct, frozen=True, kw_only=True):
    """A broker as far as a recovery of one of its queues needs it."""

    drain: DrainConsumer
    publisher: RunPublisher
    redriver: Redriver
    inspector: RunInspector


class Broker(Protocol):
    """A place with queues."""

    origin: Origin  #: which letters are its own

    @property
    def publisher(self) -> Publisher:
        """For what `write` and `rewrite` make."""

    @property
    def inspector(self) -> Inspector:
        """For questions."""

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        """Consume. Leaving gives back what is not settled, or lets it be given back."""

    async def missing(self, subscription: Subscription) -> list[str]:
        """Everything that stands in the way of a safe retry or parking, in words; empty when consuming may begin."""

    async def declare(self, subscription: Subscription) -> None:
        """Make what is missing. Nothing that is there is changed in a way that could lose a message."""

    async def delete_empty(self, queue: str) -> bool:
        """Delete it unless a message is in it or on its way; false when one is. One that is gone is deleted."""

    async def peek(self, queue: str, *, count_max: int) -> Sequence[NewLetter]:
        """Look at the first letters and give all of them back."""

    def letter(self, delivery: Delivery, queue: str) -> NewLetter:
        """What capture keeps of it, with all its bytes. Raises MessageRefused for what can be no letter."""

    def kinds(self, properties: bytes) -> Kinds:
        """What the broker calls the kinds of what a letter has, for people. Never raises."""

    def write(self, message: Message, to: Address, *, death: DeathStory | None = None, by: str = "") -> Outgoing:
        """A message of our own: body, id and headers; with a death it is parked, by somebody."""

    def outgoing(self, message: Message, to: Address, *, at_us: int = 0) -> Outgoing:
        """A message of a program, with all that it says; `at_us` is when it may be handed out, 0 is at once.

        Raises Invalid for what this broker would not keep.
        """

    def rewrite(self, content: Content, to: Address, stamp: RedriveStamp, redrive_id: str) -> Outgoing:
        """A letter of the vault as it is published again: its own bytes, its edits, and what a redrive changes.

        Raises MessageRefused for what cannot be written.
        """
