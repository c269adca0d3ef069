"""Item ids: time-ordered, unique over all queues, and readable without a table.

An id is `<14 hex digits of the sequence>-<generation>-<partition>`. The sequence is a clock in microseconds that
never stands still or goes back (or a database's sequence), so ids of one partition sort in the order of arrival.
The generation is a queue's own number and is never used again, so an id of another queue, or of a queue that was
deleted and made anew, is simply not there.
"""

from __future__ import annotations

import re

SEQUENCE_BITS = 53
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
_DIGITS = 14
#: 53 bits: the first of the fourteen digits is 0 or 1.
_PATTERN = "[01][0-9a-f]{13}"
_digits = re.compile(_PATTERN, re.ASCII).fullmatch


def id_suffix(generation: int, partition: int) -> str:
    """What every id of one partition ends with."""
    return f"-{generation:x}-{partition:x}"


def format_id(sequence: int, suffix: str) -> str:
    """The text of an id."""
    return f"{sequence:014x}{suffix}"


def parse_id(text: str, suffix: str) -> int | None:
    """The sequence of an id of this partition; none when it is anything else."""
    if text[_DIGITS:] != suffix or _digits(text[:_DIGITS]) is None:
        return None
    return int(text[:_DIGITS], 16)


def ids_pattern(suffix: str) -> re.Pattern[str]:
    """Matches ids of one partition joined by commas: one look for a whole request."""
    one = _PATTERN + re.escape(suffix)
    return re.compile(f"{one}(?:,{one})*", re.ASCII)


def sequence_of(text: str) -> int:
    """The sequence of an id that is known to be one."""
    return int(text[:_DIGITS], 16)


def partition_of(text: str) -> int:
    """The partition of an id that a store has given out."""
    return int(text.rpartition("-")[2], 16)
