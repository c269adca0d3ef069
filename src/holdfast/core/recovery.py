"""A recovery run in values: what is asked for, a letter in hand, what was found before, why it stopped, and what it
says at its end, also for people. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field

from holdfast.core.message import Address, Delivery
from holdfast.core.moments import SECOND_US, format_duration
from holdfast.core.routes import Route, RouteTable
from holdfast.core.states import RunState

MINUTE_S = 60.0
#: No letter comes nearer than this many returns to its queue's delivery limit, at which the broker deletes it.
RETURNS_SPARE_COUNT = 5
SAMPLE_CHARACTERS_MAX = 200
REASONS_COUNT_MAX = 1_000
OTHER_REASONS = "(further reasons)"
#: Queues that are counted by name. Strangers choose routing keys and types.
NAMES_COUNT_MAX = 1_000
OTHERS = "(further)"
#: Above and below the block at the end of a run.
RULE = "=" * 32


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


class RecoveryOrder(Struct, frozen=True, kw_only=True):
    """What somebody asks for. Of an embedded dead queue each item goes back to the queue it died in, by no table."""

    dead_queue: str
    table: RouteTable = RouteTable()
    limits: RunLimits = RunLimits()
    where: tuple[str, ...] = ()
    dry_run: bool = False
    keep_unroutable: bool = False
    strict: bool = False
    run: str = ""
    by: str = ""  #: who asks
    origin: str = ""  #: the queue and where it is, without any login
    journal_file: str = ""  #: where the journal is kept, for people
    backup_file: str = ""  #: each letter is written there first
    from_backup: str = ""  #: the letters of this backup are published; the queue is not touched


class RunLetter(Struct, eq=False, gc=False):
    """A letter of a run. It lives through lost connections: a later delivery of the same bytes takes its place.

    Nothing that it holds holds it, and there are thousands: the garbage collector need not look at them.
    """

    delivery: Delivery
    properties: bytes  #: what its copy carries instead of those that it came with
    digest: bytes
    route: Route
    redelivered: bool
    returns: int | None  #: how often the queue had it back; None where nobody counts
    size_bytes: int
    at_s: float = 0.0
    here: bool = True  #: its delivery is ours; False: it was lost with its connection
    state: RunState = RunState.OUTSIDE  #: `LetterTable` alone changes it

    @property
    def address(self) -> Address | None:
        """Where it goes; None when it is kept."""
        return self.route.address


class Depth(Struct, frozen=True, kw_only=True):
    """What a queue says of itself. 0 may also mean that it has no leader at the moment."""

    ready: int
    consumers: int = 0
    untaken: int = 0  #: of ours: delivered, and nobody has taken them yet
    is_sure: bool = False  #: it need not be asked again


class Permission(Struct, frozen=True, kw_only=True):
    """Something that the user must be allowed to do."""

    verb: str  #: read, write or configure
    what: str
    given: bool | None  #: None: nobody could say

    def __str__(self) -> str:
        return f"{self.verb} {self.what}: {'not known' if self.given is None else 'yes' if self.given else 'NO'}"


class Preflight(Struct, kw_only=True):
    """What was found before the first letter is taken."""

    broker: str  #: name and version
    depth: Depth
    queue_type: str = ""  #: empty when nobody could say
    delivery_limit: int | None = None
    limit_is_assumed: bool = False
    cure: str = ""  #: what would take the limit away
    gives_back_at_tail: bool = False  #: what is given back to a queue that counts returns goes behind newer letters
    alarm: str = ""
    has_management: bool = False
    missing: list[str] = field(default_factory=list)  #: targets that are not there or do not route
    cycles: list[str] = field(default_factory=list)  #: targets that lead back into the dead-letter queue
    copies: Mapping[str, list[str]] = {}  #: address → all queues that get a copy
    rights: list[Permission] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    #: The queues that get what is sent to an address, as they were seen then; none when nobody could say.
    receivers: Callable[[Address], Sequence[str]] = lambda address: ()


class RunEnd(enum.Enum):
    """How a run leaves its queue, as far as it matters to journals."""

    BROKEN = "broken"  #: by an error: what it noted is for the next run
    LOST = "lost"  #: without its connection: letters whose acks were lost with it may be there, nobody knows which
    PARTLY = "partly"  #: clean, and letters may be there that it has not looked at
    KEPT = "kept"  #: it has looked at every letter, and some are still there
    WHOLE = "whole"  #: nothing is left


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
    failed: int = 0  #: kept because their publish did not succeed, or would not
    skipped: int = 0  #: kept because nothing says where they belong
    filtered: int = 0  #: kept because --where left them out
    possible_duplicates: int = 0
    recognised: int = 0  #: published before a connection was lost or a run killed, and not published again
    unknown: int = 0  #: of the failed: published, and nobody knows whether the broker has them
    perhaps_elsewhere: int = 0  #: of the failed: nacked, and nobody could say whether other queues get a copy
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


def progress_of(summary: Summary, limit: int | None) -> tuple[int, int | None]:
    """How many are done, and of how many (None while nobody knows). What --where leaves out counts toward no limit."""
    done = summary.recovered + summary.kept + sum(addresses.total() for addresses in summary.planned.values())
    if limit is None or limit >= summary.found:
        return done, summary.found or None
    return min(done - summary.filtered, limit), limit


def add_planned(summary: Summary, kind: str, to: Address) -> None:
    """In a dry run: a letter of this type would go there."""
    type_, address = kind or "(no type)", str(to)
    if address not in summary.planned.get(type_, ()) and sum(map(len, summary.planned.values())) >= NAMES_COUNT_MAX:
        type_ = address = OTHERS
    summary.planned.setdefault(type_, Counter())[address] += 1


def _has_room(names: Counter[str], name: str) -> bool:
    return name in names or len(names) < NAMES_COUNT_MAX


def may_return(returns: int, delivery_limit: int | None) -> bool:
    """Whether a letter that came back so often may be given back once more without coming near the limit."""
    return delivery_limit is None or returns < delivery_limit - RETURNS_SPARE_COUNT


def address_text(address: Address | None) -> str:
    """An address as a key of counts: what a person would call it."""
    return "" if address is None else address.routing_key or address.exchange


def as_utf8(name: str) -> str:
    """A name that a stranger chose, for JSON: it may have bytes that are not UTF-8, and JSON has no place for these."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def summary_lines(summary: Summary) -> list[str]:
    """The block at the end of a run."""
    kept_in = "backup" if summary.from_backup else "DLQ"
    lines = [
        RULE,
        "DLQ RECOVERY SUMMARY" + (" (DRY RUN)" if summary.dry_run else ""),
        RULE,
        f"Total Recovered: {summary.recovered} messages",
        f"Total Failed: {summary.failed} messages (kept in {kept_in} for retry)",
        f"Skipped Messages: {summary.skipped} (unknown type, kept in {kept_in} for manual review)",
    ]
    if summary.filtered:
        lines.append(f"Left Out: {summary.filtered} (by --where, kept in {kept_in})")
    if summary.unseen:
        lines.append(f"Not Looked At: {summary.unseen} (behind the limit, or the run ended before)")
    if summary.possible_duplicates:
        lines.append(f"Possible Duplicates: {summary.possible_duplicates} (same x-redrive-id)")
    if summary.perhaps_elsewhere:
        lines.append(f"Nacked, Perhaps Stored Elsewhere: {summary.perhaps_elsewhere} (of the failed)")
    lines += _counts("Successfully Recovered By Queue:", summary.by_queue)
    lines += _counts("Failed Recoveries By Queue:", summary.failed_by_queue)
    if summary.dry_run:
        lines += ["", "Would be recovered:" + ("" if summary.planned else " nothing")]
        for kind, addresses in summary.planned.items():
            lines += [f"   {kind} -> {address}: {count}" for address, count in addresses.most_common()]
        if summary.returned:
            lines.append(f"This cost {summary.returned} returns; on a queue with a delivery limit each of them counts.")
    if summary.reasons:
        lines += ["", "Kept, by reason:"]
        for text, reason in summary.reasons.items():
            lines.append(f"   {text}: {reason.count}")
            if reason.sample is not None:
                one = reason.sample
                lines.append(f"      for example message_id={one.message_id!r} type={one.type!r} body={one.body!r}")
    duration = format_duration(round(summary.duration_s * 10) * SECOND_US // 10)
    lines += ["", f"Took {duration}, {summary.rate_per_s:g} messages/s, stopped by {summary.stopped_by}."]
    lines += [f"Copies of {address} go to: {', '.join(queues)}" for address, queues in summary.copies.items()]
    lines += [f"Note: {note}" for note in summary.notes]
    if summary.failure:
        lines.append(f"Ended early: {summary.failure}")
    lines.append(RULE)
    if summary.remaining:
        lines.append(f"{summary.remaining} messages still in DLQ (will retry on next startup)")
    elif summary.remaining is not None:
        lines.append("DLQ Empty")
    elif not summary.from_backup:
        lines.append("How many messages are still in DLQ could not be read: look at the queue")
    return lines


def _counts(title: str, counts: Counter[str]) -> list[str]:
    return ["", title, *(f"   {key}: {count}" for key, count in counts.most_common())] if counts else []
