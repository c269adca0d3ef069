"""A recovery run in values: its limits, why it stopped, and what it says at its end. Pure."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from msgspec import Struct, field

from holdfast.core.moments import SECOND_US
from holdfast.core.routes import Route

MINUTE_S = 60.0
#: No letter comes nearer than this many returns to its queue's delivery limit, at which the broker deletes it.
RETURNS_SPARE_COUNT = 5
SAMPLE_CHARACTERS_MAX = 200
REASONS_COUNT_MAX = 1_000
OTHER_REASONS = "(further reasons)"
#: Queues that are counted by name. Strangers choose routing keys and types.
NAMES_COUNT_MAX = 1_000
OTHERS = "(further)"


class StoppedBy(StrEnum):
    """Why a run ended."""

    ALL_TAKEN = "all_taken"
    IDLE = "idle"
    EMPTY = "empty"
    STALL = "stall"
    HOLD = "hold"
    TOTAL = "total"
    SIGNAL = "signal"


class RunLimits(Struct, frozen=True, kw_only=True):
    """Where a run ends, and how much it has under way."""

    limit: int | None = None  #: letters; None is what is there at the start
    window_count_max: int = 4_000
    window_bytes_max: int = 64 * 2**20
    total_timeout_s: float = 30 * MINUTE_S
    idle_timeout_s: float = 10.0
    empty_timeout_s: float = 5.0
    stall_timeout_s: float = 30.0
    hold_timeout_s: float = 20 * MINUTE_S
    stop_timeout_s: float = 10.0
    held_count_max: int = 1_000_000
    rate_per_s: float = 0.0  #: 0: as fast as it goes


class Sample(Struct, frozen=True, kw_only=True):
    """One letter of those that were kept for a reason."""

    message_id: str = ""
    type: str = ""
    exchange: str = ""
    routing_key: str = ""
    died_in: str = ""
    body_bytes: int = 0
    body: str = ""  #: its beginning


class Reason(Struct, kw_only=True):
    """How many letters were kept for it."""

    count: int = 0
    sample: Sample | None = None


class Summary(Struct, kw_only=True):
    """What a run did. Programs rely on these names."""

    dead_queue: str = ""
    run: str = ""
    dry_run: bool = False
    found: int = 0
    recovered: int = 0
    failed: int = 0
    skipped: int = 0
    filtered: int = 0  #: kept because --where left them out
    possible_duplicates: int = 0
    recognised: int = 0  #: published before a connection was lost or a run killed, and not published again
    unknown: int = 0  #: of the failed: published, and nobody knows whether the broker has them
    put_back: int = 0  #: went back by a publish, because another return would have been too many
    returned: int = 0  #: given back to the queue; each may count toward its delivery limit
    remaining: int | None = 0  #: letters in the dead-letter queue at the end; None: nobody could say
    from_backup: bool = False  #: the letters of a file; no queue was looked at
    unseen: int = 0  #: of those found: not looked at, because the limit was reached or the run ended before
    interruptions: int = 0
    by_queue: Counter[str] = field(default_factory=Counter)
    failed_by_queue: Counter[str] = field(default_factory=Counter)
    planned: dict[str, Counter[str]] = field(default_factory=dict)  #: in a dry run: type → address → letters
    reasons: dict[str, Reason] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)  #: address → every queue that gets a copy, if several
    notes: list[str] = field(default_factory=list)
    failure: str = ""  #: why the run could not go on
    duration_s: float = 0.0
    rate_per_s: float = 0.0
    stopped_by: StoppedBy = StoppedBy.ALL_TAKEN

    @property
    def kept(self) -> int:
        """Letters that this run had in its hands and left in the queue."""
        return self.failed + self.skipped + self.filtered

    @property
    def is_complete(self) -> bool:
        """Whether every letter was recovered; of a dry run, whether every one would be."""
        is_known = self.remaining is not None or self.from_backup
        left = self.unseen or (self.remaining and not self.dry_run)
        return is_known and not self.kept and not left and not self.failure

    def went(self, name: str, count: int = 1) -> None:
        """So many were recovered to there."""
        self.by_queue[name if _has_room(self.by_queue, name) else OTHERS] += count

    def failed_at(self, name: str) -> None:
        """One was not taken there."""
        self.failed += 1
        self.failed_by_queue[name if _has_room(self.failed_by_queue, name) else OTHERS] += 1

    def reason(self, text: str) -> Reason:
        """The entry of this reason. Strangers choose texts: their number has a limit."""
        if text not in self.reasons and len(self.reasons) >= REASONS_COUNT_MAX:
            text = OTHER_REASONS
        return self.reasons.setdefault(text, Reason())


def add_planned(summary: Summary, route: Route) -> None:
    """In a dry run: a letter would go there."""
    type_, address = route.type or "(no type)", str(route.address)
    if address not in summary.planned.get(type_, ()) and sum(map(len, summary.planned.values())) >= NAMES_COUNT_MAX:
        type_ = address = OTHERS
    summary.planned.setdefault(type_, Counter())[address] += 1


def _has_room(names: Counter[str], name: str) -> bool:
    return name in names or len(names) < NAMES_COUNT_MAX


def may_return(returns: int, delivery_limit: int | None, *, times: int = 1) -> bool:
    """Whether a letter that came back so often may be given back (so many times) without coming near the limit."""
    return delivery_limit is None or returns + times <= delivery_limit - RETURNS_SPARE_COUNT


def as_utf8(name: str) -> str:
    """A name that a stranger chose, for JSON: it may have bytes that are not UTF-8, and JSON has no place for these."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def seconds(duration_us: int) -> float:
    """Microseconds as seconds."""
    return duration_us / SECOND_US
