"""Items of an embedded queue and its settings as plain frozen values, and the rules of items that every store applies.

`msgspec.Struct` stands where a dataclass would: ten times cheaper to make, and the same type is the JSON
shape, so that no face can show another field than the service gave. A payload is bytes and is never parsed.

An id is `<14 hex digits of the sequence>-<generation>-<partition>`: time-ordered, unique over all queues, and readable
without a table. The sequence is a clock in microseconds that never stands still or goes back (or a database's
sequence), so ids of one partition sort in the order of arrival. The generation is a queue's own number and is never
used again, so an id of another queue, or of a queue that was deleted and made anew, is simply not there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from holdfast.core.checks import (
    ATTEMPTS_MAX,
    DEDUPE_KEY_CHARACTERS_MAX,
    NAMESPACE,
    REFERENCE_CHARACTERS_MAX,
    TEXT_CHARACTERS_MAX,
)
from holdfast.core.moments import go_duration, microseconds_or_zero, moment, moment_or_none
from holdfast.errors import Invalid

#: A schedule less than this ahead means now: clocks differ by more.
SCHEDULE_US_MIN = 100_000

REASON_MAX_ATTEMPTS = "max_attempts"
REASON_EXPIRED = "expired"
REASON_REJECTED = "rejected"
REASON_RETENTION = "retention"

SEQUENCE_BITS = 53
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
_DIGITS = 14
#: 53 bits: the first of the fourteen digits is 0 or 1.
_PATTERN = "[01][0-9a-f]{13}"
_digits = re.compile(_PATTERN, re.ASCII).fullmatch


class PartitionIds:
    """The ids of one partition, as texts and as numbers; a store may count each partition's numbers from `first` on."""

    __slots__ = ("_are_ids", "first", "suffix")

    def __init__(self, generation: int, partition: int, *, first: int = 0) -> None:
        self.first = first
        self.suffix = f"-{generation:x}-{partition:x}"
        one = _PATTERN + re.escape(self.suffix)
        self._are_ids = re.compile(f"{one}(?:,{one})*", re.ASCII).fullmatch  # one look for a whole request

    def id_of(self, number: int) -> str:
        """The text of an id."""
        return f"{number & SEQUENCE_MAX:014x}{self.suffix}"

    def number_of(self, text: str) -> int:
        """The number of an id; -1, which no item has, when it cannot be one of ours."""
        if text[_DIGITS:] != self.suffix or _digits(text[:_DIGITS]) is None:
            return -1
        return self.first | int(text[:_DIGITS], 16)

    def first_from(self, pivot: str) -> int:
        """The number that a listing begins with; raises Invalid for a pivot that is no id of ours."""
        number = self.number_of(pivot) if pivot else self.first
        if number < 0:
            raise Invalid(f"invalid storage id; '{pivot}' is not an id of this partition")
        return number

    def numbers_of(self, ids: Sequence[str]) -> list[int]:
        """The numbers of ids; -1 for each that cannot be one of ours."""
        if self._are_ids(",".join(ids)) is None:
            return [self.number_of(text) for text in ids]
        first = self.first
        return [first | int(text[:_DIGITS], 16) for text in ids]


def partition_of(text: str) -> int:
    """The partition of an id that a store has given out."""
    return int(text.rpartition("-")[2], 16)


# What the document says of them; `core.checks` refuses with its own texts.
At = Annotated[datetime, Meta(extra_json_schema={"format": "date-time"})] | None
Payload = Annotated[
    bytes,
    Meta(extra_json_schema={"pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}),
]
_NO_NUL = "^[^\\x00]*$"
Text = Annotated[str, Meta(extra_json_schema={"maxLength": TEXT_CHARACTERS_MAX, "pattern": _NO_NUL})]
Reference = Annotated[str, Meta(extra_json_schema={"maxLength": REFERENCE_CHARACTERS_MAX, "pattern": _NO_NUL})]
Key = Annotated[str, Meta(extra_json_schema={"maxLength": DEDUPE_KEY_CHARACTERS_MAX, "pattern": _NO_NUL})]
AttemptsCount = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": ATTEMPTS_MAX})]


class NewItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What a producer hands in."""

    payload: Payload = field(name="bytes", default=b"")
    utf8: str = ""
    encoding: Text = ""
    kind: Text = ""
    reference: Reference = ""
    enqueue_at: At = None
    dedupe_key: Key = ""


class PlacedItem(Struct, frozen=True, gc=False):
    """Where a produced item is now: the answer to a producer."""

    id: str
    partition: int = 0


class LeasedItem(Struct, frozen=True, omit_defaults=True, gc=False):
    """An item with the exclusive right to work on it until `lease_deadline`."""

    id: str
    attempts: int
    lease_deadline: datetime
    payload: bytes = field(name="bytes", default=b"")
    encoding: str = ""
    kind: str = ""
    reference: str = ""
    first_id: str = ""  #: the id that it had at first, if it had another: it has a new one after every attempt


class ExtendedItem(Struct, frozen=True):
    """A lease that now runs until `lease_deadline`."""

    id: str
    lease_deadline: datetime


class RetryItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one leased item goes back: at once, at a moment, or to the dead queue."""

    id: str
    retry_at: At = None
    dead: bool = False
    reason: Text = ""


class Item(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item as it stands in its store: what a listing shows and an import takes."""

    id: str = ""
    source_id: Text = ""
    attempts: AttemptsCount = 0
    created_at: At = None
    enqueue_at: At = None
    lease_deadline: At = None
    expire_deadline: At = None
    is_leased: bool = False
    max_attempts: AttemptsCount = 0
    reference: Text = ""
    encoding: Text = ""
    kind: Text = ""
    payload: Payload = b""
    dedupe_key: Text = ""
    source_queue: Text = ""
    death_reason: Text = ""
    death_attempts: AttemptsCount = 0
    died_at: At = None
    former_key: str = ""  #: the dedupe_key that it had before it died; the key itself is free again


class PartitionInfo(Struct, frozen=True):
    """Which storage holds a partition."""

    partition: int = 0
    storage: str = ""


class QueueInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A queue as people and programs see it."""

    queue_name: str
    namespace: str = ""
    lease_timeout: str = ""
    expire_timeout: str = ""
    max_attempts: int = 0
    dead_queue: str = ""
    reference: str = ""
    requested_partitions: int = 0
    created_at: datetime | None = None
    updated_at: datetime | None = None
    partitions: list[PartitionInfo] = []
    dead_retention: str = ""
    paused: bool = False


class QueueRecord(Struct, frozen=True, kw_only=True):
    """What a catalog keeps of a queue. `generation` is its own for ever: made anew, a queue has another."""

    name: str
    generation: int = 0
    lease_timeout_us: int
    expire_timeout_us: int
    max_attempts: int = 0
    dead_queue: str = ""
    reference: str = ""
    created_at_us: int = 0
    updated_at_us: int = 0
    paused: bool = False
    dead_retention_us: int = 0
    partitions: tuple[PartitionInfo, ...] = ()

    @classmethod
    def from_row(cls, row: tuple[int, str]) -> QueueRecord:
        """From its generation, which a catalog gives it, and its JSON."""
        generation, text = row
        return replace(_decode_record(text), generation=generation)

    @property
    def json(self) -> str:
        """What a catalog writes down."""
        return msgspec.json.encode(self).decode()

    def info(self) -> QueueInfo:
        """The same, for people and programs."""
        return QueueInfo(
            queue_name=self.name,
            namespace=NAMESPACE,
            lease_timeout=go_duration(self.lease_timeout_us),
            expire_timeout=go_duration(self.expire_timeout_us),
            max_attempts=self.max_attempts,
            dead_queue=self.dead_queue,
            reference=self.reference,
            requested_partitions=len(self.partitions),
            created_at=moment(self.created_at_us),
            updated_at=moment(self.updated_at_us),
            partitions=list(self.partitions),
            dead_retention=go_duration(self.dead_retention_us) if self.dead_retention_us else "",
            paused=self.paused,
        )


_decode_record = msgspec.json.Decoder(QueueRecord).decode


def is_scheduled(at_us: int, now_us: int) -> bool:
    """Whether a moment is far enough ahead to be waited for."""
    return at_us >= now_us + SCHEDULE_US_MIN


def is_used_up(attempts: int, max_attempts: int) -> bool:
    """Whether an item may not be leased again. 0 is no limit."""
    return 0 < max_attempts <= attempts


def after_retry(item: RetryItem, *, attempts: int, max_attempts: int, immortal: bool) -> tuple[str, int]:
    """What becomes of a leased item that is given back: the reason for which it dies, or none and the moment for which
    it is scheduled, 0 when it was given none. Where nothing dies by itself (`immortal`) it lives on."""
    reason = item.reason or REASON_REJECTED if item.dead else ""
    if not reason and is_used_up(attempts, max_attempts):
        reason = REASON_MAX_ATTEMPTS
    if reason and not immortal:
        return reason, 0
    return "", 0 if item.dead else microseconds_or_zero(item.retry_at)


def cause_of(item: Item) -> str:
    """Why it died, in a line: below it a consumer may have left a traceback."""
    return item.death_reason.partition("\n")[0]


def listed_item(item_id: str, row: Sequence[Any]) -> Item:
    """An item as a listing shows it, from the columns that every store selects for it."""
    attempts, created_at, expire_at, lease_deadline, enqueue_at, kind, encoding, reference, payload = row[:9]
    dedupe_key, source_id, source_queue, death_reason, death_attempts, died_at, former_key = row[9:]
    return Item(
        id=item_id,
        attempts=attempts,
        created_at=moment(created_at),
        expire_deadline=moment(expire_at),
        lease_deadline=moment_or_none(lease_deadline),
        enqueue_at=moment_or_none(enqueue_at),
        is_leased=bool(lease_deadline),
        kind=kind,
        encoding=encoding,
        reference=reference,
        payload=payload,
        dedupe_key=dedupe_key or "",
        source_id=source_id or "",
        source_queue=source_queue or "",
        death_reason=death_reason or "",
        death_attempts=death_attempts or 0,
        died_at=moment_or_none(died_at),
        former_key=former_key or "",
    )
