"""What the queue service needs of an engine that keeps queues. Nothing in `stores/` does this: `engines/sqlite` and
`engines/postgres` do. Here a store is a queue store.

A **storage** (a folder of SQLite files, a PostgreSQL database, memory) has a **catalog** of queues, and for every
queue a **queue store**: its partitions in that storage. It takes one batch of operations and makes *one commit* of it:
either every operation of the batch took effect and its result is returned, or StorageFailed is raised and the service
acknowledges none. A request that is wrong (an id that is not leased) is a result, `IdsRefused`, not an exception: it
changes nothing and leaves its neighbours alone.

An item **moves** from one queue to another in three commits: a death takes it to its dead queue, a redrive takes it
back. The source marks it with its target (`SendBack`, or whatever lets it die), the target inserts it (`Arrive`), the
source removes it (`Remove`); then the target forgets that it came (`Forget`). A crash anywhere resumes at the mark.

Stores read their own clock, so that several processes on one database agree about deadlines. Ids come from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from holdfast.core.item import ExtendedItem, Item, LeasedItem, NewItem, QueueRecord, RetryItem
from holdfast.core.requests.queue import ImportedItem, PartitionStats


class MoveTarget(Struct, frozen=True):
    """Where an item goes: one partition, chosen when it is marked and never changed."""

    queue_name: str
    generation: int
    partition: int
    storage: str
    expire_timeout_us: int


class DyingItem(Struct, frozen=True):
    """An item marked as dying: what its target stores. `source_id` is its old id. Without a reason for its death it is
    on its way back: then it begins anew, with no story but its `source_id`."""

    source_id: str
    source_queue: str
    death_reason: str
    death_attempts: int
    died_at_us: int
    target: MoveTarget
    kind: str
    encoding: str
    reference: str
    payload: bytes
    former_key: str = ""

    @property
    def is_redrive(self) -> bool:
        return not self.death_reason

    @classmethod
    def from_row(cls, source_id: str, source_queue: str, row: Sequence[Any]) -> DyingItem:
        """From the columns that every store selects for it."""
        reason, attempts, died_at_us, *target, kind, encoding, reference, payload, former_key = row
        death = (reason, attempts, died_at_us, MoveTarget(*target))
        return cls(source_id, source_queue, *death, kind, encoding, reference, payload, former_key or "")


class StorageAbilities(Struct, frozen=True, kw_only=True):
    """What differs between storages, declared."""

    shared: bool  # other processes may change the same queues: poll, and expect a queue to be gone
    inline: bool  # a commit is so short that a lone request is served without a thread


class DeathRules(Struct, frozen=True, kw_only=True):
    """By which rules items of a queue die. In a dead queue (`immortal`) nothing dies by itself."""

    max_attempts: int = 0
    immortal: bool = False
    target: MoveTarget | None = None
    retention_us: int = 0


# --- results ----------------------------------------------------------------------------------------------------


class IdsRefused(Struct, frozen=True):
    """The operation changed nothing: these ids do not exist here, those are not leased."""

    missing: Sequence[str]
    unleased: Sequence[str]


class Ended(Struct, frozen=True):
    """What became of items: how many went back, were marked as dying or moved, and which were deleted (id, why)."""

    requeued: int = 0
    enqueued: int = 0
    dying: int = 0
    moved: int = 0
    deleted: Sequence[tuple[str, str]] = ()
    more: bool = False

    @classmethod
    def joined(cls, deaths: Sequence[Ended], *, requeued: int = 0, enqueued: int = 0, more: bool = False) -> Ended:
        """What became of those that died, for whatever reasons, and how many others came back."""
        return cls(
            requeued=requeued,
            enqueued=enqueued,
            dying=sum(death.dying for death in deaths),
            moved=sum(death.moved for death in deaths),
            deleted=[gone for death in deaths for gone in death.deleted],
            more=more,
        )


class Counted(Struct, frozen=True):
    count: int
    more: bool = False


class SentBack(Struct, frozen=True):
    """Which of them are on their way, or, if `moved`, there."""

    ids: Sequence[str]
    moved: bool = False


#: A list is what an operation made: ids of produced items, leased, extended or imported ones.
Result: TypeAlias = (
    IdsRefused | Ended | Counted | SentBack | list[str] | list[LeasedItem] | list[ExtendedItem] | list[Item]
)
R = TypeVar("R")


# --- operations -------------------------------------------------------------------------------------------------


class PartitionOperation(Struct, Generic[R], frozen=True):
    """Something to do in one partition; its parameter is its result."""

    partition: int


class IdsOperation(PartitionOperation[R], Generic[R], frozen=True):
    """Something to do with items by their ids."""

    ids: Sequence[str]


#: Any of them.
Operation: TypeAlias = PartitionOperation[Any]


class Produce(PartitionOperation[list[str]], frozen=True):
    """Append items, or schedule those whose `enqueue_at` is 100 ms ahead or more; their ids."""

    items: Sequence[NewItem]
    expire_timeout_us: int


class LeaseItems(PartitionOperation[list[LeasedItem]], frozen=True):
    """Hand out up to `count_max` items in FIFO order until now + `lease_timeout_us`; attempts rise by one."""

    count_max: int
    lease_timeout_us: int
    rules: DeathRules


class Release(IdsOperation[Counted], frozen=True):
    """Undo leases that nobody was told of: same id, same place, the attempt does not count."""


class Complete(IdsOperation[Counted | IdsRefused], frozen=True):
    """Remove leased items: all or none."""


class RetryItems(PartitionOperation[Ended | IdsRefused], frozen=True):
    """Give leased items back: to the tail, to the schedule, or to death: all or none."""

    items: Sequence[RetryItem]
    rules: DeathRules


class Extend(IdsOperation[list[ExtendedItem] | IdsRefused], frozen=True):
    """Let leases run until now + `lease_timeout_us`: all or none."""

    lease_timeout_us: int


class Due(PartitionOperation[Ended], frozen=True):
    """Carry out at most `count_max` of each kind of deadline that has passed: leases that ran out, schedules,
    expiries, items at or over the attempts limit, retention."""

    count_max: int
    rules: DeathRules


class Import(PartitionOperation[list[Item]], frozen=True):
    """Append items with their story; one whose `source_id` is there already is left out. Those that were stored."""

    items: Sequence[ImportedItem]
    expire_timeout_us: int


class Delete(IdsOperation[Counted], frozen=True):
    """Delete items by id, leased ones too; unknown ids are skipped. One ledger row each."""


class Clear(PartitionOperation[Counted], frozen=True):
    """Delete at most `count_max` items: queued, scheduled, leased. One ledger row with the count."""

    queued: bool
    scheduled: bool
    leased: bool
    count_max: int


class SendBack(IdsOperation[SentBack], frozen=True):
    """First commit of a redrive: mark those of the ids that are queued here, un-leased, and died in the queue that is
    the target. All others are left alone. Where both queues are in one database it is the whole redrive."""

    target: MoveTarget


class Arrive(PartitionOperation[Counted], frozen=True):
    """Second commit of a move: insert what is neither here by `source_id` nor remembered as arrived."""

    items: Sequence[DyingItem]
    expire_timeout_us: int


class Remove(IdsOperation[Counted], frozen=True):
    """Third commit of a move: the marked items have arrived, remove them."""


class Revive(IdsOperation[Counted], frozen=True):
    """The target of these moves is gone for good: back to the tail, to live or to die again by today's rules."""


class Forget(PartitionOperation[Counted], frozen=True):
    """The third commit of these moves is known: their arrivals need no memory any more."""

    source_ids: Sequence[str]


# --- how queues stand -------------------------------------------------------------------------------------------


class PartitionState(Struct, frozen=True):
    """How a partition stands after a commit. Moments are the store's; 0 means there is none.

    `next_due_us` is the nearest lease or schedule, `next_expiry_us` the nearest expiry of a queued item,
    `oldest_death_us` when the oldest queued dead letter died.
    """

    queued: int = 0
    leased: int = 0
    scheduled: int = 0
    dying: int = 0
    next_due_us: int = 0
    next_expiry_us: int = 0
    oldest_death_us: int = 0


class Committed(Struct, frozen=True):
    """A batch that took effect: one result per operation, the partitions it touched, the store's clock, and how long
    the store worked on it once it had begun."""

    results: Sequence[Result]
    states: Mapping[int, PartitionState]
    now_us: int
    took_us: int = 0


class LedgerEntry(Struct, frozen=True):
    """One row of the ledger: what was done to which item, why, and how many."""

    at_us: int
    action: str
    queue_name: str
    item_id: str = ""
    reason: str = ""
    count: int = 1
    detail: str = ""


class QueueStore(Protocol):
    """A queue's partitions in one storage. The service calls `commit` one batch at a time."""

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        """One transaction. Raises StorageFailed (the outcome may be unknown; acknowledge nothing, then `load`)
        or QueueMissing (deleted or made anew; nothing was written). `inline` allows it on the calling thread."""

    def can_commit_inline(self) -> bool:
        """Whether `commit` with `inline` would now return without ever suspending its caller."""

    async def load(self) -> Committed:
        """Read how every partition stands; makes what does not exist yet. Raises like `commit`."""

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        """Items marked as dying, oldest first."""

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        """Source ids remembered as arrived from that queue."""

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        """Queued and leased items, or scheduled ones, by id from the pivot on."""

    async def tally(self, partition: int, *, rules: DeathRules) -> PartitionStats:
        """Counts and averages, read from the store; it knows of no failures."""

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        """Rows of this queue's ledger in this storage, oldest first."""

    async def close(self) -> None:
        """Let go of files and connections; the next call opens them again."""


class RelatedQueues(Struct, frozen=True):
    """What a change of a queue has to know of others, read under the catalog's lock."""

    current: QueueRecord | None
    dead_queue: QueueRecord | None  # the queue that the change names as its dead queue
    source_queues: Sequence[str]  # queues whose dead queue this one is
    item_count: int | None = None  # how many items it holds, where the catalog can know that under its lock

    @classmethod
    def from_rows(cls, current: Sequence[Any], dead_queue: Sequence[Any], sources: Sequence[Any]) -> RelatedQueues:
        """From what a catalog has under each name, one row or none, and from the rows of names."""
        queue, dead = (QueueRecord.from_row(rows[0]) if rows else None for rows in (current, dead_queue))
        return cls(queue, dead, [name for (name,) in sources])


class Catalog(Protocol):
    """The queues of an installation. Changes are decided under a lock, so that two servers cannot both be right."""

    async def queues(self) -> Sequence[QueueRecord]:
        """Every queue."""

    async def version(self) -> int:
        """Rises with every change, by whomever."""

    async def change(
        self,
        name: str,
        *,
        dead_queue: str,
        decide: Callable[[RelatedQueues, int], QueueRecord],
    ) -> QueueRecord:
        """Insert or update what `decide(related, now_us)` returns. A record with generation 0 is new and gets one.

        Whatever `decide` raises is raised, and nothing changed.
        """

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        """Delete the queue that `decide` returns, with its items, and write that into the ledger."""

    async def keep(self, key: str, value: str) -> str:
        """Remember a value under a key if there is none yet; returns the one that holds."""

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        """Rows of the catalog's own ledger, oldest first."""


class Storage(Protocol):
    """One place that holds queues."""

    abilities: StorageAbilities

    def spared_us(self) -> int:
        """For how long nothing is to be deleted by time, asked before it is opened: nothing was written in it for long,
        and perhaps the clock has jumped. 0 where its clock is not the machine's."""

    async def open(self) -> None:
        """Open and check the schema version. Raises CannotStart with what to do."""

    async def close(self) -> None:
        """Close everything."""

    def catalog(self) -> Catalog:
        """The catalog of this storage; an installation uses that of its first."""

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> QueueStore:
        """The store of a queue; nothing is opened yet."""

    async def drop(self, record: QueueRecord) -> None:
        """Remove what is left of a deleted queue; harmless when it is gone."""

    async def watch(self, hint: Callable[[str], None]) -> None:
        """Call `hint(queue_name)` when another process may have changed a queue, until cancelled.
        Only a hint: the service polls too. A storage that is not shared returns at once."""
