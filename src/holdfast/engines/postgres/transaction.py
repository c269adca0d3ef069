"""One transaction: statements are queued, sent in as few round trips as their answers allow, and committed.

An `OperationBatch` is one commit of one queue: what every operation needs to know and to hand on. What it changes in
the counts and deadlines of partitions is collected beside it and takes effect after the commit.

What this process believes of partitions is exact while no other server works on the queue. Beside others the counts are
estimates, which is all that placing and leasing need: whoever finds less than it thought counts again, and `stats`
reads the database. Deadlines are lower bounds: looking once too early costs one look, and every look at what is due
brings the exact ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from psycopg.pq.abc import PGresult

from holdfast.core.item import PartitionIds, QueueRecord
from holdfast.engines.postgres.connection import PipelineConnection, Pool, QueueGone, Rows, Value, bigints, texts
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.ports.queue_store import IdsRefused, PartitionState, Result
from holdfast.proof import crash_point

if TYPE_CHECKING:
    from holdfast.engines.postgres.storage import PostgresStorage

#: Called after the commit: an operation's result, from the answers to its statements.
Finish: TypeAlias = Callable[[], Result]
#: Of an item outside of its state table: id, created_at, expire_at, attempts.
State: TypeAlias = tuple[int, int, int, int]


class PipelineTransaction:
    """A transaction that has begun. `now_us` is a frozen clock's moment; without one the database's clock holds."""

    def __init__(self, connection: PipelineConnection, *, now_us: int | None) -> None:
        self._connection = connection
        self._results: list[PGresult] = []
        self._queued = 0
        self.now_us = now_us
        self.put("begin")

    def put(self, statement: str, *values: Value) -> int:
        """Queue a statement; `rows` gives its answer after the next flush or the commit."""
        self._connection.send(statement, values)
        self._queued += 1
        return self._queued - 1

    async def ask(self, statement: str, *values: Value) -> Rows:
        """Queue a statement and wait for its answer."""
        number = self.put(statement, *values)
        await self.flush()
        return self.rows(number)

    async def flush(self) -> None:
        """Wait for the answers to everything that was queued."""
        self._results += await self._connection.receive(sync=False)

    def rows(self, number: int) -> Rows:
        """The rows that a statement answered."""
        return self._connection.rows(self._results[number])

    async def commit(self) -> None:
        """Make it last. When this raises StorageFailed, whether it did is unknown."""
        crash_point("postgres.before_commit")
        number = self.put("commit")
        self._results += await self._connection.receive(sync=True)
        if self._results[number].command_status != b"COMMIT":
            raise StorageFailed("storage failed; the transaction was rolled back, try again")
        crash_point("postgres.after_commit")

    async def rollback(self) -> None:
        """Undo it."""
        self.put("rollback")
        await self._connection.receive(sync=True)


@asynccontextmanager
async def transaction(pool: Pool, *, now_us: int | None) -> AsyncIterator[PipelineTransaction]:
    """Everything inside and one commit, or nothing. A refusal by ourselves undoes it and keeps the connection."""
    refusal: HoldfastError | None = None
    async with pool.connection() as connection:
        work = PipelineTransaction(connection, now_us=now_us)
        try:
            yield work
        except (StorageFailed, QueueGone):
            raise
        except HoldfastError as error:
            refusal = error
            await work.rollback()
        else:
            await work.commit()
    if refusal is not None:
        raise refusal


async def read(pool: Pool, statement: str, *values: Value) -> Rows:
    """The answer to one statement, outside of any transaction."""
    async with pool.connection() as connection:
        connection.send(statement, values)
        return connection.rows((await connection.receive(sync=True))[0])


class CountChange:
    """What a transaction changes; takes effect when it has committed."""

    __slots__ = ("death_us", "due_us", "dying", "expiry_us", "leased", "queued", "scheduled")

    def __init__(self) -> None:
        self.queued = self.leased = self.scheduled = self.dying = 0
        self.due_us = self.expiry_us = self.death_us = 0

    def queue(self, count: int, *, expire_at_us: int) -> None:
        """So many more are queued; the first expires then."""
        if count:
            self.queued += count
            self.expiry_us = earlier(self.expiry_us, expire_at_us)

    def schedule(self, count: int, *, at_us: int) -> None:
        """So many more are scheduled; the first for then."""
        if count:
            self.scheduled += count
            self.due_us = earlier(self.due_us, at_us)

    def lease(self, count: int, *, until_us: int) -> None:
        """So many more are leased until then."""
        if count:
            self.leased += count
            self.due_us = earlier(self.due_us, until_us)


class PostgresPartition(PartitionIds):
    """One partition, as this process knows it."""

    def __init__(self, generation: int, number: int) -> None:
        super().__init__(generation, number)
        self.generation = generation
        self.number = number
        self.queued = self.leased = self.scheduled = self.dying = 0
        self.due_us = self.expiry_us = self.death_us = 0
        self.first_id = 0  # no item that can be leased is known below this id…
        self.first_id_until_s = 0.0  # …and until when that may be believed

    def ids_of(self, numbers: Sequence[int]) -> list[str]:
        """The texts of ids."""
        suffix = self.suffix
        return [f"{number:014x}{suffix}" for number in numbers]

    def in_order(self, texts: Sequence[str]) -> list[int]:
        """The numbers of ids that are ours in one order, so that two servers lock them in one order."""
        return sorted({number for number in self.numbers_of(texts) if number >= 0})

    def apply(self, change: CountChange) -> None:
        """A transaction has committed."""
        self.queued = max(0, self.queued + change.queued)
        self.leased = max(0, self.leased + change.leased)
        self.scheduled = max(0, self.scheduled + change.scheduled)
        self.dying = max(0, self.dying + change.dying)
        self.due_us = earlier(self.due_us, change.due_us)
        self.expiry_us = earlier(self.expiry_us, change.expiry_us)
        self.death_us = earlier(self.death_us, change.death_us)

    def load(self, counts: Sequence[int], moments: tuple[Any, ...]) -> None:
        """Everything, as the database has it."""
        self.read(moments)
        self.queued, self.leased, self.scheduled, self.dying = counts
        self.first_id = 0

    def read(self, row: tuple[Any, ...]) -> None:
        """The exact deadlines and what is dying, from the database."""
        self.due_us, self.expiry_us, self.death_us, self.dying = (number or 0 for number in row)

    def state(self) -> PartitionState:
        """How it stands."""
        if not self.leased and not self.scheduled:
            self.due_us = 0
        if not self.queued:
            self.expiry_us = self.death_us = 0
        counts = (self.queued, self.leased, self.scheduled, self.dying)
        return PartitionState(*counts, self.due_us, self.expiry_us, self.death_us)


def earlier(one_us: int, other_us: int) -> int:
    """The earlier of two moments; 0 is none."""
    return min(one_us, other_us) if one_us and other_us else one_us or other_us


class OperationBatch:
    """One commit of one queue."""

    def __init__(self, work: PipelineTransaction, storage: PostgresStorage, record: QueueRecord) -> None:
        self.work = work
        self.storage = storage
        self.queue_name = record.name
        self.generation = generation = record.generation
        self.changes: dict[PostgresPartition, CountChange] = {}
        self.available: set[str] = set()  # queues in which it makes items available
        self.targets: dict[int, bool] = {}  # dead queues that were looked for: whether they are there
        self.looked = False  # deadlines were looked at: read the next ones
        #: Partitions in which a lease found less than it asked for: whether it began behind the start.
        self.short: dict[PostgresPartition, bool] = {}
        self._held = work.put("hold_queue", generation, work.now_us)
        self._now_us = work.now_us or 0

    @property
    def now_us(self) -> int:
        """The transaction's moment; known after the first flush."""
        if not self._now_us:
            self._now_us = self.work.rows(self._held)[0][0]
        return self._now_us

    def partition(self, number: int) -> PostgresPartition:
        """A partition of this queue."""
        return self.storage.partition(self.generation, number)

    def change(self, partition: PostgresPartition) -> CountChange:
        """What the batch changes in a partition, of this queue or of another."""
        return self.changes.setdefault(partition, CountChange())

    def put(self, statement: str, partition: PostgresPartition, *values: Value) -> int:
        """Queue a statement about a partition of this queue."""
        return self.work.put(statement, self.generation, partition.number, *values)

    async def ask(self, statement: str, partition: PostgresPartition, *values: Value) -> Rows:
        """Queue a statement about a partition of this queue and wait for its answer."""
        return await self.work.ask(statement, self.generation, partition.number, *values)

    def note(self, action: str, item_ids: Sequence[str], reason: str, *, count: int = 1, detail: str = "") -> None:
        """Rows of the ledger, in this transaction."""
        if item_ids:
            ids, reasons = texts(item_ids), texts([reason] * len(item_ids))
            self.work.put(
                "insert_ledger",
                *(self.generation, self.queue_name, self.work.now_us, action, ids, reasons, count, detail),
            )

    def made_available(self) -> None:
        """Items of this queue can be leased now: other servers shall hear of it."""
        self.available.add(self.queue_name)


def refusal(
    partition: PostgresPartition, ids: Sequence[str], *, leased: Sequence[int] | None, queued: Sequence[int] | None
) -> IdsRefused:
    """Which ids do not exist and which are not leased."""
    held, known = set(leased or ()), set(queued or ())
    missing: list[str] = []
    unleased: list[str] = []
    for text in ids:
        number = partition.number_of(text)
        if number not in held:
            (unleased if number in known else missing).append(text)
    return IdsRefused(missing, unleased)


def columns(states: Sequence[State]) -> list[bytes]:
    """States turned into columns: four arrays."""
    return [bigints([state[index] for state in states]) for index in range(4)]
