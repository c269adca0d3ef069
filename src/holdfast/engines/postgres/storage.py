"""A PostgreSQL database as a storage: several servers share its queues. Its catalog says which queues there are;
changes are decided under a lock that all servers share.

Servers on one database tell each other a queue's name when items came in or the queue changed. That is only a hint, so
it is sent after the commit, on its own, and joined: a NOTIFY inside a commit would make every commit of the database
wait for the one before it. Behind it is a poll for deadlines that have passed, of whichever server.

The common commit of a queue (plain items in, leases out, leases completed) is one round trip: begin, hold the queue,
the operations, commit. An operation that has to look before it decides adds a round trip or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast
from uuid import uuid4

import psycopg
from msgspec.structs import replace

from holdfast.core.item import Item, LeasedItem, QueueRecord, listed_item
from holdfast.core.moments import NEVER_US, go_duration
from holdfast.core.requests.queue import PartitionStats
from holdfast.engines.postgres.connection import Pool, QueueGone, bigints, connect, failed, migrate, server_of, texts
from holdfast.engines.postgres.operations import carry_out, has_keys
from holdfast.engines.postgres.transaction import (
    OperationBatch,
    PipelineTransaction,
    PostgresPartition,
    read,
    transaction,
)
from holdfast.errors import QueueMissing, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import (
    Committed,
    Complete,
    DeathRules,
    DyingItem,
    Extend,
    LeaseItems,
    LedgerEntry,
    Operation,
    RelatedQueues,
    Release,
    Result,
    RetryItems,
    StorageAbilities,
)

CONNECTIONS_COUNT_MAX = 8
DROP_COUNT_MAX = 5_000
POLL_S = 0.5
#: The first hint goes out at once, those after it together.
NOTIFY_S_MIN = 0.01
NAMES_COUNT_MAX = 1_000
CLOSE_TIMEOUT_S = 1.0
#: An estimate that went wrong is counted anew up to here; more than that is plenty.
RECOUNT_MAX = 1_000

_CATALOG = 0  # the ledger's queue number for rows about queues


class PostgresStorage:
    """Queues in a database. Without a clock, the database's own decides about every deadline."""

    abilities = StorageAbilities(shared=True, inline=False)

    def __init__(self, url: str, *, name: str, clock: Clock | None = None) -> None:
        self.name = name
        self._url = url
        self._clock = clock
        self._server = server_of(url)
        self.pool = Pool(url, server=self._server, connections_max=CONNECTIONS_COUNT_MAX)
        self._partitions: dict[tuple[int, int], PostgresPartition] = {}
        self.keeps_catalog = False
        self._catalog = PostgresCatalog(self)
        self.notifier = ChangeNotifier(self.pool)

    def spared_us(self) -> int:
        return 0

    async def open(self) -> None:
        await migrate(self._url)
        self.pool.open()

    async def close(self) -> None:
        await self.notifier.close()
        await self.pool.close()

    def catalog(self) -> PostgresCatalog:
        # Whoever asks for it keeps the queues here; otherwise queues are adopted from another storage's catalog.
        self.keeps_catalog = True
        return self._catalog

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> PostgresQueueStore:
        return PostgresQueueStore(self, record, partitions)

    async def drop(self, record: QueueRecord) -> None:
        async with transaction(self.pool, now_us=None) as work:
            work.put("catalog_delete_queue", record.generation)
        await self._drop(record.generation)
        for key in [key for key in self._partitions if key[0] == record.generation]:
            del self._partitions[key]

    async def _drop(self, generation: int) -> None:
        """Remove the items of a queue that is gone, a bounded number in each transaction."""
        for statement in ("drop_ready", "drop_leases", "drop_scheduled", "drop_dying"):
            count = DROP_COUNT_MAX
            while count == DROP_COUNT_MAX:
                count = (await read(self.pool, statement, generation, DROP_COUNT_MAX))[0][0]
        async with transaction(self.pool, now_us=None) as work:
            work.put("drop_arrivals", generation)
            work.put("drop_done", generation)

    async def watch(self, hint: Callable[[str], None]) -> None:
        for (generation,) in await read(self.pool, "select_dropped"):
            await self._drop(generation)  # a server ended between deleting a queue and removing its items
        try:
            connection = await connect(self._url)
            try:
                await connection.execute("LISTEN holdfast")
                await self._listen(connection, hint)
            finally:
                await connection.close()
        except (psycopg.Error, OSError) as error:
            raise failed(error, self._server) from error

    async def _listen(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], hint: Callable[[str], None]) -> None:
        """Hand on what others tell, and queues with deadlines that have passed. Ends only by an error."""
        clock = asyncio.get_running_loop().time
        polled_s = 0.0
        while True:
            async for notice in connection.notifies(timeout=POLL_S, stop_after=1):
                author, _, name = notice.payload.partition(" ")
                if author != self.notifier.sender:
                    hint(name)
            if clock() - polled_s >= POLL_S:
                polled_s = clock()
                for (name,) in await read(self.pool, "select_overdue", self.given_now_us()):
                    hint(name)

    # --- called by stores and catalog ------------------------------------------------------------------------

    def given_now_us(self) -> int | None:
        """A given clock's moment; none means the database's."""
        return self._clock.now_us() if self._clock is not None else None

    def partition(self, generation: int, number: int) -> PostgresPartition:
        """A partition, as far as this process knows it."""
        known = self._partitions.get((generation, number))
        if known is None:
            known = self._partitions[generation, number] = PostgresPartition(generation, number)
        return known


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
        storage.notifier.notify(batch.available)
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
                given = [i.id for i in operation.items] if isinstance(operation, RetryItems) else operation.ids
                ids += batch.partition(operation.partition).in_order(given)
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
        found = self._partition(partition)
        statement = "list_scheduled" if scheduled else "list_items"
        rows = await self._read(statement, partition, found.first_from(pivot), count_max)
        return [listed_item(found.id_of(row[0]), row[1:]) for row in rows]

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
            average_age=go_duration(age_us),
            average_leased_age=go_duration(leased_age_us),
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


class PostgresCatalog:
    """The queues of a database."""

    def __init__(self, storage: PostgresStorage) -> None:
        self._storage = storage

    async def queues(self) -> Sequence[QueueRecord]:
        return [QueueRecord.from_row(row) for row in await read(self._storage.pool, "catalog_select_queues")]

    async def version(self) -> int:
        return int((await read(self._storage.pool, "catalog_read_version"))[0][0])

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        storage = self._storage
        async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
            now_us = (await work.ask("catalog_lock", work.now_us))[0][0]
            record = decide(await _related_queues(work, name, dead_queue), now_us)
            settings = (record.dead_queue, record.dead_retention_us, record.json)
            if record.generation:
                work.put("catalog_update_queue", record.generation, *settings)
            else:
                rows = await work.ask("catalog_insert_queue", name, *settings)
                record = replace(record, generation=rows[0][0])
            work.put("catalog_raise_version")
        storage.notifier.notify({name})
        return record

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        storage = self._storage
        async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
            await work.ask("catalog_lock", work.now_us)
            related = await _related_queues(work, name, "")
            if related.current is not None:
                work.put("catalog_hold_queue", related.current.generation)
                rows = await work.ask("catalog_count_items", related.current.generation)
                # Partitions in other storages cannot be counted here; the caller has.
                elsewhere = any(p.storage != storage.name for p in related.current.partitions)
                count = max(count, rows[0][0]) if elsewhere else rows[0][0]
                related = replace(related, item_count=count)
            record = decide(related)
            work.put("catalog_delete_queue", record.generation)
            work.put(
                "insert_ledger",
                *(_CATALOG, name, work.now_us, "queue_deleted", texts([""]), texts(["queues.delete"])),
                *(count, ""),
            )
            work.put("catalog_raise_version")
        storage.notifier.notify({name})
        return record

    async def keep(self, key: str, value: str) -> str:
        async with transaction(self._storage.pool, now_us=None) as work:
            work.put("catalog_keep", key, value)
            kept = work.put("catalog_find_kept", key)
        return str(work.rows(kept)[0][0])

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await read(self._storage.pool, "select_ledger", _CATALOG, after, count_max)
        return [LedgerEntry(*row) for row in rows]


async def _related_queues(work: PipelineTransaction, name: str, dead_queue: str) -> RelatedQueues:
    answers = [work.put("catalog_find_queue", name), work.put("catalog_find_queue", dead_queue)]
    answers.append(work.put("catalog_select_sources", name))
    await work.flush()
    return RelatedQueues.from_rows(*map(work.rows, answers))


class ChangeNotifier:
    """Tells other servers which queues to look at."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._names: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.sender = uuid4().hex

    def notify(self, names: Iterable[str]) -> None:
        """Tell them soon; never waits and never fails."""
        self._names.update(names)
        if self._names and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="postgres hints")

    async def _run(self) -> None:
        while self._names:
            names = [self._names.pop() for _ in range(min(len(self._names), NAMES_COUNT_MAX))]
            try:
                await read(self._pool, "notify", texts([f"{self.sender} {name}" for name in names]))
            except StorageFailed:
                return  # whoever missed it polls
            await asyncio.sleep(NOTIFY_S_MIN)

    async def close(self) -> None:
        """Send what is left, unless the database takes too long: whoever misses it polls."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait([self._task])
