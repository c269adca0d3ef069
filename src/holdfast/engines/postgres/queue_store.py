"""A queue's partitions in a PostgreSQL database. Other servers may work on the same queue at the same time.

The common commit (plain items in, leases out, leases completed) is one round trip: begin, hold the queue, the
operations, commit. An operation that has to look before it decides adds a round trip or two.

What rows of the database are as values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.core.item import Item, QueueRecord
from holdfast.core.moments import moment, moment_or_none
from holdfast.engines.postgres import entries, leasing
from holdfast.engines.postgres import lifecycle as deaths
from holdfast.engines.postgres.connection import QueueGone, bigints
from holdfast.engines.postgres.partition import PostgresPartition
from holdfast.engines.postgres.transaction import Finish, OperationBatch, read, transaction
from holdfast.errors import Invalid, QueueMissing, StorageFailed
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Committed,
    Complete,
    DeathRules,
    Delete,
    Due,
    DyingItem,
    Extend,
    Forget,
    Import,
    LeasedItems,
    LeaseItems,
    LedgerEntry,
    MoveTarget,
    Operation,
    Produce,
    Release,
    Remove,
    Result,
    RetryItems,
    Revive,
    SendBack,
    Tally,
)

if TYPE_CHECKING:
    from holdfast.engines.postgres.storage import PostgresStorage


def item(stand: PostgresPartition, row: tuple[Any, ...]) -> Item:
    """A row of a listing."""
    number, attempts, created_at, expire_at, lease_deadline, enqueue_at = row[:6]
    kind, encoding, reference, payload, dedupe_key, source_id = row[6:12]
    source_queue, death_reason, death_attempts, died_at, former_key = row[12:]
    return Item(
        id=stand.id_of(number),
        attempts=attempts,
        created_at=moment(created_at),
        expire_deadline=moment(expire_at),
        lease_deadline=moment_or_none(lease_deadline),
        enqueue_at=moment_or_none(enqueue_at),
        is_leased=bool(lease_deadline),
        kind=kind,
        encoding=encoding,
        reference=reference,
        payload=payload,
        dedupe_key=dedupe_key or "",
        source_id=source_id or "",
        source_queue=source_queue or "",
        death_reason=death_reason or "",
        death_attempts=death_attempts or 0,
        died_at=moment_or_none(died_at),
        former_key=former_key or "",
    )


def corpse(stand: PostgresPartition, queue_name: str, row: tuple[Any, ...]) -> DyingItem:
    """An item marked as dying."""
    return DyingItem(
        source_id=stand.id_of(row[0]),
        source_queue=queue_name,
        death_reason=row[1],
        death_attempts=row[2],
        died_at_us=row[3],
        target=MoveTarget(
            queue_name=row[4],
            generation=row[5],
            partition=row[6],
            storage=row[7],
            expire_timeout_us=row[8],
        ),
        kind=row[9],
        encoding=row[10],
        reference=row[11],
        payload=row[12],
        former_key=row[13] or "",
    )


def ledger_entry(row: tuple[Any, ...]) -> LedgerEntry:
    """A row of the ledger."""
    return LedgerEntry(
        at_us=row[0],
        action=row[1],
        queue_name=row[2],
        item_id=row[3],
        reason=row[4],
        count=row[5],
        detail=row[6],
    )


#: An estimate that went wrong is counted anew up to here; more than that is plenty.
RECOUNT_MAX = 1_000

_VERBS: dict[type, Callable[[OperationBatch, Any], Awaitable[Finish]]] = {
    Produce: entries.produce,
    Import: entries.import_items,
    Arrive: entries.arrive,
    LeaseItems: leasing.lease,
    Release: leasing.release,
    Complete: leasing.complete,
    Extend: leasing.extend,
    RetryItems: leasing.retry,
    Due: deaths.due,
    Remove: deaths.remove,
    Revive: deaths.revive,
    Forget: deaths.forget,
    SendBack: deaths.redrive,
    Delete: deaths.delete,
    Clear: deaths.clear,
}


class PostgresQueueStore:
    """The partitions of one queue in one database."""

    def __init__(self, storage: PostgresStorage, record: QueueRecord, partitions: Sequence[int]) -> None:
        self._storage = storage
        self._record = record
        self._numbers = tuple(partitions)

    # --- writing ----------------------------------------------------------------------------------------------

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        storage = self._storage
        try:
            async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
                batch = OperationBatch(
                    work,
                    storage=storage.name,
                    queue_name=self._record.name,
                    generation=self._record.generation,
                    find_stand=storage.stand,
                )
                self._lock_in_order(batch, operations)
                finishes = [await _VERBS[type(operation)](batch, operation) for operation in operations]
                touched = {operation.partition for operation in operations}
                moments = {p: batch.put("read_moments", p) for p in touched} if batch.looked else {}
        except QueueGone as error:
            raise QueueMissing(self._record.name) from error
        results = [finish() for finish in finishes]
        for key, change in work.changes.items():
            storage.stand(*key).apply(change)
        for partition, answer in moments.items():
            batch.stand(partition).read(work.rows(answer)[0])
        storage.ring(work.available)
        if batch.short:
            results = await self._make_up(batch, operations, results)
        return Committed(results, {p: batch.stand(p).shape() for p in touched}, batch.now_us)

    def _lock_in_order(self, batch: OperationBatch, operations: Sequence[Operation]) -> None:
        """Two servers that meet the same rows meet them in one order: otherwise each could wait for the other."""
        if any(map(entries.has_keys, operations)):
            batch.work.put("lock_keys", self._record.generation)
        settling = [o for o in operations if isinstance(o, Complete | Extend | RetryItems | Release)]
        if len(settling) > 1:
            ids: list[int] = []
            for operation in settling:
                texts = [i.id for i in operation.items] if isinstance(operation, RetryItems) else operation.ids
                ids += batch.stand(operation.partition).numbers_of(texts)
            batch.work.put("lock_leases", bigints(sorted(ids)))

    async def _make_up(
        self, batch: OperationBatch, operations: Sequence[Operation], results: list[Result]
    ) -> list[Result]:
        """Leases found less than they asked for: look at the start too where they did not, and put counts right."""
        with suppress(StorageFailed):  # what was committed stands, and is answered
            for index, operation in enumerate(operations):
                leased = results[index]
                if (
                    isinstance(operation, LeaseItems)
                    and isinstance(leased, LeasedItems)
                    and batch.short.get(operation.partition)
                ):
                    missing = operation.count_max - len(leased.items)
                    again = await self.commit([replace(operation, count_max=missing)]) if missing else None
                    if again is not None and isinstance(again.results[0], LeasedItems):
                        results[index] = LeasedItems([*leased.items, *again.results[0].items])
            for partition in batch.short:
                stand = batch.stand(partition)
                if stand.queued:
                    rows = await self._read("count_ready", partition, RECOUNT_MAX)
                    stand.queued = rows[0][0]
        return results

    def can_commit_inline(self) -> bool:
        return False

    async def load(self) -> Committed:
        storage, generation = self._storage, self._record.generation
        try:
            async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
                if not storage.keeps_catalog:
                    work.put("drop_elder_queues", generation, self._record.name)
                    work.put("adopt_queue", generation, self._record.name)
                held = work.put("hold_queue", generation, work.now_us)
                counts = [work.put("read_counts", generation, partition) for partition in self._numbers]
                moments = [work.put("read_moments", generation, partition) for partition in self._numbers]
        except QueueGone as error:
            raise QueueMissing(self._record.name) from error
        for answer, found in zip(counts, moments, strict=True):
            partition, queued, leased, scheduled, dying = work.rows(answer)[0]
            stand = storage.stand(generation, partition)
            stand.read(work.rows(found)[0])
            stand.queued, stand.leased, stand.scheduled, stand.dying = queued, leased, scheduled, dying
            stand.first_id = 0
        shapes = {p: storage.stand(generation, p).shape() for p in self._numbers}
        return Committed([], shapes, work.rows(held)[0][0])

    # --- reading ----------------------------------------------------------------------------------------------

    async def corpses(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        rows = await self._read("select_dying", partition, count_max)
        return [corpse(self._stand(partition), self._record.name, row) for row in rows]

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        rows = await read(self._storage.pool, "select_arrivals", self._record.generation, source_queue, count_max)
        return [source_id for (source_id,) in rows]

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        stand = self._stand(partition)
        first = stand.number_of(pivot) if pivot else 0
        if first < 0:
            raise Invalid(f"invalid storage id; '{pivot}' is not an id of this partition")
        statement = "list_scheduled" if scheduled else "list_items"
        return [item(stand, row) for row in await self._read(statement, partition, first, count_max)]

    async def tally(self, partition: int, *, mortality: DeathRules) -> Tally:
        ceiling = mortality.max_attempts or leasing.NEVER
        rows = await self._read("tally", partition, self._storage.given_now_us(), ceiling)
        queued, leased, scheduled, dying, overdue, age, leased_age = rows[0]
        return Tally(
            partition=partition,
            queued=queued,
            leased=leased,
            scheduled=scheduled,
            dying=dying,
            overdue=overdue if mortality.immortal else 0,
            average_age_us=age,
            average_leased_age_us=leased_age,
        )

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await read(self._storage.pool, "select_ledger", self._record.generation, after, count_max)
        return [ledger_entry(row) for row in rows]

    def _stand(self, partition: int) -> PostgresPartition:
        return self._storage.stand(self._record.generation, partition)

    async def _read(self, statement: str, partition: int, *values: int | None) -> list[tuple[Any, ...]]:
        return await read(self._storage.pool, statement, self._record.generation, partition, *values)

    async def close(self) -> None:
        """Connections belong to the storage."""
