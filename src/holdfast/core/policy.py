"""How often and how soon a message is tried again, and what follows from an outcome. Pure.

`attempts=3`: the handler runs three times. A run counts when it ended, by an exception or by the end of its process;
`used` is the number of runs so far, `attempt` the number of the one that is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from holdfast.core.checks import ATTEMPTS_MAX
from holdfast.core.moments import DURATION_US_MAX, format_duration
from holdfast.core.outcome import Dead, Done, Failure, Outcome, RetryLater, delay_us
from holdfast.errors import Invalid

REASON_PERMANENT = "permanent"
REASON_ATTEMPTS = "attempts"
REASON_POISON = "poison"
STEPS_COUNT_MAX = 32


class RetryPolicy(Struct, frozen=True):
    """`Retry(attempts=3, delay="15s")`, or a ladder: `delay=["1s", "15s", "5m"]`, whose last step is repeated.

    `spread` makes each delay longer by up to that part of it, by chance, so that what failed together does not come
    back together. Where the delay is that of a wait queue, there is nothing to spread.

    `by="broker"` leaves the way to the wait queue to RabbitMQ (nack without requeue, dead-letter exchange), instead of
    a publish that is confirmed. On a classic queue that is at most once; the embedded queue knows no difference.
    """

    attempts: int = 3
    delay: str | float | Sequence[str | float] = "15s"
    spread: float = 0.0
    by: Literal["publish", "broker"] = "publish"

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise Invalid(f"attempts is invalid; {self.attempts} is not from 1 to {ATTEMPTS_MAX}")
        if not 0 <= self.spread <= 1:
            raise Invalid(f"spread is invalid; {self.spread} is not from 0 to 1")
        if not 1 <= len(self.steps_us) <= STEPS_COUNT_MAX:
            raise Invalid(f"delay is invalid; a ladder has 1 to {STEPS_COUNT_MAX} steps")
        if self.by not in {"publish", "broker"}:
            raise Invalid(f"by is invalid; '{self.by}' is neither 'publish' nor 'broker'")
        if self.by == "broker" and len(self.steps_us) > 1:
            raise Invalid("delay is invalid; the broker knows one wait queue, a ladder needs by='publish'")

    @property
    def steps_us(self) -> tuple[int, ...]:
        """The ladder in microseconds."""
        steps = [self.delay] if isinstance(self.delay, str | int | float) else self.delay
        return tuple(delay_us(step, what="delay") for step in steps)

    def delay_us(self, attempt: int, *, chance: float = 0.0) -> int:
        """How long to wait after this attempt failed; `chance` is from 0 to 1."""
        steps = self.steps_us
        step_us = steps[min(max(attempt, 1), len(steps)) - 1]
        return min(DURATION_US_MAX, round(step_us * (1 + self.spread * chance)))


class Ack(Struct, frozen=True):
    """It is done."""


class Wait(Struct, frozen=True, kw_only=True):
    """It is tried again after this long."""

    delay_us: int
    failure: Failure

    @property
    def delay(self) -> str:
        """For people."""
        return format_duration(self.delay_us)


class Park(Struct, frozen=True, kw_only=True):
    """It goes to the dead queue."""

    reason: str
    failure: Failure


class Run(Struct, frozen=True):
    """It may run."""


Decision: TypeAlias = Ack | Wait | Park
#: What a message has that ended the process it ran in: nobody caught an exception.
POISON = Failure(type="holdfast.Poison", message="the process ended while this message was being worked on")


def decide(outcome: Outcome, *, attempt: int, policy: RetryPolicy, chance: float = 0.0) -> Decision:
    """What becomes of a message after attempt number `attempt`."""
    match outcome:
        case Done():
            return Ack()
        case Dead(failure=failure):
            return Park(reason=REASON_PERMANENT, failure=failure)
        case RetryLater(failure=failure) if attempt >= policy.attempts:
            return Park(reason=REASON_ATTEMPTS, failure=failure)
        case RetryLater(failure=failure, delay_us=None):
            return Wait(delay_us=policy.delay_us(attempt, chance=chance), failure=failure)
        case RetryLater(failure=failure, delay_us=asked_us):
            return Wait(delay_us=min(asked_us or 0, DURATION_US_MAX), failure=failure)


def admit(*, used: int, policy: RetryPolicy, step_aside: bool = False) -> Run | Wait | Park:
    """Whether a message that was just delivered may run: the poison guard.

    `used` counts runs that ended with their process too. `step_aside` is for a broker that cannot tell how often a
    message came: the one that came again waits once, with one more attempt on its count, before it runs again.
    """
    if used >= policy.attempts:
        return Park(reason=REASON_POISON, failure=POISON)
    if step_aside:
        return Wait(delay_us=policy.delay_us(used), failure=POISON)
    return Run()


def step_for(delay_us: int, steps_us: Sequence[int]) -> int:
    """Which of these delays stands for the one asked for: the shortest that is not shorter, else the longest."""
    longer = [step for step in steps_us if step >= delay_us]
    return steps_us.index(min(longer)) if longer else steps_us.index(max(steps_us))
