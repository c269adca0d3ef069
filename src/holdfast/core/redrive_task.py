"""A plan (a frozen set of letters and what would become of them) and the task that carries it out. Pure values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Literal

from msgspec import Struct, json

from holdfast.core.letter_selection import Selection
from holdfast.errors import Invalid

RATE_PER_S_MAX = 100_000
REDRIVES_MAX_DEFAULT = 5
PLAN_COUNT_MAX = 1_000_000
NAME_CHARACTERS_MAX = 200
REASON_CHARACTERS_MAX = 2_000
UNROUTED_SHOWN_MAX = 100


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where letters go: the queue each died in, its wait queue, where it was published first, or one address."""

    kind: Literal["queue", "wait", "original", "address"] = "queue"
    exchange: str = ""
    routing_key: str = ""


class Canary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send a few, watch whether they come back, widen or stop."""

    first: int = 10
    wait: str = "auto"
    widen: float = 2.0
    stop_above: float = 0.05


class Wish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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


class Plan(Struct, frozen=True, kw_only=True):
    """What `execute` will do, exactly. `ids` is the frozen set, in ranges."""

    hash: str
    wish: Wish
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


class RedriveState(Enum):
    """How a task stands. `stopped` is its canary's doing."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    DONE = "done"


class Redrive(Struct, frozen=True, kw_only=True):
    """A task. What is not redriven, failed or skipped is still to come."""

    id: int
    name: str
    reason: str
    plan: str
    state: RedriveState
    wish: Wish
    total: int
    operation: str
    started_at: datetime
    started_by: str
    redriven: int = 0
    failed: int = 0
    skipped: int = 0
    unknown: int = 0
    came_back: int = 0
    why: str = ""


class Leased(Struct, frozen=True):
    """A letter that is ours to publish, with the id under which every copy of it is recognisable."""

    letter: int
    redrive_id: str
    address: str
    body_bytes: int = 0


class Settled(Struct, frozen=True):
    """What became of a publish."""

    letter: int
    kind: Literal["redriven", "failed", "unknown"]
    why: str = ""


def plan_hash(wish: Wish, letters: Sequence[tuple[int, int, str]]) -> str:
    """The hash over the wish, and over id, revision and address of every letter."""
    return hashlib.sha256(json.encode((wish, letters))).hexdigest()


def check_wish(wish: Wish) -> None:
    """Raises Invalid."""
    if not 0 <= wish.max_per_s <= RATE_PER_S_MAX:
        raise Invalid(f"plan is invalid; max_per_s is from 0 to {RATE_PER_S_MAX}")
    if not 1 <= wish.redrives_max <= 1_000:
        raise Invalid("plan is invalid; redrives_max is from 1 to 1000")
    if (wish.target.exchange or wish.target.routing_key) and wish.target.kind != "address":
        raise Invalid("plan is invalid; an exchange or routing key goes with the target 'address' alone")
    if wish.target.kind == "address" and not (wish.target.exchange or wish.target.routing_key):
        raise Invalid("plan is invalid; the target 'address' needs an exchange or a routing key")
    canary = wish.canary
    if canary and not (1 <= canary.first <= 10_000 and 1 < canary.widen <= 100 and 0 <= canary.stop_above <= 1):
        raise Invalid("plan is invalid; canary takes first 1 to 10000, widen above 1 to 100, stop_above 0 to 1")
