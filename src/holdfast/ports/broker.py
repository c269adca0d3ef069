"""What the consumer runtime needs of a broker: messages, and three ways to settle each.

Whatever settles a message returns when the broker has it durably. If it raises, the message is still ours, unsettled,
and settling it may be tried again; it may then exist twice, never not at all. NotOurs alone says that it is the
broker's again and will be delivered a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from holdfast.core.message import Message, Outcome, Outgoing
from holdfast.core.policy import Park, RetryPolicy, Wait

#: Called with messages that share an outcome.
Told: TypeAlias = Callable[[Sequence[Outgoing], Outcome], None]
Layout: TypeAlias = Literal["per-consumer", "quorum", "shared-dlq"]


class Subscription(Struct, frozen=True, kw_only=True):
    """What a consumer asks of a broker."""

    queue: str
    policy: RetryPolicy
    prefetch: int  #: how many messages may be ours at a time
    consumer: str = ""  #: who parks, for the letter
    layout: Layout = "per-consumer"  #: on RabbitMQ: how wait queues and dead queue are laid out


class Incoming(Struct, frozen=True, kw_only=True, eq=False):
    """A message that is ours until it is settled."""

    message: Message
    used: int  #: how many attempts were made before this one
    #: It came again and the broker cannot say how often: whoever worked on it may have ended with his process.
    step_aside: bool = False
    tag: object = None  #: the broker's own


class Intake(Protocol):
    """An open subscription."""

    @property
    def trouble(self) -> str:
        """Why no messages come at the moment; the empty text while they can."""

    async def take(self, count_max: int) -> Sequence[Incoming]:
        """Wait for messages; none means that it was stopped. Raises HoldfastError when consuming ended for good."""

    async def stop(self) -> None:
        """No new messages. What is ours can still be settled."""

    async def ack(self, incoming: Incoming) -> None:
        """It is done."""

    async def wait(self, incoming: Incoming, wait: Wait) -> None:
        """It comes again after its delay, with one more attempt on its count."""

    async def park(self, incoming: Incoming, park: Park) -> None:
        """It goes to the dead queue, with the story of its death."""

    async def give_back(self, incoming: Incoming) -> None:
        """It goes back to the queue as it is, now."""


class ConsumerIntake(Intake, Protocol):
    """What handlers are run from."""

    async def begin(self, incoming: Incoming) -> None:
        """Its handler is about to run; where the broker does not count attempts, that is noted. Raises as settling."""


class Publisher(Protocol):
    """Publishes with confirms; what no queue has is a failure. Only *confirmed* allows a source to be settled.

    Connects again by itself, and sends again what was in flight: so that may arrive twice. Every message gets an
    outcome, *unknown* when nobody can say.
    """

    @property
    def trouble(self) -> str:
        """Why nothing can be published at the moment (an alarm, no connection); the empty text while it can."""

    @property
    def sent_again(self) -> int:
        """How many publishes were repeated because the outcome of the first was unknown."""

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        """Publish and wait; outcomes in the same order. Raises BrokerLost only when the publisher is closed."""

    def send(self, messages: Sequence[Outgoing], told: Told, *, timeout_s: float) -> None:
        """As `publish`, without waiting: `told` hears of every message once, as soon as its outcome is known."""


class Broker(Protocol):
    """A place with queues."""

    async def missing(self, subscription: Subscription) -> list[str]:
        """Everything that stands in the way of a safe retry or parking, in words; empty when consuming may begin."""

    async def declare(self, subscription: Subscription) -> None:
        """Make what is missing. Nothing that is there is changed in a way that could lose a message."""

    def open(self, subscription: Subscription) -> AbstractAsyncContextManager[ConsumerIntake]:
        """Consume. Leaving gives back what is not settled, or lets it be given back."""
