"""SQLite connections: how a file is opened, brought to today's schema, and how its errors read.

Every write is one `BEGIN IMMEDIATE` transaction with WAL and `synchronous=FULL`: a commit survives a power cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from holdfast.errors import StorageFailed, Unstorable
from holdfast.ports.database import migrated_kinds, migrations, statements
from holdfast.proof import crash_point

PACKAGE = "holdfast.engines.sqlite"
SQL = statements(PACKAGE)
MIGRATIONS = {kind: migrations(PACKAGE, kind=kind) for kind in migrated_kinds(PACKAGE)}

BUSY_TIMEOUT_MS = 5_000
STATEMENTS_COUNT_MAX = 128
CACHE_KIB = 8_192
READER_CACHE_KIB = 1_024
#: Bodies are nobody else's to read.
FILE_MODE = 0o600

_READ_WRITE = apsw.SQLITE_OPEN_READWRITE
_READ_ONLY = apsw.SQLITE_OPEN_READONLY
_CREATE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE

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
    """SQLite's errors, and the disk's, as StorageFailed."""
    try:
        yield
    except (apsw.Error, OSError) as error:
        raise translation(error, path) from error


def translation(error: apsw.Error | OSError, path: Path) -> StorageFailed:
    """What an error of SQLite or of the disk is for everybody else."""
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


def json_list(row_ids: list[int]) -> str:
    """Row ids for `json_each`: one statement for many rows."""
    return f"[{','.join(map(str, row_ids))}]"


def open_writer(path: Path, *, kind: str, create: bool) -> apsw.Connection:
    """The one connection that writes a file, at today's schema."""
    with translated(path):
        if create and str(path) != ":memory:":
            _make_private(path)
        connection = apsw.Connection(
            str(path), flags=_CREATE if create else _READ_WRITE, statementcachesize=STATEMENTS_COUNT_MAX
        )
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
        connection = apsw.Connection(str(path), flags=_READ_ONLY)
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
        return connection


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
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, FILE_MODE)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
