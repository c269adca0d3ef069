"""Moments and durations as text, as `datetime`, and as whole microseconds (what stores keep); and how long to wait.

Durations read like `900ms`, `30s`, `1h30m`; moments are RFC 3339 in UTC. Nothing here reads a clock.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from holdfast.errors import Invalid

SECOND_US = 1_000_000
#: What has worked for so long has worked: the waits begin small again.
STEADY_S = 5.0
#: When nothing was written for so long the clock may have jumped: for a while nothing is deleted by what it says.
GAP_US = 6 * 3600 * SECOND_US
GAP_WAIT_US = 600 * SECOND_US
#: Later than every moment, and above every count.
NEVER_US = 1 << 62
DURATION_CHARACTERS_MAX = 15
#: What `go_duration` writes may be longer than what somebody may ask for.
WRITTEN_CHARACTERS_MAX = 24
#: A hundred years: every sum of a moment and a duration stays inside 64 bits and the year 9999.
DURATION_US_MAX = 100 * 365 * 86_400 * SECOND_US

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_US = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_UNITS_US = {"ns": 0.001, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+", re.ASCII)
_ANY_PART = re.compile(r"([0-9]*\.?[0-9]*)([^0-9.]*)")
_ZERO_PART = re.compile("(?<=[hm])0[ms]")
#: What clients of the queue service match, word for word.
_GO_FORMATS = {
    "request timeout": "900ms, 5m or 15m",
    "lease timeout": "8m, 15m or 1h",
    "expire timeout": "60m, 2h or 24h",
}


def parse_duration(text: str, *, what: str, characters_max: int = DURATION_CHARACTERS_MAX) -> int:
    """Microseconds in `text`; raises Invalid as `{what} is invalid; …`. The empty text is 0."""
    if text in {"", "0"}:
        return 0
    if len(text) > characters_max:
        raise Invalid(f"{what} is invalid; cannot be greater than '{characters_max}' characters")
    if text.startswith("-"):
        raise Invalid(f"{what} is invalid; '{text}' cannot be negative")
    if not _WHOLE.fullmatch(text):
        if what in _GO_FORMATS:
            raise Invalid(f"{what} is invalid; time: {_as_go_says(text)} - expected format: {_GO_FORMATS[what]}")
        raise Invalid(f"{what} is invalid; '{text}' is not a duration - expected format: 900ms, 5m or 1h30m")
    total_us = sum(float(number) * _UNITS_US[unit] for number, unit in _PART.findall(text))
    if total_us > DURATION_US_MAX:
        raise Invalid(f"{what} is invalid; '{text}' is more than a hundred years")
    return round(total_us)


def _as_go_says(text: str) -> str:
    """Why it is no duration, in the words of Go."""
    for number, unit in _ANY_PART.findall(text):
        if not number.strip("."):
            break
        if not unit:
            return f'missing unit in duration "{text}"'
        if unit not in _UNITS_US:
            return f'unknown unit "{unit}" in duration "{text}"'
    return f'invalid duration "{text}"'


def written_duration(text: str) -> int:
    """Microseconds of what `go_duration` wrote, here or on a server."""
    return parse_duration(text, what="duration", characters_max=WRITTEN_CHARACTERS_MAX)


def go_duration(duration_us: int) -> str:
    """As Go writes it, which is what clients of the queue service compare: `1h30m0s`, `1m0s`, `1.5s`, `900ms`."""
    if duration_us == 0:
        return "0s"
    if duration_us < SECOND_US:
        return f"{_plain(duration_us, 1000)}ms" if duration_us >= 1000 else f"{duration_us}µs"
    minutes, rest_us = divmod(duration_us, 60 * SECOND_US)
    hours, minute = divmod(minutes, 60)
    whole = f"{hours}h{minute}m" if hours else f"{minute}m" if minute else ""
    return f"{whole}{_plain(rest_us, SECOND_US)}s"


def format_duration(duration_us: int) -> str:
    """The shortest text that `parse_duration` reads back as the same: `1h30m`, `1.5s`, `900ms`."""
    return _ZERO_PART.sub("", go_duration(duration_us)).replace("µ", "u")


def _plain(numerator: int, denominator: int) -> str:
    digits = len(str(denominator)) - 1
    return f"{numerator / denominator:.{digits}f}".rstrip("0").rstrip(".")


def moment(at_us: int) -> datetime:
    """The aware moment of `at_us` microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=at_us)


def moment_or_none(at_us: int | None) -> datetime | None:
    """Like `moment`; none or zero is none."""
    return moment(at_us) if at_us else None


def microseconds_or_zero(at: datetime | None) -> int:
    """Like `microseconds`; 0 for none, and for the first year, which is how Go writes a moment that was not set."""
    return microseconds(at) if at and at.year > 1 else 0


def microseconds(at: datetime) -> int:
    """Microseconds since 1970, at least 1; without a zone it is UTC.

    A moment before 1970 or after 9999 is taken as the nearest inside, because 0 says "none" in a store.
    """
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max((at - _EPOCH) // _MICROSECOND, 1), _LAST_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before trying again: doubling, with a ceiling, and spread so that clients do not come at once.

    `delay_s(0)` is the wait after the first failure.
    """

    first_s: float = 0.1
    factor: float = 2.0
    delay_s_max: float = 15.0

    def delay_s(self, failures: int, *, spread: float | None = None) -> float:
        """Between half and all of the doubled delay; `spread` (0 to 1) is chosen by chance unless given."""
        chance = random.random() if spread is None else spread  # noqa: S311  nobody gains by guessing it
        # The exponent has a ceiling of its own: a broker that is away for a week must not overflow a float.
        full_s = min(self.first_s * self.factor ** min(failures, 64), self.delay_s_max)
        return full_s * (0.5 + chance / 2)


class BackoffTimer:
    """The wait before the next try, by how the last ones went. No clock of its own: moments are handed in.

    What worked, but not for long, counts as a failure: a broker that hangs up on everybody is not asked in a loop.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0
        self._since_s: float | None = None

    def worked(self, now_s: float) -> None:
        """A try succeeded."""
        self._since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """A try failed, or what it had brought about ended: how long to wait before the next."""
        if self._since_s is not None and now_s - self._since_s >= STEADY_S:
            self._failures = 0
        self._since_s = None
        self._failures += 1
        return self._backoff.delay_s(self._failures - 1)


def in_utc(at: datetime | None) -> datetime | None:
    """The same moment, written in UTC."""
    return moment_or_none(microseconds_or_zero(at))
