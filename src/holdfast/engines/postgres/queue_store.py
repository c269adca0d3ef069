"""A queue's partitions in a PostgreSQL database. Other servers may work on the same queue at the same time.

The common commit (plain items in, leases out, leases completed) is one round trip: begin, hold the queue, the
operations, commit. An operation that has to look before it decides adds a round trip or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from holdfast.core.item import Item, LeasedItem, QueueRecord, listed_item
from holdfast.core.moments import NEVER_US, format_duration
from holdfast.core.requests.queue import PartitionStats
from holdfast.engines.postgres.connection import QueueGone, bigints
from holdfast.engines.postgres.operations import carry_out, has_keys
from holdfast.engines.postgres.partition import PostgresPartition
from holdfast.engines.postgres.transaction import OperationBatch, read, transaction
from holdfast.errors import QueueMissing, StorageFailed
from holdfast.ports.queue_store import (
    Committed,
    Complete,
    DeathRules,
    DyingItem,
    Extend,
    LeaseItems,
    LedgerEntry,
    Operation,
    Release,
    Result,
    RetryItems,
)

if TYPE_CHECKING:
    from holdfast.engines.postgres.storage import PostgresStorage


#: An estimate that went wrong is counted anew up to here; more than that is plenty.
RECOUNT_MAX = 1_000


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
                batch = OperationBatch(work, storage, self._record)
                self._lock_in_order(batch, operations)
                finishes = [await carry_out(batch, operation) for operation in operations]
                touched = [batch.partition(number) for number in {operation.partition for operation in operations}]
                moments = [batch.put("read_moments", partition) for partition in touched] if batch.looked else []
        except QueueGone as error:
            raise QueueMissing(self._record.name) from error
        results = [finish() for finish in finishes]
        for partition, change in batch.changes.items():
            partition.apply(change)
        for partition, answer in zip(touched, moments, strict=False):
            partition.read(work.rows(answer)[0])
        storage.notify(batch.available)
        if batch.short:
            await self._make_up(batch, operations, results)
        return Committed(results, {partition.number: partition.state() for partition in touched}, batch.now_us)

    def _lock_in_order(self, batch: OperationBatch, operations: Sequence[Operation]) -> None:
        """Two servers that meet the same rows meet them in one order: otherwise each could wait for the other."""
        if any(map(has_keys, operations)):
            batch.work.put("lock_keys", self._record.generation)
        settling = [o for o in operations if isinstance(o, Complete | Extend | RetryItems | Release)]
        if len(settling) > 1:
            ids: list[int] = []
            for operation in settling:
                texts = [i.id for i in operation.items] if isinstance(operation, RetryItems) else operation.ids
                ids += batch.partition(operation.partition).in_order(texts)
            batch.work.put("lock_leases", bigints(sorted(ids)))

    async def _make_up(self, batch: OperationBatch, operations: Sequence[Operation], results: Sequence[Result]) -> None:
        """Leases found less than they asked for: look at the start too where they did not, and put counts right."""
        with suppress(StorageFailed):  # what was committed stands, and is answered
            for index, operation in enumerate(operations):
                if isinstance(operation, LeaseItems) and batch.short.get(batch.partition(operation.partition)):
                    leased = cast(list[LeasedItem], results[index])
                    if missing := operation.count_max - len(leased):
                        again = await self.commit([replace(operation, count_max=missing)])
                        leased += cast(list[LeasedItem], again.results[0])
            for partition in batch.short:
                if partition.queued:
                    partition.queued = (await self._read("count_ready", partition.number, RECOUNT_MAX))[0][0]

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
            number, *counted = work.rows(answer)[0]
            self._partition(number).load(counted, work.rows(found)[0])
        states = {number: self._partition(number).state() for number in self._numbers}
        return Committed([], states, work.rows(held)[0][0])

    # --- reading ----------------------------------------------------------------------------------------------

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        rows = await self._read("select_dying", partition, count_max)
        id_of = self._partition(partition).id_of
        return [DyingItem.from_row(id_of(row[0]), self._record.name, row[1:]) for row in rows]

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        rows = await read(self._storage.pool, "select_arrivals", self._record.generation, source_queue, count_max)
        return [source_id for (source_id,) in rows]

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        place = self._partition(partition)
        statement = "list_scheduled" if scheduled else "list_items"
        rows = await self._read(statement, partition, place.first_from(pivot), count_max)
        return [listed_item(place.id_of(row[0]), row[1:]) for row in rows]

    async def tally(self, partition: int, *, rules: DeathRules) -> PartitionStats:
        ceiling = rules.max_attempts or NEVER_US
        rows = await self._read("tally", partition, self._storage.given_now_us(), ceiling)
        queued, leased, scheduled, dying, overdue, age_us, leased_age_us = rows[0]
        return PartitionStats(
            partition=partition,
            total=queued + leased,
            total_leased=leased,
            scheduled=scheduled,
            dying=dying,
            overdue=overdue if rules.immortal else 0,
            average_age=format_duration(age_us),
            average_leased_age=format_duration(leased_age_us),
        )

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await read(self._storage.pool, "select_ledger", self._record.generation, after, count_max)
        return [LedgerEntry(*row) for row in rows]

    def _partition(self, number: int) -> PostgresPartition:
        return self._storage.partition(self._record.generation, number)

    async def _read(self, statement: str, partition: int, *values: int | None) -> list[tuple[Any, ...]]:
        return await read(self._storage.pool, statement, self._record.generation, partition, *values)

    async def close(self) -> None:
        """Connections belong to the storage."""
