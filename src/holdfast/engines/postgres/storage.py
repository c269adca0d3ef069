"""A PostgreSQL database as a storage: several servers share its queues. Its catalog says which queues there are;
changes are decided under a lock that all servers share.

Servers on one database tell each other a queue's name when items came in or the queue changed. That is only a hint, so
it is sent after the commit, on its own, and joined: a NOTIFY inside a commit would make every commit of the database
wait for the one before it. Behind it is a poll for deadlines that have passed, of whichever server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import psycopg

from holdfast.core.item import QueueRecord
from holdfast.engines.postgres.connection import Pool, connect, failed, migrate, place_of, texts
from holdfast.engines.postgres.partition import PostgresPartition
from holdfast.engines.postgres.queue_store import PostgresQueueStore
from holdfast.engines.postgres.transaction import PipelineTransaction, read, transaction
from holdfast.errors import StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import LedgerEntry, RelatedQueues, StorageAbilities

CONNECTIONS_COUNT_MAX = 8
DROP_COUNT_MAX = 5_000
POLL_S = 0.5
#: The first hint goes out at once, those after it together.
NOTIFY_S_MIN = 0.01
NAMES_COUNT_MAX = 1_000
CLOSE_TIMEOUT_S = 1.0

_CATALOG = 0  # the ledger's queue number for rows about queues


class PostgresStorage:
    """Queues in a database. Without a clock, the database's own decides about every deadline."""

    abilities = StorageAbilities(shared=True, inline=False)

    def __init__(
        self, url: str, *, name: str, clock: Clock | None = None, connections_max: int = CONNECTIONS_COUNT_MAX
    ) -> None:
        self.name = name
        self._url = url
        self._clock = clock
        self._place = place_of(url)
        self.pool = Pool(url, place=self._place, connections_max=connections_max)
        self._partitions: dict[tuple[int, int], PostgresPartition] = {}
        self.keeps_catalog = False
        self._catalog = PostgresCatalog(self)
        self._notifier = ChangeNotifier(self.pool)

    async def open(self) -> None:
        await migrate(self._url)
        self.pool.open()

    async def close(self) -> None:
        await self._notifier.close()
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
            raise failed(error, self._place) from error

    async def _listen(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], hint: Callable[[str], None]) -> None:
        """Hand on what others tell, and queues with deadlines that have passed. Ends only by an error."""
        clock = asyncio.get_running_loop().time
        polled_s = 0.0
        while True:
            async for notice in connection.notifies(timeout=POLL_S, stop_after=1):
                author, _, name = notice.payload.partition(" ")
                if author != self._notifier.sender:
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

    def notify(self, names: Iterable[str]) -> None:
        """Other servers shall look at these queues."""
        self._notifier.notify(names)


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
                record = msgspec.structs.replace(record, generation=rows[0][0])
            work.put("catalog_raise_version")
        storage.notify({name})
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
                related = msgspec.structs.replace(related, item_count=count)
            record = decide(related)
            work.put("catalog_delete_queue", record.generation)
            work.put(
                "insert_ledger",
                *(_CATALOG, name, work.now_us, "queue_deleted", texts([""]), texts(["queues.delete"])),
                *(count, ""),
            )
            work.put("catalog_raise_version")
        storage.notify({name})
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
