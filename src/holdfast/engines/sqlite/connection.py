"""SQLite connections: how a file is opened, brought to today's schema, how its log is folded and its errors read.

Every write is one `BEGIN IMMEDIATE` transaction with WAL and `synchronous=FULL`: a commit survives a power cut.

What is below `MEMORY` is no file: SQLite's `memdb` keeps it by its name, for all connections of this process, as long
as one of them is open. The one that made it stays open until `delete_files`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec

from holdfast.errors import StorageFailed, Unstorable
from holdfast.ports.database import migrations, statements
from holdfast.proof import crash_point

PACKAGE = "holdfast.engines.sqlite"
SQL = statements(PACKAGE)
MIGRATIONS = migrations(PACKAGE)

BUSY_TIMEOUT_MS = 5_000
STATEMENTS_COUNT_MAX = 128
CACHE_KIB = 8_192
READER_CACHE_KIB = 1_024
#: Bodies are nobody else's to read.
FILE_MODE = 0o600
MEMORY = Path(":memory:")
MEMORY_BYTES_MAX = 2**40  #: SQLite's own limit is one GiB

#: A log of so many pages is folded beside the commits,
BESIDE_PAGES_COUNT = 1_000
#: and one of so many pages by the commit that finds it so.
WITHIN_PAGES_COUNT = 8_000
#: A log is lengthened by so much at once, up to what it holds when it is folded for the first time.
AHEAD_BYTES = 2**20
AHEAD_BYTES_MAX = 5 * 2**20
FRAME_HEADER_BYTES = 24
_ZEROS = bytes(AHEAD_BYTES)


#: What is in memory, by its path; each connection is there only to be open.
_in_memory: dict[Path, apsw.Connection] = {}

_READ_WRITE = apsw.SQLITE_OPEN_READWRITE
_READ_ONLY = apsw.SQLITE_OPEN_READONLY
_CREATE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE

#: What SQLite gives out as good, and is not.
UNREADABLE = (UnicodeDecodeError, msgspec.DecodeError)
_WHAT_HAPPENED: dict[type[apsw.Error], str] = {
    apsw.FullError: "the disk is full",
    apsw.ReadOnlyError: "the file or its disk is read-only",
    apsw.BusyError: "the file is locked by another program",
    apsw.LockedError: "the file is locked by another program",
    apsw.CorruptError: "the file is corrupt, restore it from a backup",
    apsw.NotADBError: "the file is not a SQLite database, restore it from a backup",
    apsw.CantOpenError: "the file cannot be opened",
    apsw.IOError: "the disk does not read or write",
}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's errors, and the disk's, as StorageFailed; and those of rows that cannot be what was written."""
    try:
        yield
    except (apsw.Error, OSError, *UNREADABLE) as error:
        raise translation(error, path) from error


def translation(error: Exception, path: Path) -> StorageFailed:
    """What an error of SQLite, of the disk or of what is on it, is for everybody else."""
    if isinstance(error, UNREADABLE):
        return StorageFailed(f"storage failed; {path.name}: {_WHAT_HAPPENED[apsw.CorruptError]}, try again")
    if isinstance(error, OSError):
        return StorageFailed(f"storage failed; {path.name}: {error.strerror or error}, try again")
    if isinstance(error, apsw.TooBigError):
        return Unstorable(f"storage failed; {path.name}: a value is too large for SQLite")
    what = next((text for kind, text in _WHAT_HAPPENED.items() if isinstance(error, kind)), str(error))
    return StorageFailed(f"storage failed; {path.name}: {what}, try again")


def fetch_all(connection: apsw.Connection, statement: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
    """The rows of a statement of `sql/`, as tuples of what their columns hold."""
    return connection.execute(SQL[statement], bindings).fetchall()


def fetch_one(connection: apsw.Connection, statement: str, bindings: tuple[Any, ...] = ()) -> Any:
    """The first row of a statement of `sql/`, or none."""
    return connection.execute(SQL[statement], bindings).fetchone()


def is_in_memory(path: Path) -> bool:
    """Whether a path is below `MEMORY`."""
    return path.parts[:1] == MEMORY.parts


def size_of(path: Path) -> int | None:
    """How long a file is; None when there is none."""
    if is_in_memory(path):
        return int(_in_memory[path].pragma("page_count")) if path in _in_memory else None
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def delete_files(folder: Path, start: str = "") -> None:
    """Delete the files of a folder whose names begin so."""
    if is_in_memory(folder):
        for path in [path for path in _in_memory if path.parent == folder and path.name.startswith(start)]:
            _in_memory.pop(path).close()
        return
    for path in sorted(folder.glob(f"{start}*")):
        with suppress(FileNotFoundError):
            path.unlink()


def json_list(row_ids: list[int]) -> str:
    """Row ids for `json_each`: one statement for many rows."""
    return f"[{','.join(map(str, row_ids))}]"


def open_writer(path: Path, *, kind: str, create: bool) -> apsw.Connection:
    """The one connection that writes a file, at today's schema."""
    with translated(path):
        if create:
            _make_private(path)
        connection = _connect(path, _CREATE if create else _READ_WRITE)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            for pragma in (
                "journal_mode = WAL",
                "synchronous = FULL",
                f"cache_size = -{CACHE_KIB}",
                "temp_store = MEMORY",
                "secure_delete = OFF",
            ):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            _migrate(connection, path, kind)
        except BaseException:
            connection.close()
            raise
    if create:
        _sync_folder(path.parent)
    return connection


def open_reader(path: Path) -> apsw.Connection:
    """A connection that only reads: listings and counts beside the writer."""
    with translated(path):
        connection = _connect(path, _READ_ONLY)
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
        return connection


def _connect(path: Path, flags: int) -> apsw.Connection:
    if is_in_memory(path):
        return apsw.Connection(f"/{path}", flags=flags, vfs="memdb", statementcachesize=STATEMENTS_COUNT_MAX)
    return apsw.Connection(str(path), flags=flags, statementcachesize=STATEMENTS_COUNT_MAX)


def _migrate(connection: apsw.Connection, path: Path, kind: str) -> None:
    steps = MIGRATIONS[kind]
    newest = max(steps)
    version = int(connection.pragma("user_version"))
    if version > newest:
        raise StorageFailed(
            f"schema is too new; {path.name} has version {version} and this program knows {newest}, "
            "use a newer Holdfast"
        )
    for number, step in steps.items():
        if number > version:
            with transaction(connection):
                connection.execute(step)
                connection.execute(f"PRAGMA user_version = {number}")


@contextmanager
def transaction(connection: apsw.Connection) -> Iterator[None]:
    """Everything inside, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        crash_point("sqlite.before_commit")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(apsw.Error):  # SQLite rolls some failures back by itself
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise
    crash_point("sqlite.after_commit")


def _make_private(path: Path) -> None:
    """An empty file for its owner alone, whatever the umask and the folder allow; SQLite gives -wal and -shm its mode.

    A file that is there is not even opened: closing it would end the locks that this process has on it.
    """
    if is_in_memory(path):
        if path not in _in_memory:
            import ctypes

            connection = _in_memory[path] = _connect(path, _CREATE)

            limit = ctypes.c_int64(MEMORY_BYTES_MAX)
            connection.file_control("main", apsw.SQLITE_FCNTL_SIZE_LIMIT, ctypes.addressof(limit))
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, FILE_MODE)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    if is_in_memory(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """Folds the write-ahead log of one file into it while its writer is open: beside the commits, not within one.

    SQLite's own way is to do it at the end of whichever commit fills the log, which then takes several times as long.
    Here another thread does it through a connection of its own. A log that is written without a pause can only start
    over when all of it has been folded; so one that has grown to its limit is folded by its writer, which has little
    left to do. Where one client is served alone nothing would go on beside it: then its commit folds the log, as SQLite
    would.

    A young log is lengthened by zeros before it is needed: a sync that need not note a new length is about twice as
    quick. SQLite takes zeros behind the last frame for what they are: no frame.
    """

    def __init__(self, path: Path, writer: apsw.Connection, threads: Executor) -> None:
        self._path = path
        self._writer = writer
        self._threads = threads
        self._beside: apsw.Connection | None = None
        self._lock = threading.Lock()
        self._open = True
        self._ask_at_pages_count = BESIDE_PAGES_COUNT
        self.pages_count = 0
        self._log = f"{path}-wal"
        self._frame_bytes = int(writer.pragma("page_size")) + FRAME_HEADER_BYTES
        self._room_pages_count = 0
        writer.set_wal_hook(self._note)  # also turns SQLite's own way off

    def _note(self, connection: apsw.Connection, name: str, pages_count: int) -> int:
        if pages_count < self.pages_count:
            self._ask_at_pages_count = BESIDE_PAGES_COUNT  # it has started over
        self.pages_count = pages_count
        if pages_count >= self._room_pages_count:
            self._lengthen(pages_count)
        return apsw.SQLITE_OK

    def _lengthen(self, pages_count: int) -> None:
        """Called by the writer after its commit, when nobody else writes the log."""
        try:
            log = os.open(self._log, os.O_WRONLY)
            try:
                end = max(os.fstat(log).st_size, (pages_count + 1) * self._frame_bytes)
                if end < AHEAD_BYTES_MAX:
                    end += os.pwrite(log, _ZEROS, end)
            finally:
                os.close(log)
        except OSError:  # no room, or no such file: then SQLite lengthens it frame by frame, and says what is wrong
            end = AHEAD_BYTES_MAX
        full = end >= AHEAD_BYTES_MAX
        # Some room is left for the next commit, so that it finds the length it needs.
        self._room_pages_count = 2**62 if full else (end - AHEAD_BYTES // 4) // self._frame_bytes

    def after_commit(self, *, alone: bool) -> None:
        """Called after a commit that left a full log; `alone` when nothing else goes on beside it.

        Never raises: the commit stands, and what was not folded now is folded later.
        """
        if alone or self.pages_count >= WITHIN_PAGES_COUNT:
            with suppress(apsw.Error):
                self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif self.pages_count >= self._ask_at_pages_count:
            self._ask_at_pages_count = self.pages_count + BESIDE_PAGES_COUNT
            with suppress(RuntimeError):  # the storage is being closed
                self._threads.submit(self._fold)

    def _fold(self) -> None:
        with self._lock, suppress(apsw.Error):
            if not self._open:
                return
            if self._beside is None:
                self._beside = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
                self._beside.execute("PRAGMA synchronous = FULL")
            self._beside.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def close(self) -> None:
        """Let go of the file; waits for a folding that is under way."""
        with self._lock:
            self._open = False
            beside, self._beside = self._beside, None
            if beside is not None:
                beside.close()
