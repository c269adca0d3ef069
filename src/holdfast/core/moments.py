"""Moments and durations as text, as `datetime`, and as whole microseconds (what stores keep).

Durations read like `900ms`, `30s`, `1h30m`; moments are RFC 3339 in UTC. Nothing here reads a clock.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from holdfast.errors import Invalid

SECOND_US = 1_000_000
DURATION_CHARACTERS_MAX = 15
#: A hundred years: every sum of a moment and a duration stays inside 64 bits and the year 9999.
DURATION_US_MAX = 100 * 365 * 86_400 * SECOND_US

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_US = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_UNITS_US = {"ns": 0.001, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+", re.ASCII)


def parse_duration(text: str, *, what: str) -> int:
    """Microseconds in `text`; raises Invalid as `{what} is invalid; …`. The empty text is 0."""
    if text in {"", "0"}:
        return 0
    if len(text) > DURATION_CHARACTERS_MAX:
        raise Invalid(f"{what} is invalid; cannot be greater than '{DURATION_CHARACTERS_MAX}' characters")
    if text.startswith("-"):
        raise Invalid(f"{what} is invalid; '{text}' cannot be negative")
    if not _WHOLE.fullmatch(text):
        raise Invalid(f"{what} is invalid; '{text}' is not a duration - expected format: 900ms, 5m or 1h30m")
    total_us = sum(float(number) * _UNITS_US[unit] for number, unit in _PART.findall(text))
    if total_us > DURATION_US_MAX:
        raise Invalid(f"{what} is invalid; '{text}' is more than a hundred years")
    return round(total_us)


def format_duration(duration_us: int) -> str:
    """The shortest text that `parse_duration` reads back as the same: `1h30m`, `1.5s`, `900ms`."""
    if duration_us == 0:
        return "0s"
    seconds, rest_us = divmod(duration_us, SECOND_US)
    if seconds == 0:
        return f"{_plain(rest_us, 1000)}ms" if rest_us >= 1000 else f"{rest_us}us"
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    parts = [f"{hours}h" if hours else "", f"{minute}m" if minute else ""]
    if second or rest_us:
        parts.append(f"{_plain(second * SECOND_US + rest_us, SECOND_US)}s")
    return "".join(parts)


def _plain(numerator: int, denominator: int) -> str:
    digits = len(str(denominator)) - 1
    return f"{numerator / denominator:.{digits}f}".rstrip("0").rstrip(".")


def moment(at_us: int) -> datetime:
    """The aware moment of `at_us` microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=at_us)


def moment_or_none(at_us: int | None) -> datetime | None:
    """Like `moment`; none or zero is none."""
    return moment(at_us) if at_us else None


def microseconds(at: datetime) -> int:
    """Microseconds since 1970, at least 1; without a zone it is UTC.

    A moment before 1970 or after 9999 is taken as the nearest inside, because 0 says "none" in a store.
    """
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max((at - _EPOCH) // _MICROSECOND, 1), _LAST_US)


def in_utc(at: datetime | None) -> datetime | None:
    """The same moment, written in UTC."""
    return moment(microseconds(at)) if at else None
