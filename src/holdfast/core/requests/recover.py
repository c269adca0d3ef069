"""`/admin/recoveries` and `/admin/topology`: what can be asked of recoveries that a server runs, and of the topology
of its broker, and what is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct, convert, field, to_builtins
from msgspec.structs import replace

from holdfast.core.letter import Origin
from holdfast.core.message import Address
from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.core.plan import Place
from holdfast.core.recovery import OTHERS, Permission, RecoveryOrder, RunLimits, Sample, Summary, as_utf8
from holdfast.core.requests.declare import Access, Caller, Request, Role, declare
from holdfast.core.requests.vault import Duration, Limit, Text
from holdfast.core.routes import NAME_BYTES_MAX, NOT_FOR_THIS_RUN, NOWHERE, TYPE_HEADER, Mode, RouteTable, parse_routes
from holdfast.core.selection import CONDITIONS_COUNT_MAX, PAGE_COUNT_DEFAULT, LetterFilter
from holdfast.core.topology.model import Family, Topology
from holdfast.core.topology.rules import Hazard
from holdfast.errors import Invalid

R = TypeVar("R")

#: Of the text of a routes file; one of this size is read in a few hundredths of a second.
ROUTES_CHARACTERS_MAX = 64_000
#: In a line: the time that a key takes to be read grows with the square of their number.
DOTS_COUNT_MAX = 16
RATE_PER_S_MAX = 1_000_000
#: What is kept of each table of a summary: strangers choose the names in them.
KEPT_COUNT_MAX = 100
KEPT_CHARACTERS_MAX = 500
HIDDEN = "(of other queues)"
#: What a caller who is held to some queues reads of why letters were kept: no other queue is named in these.
OPEN_REASONS = frozenset((NOWHERE, NOT_FOR_THIS_RUN, "left out by --where"))
OPEN_REASON = "type '"
TIMEOUTS = ("total_timeout", "idle_timeout", "empty_timeout", "stall_timeout", "hold_timeout", "stop_timeout")


# --- what is answered -----------------------------------------------------------------------------------------


class RecoveryState(StrEnum):
    """How it stands with a recovery."""

    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    PARTLY_DONE = "partly_done"  #: letters are left, each with its reason
    FAILED = "failed"  #: it could not begin, or ended by an error of its own


class RecoveryRow(Struct, frozen=True, kw_only=True):
    """One recovery in a line. `expected` is null while nobody knows how many there are."""

    run: str
    queue: str
    by: str
    dry_run: bool
    state: RecoveryState
    began_at: datetime
    ended_at: datetime | None = None
    stopped_by: str = ""
    why: str = ""  #: of one that could not begin, or go on
    found: int = 0
    done: int = 0  #: looked at, whatever became of them
    expected: int | None = None
    recovered: int = 0
    failed: int = 0
    skipped: int = 0
    filtered: int = 0
    remaining: int | None = None
    rate_per_s: float = 0.0

    def seen_by(self, caller: Caller) -> RecoveryRow:
        """A reason may have names of queues in it that the caller is not for."""
        return replace(self, why="") if caller.queues else self


class RecoveryReason(Struct, frozen=True, kw_only=True):
    """How many letters stayed for it, and one of them, without its body."""

    count: int = 0
    sample: Sample | None = None


class RecoverySummary(Struct, frozen=True, kw_only=True):
    """What a run did, as its report says: the numbers of `holdfast recover --json`."""

    found: int = 0
    recovered: int = 0
    failed: int = 0
    skipped: int = 0
    filtered: int = 0
    possible_duplicates: int = 0
    recognised: int = 0
    unknown: int = 0
    perhaps_elsewhere: int = 0
    put_back: int = 0
    returned: int = 0
    remaining: int | None = None
    unseen: int = 0
    interruptions: int = 0
    by_queue: dict[str, int] = {}
    failed_by_queue: dict[str, int] = {}
    planned: dict[str, dict[str, int]] = {}
    reasons: dict[str, RecoveryReason] = {}
    copies: dict[str, list[str]] = {}
    notes: list[str] = []
    failure: str = ""
    duration_s: float = 0.0
    rate_per_s: float = 0.0

    @classmethod
    def of(cls, summary: Summary) -> RecoverySummary:
        """What is kept of it: no bodies, and of each table what is most."""
        told = to_builtins(summary)
        told |= {
            "by_queue": dict(summary.by_queue.most_common(KEPT_COUNT_MAX)),
            "failed_by_queue": dict(summary.failed_by_queue.most_common(KEPT_COUNT_MAX)),
            "planned": {
                kind[:KEPT_CHARACTERS_MAX]: dict(to.most_common(KEPT_COUNT_MAX))
                for kind, to in list(summary.planned.items())[:KEPT_COUNT_MAX]
            },
            "reasons": {
                why[:KEPT_CHARACTERS_MAX]: {**to_builtins(one), "sample": _without_body(one.sample)}
                for why, one in sorted(summary.reasons.items(), key=lambda item: -item[1].count)[:KEPT_COUNT_MAX]
            },
            "copies": {key: list(to)[:KEPT_COUNT_MAX] for key, to in list(summary.copies.items())[:KEPT_COUNT_MAX]},
            "notes": [note[: 2 * KEPT_CHARACTERS_MAX] for note in summary.notes[:KEPT_COUNT_MAX]],
        }
        return convert(told, cls)

    def seen_by(self, caller: Caller) -> RecoverySummary:
        """Without what is of queues that the caller is not for."""
        if not caller.queues:
            return self
        reasons: dict[str, int] = {}
        for why, one in self.reasons.items():
            is_open = why in OPEN_REASONS or why.startswith(OPEN_REASON)
            name = why if is_open else "for a reason that a token for all queues sees"
            reasons[name] = reasons.get(name, 0) + one.count
        return replace(
            self,
            by_queue=_seen(self.by_queue, caller),
            failed_by_queue=_seen(self.failed_by_queue, caller),
            planned={kind: _seen(to, caller) for kind, to in self.planned.items()},
            reasons={why: RecoveryReason(count=count) for why, count in reasons.items()},
            copies={},
            notes=[],
            failure="",
        )


def _without_body(sample: Sample | None) -> dict[str, object] | None:
    return None if sample is None else {**to_builtins(sample), "body": ""}


def _seen(counts: Mapping[str, int], caller: Caller) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in counts.items():
        known = name if name == OTHERS or caller.may_touch(name) else HIDDEN
        found[known] = found.get(known, 0) + count
    return found


class RecoveryOptions(Struct, frozen=True, kw_only=True):
    """What was asked for. Of many routes the first hundred."""

    to: str = "routes"
    address: Place | None = None
    routes: dict[str, Place] = {}
    redirect: Place | None = None
    type_header: str = ""
    source: str = ""
    where: list[str] = []
    limit: int | None = None
    rate_per_s: float = 0.0
    allow_copies: bool = False
    keep_unroutable: bool = False
    strict: bool = False

    @classmethod
    def of(cls, order: RecoveryOrder) -> RecoveryOptions:
        """As an order has it."""
        table = order.table
        return cls(
            to=table.mode.value,
            address=_place(table.address),
            routes={as_utf8(kind): _place(to) for kind, to in list(table.routes.items())[:KEPT_COUNT_MAX]},
            redirect=_place(table.redirect),
            type_header=as_utf8(table.type_header) if table.type_header != TYPE_HEADER else "",
            source=as_utf8(table.source),
            where=[as_utf8(text) for text in order.where],
            limit=order.limits.limit,
            rate_per_s=order.limits.rate_per_s,
            allow_copies=table.allow_copies,
            keep_unroutable=order.keep_unroutable,
            strict=order.strict,
        )


def _place(address: Address | None) -> Any:
    if address is None:
        return None
    return Place(exchange=as_utf8(address.exchange), routing_key=as_utf8(address.routing_key))


class RecoveryView(Struct, frozen=True, kw_only=True):
    """One recovery: what was asked for, what it did or has done until now, and of one that runs here what it said."""

    recovery: RecoveryRow
    options: RecoveryOptions
    summary: RecoverySummary
    said: list[str] = []

    def seen_by(self, caller: Caller) -> RecoveryView:
        """Without what is of queues that the caller is not for."""
        if not caller.queues:
            return self
        options = replace(self.options, address=None, routes={}, redirect=None, source="")
        return RecoveryView(
            recovery=self.recovery.seen_by(caller), options=options, summary=self.summary.seen_by(caller)
        )


class RecoveriesReply(Struct, frozen=True, kw_only=True):
    """A page of runs; the first one begins with those that run now."""

    recoveries: list[RecoveryRow]
    next: str = ""


class PreflightView(Struct, frozen=True, kw_only=True):
    """What was found before anything is taken. `refused` is why a start would be refused; empty when it would not."""

    queue: str
    origin: Origin
    broker: str
    ready: int
    consumers: int
    queue_type: str
    delivery_limit: int | None
    limit_is_assumed: bool
    cure: str
    alarm: str
    has_management: bool
    rights: list[Permission]
    missing: list[str]
    cycles: list[str]
    warnings: list[str]
    copies: dict[str, list[str]]
    refused: str


class DepthView(Struct, frozen=True, kw_only=True):
    """A queue of the broker, as the management API counted it last; null where it did not say."""

    messages: int | None = None
    consumers: int | None = None
    policy: str | None = None


class TopologyReply(Struct, frozen=True, kw_only=True):
    """The topology of a virtual host, with what is known to lose messages in it. `state` says where it is from, or why
    there is none: the broker, a file alone, none is configured, it has no management API here, it does not answer."""

    state: Literal["broker", "no_broker", "no_management", "asking", "unreachable"]
    why: str = ""
    vhost: str = ""
    version: str = ""
    read_at: datetime | None = None
    is_file: bool = False  #: it is what the file of the settings says
    topology: Topology = field(default_factory=Topology)
    families: list[Family] = []
    dead_queues: list[str] = []
    roles: dict[str, Literal["main", "wait", "dead"]] = {}
    depths: dict[str, DepthView] = {}
    hazards: list[Hazard] = []
    has_file: bool = False
    file_trouble: str = ""
    differences: list[str] = []  #: between the file of the settings and the broker


# --- recoveries -----------------------------------------------------------------------------------------------


class RecoveryRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A dead-letter queue, and how it is to be recovered."""

    queue: Annotated[Text, Meta(min_length=1, description="A dead-letter queue.")]
    routes: Annotated[
        str,
        Meta(max_length=ROUTES_CHARACTERS_MAX, description="The text of a routes file (TOML): which type goes where."),
    ] = ""
    to: Annotated[
        Literal["routes", "source", "exchange", "wait", "address"],
        Meta(
            description="routes: by type, and what has none where it came from; source: each to the queue that it died "
            "in; exchange: to its original exchange and key; wait: to its wait queue; address: all to one."
        ),
    ] = "routes"
    address: Annotated[Place | None, Meta(description="With `address`: where all go.")] = None
    source: Annotated[Text, Meta(description="The queue that letters died in that do not tell.")] = ""
    allow_copies: Annotated[bool, Meta(description="Also where the headers of a letter lead to several queues.")] = (
        False
    )
    keep_unroutable: Annotated[bool, Meta(description="Go on though a route leads nowhere; its letters are kept.")] = (
        False
    )
    strict: Annotated[bool, Meta(description="Refuse a queue with a delivery limit.")] = False
    where: Annotated[
        list[Text],
        Meta(max_length=CONDITIONS_COUNT_MAX, description="Only letters that fit: type=…, reason=…, age>1h, body~….)"),
    ] = []
    limit: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000_000)] | None,
        Meta(description="At most so many letters that fit; those there now if left out."),
    ] = None
    rate: Annotated[
        float, Meta(ge=0, le=RATE_PER_S_MAX, description="At most so many letters a second; 0 is no limit.")
    ] = 0.0
    total_timeout: Annotated[Duration, Meta(description="The run ends after this long.")] = "30m"
    idle_timeout: Annotated[Duration, Meta(description="It ends when no letter came for this long.")] = "10s"
    empty_timeout: Annotated[Duration, Meta(description="It ends when the queue was empty for this long.")] = "5s"
    stall_timeout: Annotated[Duration, Meta(description="It ends when no letter could be settled for this long.")] = (
        "30s"
    )
    hold_timeout: Annotated[Duration, Meta(description="It ends when a letter was held for this long.")] = "20m"
    stop_timeout: Annotated[Duration, Meta(description="How long a stop waits for confirms.")] = "10s"

    @property
    def places(self) -> list[Place]:
        """Every place that it names; where a letter says that it died is not its choice. Raises Invalid."""
        table = self.table()
        named = [one for one in (*table.routes.values(), table.redirect, table.address) if one is not None]
        sources = [Place(routing_key=self.source)] if self.source else []
        return [*(Place(exchange=one.exchange, routing_key=one.routing_key) for one in named), *sources]

    def table(self) -> RouteTable:
        """Where letters go. Raises Invalid."""
        if any(line.count(".") > DOTS_COUNT_MAX for line in self.routes.split("\n")):
            raise Invalid(f"routes file is invalid; it has a line with more than {DOTS_COUNT_MAX} dots")
        table = parse_routes(self.routes.encode("utf-8", "replace"), source="it") if self.routes else RouteTable()
        if (self.to == "address") != (self.address is not None):
            raise Invalid("address is invalid; it goes with to = address, and that needs one")
        address = None
        if self.address is not None:
            address = Address(exchange=self.address.exchange, routing_key=self.address.routing_key)
            names = (address.exchange, address.routing_key)
            if not any(names) or max(len(one.encode("utf-8", "replace")) for one in names) > NAME_BYTES_MAX:
                raise Invalid(f"address is invalid; give a queue, or an exchange and a key, of {NAME_BYTES_MAX} bytes")
        more = {"source": self.source, "allow_copies": self.allow_copies}
        return replace(table, mode=Mode(self.to), address=address, **more)

    def limits(self) -> RunLimits:
        """Where the run ends. Raises Invalid."""
        timeouts = {f"{name}_s": parse_duration(getattr(self, name), what=name) / SECOND_US for name in TIMEOUTS}
        return replace(RunLimits(limit=self.limit, rate_per_s=self.rate), **timeouts)

    def order(self, caller: Caller, **more: str | bool) -> RecoveryOrder:
        """What a caller asks for, as an order; letters go to queues that he is for. Raises Invalid."""
        LetterFilter(self.where)
        return RecoveryOrder(
            dead_queue=self.queue,
            table=replace(self.table(), only=caller.queues),
            limits=self.limits(),
            where=tuple(self.where),
            keep_unroutable=self.keep_unroutable,
            strict=self.strict,
            by=caller.name,
            **more,  # type: ignore[arg-type]  # names of its fields
        )


@declare("recoveries.list", "GET /admin/recoveries", role=Role.VIEWER, about=Access.EACH)
class ListRecoveries(Request[RecoveriesReply], frozen=True, kw_only=True):
    """Recoveries that run now, and the last ones before, newest first."""

    limit: Annotated[Limit, Meta(description="At most so many.")] = PAGE_COUNT_DEFAULT
    cursor: Annotated[str, Meta(max_length=200, description="Where the page before ended.")] = ""


@declare(
    "recoveries.preflight",
    "POST /admin/recoveries/preflight",
    role=Role.OPERATOR,
    about="queue",
    names=("address", "places"),
    redrives=True,
    is_change=False,
    schema="PreflightRequest",
)
class PreflightRecovery(RecoveryRequest[PreflightView], frozen=True, kw_only=True):
    """What a recovery would meet: the queue, its limits, the rights, and whether its targets are there.

    Nothing is taken.
    """


@declare(
    "recoveries.start",
    "POST /admin/recoveries",
    role=Role.OPERATOR,
    about="queue",
    names=("address", "places"),
    redrives=True,
    schema="RecoveryRequest",
)
class StartRecovery(RecoveryRequest[RecoveryView], frozen=True, kw_only=True):
    """Recover a dead-letter queue: every letter back to where it belongs, published first and acked second.

    It runs in the server, and returns when it has begun.
    """

    dry_run: Annotated[bool, Meta(description="Take nothing away; each letter is looked at and given back.")] = False


class RunRequest(Request[RecoveryView], frozen=True, kw_only=True):
    """A recovery by its name."""

    run: Annotated[Text, Meta(description="The name of a run.")]


@declare("recoveries.show", "GET /admin/recoveries/{run}", role=Role.VIEWER, about=Access.FOUND)
class ReadRecovery(RunRequest, frozen=True, kw_only=True):
    """One recovery: its progress, or its summary."""


@declare("recoveries.stop", "POST /admin/recoveries/{run}/stop", role=Role.OPERATOR, about=Access.FOUND, redrives=True)
class StopRecovery(RunRequest, frozen=True, kw_only=True):
    """Stop a recovery: what is published is settled, the rest is given back. Asked for again, it ends at once."""


# --- topology -------------------------------------------------------------------------------------------------


@declare("topology.read", "GET /admin/topology", role=Role.VIEWER, about=Access.ALL)
class ReadTopology(Request[TopologyReply], frozen=True, kw_only=True):
    """The exchanges, queues and bindings of the broker, with how deep each queue is and what could lose messages."""

    like: Annotated[Text, Meta(description="Only what has this in its name, and what it is bound to.")] = ""
