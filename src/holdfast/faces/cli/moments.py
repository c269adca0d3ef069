"""Moments as people type them: RFC 3339, or `+10m` from now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from holdfast.core.moments import parse_duration
from holdfast.faces.cli.checks import duration
from holdfast.faces.cli.failures import BadUsage


def parse_moment(text: str, *, option: str) -> datetime:
    """The moment that was meant; raises BadUsage."""
    if text.startswith("+"):
        delay_us = parse_duration(duration(text[1:], option=option), what=option)
        return datetime.now(UTC) + timedelta(microseconds=delay_us)
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError as error:
        raise BadUsage(f"{option} is invalid; '{text}' is no moment, use 2030-01-31T08:00:00Z or +10m") from error
    if at.tzinfo is None:
        raise BadUsage(f"{option} is invalid; '{text}' has no time zone, end it with Z for UTC")
    return at
