"""A folder of SQLite files: `catalog.db`, which says what queues there are, and one file per queue, opened on use and
closed when too many are open. It is locked, so that two processes never write the same files.

Without a folder all of it is in memory, for tests and for what may be lost: then nothing waits for a disk, so nothing
runs in a thread of its own, and it is gone when it is closed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from holdfast.core.item import QueueRecord
from holdfast.engines.sqlite.connection import (
    MEMORY,
    SQL,
    delete_files,
    fetch_all,
    fetch_one,
    open_writer,
    size_of,
    transaction,
    translated,
)
from holdfast.engines.sqlite.queue_store import SqliteQueueStore
from holdfast.errors import CannotStart, HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import LedgerEntry, RelatedQueues, StorageAbilities

T = TypeVar("T")

OPEN_FILES_COUNT_MAX = 200
COMMIT_THREADS_COUNT_MAX = 4


class FolderLock:
    """An OS lock that ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Make and lock the folder; raises CannotStart that names the process which holds it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CannotStart(
                f"data folder cannot be used; '{self._folder}': {error.strerror}, choose another folder or mend it"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise CannotStart(
                f"data folder is in use; '{self._folder}' is locked by process {holder}, stop it, choose another "
                "folder, or use PostgreSQL to share queues between processes"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise CannotStart(
                f"data folder cannot be written; '{self._folder}': {error.strerror}, free some space or mend it"
            ) from error
        self._descriptor = descriptor

    def let_go(self) -> None:
        """Unlock the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class LocalCalls(Executor):
    """Does at once, in the thread that asks, whatever it is given."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        """The result is there when this returns."""
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **more))
        except BaseException as error:  # noqa: BLE001 - it is told to whoever asks
            done.set_exception(error)
        return done


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
        self._db = open_writer(self._path, kind="catalog", create=size_of(self._path) is None)
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
        return [QueueRecord.from_row(row) for row in rows]

    async def version(self) -> int:
        return self._version

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        def work(db: apsw.Connection) -> QueueRecord:
            with transaction(db):
                record = decide(_related(db, name, dead_queue), self._clock.now_us())
                text = record.json
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
                record = decide(_related(db, name, ""))
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
        return [LedgerEntry(*row) for row in rows]

    # --- files: called from worker threads --------------------------------------------------------------------

    def was_made(self, generation: int) -> bool:
        """Whether the file of this queue has existed: then a missing one is a loss, not a beginning."""
        return generation in self._made

    def note_made(self, generation: int) -> None:
        """The file of this queue exists now."""
        if generation not in self._made:
            self._note_file("catalog_insert_file", generation)
            self._made.add(generation)

    def delete_later(self, generation: int) -> None:
        """The file of this queue may be removed."""
        self._note_file("catalog_doom_file", generation)

    def forget(self, generation: int) -> None:
        """The file of this queue has been removed."""
        self._note_file("catalog_forget_file", generation)
        self._made.discard(generation)

    def _note_file(self, statement: str, generation: int) -> None:
        def work(db: apsw.Connection) -> None:
            with transaction(db):
                db.execute(SQL[statement], (generation,))

        self._locked(work)


def _related(db: apsw.Connection, name: str, dead_queue: str) -> RelatedQueues:
    return RelatedQueues.from_rows(
        fetch_all(db, "catalog_find_queue", (name,)),
        fetch_all(db, "catalog_find_queue", (dead_queue,)),
        fetch_all(db, "catalog_select_sources", (name,)),
    )


class SqliteStorage:
    """Queues in a folder that belongs to this process alone; in memory without one."""

    abilities = StorageAbilities(shared=False, inline=True)

    def __init__(self, folder: Path | None, *, clock: Clock, open_files_max: int = OPEN_FILES_COUNT_MAX) -> None:
        self.clock = clock
        self._folder = folder or MEMORY / secrets.token_hex()
        self._lock = FolderLock(folder) if folder else None
        self.threads: Executor = LocalCalls()
        self.checkpointer: Executor = self.threads
        if folder is not None:
            self.threads = ThreadPoolExecutor(COMMIT_THREADS_COUNT_MAX, thread_name_prefix="sqlite")
            self.checkpointer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._catalog = SqliteCatalog(self._folder / "catalog.db", clock=clock, threads=self.threads)
        self._open_files_max = open_files_max
        self.uses = count()  # numbers the uses of files: which one has been unused for longest
        self._open: set[SqliteQueueStore] = set()

    async def open(self) -> None:
        if self._lock is None:
            self._catalog.open()
            return
        self._lock.take()
        try:
            (self._folder / "queues").mkdir(exist_ok=True, mode=0o700)
            for generation in self._catalog.open():
                self._remove_files(generation)
        except OSError as error:
            self._lock.let_go()
            raise CannotStart(f"data folder cannot be used; '{self._folder}': {error.strerror}") from error
        except HoldfastError as error:
            self._lock.let_go()
            raise CannotStart(f"data folder cannot be opened; '{self._folder}': {error.message}") from error

    async def close(self) -> None:
        for store in list(self._open):
            await store.close()
        self._catalog.close()
        self.threads.shutdown(wait=True)
        self.checkpointer.shutdown(wait=True)
        if self._lock is None:
            delete_files(self._folder)
            delete_files(self._folder / "queues")
        else:
            self._lock.let_go()

    def catalog(self) -> SqliteCatalog:
        return self._catalog

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> SqliteQueueStore:
        return SqliteQueueStore(self, record, partitions, self._path(record))

    def _path(self, record: QueueRecord) -> Path:
        # The number alone names the file; the rest is for people who look into the folder.
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record.name)[:40]
        return self._folder / "queues" / f"{record.generation:06d}-{readable}.db"

    async def drop(self, record: QueueRecord) -> None:
        def remove() -> None:
            self._catalog.delete_later(record.generation)
            self._remove_files(record.generation)

        await asyncio.get_running_loop().run_in_executor(self.threads, remove)

    def _remove_files(self, generation: int) -> None:
        delete_files(self._folder / "queues", f"{generation:06d}-")
        self._catalog.forget(generation)

    async def watch(self, hint: Callable[[str], None]) -> None:
        """The folder is this process's own: nobody else changes it."""

    # --- called by its queues ------------------------------------------------------------------------------------

    def closed(self, store: SqliteQueueStore) -> None:
        """A file was closed."""
        self._open.discard(store)

    async def make_room(self, store: SqliteQueueStore) -> None:
        """A file is about to be used: close those unused for longest while too many are open."""
        self._open.add(store)
        while len(self._open) > self._open_files_max:
            idle = [other for other in self._open if other is not store and other.idle]
            if not idle:
                return
            await min(idle, key=lambda other: other.last_use).close()
