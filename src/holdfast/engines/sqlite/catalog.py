"""The catalog of a folder: which queues there are, and which files belong to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import apsw
import msgspec

from holdfast.core.queue import QueueRecord
from holdfast.engines.sqlite.connection import SQL, fetch_all, fetch_one, open_writer, transaction, translated
from holdfast.errors import StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queues import LedgerEntry, RelatedQueues

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(QueueRecord).decode


class SqliteCatalog:
    """`catalog.db`. Its connection is used by one thread at a time."""

    def __init__(self, path: Path, *, clock: Clock, threads: Executor) -> None:
        self._path = path
        self._clock = clock
        self._threads = threads
        self._lock = threading.Lock()
        self._db: apsw.Connection | None = None
        self._version = 0
        self._made: set[int] = set()

    def open(self) -> list[int]:
        """Open the file, on the calling thread; returns the generations whose files may be removed."""
        self._db = open_writer(self._path, kind="catalog", create=not self._path.exists())
        files = fetch_all(self._db, "catalog_select_files")
        self._made = {generation for generation, _ in files}
        return [generation for generation, doomed in files if doomed]

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    async def _do(self, work: Callable[[apsw.Connection], T]) -> T:
        def run() -> T:
            return self._locked(work)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _locked(self, work: Callable[[apsw.Connection], T]) -> T:
        with self._lock, translated(self._path):
            if self._db is None:
                raise StorageFailed("storage failed; the catalog is closed")
            return work(self._db)

    async def queues(self) -> Sequence[QueueRecord]:
        rows = await self._do(lambda db: fetch_all(db, "catalog_select_queues"))
        return [_record(row) for row in rows]

    async def version(self) -> int:
        return self._version

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        def work(db: apsw.Connection) -> QueueRecord:
            with transaction(db):
                record = decide(_neighbours(db, name, dead_queue), self._clock.now_us())
                text = _encode(record).decode()
                if record.generation:
                    db.execute(SQL["catalog_update_queue"], (record.generation, record.dead_queue, text))
                    return record
                db.execute(SQL["catalog_insert_queue"], (name, record.dead_queue, text))
                return msgspec.structs.replace(record, generation=db.last_insert_rowid())

        record = await self._do(work)
        self._version += 1
        return record

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        def work(db: apsw.Connection) -> QueueRecord:
            with transaction(db):
                record = decide(_neighbours(db, name, ""))
                db.execute(SQL["catalog_delete_queue"], (record.generation,))
                db.execute(SQL["catalog_doom_file"], (record.generation,))
                entry = (self._clock.now_us(), "queue_deleted", name, "queues.delete", count)
                db.execute(SQL["catalog_insert_ledger"], entry)
            return record

        record = await self._do(work)
        self._version += 1
        return record

    async def keep(self, key: str, value: str) -> str:
        def work(db: apsw.Connection) -> str:
            with transaction(db):
                db.execute(SQL["catalog_keep"], (key, value))
            return str(fetch_one(db, "catalog_find_kept", (key,))[0])

        return await self._do(work)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await self._do(lambda db: fetch_all(db, "catalog_select_ledger", (after, count_max)))
        return [
            LedgerEntry(
                at_us=row[0],
                action=row[1],
                queue_name=row[2],
                item_id=row[3],
                reason=row[4],
                count=row[5],
                detail=row[6],
            )
            for row in rows
        ]

    # --- files: called from worker threads --------------------------------------------------------------------

    def was_made(self, generation: int) -> bool:
        """Whether the file of this queue has existed: then a missing one is a loss, not a beginning."""
        return generation in self._made

    def note_made(self, generation: int) -> None:
        """The file of this queue exists now."""
        if generation in self._made:
            return

        def work(db: apsw.Connection) -> None:
            with transaction(db):
                db.execute(SQL["catalog_insert_file"], (generation,))

        self._locked(work)
        self._made.add(generation)

    def doom(self, generation: int) -> None:
        """The file of this queue may be removed."""

        def work(db: apsw.Connection) -> None:
            with transaction(db):
                db.execute(SQL["catalog_doom_file"], (generation,))

        self._locked(work)

    def forget(self, generation: int) -> None:
        """The file of this queue has been removed."""

        def work(db: apsw.Connection) -> None:
            with transaction(db):
                db.execute(SQL["catalog_forget_file"], (generation,))

        self._locked(work)
        self._made.discard(generation)


def _record(row: tuple[int, str]) -> QueueRecord:
    generation, text = row
    return msgspec.structs.replace(_decode(text), generation=generation)


def _neighbours(db: apsw.Connection, name: str, dead_queue: str) -> RelatedQueues:
    current = fetch_one(db, "catalog_find_queue", (name,))
    dead = fetch_one(db, "catalog_find_queue", (dead_queue,)) if dead_queue else None
    sources = [row[0] for row in fetch_all(db, "catalog_select_sources", (name,))]
    return RelatedQueues(_record(current) if current else None, _record(dead) if dead else None, sources)
