"""What the collector needs to survive a crash: its state, its index of ordinals, and queues that outlive it.

A transaction has one owner at a time. Every write names the owner's fence: a number that rises with each change of
owner, so that a former owner who wakes up late changes nothing and gets LeaseLost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from holdfast.core.collect import Header, Part, Range, SeriesState, Transaction
from holdfast.core.states import TransactionState
from holdfast.errors import HoldfastError
from holdfast.ports.broker import Incoming, Intake


class LeaseLost(HoldfastError):
    """The transaction has another owner, another state, or is gone: nothing was written, and we have to let go."""


class MessageRefused(HoldfastError):
    """The other side will never take this message as it is (too large, unreadable); it was not stored."""


class LedgerLine(Struct, frozen=True, kw_only=True):
    """What was done to a transaction, when and why."""

    at_us: int
    transaction: str
    action: str
    reason: str = ""
    detail: str = ""


class PartsStored(Struct, frozen=True, kw_only=True):
    """What became of parts: for each given one, in order, the part that counts; and how the series stand now."""

    winners: Sequence[Part]
    stand: Mapping[str, SeriesState]


class Transactions(Protocol):
    """Layer one: which transactions there are and where each stands. Every method raises StorageFailed."""

    #: Whether other processes may own transactions of the same store.
    shared: bool

    async def create(self, transaction: Transaction, request: bytes, *, lease_us: int) -> Transaction:
        """Insert it with its owner and a first fence, or return the one that has this id already."""

    async def find(self, transaction: str) -> Transaction | None:
        """One transaction."""

    async def request(self, transaction: str) -> bytes:
        """The body of its request; empty when it is gone."""

    async def page(self, *, after: str, count_max: int) -> Sequence[Transaction]:
        """Transactions by id, after the given one."""

    async def take(self, *, owner: str, lease_us: int, count_max: int) -> Sequence[Transaction]:
        """Own some that are unfinished and that nobody owns, or whose owner is past its lease; the fence rises.

        Where the store is not shared, all others' leases count as run out: their process is gone.
        """

    async def seize(self, transaction: str, *, owner: str, lease_us: int) -> Transaction | None:
        """Own it whoever owns it; the fence rises."""

    async def extend(self, fences: Mapping[str, int], *, lease_us: int) -> Sequence[str]:
        """Heartbeat: renew the leases; returns the ids that are still ours."""

    async def give_back(self, transaction: str, *, fence: int) -> None:
        """End the lease, so that another may take it at once. Nothing happens when it is not ours."""

    async def move(
        self, transaction: str, *, fence: int, source: TransactionState, target: TransactionState, reason: str = ""
    ) -> Transaction:
        """One transition, durable when it returns. An end is also written to the ledger. Raises LeaseLost."""

    async def set_clean(self, transaction: str, *, fence: int) -> None:
        """Nothing is left to do for it. Raises LeaseLost."""

    async def idle(self, *, for_us: int, count_max: int) -> Sequence[str]:
        """Unfinished transactions without progress for so long."""

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerLine]:
        """The ledger from its beginning, `after` lines left out."""


class Index(Protocol):
    """Layer three: which ordinals are stored. Writes raise LeaseLost, everything raises StorageFailed."""

    async def put_parts(self, transaction: str, parts: Sequence[Part], *, fence: int) -> PartsStored:
        """Insert each part unless its ordinal is there: atomic, one commit. Counts and progress go along.

        The path of a part that lost to other bytes is noted for removal in the same commit.
        """

    async def put_header(self, transaction: str, header: Header, *, fence: int) -> Mapping[str, SeriesState]:
        """Keep a series' count; returns how the series stand now."""

    async def find_parts(self, transaction: str, keys: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Part]:
        """Those of the ordinals that are there."""

    async def stand(self, transaction: str) -> Mapping[str, SeriesState]:
        """How every series stands that has a header or a part; as of the last commit."""

    async def count(self, transaction: str) -> Mapping[str, tuple[int, int, int]]:
        """For each series the number of rows, their bytes, and the highest ordinal; counted row by row."""

    async def parts(self, transaction: str, series: str, *, first: int, count_max: int) -> Sequence[Part]:
        """Parts by ordinal, from `first` on."""

    async def stored(self, transaction: str, series: str, *, count_max: int) -> Sequence[Range]:
        """The ordinals that are there, as ranges in order; the first `count_max` of them."""

    async def remove(self, transaction: str, parts: Sequence[Part], *, fence: int) -> None:
        """Take parts out again and note their paths for removal."""

    async def remove_header(self, transaction: str, series: str, *, fence: int) -> None:
        """Take a series' count out again."""

    async def note_stray(self, transaction: str, paths: Sequence[str], *, fence: int) -> None:
        """Note blobs for removal."""

    async def strays(self, transaction: str) -> Sequence[str]:
        """The noted blobs that no row of the index names."""

    async def forget(self, transaction: str, *, fence: int, count_max: int) -> int:
        """Delete rows of the index and notes; returns how many, 0 when none is left."""


class CollectStore(Transactions, Index, Protocol):
    """State and index in one database."""

    async def open(self) -> None:
        """Raises CannotStart."""

    async def close(self) -> None:
        """Let go of it."""


class GroupIntake(Intake, Protocol):
    """An intake that settles several at a time."""

    async def ack_all(self, incoming: Sequence[Incoming]) -> Sequence[Incoming]:
        """They are done. Returns those for which that did not work together: acked one by one, each says why."""


class Transport(Protocol):
    """Layer two: durable queues that are acked only after the work, and confirmed publishes."""

    async def check(self, address: str) -> None:
        """Raises Invalid when nothing can be sent to this address as things are."""

    async def declare(self, queues: Sequence[str]) -> None:
        """Make the queues durable, and the dead queue; what is there stays as it is."""

    def open(self, queue: str, *, count_max: int, bytes_max: int) -> AbstractAsyncContextManager[GroupIntake]:
        """Consume from a queue; `count_max` is how many messages may be ours at a time.

        Where messages are pushed, there are so few of them that they weigh at most `bytes_max`, or one at a time; as
        far as the largest one so far can tell.
        """

    async def send(self, address: str, body: bytes, *, message_id: str, attributes: Mapping[str, object]) -> None:
        """Returns when it is stored there. Raises Refused for good, any other HoldfastError for now."""

    async def park(self, body: bytes, *, attributes: Mapping[str, object], reason: str) -> None:
        """Put a message that was taken in before into the dead queue."""

    async def delete(self, queue: str) -> bool:
        """Delete it unless a message is in it or on its way; false when one is. One that is gone is deleted."""
