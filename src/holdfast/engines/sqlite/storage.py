"""A folder of SQLite files: `catalog.db`, which says what queues there are, and one file per queue, opened on use and
closed when too many are open. It is locked, so that two processes never write the same files. A queue's file has one
writing connection, one transaction per batch, and a reading connection beside it.

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
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from holdfast.core.item import Item, QueueRecord, listed_item
from holdfast.core.moments import GAP_US, GAP_WAIT_US, NEVER_US, go_duration
from holdfast.core.requests.queue import PartitionStats
from holdfast.engines.sqlite.connection import (
    BESIDE_PAGES_COUNT,
    MEMORY,
    SQL,
    Checkpoints,
    delete_files,
    fetch_all,
    fetch_one,
    open_reader,
    open_writer,
    size_of,
    transaction,
    translated,
    translation,
)
from holdfast.engines.sqlite.operations import Operations
from holdfast.engines.sqlite.partition import Moments, SqlitePartition, read_partitions
from holdfast.engines.threads import in_thread
from holdfast.errors import CannotStart, HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import (
    Committed,
    DeathRules,
    DyingItem,
    LedgerEntry,
    Operation,
    RelatedQueues,
    StorageAbilities,
)
from holdfast.proof import crash_point

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
        with translated(self._path):
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
        return await self._do(lambda db: [QueueRecord.from_row(row) for row in fetch_all(db, "catalog_select_queues")])

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
        self.open_stores: set[SqliteQueueStore] = set()

    def spared_us(self) -> int:
        if self._lock is None:
            return 0
        mark, now_us = self._folder / "clock-gap", self.clock.now_us()
        with suppress(OSError, ValueError):  # a process before has found the gap, and may have written since
            if (left_us := int(mark.read_text("ascii")) - now_us) > 0:
                return min(left_us, GAP_WAIT_US)
        files = [*self._folder.glob("catalog.db*"), *self._folder.glob("queues/*.db*")]
        written = [path.stat().st_mtime_ns // 1000 for path in files if not path.name.endswith("-shm")]
        if not written or now_us - max(written) <= GAP_US:
            return 0
        with suppress(OSError):
            mark.write_text(f"{now_us + GAP_WAIT_US}", "ascii")
        return GAP_WAIT_US

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
        for store in list(self.open_stores):
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

    async def make_room(self, store: SqliteQueueStore) -> None:
        """A file is about to be used: close those unused for longest while too many are open."""
        self.open_stores.add(store)
        while len(self.open_stores) > self._open_files_max:
            idle = [other for other in self.open_stores if other is not store and other.idle]
            if not idle:
                return
            await min(idle, key=lambda other: other.last_use).close()


class SqliteQueueStore:
    """The partitions of one queue in one file."""

    def __init__(self, storage: SqliteStorage, record: QueueRecord, partitions: Sequence[int], path: Path) -> None:
        self._storage = storage
        self._name = record.name
        self._generation = record.generation
        self._numbers = tuple(partitions)
        self.path = path
        self.last_use = 0
        self._writer: apsw.Connection | None = None
        self._operations: Operations | None = None
        self._checkpoints: Checkpoints | None = None
        self._reader: apsw.Connection | None = None
        self._partitions: dict[int, SqlitePartition] = {}
        self._moments: Moments
        self._write_lock = asyncio.Lock()
        self._read_lock = asyncio.Lock()

    # --- writing ----------------------------------------------------------------------------------------------

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        if inline and self.can_commit_inline():
            return self._commit(operations, alone=True)
        async with self._write_lock:
            await self._storage.make_room(self)
            return await in_thread(self._storage.threads, lambda: self._commit(operations))

    def can_commit_inline(self) -> bool:
        return self._writer is not None and not self._write_lock.locked()

    async def load(self) -> Committed:
        async with self._write_lock:
            await self._storage.make_room(self)
            return await in_thread(self._storage.threads, self._load)

    def _commit(self, operations: Sequence[Operation], *, alone: bool = False) -> Committed:
        if self._writer is None:
            self._open()
        writer, work, checkpoints = self._writer, self._operations, self._checkpoints
        assert writer and work and checkpoints  # noqa: S101, PT018 - _open has set all of them
        now_us = self._storage.clock.now_us()
        self.last_use = next(self._storage.uses)
        try:
            # Written out instead of `transaction`: this is the hot path, and a context manager costs as much as a row.
            writer.execute("BEGIN IMMEDIATE")
            results = work.carry_out(operations, now_us)
            touched = [self._partitions[number] for number in {o.partition for o in operations}]
            for partition in touched:
                if (row := partition.reserve()) is not None:
                    writer.execute(SQL["update_partition"], row)
            crash_point("sqlite.before_commit")
            writer.execute("COMMIT")
        except BaseException as error:
            # The counts in memory may be ahead of the file: read them anew before the next commit. Letting go of the
            # connection rolls back what it had begun.
            self._let_go_of_writer()
            if isinstance(error, apsw.Error | OSError):
                raise translation(error, self.path) from error
            raise
        crash_point("sqlite.after_commit")
        if checkpoints.pages_count >= BESIDE_PAGES_COUNT:
            checkpoints.after_commit(alone=alone)
        states = {p.number: self._moments.state(p) for p in touched}
        return Committed(results, states, now_us, self._storage.clock.now_us() - now_us)

    def _load(self) -> Committed:
        self.last_use = next(self._storage.uses)
        self._let_go_of_writer()
        self._open()
        states = {number: self._moments.state(self._partitions[number]) for number in self._numbers}
        return Committed([], states, self._storage.clock.now_us())

    def _open(self) -> None:
        size = size_of(self.path)  # 0 also while somebody copies a backup to its place
        if not size and self._storage.catalog().was_made(self._generation):
            what = "missing" if size is None else "empty"
            raise StorageFailed(
                f"storage failed; the file {self.path.name} of queue '{self._name}' is {what}, restore it from a "
                "backup or delete the queue"
            )
        writer = open_writer(self.path, kind="queue", create=size is None)
        with translated(self.path):
            self._partitions = read_partitions(writer, self._generation)
            missing = [(number,) for number in self._numbers if number not in self._partitions]
            if missing:
                with transaction(writer):
                    writer.executemany(SQL["insert_partition"], missing)
                self._partitions = read_partitions(writer, self._generation)
            self._moments = Moments(writer)
        self._storage.catalog().note_made(self._generation)
        self._writer = writer
        self._checkpoints = Checkpoints(self.path, writer, self._storage.checkpointer)
        self._operations = Operations(writer, self._partitions, self._moments)

    def _let_go_of_writer(self) -> None:
        writer, self._writer, self._operations = self._writer, None, None
        if writer is not None:
            with translated(self.path):
                if self._checkpoints is not None:
                    self._checkpoints.close()
                writer.close()

    # --- reading ----------------------------------------------------------------------------------------------

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        def run() -> T:
            if size_of(self.path) is None:
                raise StorageFailed(f"storage failed; the file {self.path.name} is missing")
            with translated(self.path):
                if self._reader is None:
                    self._reader = open_reader(self.path)
                try:
                    return work(self._reader)
                except apsw.Error:
                    self._let_go_of_reader()
                    raise

        async with self._read_lock:
            return await in_thread(self._storage.threads, run)

    def _let_go_of_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _loaded(self, partition: int) -> SqlitePartition:
        """A partition that has been loaded; raises StorageFailed: a file that never opened has shown none."""
        found = self._partitions.get(partition)
        if found is None:
            raise StorageFailed(f"storage failed; {self.path.name}: partition {partition} is not loaded, try again")
        return found

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        found = self._loaded(partition)
        rows = await self._read(lambda db: fetch_all(db, "select_dying", (found.first, found.last, count_max)))
        return [DyingItem.from_row(found.id_of(row[0]), self._name, row[1:]) for row in rows]

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        rows = await self._read(lambda db: fetch_all(db, "select_arrivals", (source_queue, count_max)))
        return [row[0] for row in rows]

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        found = self._loaded(partition)
        first = found.first_from(pivot)
        statement = "list_scheduled" if scheduled else "list_items"
        rows = await self._read(lambda db: fetch_all(db, statement, (first, found.last, count_max)))
        return [listed_item(found.id_of(row[0]), row[1:]) for row in rows]

    async def tally(self, partition: int, *, rules: DeathRules) -> PartitionStats:
        found, now_us = self._loaded(partition), self._storage.clock.now_us()
        span = (found.first, found.last)
        ceiling = rules.max_attempts or NEVER_US

        def read(db: apsw.Connection) -> PartitionStats:
            db.execute("BEGIN")
            try:
                queued, queued_age_us, overdue = fetch_one(db, "tally_ready", (*span, now_us, ceiling))
                leased, leased_age_us, lease_age_us = fetch_one(db, "tally_leases", (*span, now_us))
                waiting, dying = fetch_one(db, "tally_others", span)
            finally:
                db.execute("COMMIT")
            total = queued + leased
            return PartitionStats(
                partition=partition,
                total=total,
                total_leased=leased,
                scheduled=waiting,
                dying=dying,
                overdue=overdue if rules.immortal else 0,
                average_age=go_duration(max(0, (queued_age_us + leased_age_us) // max(total, 1))),
                average_leased_age=go_duration(max(0, lease_age_us // max(leased, 1))),
            )

        return await self._read(read)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await self._read(lambda db: fetch_all(db, "select_ledger", (after, count_max)))
        return [LedgerEntry(at_us, action, self._name, *story) for at_us, action, *story in rows]

    # --- letting go -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Open, and nobody uses it at this moment."""
        return self._writer is not None and not self._write_lock.locked() and not self._read_lock.locked()

    async def close(self) -> None:
        async with self._write_lock, self._read_lock:
            self._storage.open_stores.discard(self)
            await in_thread(self._storage.threads, self._close_both)

    def _close_both(self) -> None:
        # The reader first: the last connection of a file folds the write-ahead log into it.
        self._let_go_of_reader()
        self._write_counts()
        self._let_go_of_writer()

    def _write_counts(self) -> None:
        """The next opening need not count. Where it cannot be written, it will count."""
        stale = [partition for partition in self._partitions.values() if not partition.exact]
        if self._writer is None or not stale:
            return
        for partition in stale:
            partition.exact = True
        with suppress(StorageFailed), translated(self.path), transaction(self._writer):
            self._writer.executemany(SQL["update_partition"], [partition.row() for partition in stale])
