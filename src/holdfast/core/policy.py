"""What a handler answers (done, retry or dead), which exceptions mean which, and what follows: how often and how soon a
message is tried again. Pure.

`attempts=3`: the handler runs three times. A run counts when it ended, by an exception or by the end of its process;
`used` is the number of runs so far, `attempt` the number of the one that is on.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from holdfast.core.checks import ATTEMPTS_MAX
from holdfast.core.moments import DURATION_US_MAX, SECOND_US, format_duration, parse_duration
from holdfast.errors import Invalid

#: All three texts together. Headers of 128 KiB make the broker close the connection.
FAILURE_BYTES_MAX = 8 * 1024
TYPE_BYTES_MAX = 256
MESSAGE_BYTES_MAX = 2 * 1024
CUT = "…"
REASON_PERMANENT = "permanent"
REASON_ATTEMPTS = "attempts"
REASON_POISON = "poison"
STEPS_COUNT_MAX = 32


class Permanent(Exception):
    """Raised by a handler: no further attempt can help, park the message now."""


class RetryAfter(Exception):
    """Raised by a handler: try again, but not before this much time has passed (`"90s"`, or seconds)."""

    def __init__(self, delay: str | float, message: str = "") -> None:
        super().__init__(message or f"asked for another attempt after {delay}")
        self.delay_us = delay_us(delay, what="delay of RetryAfter")


class Failure(Struct, frozen=True, kw_only=True):
    """An exception as text, 8 KiB at the most."""

    type: str
    message: str = ""
    stack: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The texts of an exception. An exception that cannot say what it is must not stop the parking."""
        try:
            message = str(error)
        except Exception:  # noqa: BLE001 - a stranger's __str__
            message = "(its text cannot be read)"
        try:
            stack = "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001
            stack = ""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls.cut(name, message, stack)

    @classmethod
    def cut(cls, kind: str, message: str, stack: str) -> Failure:
        """The texts within their limits. Of a stack trace the end says most."""
        kind = head(clean(kind), TYPE_BYTES_MAX)
        message = head(clean(message), MESSAGE_BYTES_MAX)
        left = FAILURE_BYTES_MAX - len(kind.encode()) - len(message.encode())
        return cls(type=kind, message=message, stack=tail(clean(stack), left))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Done(Struct, frozen=True):
    """The handler returned."""


class RetryLater(Struct, frozen=True, kw_only=True):
    """It failed, and another attempt may help; `delay_us` is what the handler asked for, if anything."""

    failure: Failure
    delay_us: int | None = None


class Dead(Struct, frozen=True, kw_only=True):
    """It failed, and no attempt can help."""

    failure: Failure


HandlerResult: TypeAlias = Done | RetryLater | Dead


def outcome_of(error: BaseException | None, *, permanent: Sequence[type[BaseException]] = ()) -> HandlerResult:
    """What an exception means; None is success. `permanent` names further types that mean the same as Permanent."""
    if error is None:
        return Done()
    failure = Failure.of(error)
    if isinstance(error, (Permanent, *permanent)):
        return Dead(failure=failure)
    if isinstance(error, RetryAfter):
        return RetryLater(failure=failure, delay_us=error.delay_us)
    return RetryLater(failure=failure)


def delay_us(delay: str | float, *, what: str) -> int:
    """Microseconds of `"15s"` or of a number of seconds; raises Invalid."""
    if isinstance(delay, str):
        return parse_duration(delay, what=what)
    if not 0 <= delay <= DURATION_US_MAX / SECOND_US:  # false for NaN too
        raise Invalid(f"{what} is invalid; {delay} is not a number of seconds from 0 to a hundred years")
    return round(delay * SECOND_US)


def clean(text: str) -> str:
    """What every store and every header can hold: no NUL, no half of a surrogate pair."""
    return text.replace("\x00", "�").encode("utf-8", "replace").decode()


def head(text: str, bytes_max: int) -> str:
    """The beginning of a text, within so many bytes."""
    raw = text.encode()
    if len(raw) <= bytes_max:
        return text
    return raw[: max(0, bytes_max - len(CUT.encode()))].decode("utf-8", "ignore") + CUT


def tail(text: str, bytes_max: int) -> str:
    """The end of a text, within so many bytes."""
    raw = text.encode()
    if len(raw) <= bytes_max:
        return text
    return CUT + raw[len(raw) - max(0, bytes_max - len(CUT.encode())) :].decode("utf-8", "ignore")


class RetryPolicy(Struct, frozen=True):
    """`Retry(attempts=3, delay="15s")`, or a ladder: `delay=["1s", "15s", "5m"]`, whose last step is repeated. (`Retry`
    is its public name.)

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


def decide(outcome: HandlerResult, *, attempt: int, policy: RetryPolicy, chance: float = 0.0) -> Decision:
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
