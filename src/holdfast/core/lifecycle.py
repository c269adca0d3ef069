"""When an item lives, waits or dies: the rules that every store applies, as pure functions."""

from __future__ import annotations

#: A schedule less than this ahead means now: clocks differ by more.
SCHEDULE_US_MIN = 100_000

REASON_MAX_ATTEMPTS = "max_attempts"
REASON_EXPIRED = "expired"
REASON_REJECTED = "rejected"
REASON_RETENTION = "retention"


def is_scheduled(at_us: int, now_us: int) -> bool:
    """Whether a moment is far enough ahead to be waited for."""
    return at_us >= now_us + SCHEDULE_US_MIN


def is_used_up(attempts: int, max_attempts: int) -> bool:
    """Whether an item may not be leased again. 0 is no limit."""
    return 0 < max_attempts <= attempts
