"""One transaction: statements are queued, sent in as few round trips as their answers allow, and committed.

An `OperationBatch` is one commit of one queue: what every operation needs to know and to hand on. What it changes in
the counts of partitions is collected beside it and takes effect after the commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from psycopg.pq.abc import PGresult

from holdfast.core.item import QueueRecord
from holdfast.engines.postgres.connection import PipelineConnection, Pool, QueueGone, Rows, Value, bigints, texts
from holdfast.engines.postgres.partition import CountChange, PostgresPartition
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.ports.queue_store import IdsRefused, Result
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
        place = self.put(statement, *values)
        await self.flush()
        return self.rows(place)

    async def flush(self) -> None:
        """Wait for the answers to everything that was queued."""
        self._results += await self._connection.receive(sync=False)

    def rows(self, place: int) -> Rows:
        """The rows that a statement answered."""
        return self._connection.rows(self._results[place])

    async def commit(self) -> None:
        """Make it last. When this raises StorageFailed, whether it did is unknown."""
        crash_point("postgres.before_commit")
        place = self.put("commit")
        self._results += await self._connection.receive(sync=True)
        if self._results[place].command_status != b"COMMIT":
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
