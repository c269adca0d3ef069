"""What custody needs of a store: letters, groups, redrives, the ledger and tokens, each change in one commit with its
row in the ledger.

Whatever changes something returns after the commit. If it raises StorageFailed, nothing is acknowledged: the change is
there with its row or it is not, and the same call may be repeated; only `put` then makes a second letter, unless the
broker delivers the message again as redelivered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from holdfast.core.ledger import LedgerAct, LedgerRow
from holdfast.core.letter import Content, Group, GroupStatus, JsonValue, Letter, NewLetter, Revision
from holdfast.core.plan import LeasedLetter, Plan, PlanOptions, RedriveState, RedriveTask, Settled
from holdfast.core.requests.roles import Token
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState

#: How many bytes of bodies are leased at once.
LEASE_BYTES_MAX = 64 * 1024 * 1024


class Stored(Struct, frozen=True):
    """Where a delivery is now. `matched` says that it was there already and that its un-acked row is used up."""

    letter: int
    matched: bool


class Page(Struct, frozen=True):
    """Some letters. `after` is where the next page begins, 0 at the end; `stopped` says that the search gave up there
    before the page was full."""

    letters: Sequence[Letter]
    after: int = 0
    stopped: bool = False


class Count(Struct, frozen=True):
    """How many. `exact` is false when counting stopped: then there are at least so many."""

    count: int
    exact: bool = True


class FailedImport(Struct, frozen=True, kw_only=True):
    """What the vault itself could not take; its body is kept."""

    id: int
    queue: str
    reason: str
    body: bytes
    properties: bytes
    at: datetime


class QueueTally(Struct, frozen=True):
    """How many letters of a queue are in a state."""

    queue: str
    state: str
    count: int


class Letters(Protocol):
    """The letters themselves."""

    async def put(self, letters: Sequence[NewLetter], act: LedgerAct) -> list[Stored]:
        """Store deliveries, un-acked, in one commit; in the same order.

        A delivery is taken for one that is stored only if it is redelivered and an un-acked row of its queue has its
        digest; each row is used up once. A blob must have been announced, and is claimed. A letter that carries the
        redrive id of another makes that one *came_back*.
        """

    async def acking(self, ids: Sequence[int], *, sent: bool = True) -> None:
        """The acks of these are about to be sent: from now on no delivery is taken for one of them. Not `sent`: they
        were not, for certain, and the messages come again."""

    async def put_failed(self, queue: str, *, body: bytes, properties: bytes, reason: str, act: LedgerAct) -> int:
        """Keep what cannot be a letter."""

    async def failed(self, *, after: int, count_max: int) -> list[FailedImport]:
        """What could not be a letter, oldest first."""

    async def find(self, selection: Selection, *, before: int = 0, count_max: int) -> Page:
        """Newest first, those with a smaller id than `before`."""

    async def ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        """Id and revision of all of them, oldest first. Raises Invalid when there are more than `count_max`."""

    async def oldest_ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        """Id and revision of the oldest ones."""

    async def count(self, selection: Selection) -> Count:
        """How many there are."""

    async def oldest(self, selection: Selection) -> Letter | None:
        """The one with the smallest id."""

    async def get(self, letter: int) -> Letter | None:
        """One letter."""

    async def content(self, letter: int, *, revision: int | None = None) -> Content | None:
        """What would be published of it: its newest revision, or the given one; 0 is the original."""

    async def load(self, ids: Sequence[int]) -> list[tuple[Letter, Content]]:
        """Letters with what would be published of each."""

    async def move(
        self, ids: Sequence[int], *, source: LetterState, target: LetterState, act: LedgerAct, expected: int
    ) -> int:
        """Bring all of them from one state into another, or none. Raises Invalid when not exactly `expected` are in
        the source state."""

    async def revise(
        self,
        letter: int,
        *,
        revision: int,
        body: bytes | None,
        put: dict[str, JsonValue],
        drop: Sequence[str],
        act: LedgerAct,
    ) -> int:
        """Add a revision after `revision`, the one that the caller saw. Raises Invalid when it is not the newest or
        the letter is not *captured*."""

    async def revisions(self, letter: int) -> list[Revision]:
        """All of them, oldest first."""

    async def resolve_due(self, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        """*redriven* becomes *resolved* for those that were redriven before a moment."""

    async def expire(self, state: LetterState, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        """Delete letters of a state that have been in it since before a moment; they are counted and in the ledger."""


class Groups(Protocol):
    """Failure groups."""

    async def page(self, *, status: GroupStatus | None, after: int, count_max: int) -> list[tuple[int, Group]]:
        """The ones that got a letter last come first; each with its cursor."""

    async def change(self, key: str, *, status: GroupStatus | None, note: str | None, act: LedgerAct) -> Group | None:
        """Say something of a group. None when there is no such group."""


class RedriveStore(Protocol):
    """Plans and tasks."""

    async def keep_plan(self, plan: Plan) -> None:
        """Keep a plan."""

    async def plan(self, found: str) -> Plan | None:
        """A plan by its hash."""

    async def start(
        self,
        *,
        plan: Plan,
        letters: Sequence[tuple[int, str]],
        wish: PlanOptions,
        name: str,
        operation: str,
        act: LedgerAct,
    ) -> tuple[RedriveTask, bool]:
        """A task over these letters, each with its address, or the one that this operation id started before."""

    async def find(self, redrive: int) -> RedriveTask | None:
        """One task."""

    async def by_operation(self, operation: str) -> RedriveTask | None:
        """The task that an operation id started."""

    async def page(self, *, before: int, count_max: int) -> list[RedriveTask]:
        """Newest first."""

    async def set_state(
        self, redrive: int, state: RedriveState, *, sources: Sequence[RedriveState], act: LedgerAct
    ) -> bool:
        """Bring a task into a state; false when it was in none of `sources`."""

    async def hold(self, redrive: int, holder: str, *, until: datetime) -> bool:
        """Say who runs a running task, until a moment; false when another has said so, or it is not running."""

    async def let_go(self, redrive: int, holder: str) -> None:
        """Nobody runs it any more, if this one did."""

    async def lease(
        self, redrive: int, *, count_max: int, until: datetime, act: LedgerAct, bytes_max: int = LEASE_BYTES_MAX
    ) -> list[LeasedLetter]:
        """Letters to publish: *redriving* from now on. What is no longer *captured* is skipped. Always at least one
        where there is one, whatever its size."""

    async def release(self, *, count_max: int, act: LedgerAct) -> int:
        """Letters of cancelled tasks whose outcome is unknown, or whose lease has run out, are *captured* again, with
        a note of that in the ledger; how many there were. To the task they stay unknown, and a confirm still counts.
        """

    async def contents(self, leased: Sequence[LeasedLetter]) -> list[Content]:
        """What is to be published of each, in the same order."""

    async def succeeded(self, redrive_ids: Sequence[str], act: LedgerAct) -> list[str]:
        """A consumer has done what was redriven under these ids: *redriven* becomes *resolved*. Returns those whose
        confirm is not noted yet; ids that nobody knows are let be."""

    async def settle(self, redrive: int, settled: Sequence[Settled], act: LedgerAct, *, until: datetime) -> None:
        """What became of letters that were leased until a moment. *redriven* counts also when the lease ran out and
        another has the letter; *failed* and *unknown* only from the one who has it. Unknown ones stay *redriving*."""


class Ledger(Protocol):
    """The chained record of everything that was done or denied."""

    async def append(
        self, act: LedgerAct, *, outcome: str, queue: str = "", letters: str = "", count: int = 0
    ) -> LedgerRow:
        """A row that goes with no other change."""

    async def rows(self, *, after: int, count_max: int) -> list[LedgerRow]:
        """Oldest first, those behind `after`."""

    async def newest(self) -> LedgerRow | None:
        """The last one."""

    async def of_letter(self, letter: int, *, count_max: int) -> list[LedgerRow]:
        """What was done to one letter."""

    async def tallies(self) -> list[QueueTally]:
        """Letters by queue and state, as the vault keeps the numbers."""

    async def counted(self) -> tuple[int, list[QueueTally]]:
        """The same, counted one by one; and the number of the newest row at that very moment."""


class Tokens(Protocol):
    """API tokens."""

    async def put(self, token: Token, act: LedgerAct) -> bool:
        """Keep one; false when the name is taken."""

    async def all(self) -> list[Token]:
        """All of them."""

    async def revoke(self, name: str, act: LedgerAct) -> bool:
        """Never let it in again; false when there is none of that name that is valid."""


class UnclaimedBlobs(Protocol):
    """Blobs that no letter has: one is announced before it is put, and `Letters.put` claims it in the letter's own
    commit; what retention leaves behind is loose again."""

    async def announce(self, blobs: Sequence[str], *, for_s: float) -> None:
        """These are about to be put; whatever is not claimed within that time is deleted."""

    async def doom(self, *, count_max: int) -> list[str]:
        """The ones whose time has come. From now on nobody can claim them: delete them, then `forget` them."""

    async def forget(self, blobs: Sequence[str]) -> None:
        """They are deleted."""


class Vault(Protocol):
    """Everything that is in custody."""

    letters: Letters
    groups: Groups
    redrives: RedriveStore
    ledger: Ledger
    tokens: Tokens
    loose: UnclaimedBlobs
    #: How many letters this process has moved, by queue, source and target; "" is outside, and a source "unknown" is
    #: *redriving* of a task that was cancelled.
    moves: Mapping[tuple[str, str, str], int]

    async def open(self) -> None:
        """Raises CannotStart."""

    async def close(self) -> None:
        """Let go of it."""


#: Makes the key of the ledger, or reads it.
KeyMaker = Callable[[], bytes]
