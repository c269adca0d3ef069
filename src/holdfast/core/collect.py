"""Collected results: transactions, series, ordinals, and what their messages look like. Pure values and functions.

A message says what it is by five attributes: `transaction-id`, `series`, `ordinal`, `count`, `series-count`. They are
headers on RabbitMQ; on the embedded queue they stand as a JSON object in the item's `reference`. The body is bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from holdfast.core.message import Message
from holdfast.core.states import TRANSACTION_MOVES, TransactionState
from holdfast.errors import Invalid

DEAD_QUEUE = "collector.dlq"
ID_CHARACTERS_MAX = 100
SERIES_COUNT_MAX = 10_000
ORDINAL_MAX = 2**53 - 1
REQUEST_BYTES_MAX = 4 * 2**20
RESERVED_SERIES = frozenset({"gaps", "abandon", "missing"})
MANIFEST = "manifest-"

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{ID_CHARACTERS_MAX - 1}}}", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,16}", re.ASCII)


class Transaction(Struct, frozen=True):
    """One collected result as it is kept: everything but its request."""

    id: str
    state: TransactionState
    producer: str
    notify: str = ""
    series: tuple[str, ...] | None = None  #: the whole set when it was given with the request
    reason: str = ""
    created_at_us: int = 0
    updated_at_us: int = 0
    progress_at_us: int = 0
    owner: str = ""
    fence: int = 0
    is_clean: bool = False  #: its queues are gone; nothing is left to do


class Part(Struct, frozen=True):
    """One stored ordinal."""

    series: str
    ordinal: int
    path: str
    size_bytes: int
    sha256: str


class Header(Struct, frozen=True, kw_only=True):
    """A header message: how many ordinals a series has, and, if it says so, how many series there are."""

    series: str
    count: int
    series_count: int | None = None


class Payload(Struct, frozen=True, kw_only=True):
    """A payload message, its bytes apart."""

    series: str
    ordinal: int


class SeriesState(Struct, frozen=True):
    """How a series stands in the index. `count` is None until its header has come."""

    series: str
    count: int | None = None
    series_count: int | None = None
    stored_count: int = 0
    stored_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.count is not None and self.stored_count == self.count


Range: TypeAlias = tuple[int, int]  #: first and last, both included
Stand: TypeAlias = Mapping[str, SeriesState]


def queue_names(transaction: str) -> tuple[str, str]:
    """The header queue and the payload queue: the same names after every crash."""
    return f"transaction-{transaction}-header", f"transaction-{transaction}-payload"


def check_name(name: str, *, what: str) -> str:
    """A transaction id or a series: part of a queue's name, a path and an address. Raises Invalid."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{what} is invalid; {name[:120]!r} must be 1 to {ID_CHARACTERS_MAX} letters, digits, '.', '_' or '-', "
            "and not begin with '.' or '-'"
        )
    return name


def check_series(name: str) -> str:
    """A series: a name that no path of ours needs. Raises Invalid."""
    check_name(name, what="series")
    if name in RESERVED_SERIES or name.startswith(MANIFEST):
        raise Invalid(f"series is invalid; '{name}' is reserved, use another name")
    return name


def check_move(source: TransactionState, target: TransactionState) -> None:
    """Raises Invalid for a move that the table does not have."""
    if (source, target) not in TRANSACTION_MOVES:
        raise Invalid(f"transaction cannot go on; from '{source.value}' to '{target.value}' is no move")


def blob_path(transaction: str, series: str, ordinal: int, sha256: str) -> str:
    """Where the bytes of an ordinal are. The digest in it keeps two claims on one ordinal apart."""
    return f"{transaction}/{series}/{ordinal}-{sha256}"


def manifest_path(transaction: str, sha256: str) -> str:
    """Where the list of parts is."""
    return f"{transaction}/{MANIFEST}{sha256}"


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def attributes(message: Message) -> Mapping[str, object]:
    """What a message says of itself: its headers, or the JSON object in its reference."""
    if message.headers:
        return message.headers
    try:
        found: Any = msgspec.json.decode(message.reference) if message.reference else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_header(message: Message, transaction: str) -> Header | str:
    """A header message, or why it is none."""
    given = attributes(message)
    if wrong := _strange(given, transaction):
        return wrong
    count, series_count = _whole(given.get("count")), given.get("series-count")
    if count is None:
        return f"header has no valid count; {_shown(given.get('count'))} is not a whole number from 0 on"
    known = _whole(series_count)
    if series_count is not None and (known is None or not 1 <= known <= SERIES_COUNT_MAX):
        return f"header has no valid series-count; {_shown(series_count)} is not from 1 to {SERIES_COUNT_MAX}"
    return Header(series=str(given["series"]), count=count, series_count=known)


def read_payload(message: Message, transaction: str) -> Payload | str:
    """A payload message, or why it is none."""
    given = attributes(message)
    if wrong := _strange(given, transaction):
        return wrong
    ordinal = _whole(given.get("ordinal"))
    if ordinal is None:
        return f"payload has no valid ordinal; {_shown(given.get('ordinal'))} is not a whole number from 0 on"
    return Payload(series=str(given["series"]), ordinal=ordinal)


def _strange(given: Mapping[str, object], transaction: str) -> str:
    owner, series = given.get("transaction-id"), given.get("series")
    if not isinstance(owner, str) or not isinstance(series, str):
        return "message has not its attributes; transaction-id and series must be texts"
    if owner != transaction:
        return f"message belongs to another transaction; {_shown(owner)}, this is '{transaction}'"
    try:
        check_series(series)
    except Invalid as error:
        return error.message
    return ""


def _whole(value: object) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= ORDINAL_MAX else None


def _shown(value: object) -> str:
    return repr(value)[:80]


def known_set(given: Sequence[str] | None, stand: Stand) -> frozenset[str] | None:
    """The series of the result; None while nobody has said which. It is never inferred from what has come."""
    if given is not None:
        return frozenset(given)
    announced = [series for series in stand.values() if series.count is not None]
    total = next((series.series_count for series in announced if series.series_count is not None), None)
    if total is None or len(announced) < total:
        return None
    return frozenset(series.series for series in announced)


def is_complete(given: Sequence[str] | None, stand: Stand) -> bool:
    """Whether the set is known and every series of it is whole."""
    known = known_set(given, stand)
    return known is not None and all(name in stand and stand[name].is_complete for name in known)


def header_contradiction(header: Header, given: Sequence[str] | None, stand: Stand) -> str:
    """Why this header cannot be true together with what is known; the empty text when it can."""
    before = stand.get(header.series)
    if before is not None and before.count is not None and before.count != header.count:
        return f"series has another count; '{header.series}' has {before.count}, this header says {header.count}"
    totals = {series.series_count for series in stand.values() if series.series_count is not None}
    if given is not None:
        totals = {len(given)}
    if header.series_count is not None and totals and header.series_count not in totals:
        return f"set of series has another size; {min(totals)} are known, this header says {header.series_count}"
    announced = {series.series for series in stand.values() if series.count is not None} | {header.series}
    total = header.series_count if header.series_count is not None else min(totals, default=None)
    if given is None and total is not None and len(announced) > total:
        return f"series is outside the known set; '{header.series}' would be one more than the {total} announced"
    return ""


def ranges(ordinals: Sequence[Range], *, count: int) -> list[Range]:
    """What is missing below `count` when these ranges, in order, are there."""
    missing: list[Range] = []
    start = 0
    for first, last in ordinals:
        if first > start:
            missing.append((start, min(first, count) - 1))
        start = max(start, last + 1)
        if start >= count:
            break
    if start < count:
        missing.append((start, count - 1))
    return [(first, last) for first, last in missing if first <= last]
