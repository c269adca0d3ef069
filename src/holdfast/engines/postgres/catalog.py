"""The catalog of a database: which queues there are. Changes are decided under a lock that all servers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.queue import QueueRecord
from holdfast.engines.postgres.rows import ledger_entry
from holdfast.engines.postgres.transaction import PipelineTransaction, read, transaction
from holdfast.engines.postgres.values import texts
from holdfast.errors import QueueMissing
from holdfast.ports.queues import LedgerEntry, RelatedQueues

if TYPE_CHECKING:
    from holdfast.engines.postgres.storage import PostgresStorage

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(QueueRecord).decode
_CATALOG = 0  # the ledger's queue number for rows about queues


class PostgresCatalog:
    """The queues of a database."""

    def __init__(self, storage: PostgresStorage) -> None:
        self._storage = storage

    async def queues(self) -> Sequence[QueueRecord]:
        return [_record(row) for row in await read(self._storage.pool, "catalog_select_queues")]

    async def version(self) -> int:
        return int((await read(self._storage.pool, "catalog_read_version"))[0][0])

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        storage = self._storage
        async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
            now_us = (await work.ask("catalog_lock", work.now_us))[0][0]
            record = decide(await _neighbours(work, name, dead_queue), now_us)
            settings = (record.dead_queue, record.dead_retention_us, _encode(record).decode())
            if record.generation:
                work.put("catalog_update_queue", record.generation, *settings)
            else:
                rows = await work.ask("catalog_insert_queue", name, *settings)
                record = msgspec.structs.replace(record, generation=rows[0][0])
            work.put("catalog_raise_version")
        storage.ring({name})
        return record

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        storage = self._storage
        async with transaction(storage.pool, now_us=storage.given_now_us()) as work:
            await work.ask("catalog_lock", work.now_us)
            neighbours = await _neighbours(work, name, "")
            if neighbours.current is not None:
                work.put("catalog_hold_queue", neighbours.current.generation)
                rows = await work.ask("catalog_count_items", neighbours.current.generation)
                # Partitions in other storages cannot be counted here; the caller has.
                elsewhere = any(p.storage != storage.name for p in neighbours.current.partitions)
                count = max(count, rows[0][0]) if elsewhere else rows[0][0]
                neighbours = msgspec.structs.replace(neighbours, item_count=count)
            record = decide(neighbours)
            if neighbours.current is None:
                raise QueueMissing(name)
            work.put("catalog_delete_queue", record.generation)
            work.put(
                "insert_ledger",
                *(_CATALOG, name, work.now_us, "queue_deleted", texts([""]), texts(["queues.delete"])),
                *(count, ""),
            )
            work.put("catalog_raise_version")
        storage.ring({name})
        return record

    async def keep(self, key: str, value: str) -> str:
        async with transaction(self._storage.pool, now_us=None) as work:
            work.put("catalog_keep", key, value)
            kept = work.put("catalog_find_kept", key)
        return str(work.rows(kept)[0][0])

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await read(self._storage.pool, "select_ledger", _CATALOG, after, count_max)
        return [ledger_entry(row) for row in rows]


def _record(row: tuple[Any, ...]) -> QueueRecord:
    generation, text = row
    return msgspec.structs.replace(_decode(text), generation=generation)


async def _neighbours(work: PipelineTransaction, name: str, dead_queue: str) -> RelatedQueues:
    answers = [work.put("catalog_find_queue", name), work.put("catalog_find_queue", dead_queue)]
    sources = work.put("catalog_select_sources", name)
    await work.flush()
    current, dead = (work.rows(answer) for answer in answers)
    return RelatedQueues(
        _record(current[0]) if current else None,
        _record(dead[0]) if dead else None,
        [source for (source,) in work.rows(sources)],
    )
