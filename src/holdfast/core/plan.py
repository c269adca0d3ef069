"""A plan (a frozen set of letters and what would become of them) and the task that carries it out. Pure values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Literal

from msgspec import Struct, json

from holdfast.core.moments import parse_duration
from holdfast.core.selection import Selection
from holdfast.errors import Invalid

RATE_PER_S_MAX = 100_000
REDRIVES_MAX_DEFAULT = 5
PLAN_COUNT_MAX = 1_000_000
NAME_CHARACTERS_MAX = 200
REASON_CHARACTERS_MAX = 2_000
UNROUTED_SHOWN_MAX = 100
ROUTES_COUNT_MAX = 1_000
NAME_BYTES_MAX = 255


class Place(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An address, as a request names it. Without an exchange the routing key is a queue's name."""

    exchange: str = ""
    routing_key: str = ""


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where letters go: the queue each died in, its wait queue, where it was published first, one address, or by the
    type of each: a type that is not among the routes is left out; without a type it goes where it was published first,
    else to `redirect`. `source` is the queue that letters died in of which nothing tells it."""

    kind: Literal["queue", "wait", "original", "address", "type"] = "queue"
    source: str = ""
    exchange: str = ""
    routing_key: str = ""
    routes: dict[str, Place] = {}
    redirect: Place | None = None
    type_header: str = ""

    def places(self) -> list[Place]:
        """Those that it names; where a letter says that it died or was published first is not its choice."""
        named = [Place(exchange=self.exchange, routing_key=self.routing_key)] if self.kind == "address" else []
        named += [Place(routing_key=self.source)] if self.source else []
        return [*named, *self.routes.values(), *([self.redirect] if self.redirect else [])]


class Retries(Struct, frozen=True, kw_only=True):
    """How consumers try again, where nothing else tells: how often, and after which delays, the last one repeated."""

    attempts: int = 3
    delays_s: tuple[float, ...] = ()

    def ladder_s(self, delays_s: Sequence[float] = (), *, attempts: int = 0) -> float | None:
        """Until a message that fails every time is dead: attempts times delay. None when no delay is known."""
        steps = tuple(delays_s) or self.delays_s
        if not steps:
            return None
        return sum(steps[min(index, len(steps) - 1)] for index in range(attempts or self.attempts))


def longest(ladders: Sequence[float | None]) -> float | None:
    """None when nobody can say of one of them, or of any."""
    known = [ladder for ladder in ladders if ladder is not None]
    return max(known) if known and len(known) == len(ladders) else None


class Canary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send a few, watch whether they come back, widen or stop."""

    first: int = 10
    wait: str = "auto"
    widen: float = 2.0
    stop_above: float = 0.05

    def wider(self, allowed: int) -> int:
        """How many may have gone in all once those that were allowed so far were watched."""
        return max(allowed + 1, round(allowed * self.widen))

    def watches(self, count: int) -> int:
        """How often it watches until so many letters have gone."""
        times, allowed = 0, self.first
        while allowed <= count:
            times, allowed = times + 1, self.wider(allowed)
        return times

    def allows(self, sent: int) -> int:
        """How many may have gone in all, when so many have."""
        allowed = self.first
        while sent > allowed:
            allowed = self.wider(allowed)
        return allowed


class PlanOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a plan is asked for."""

    selection: Selection = Selection()
    target: Target = Target()
    max_per_s: int = 0  #: 0 is as fast as the broker confirms
    redrives_max: int = REDRIVES_MAX_DEFAULT
    force: bool = False  #: also letters that were redriven `redrives_max` times
    canary: Canary | None = None


class Unrouted(Struct, frozen=True):
    """A letter that is left out, and why."""

    letter: int
    why: str


class LeftOut(Struct, frozen=True):
    """One reason, how many letters are left out for it, and the id of one of them."""

    why: str
    count: int
    sample: int


class Plan(Struct, frozen=True, kw_only=True):
    """What `execute` will do, exactly. `ids` is the frozen set, in ranges."""

    hash: str
    wish: PlanOptions
    ids: str
    count: int
    targets: dict[str, int]
    left_out: tuple[Unrouted, ...]
    left_out_count: int
    redriven_before: int
    estimated_s: float
    notes: tuple[str, ...]
    made_at: datetime
    made_by: str
    reasons: tuple[LeftOut, ...] = ()  #: all that are left out, the most frequent reason first
    copies: dict[str, list[str]] = {}  #: address → every queue that gets a copy, for exchanges
    canary_wait: str = ""  #: how long a canary watches, `auto` put into seconds


class RedriveState(Enum):
    """How a task stands. `stopped` is its canary's doing."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    DONE = "done"


class RedriveTask(Struct, frozen=True):
    """A task. What is not redriven, failed or skipped is still to come. Possible duplicates are letters that were
    published again, because nobody knows whether the first copy arrived. A running task that nobody holds has lost its
    process."""

    id: int
    name: str
    reason: str
    plan: str
    state: RedriveState
    wish: PlanOptions
    total: int
    operation: str
    started_at: datetime
    started_by: str
    redriven: int = 0
    failed: int = 0
    skipped: int = 0
    unknown: int = 0
    came_back: int = 0
    possible_duplicates: int = 0
    why: str = ""
    held_by: str = ""
    held_until: datetime | None = None
    changed_at: datetime | None = None  #: when its state changed last; null when that is not known
    changed_by: str = ""
    watched_until: datetime | None = None  #: its canary waits until then, to see what comes back

    @property
    def settled(self) -> int:
        """Of how many the end is known."""
        return self.redriven + self.failed + self.skipped


def plan_hash(wish: PlanOptions, letters: Sequence[tuple[int, int, str]]) -> str:
    """The hash over the wish, and over id, revision and address of every letter."""
    return hashlib.sha256(json.encode((wish, letters))).hexdigest()


def check_wish(wish: PlanOptions) -> None:
    """Raises Invalid."""
    if not 0 <= wish.max_per_s <= RATE_PER_S_MAX:
        raise Invalid(f"plan is invalid; max_per_s is from 0 to {RATE_PER_S_MAX}")
    if not 1 <= wish.redrives_max <= 1_000:
        raise Invalid("plan is invalid; redrives_max is from 1 to 1000")
    check_target(wish.target)
    canary = wish.canary
    if canary and not (1 <= canary.first <= 10_000 and 1 < canary.widen <= 100 and 0 <= canary.stop_above <= 1):
        raise Invalid("plan is invalid; canary takes first 1 to 10000, widen above 1 to 100, stop_above 0 to 1")
    if canary and canary.wait != "auto":
        parse_duration(canary.wait, what="canary wait")


def check_target(target: Target) -> None:
    """Raises Invalid for what is missing, or goes with another kind."""
    if (target.exchange or target.routing_key) and target.kind != "address":
        raise Invalid("plan is invalid; an exchange or routing key goes with the target 'address' alone")
    if target.kind == "address" and not (target.exchange or target.routing_key):
        raise Invalid("plan is invalid; the target 'address' needs an exchange or a routing key")
    if (target.routes or target.redirect or target.type_header) and target.kind != "type":
        raise Invalid("plan is invalid; routes, redirect and type_header go with the target 'type' alone")
    if target.kind == "type" and not target.routes:
        raise Invalid("plan is invalid; the target 'type' needs routes")
    if len(target.routes) > ROUTES_COUNT_MAX:
        raise Invalid(f"plan is invalid; at most {ROUTES_COUNT_MAX} routes, got {len(target.routes)}")
    places = target.places()
    if any(not (place.exchange or place.routing_key) for place in places):
        raise Invalid("plan is invalid; a route needs an exchange or a routing key")
    texts = [target.type_header, *(text for place in places for text in (place.exchange, place.routing_key))]
    if any(len(text.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX for text in texts):
        raise Invalid(f"plan is invalid; a name has {NAME_BYTES_MAX} bytes at the most")
