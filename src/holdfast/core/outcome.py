"""What a handler answers: done, retry or dead; and which exceptions mean which."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from holdfast.core.moments import DURATION_US_MAX, SECOND_US, parse_duration
from holdfast.errors import Invalid

#: All three texts together. Headers of 128 KiB make the broker close the connection.
FAILURE_BYTES_MAX = 8 * 1024
TYPE_BYTES_MAX = 256
MESSAGE_BYTES_MAX = 2 * 1024
CUT = "…"


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


Outcome: TypeAlias = Done | RetryLater | Dead


def outcome_of(error: BaseException | None, *, permanent: Sequence[type[BaseException]] = ()) -> Outcome:
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
