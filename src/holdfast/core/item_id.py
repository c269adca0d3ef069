"""Item ids: time-ordered, unique over all queues, and readable without a table.

An id is `<14 hex digits of the sequence>-<generation>-<partition>`. The sequence is a clock in microseconds that
never stands still or goes back (or a database's sequence), so ids of one partition sort in the order of arrival.
The generation is a queue's own number and is never used again, so an id of another queue, or of a queue that was
deleted and made anew, is simply not there.
"""

from __future__ import annotations

SEQUENCE_BITS = 53
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
_DIGITS = 14


def id_suffix(generation: int, partition: int) -> str:
    """What every id of one partition ends with."""
    return f"-{generation:x}-{partition:x}"


def format_id(sequence: int, suffix: str) -> str:
    """The text of an id."""
    return f"{sequence:014x}{suffix}"


def parse_id(text: str, suffix: str) -> int | None:
    """The sequence of an id of this partition; none when it is anything else."""
    if len(text) != _DIGITS + len(suffix) or not text.endswith(suffix):
        return None
    digits = text[:_DIGITS]
    if not digits.isalnum() or not digits.isascii() or digits != digits.lower():
        return None
    try:
        sequence = int(digits, 16)
    except ValueError:
        return None
    return sequence if sequence <= SEQUENCE_MAX else None
