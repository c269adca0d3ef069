"""A folder of SQLite files: `catalog.db`, and one file per queue, opened on use and closed when too many are open."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from holdfast.core.queue import QueueRecord
from holdfast.engines.sqlite.catalog import SqliteCatalog
from holdfast.engines.sqlite.folder import FolderLock
from holdfast.engines.sqlite.shelves import SqliteQueueStore
from holdfast.errors import CannotStart, HoldfastError
from holdfast.ports.clock import Clock
from holdfast.ports.queues import StorageAbilities

OPEN_FILES_COUNT_MAX = 200
COMMIT_THREADS_COUNT_MAX = 4


class SqliteStorage:
    """Queues in a folder that belongs to this process alone."""

    abilities = StorageAbilities(shared=False, moves_in_one_commit=False, inline=True)

    def __init__(self, folder: Path, *, clock: Clock, open_files_max: int = OPEN_FILES_COUNT_MAX) -> None:
        self.clock = clock
        self.threads = ThreadPoolExecutor(COMMIT_THREADS_COUNT_MAX, thread_name_prefix="sqlite")
        self.checkpointer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._folder = folder
        self._lock = FolderLock(folder)
        self._catalog = SqliteCatalog(folder / "catalog.db", clock=clock, threads=self.threads)
        self._open_files_max = open_files_max
        self._open: OrderedDict[SqliteQueueStore, None] = OrderedDict()

    async def open(self) -> None:
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
        for shelves in list(self._open):
            await shelves.close()
        self._catalog.close()
        self.threads.shutdown(wait=True)
        self.checkpointer.shutdown(wait=True)
        self._lock.let_go()

    def catalog(self) -> SqliteCatalog:
        return self._catalog

    def shelves(self, record: QueueRecord, partitions: Sequence[int]) -> SqliteQueueStore:
        return SqliteQueueStore(self, record, partitions, self._path(record))

    def _path(self, record: QueueRecord) -> Path:
        # The number alone names the file; the rest is for people who look into the folder.
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", record.name)[:40]
        return self._folder / "queues" / f"{record.generation:06d}-{readable}.db"

    async def drop(self, record: QueueRecord) -> None:
        def remove() -> None:
            self._catalog.doom(record.generation)
            self._remove_files(record.generation)

        await asyncio.get_running_loop().run_in_executor(self.threads, remove)

    def _remove_files(self, generation: int) -> None:
        for path in sorted((self._folder / "queues").glob(f"{generation:06d}-*")):
            with suppress(FileNotFoundError):
                path.unlink()
        self._catalog.forget(generation)

    async def watch(self, hint: Callable[[str], None]) -> None:
        """The folder is this process's own: nobody else changes it."""

    # --- called by shelves ------------------------------------------------------------------------------------

    def was_made(self, generation: int) -> bool:
        """Whether the file of a queue has existed."""
        return self._catalog.was_made(generation)

    def note_made(self, generation: int) -> None:
        """The file of a queue exists now."""
        self._catalog.note_made(generation)

    def used(self, shelves: SqliteQueueStore) -> None:
        """A file was just used."""
        self._open[shelves] = None
        self._open.move_to_end(shelves)

    def closed(self, shelves: SqliteQueueStore) -> None:
        """A file was closed."""
        self._open.pop(shelves, None)

    async def make_room(self, shelves: SqliteQueueStore) -> None:
        """A file is about to be used: close those unused for longest while too many are open."""
        self.used(shelves)
        while len(self._open) > self._open_files_max:
            oldest = next((other for other in self._open if other is not shelves and other.idle), None)
            if oldest is None:
                return
            await oldest.close()
