"""Time, handed in: the moments that are stored, shown and compared, and calls at a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that was asked for and can still be called off."""

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""


class Clock(Protocol):
    """The moment, and calls at a later one."""

    def now_us(self) -> int:
        """Microseconds since 1970, UTC."""

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        """Call back from the event loop once `delay_us` has passed; at once when it is not positive."""
