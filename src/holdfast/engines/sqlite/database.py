"""A database in a SQLite file: one thread writes. Without a path it is in memory.

The vault's file has a reader beside its writer. What the collector knows is written and read by one thread, in order,
and its folder is this process's alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from holdfast.engines.sqlite.connection import (
    MEMORY,
    delete_files,
    open_reader,
    open_writer,
    size_of,
    transaction,
    translated,
)
from holdfast.engines.sqlite.storage import FolderLock
from holdfast.errors import CannotStart, HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.database import Dialect, Look, Row, Tx, closing_soon

T = TypeVar("T")
VAULT_READER_CACHE_KIB = 65_536
#: Ordinals come nearly in order and are written once: more would only grow with the result.
COLLECT_CACHE_KIB = 1_024


class SqliteDialect:
    """How SQLite says it."""

    shared = False
    in_ids = "IN (SELECT value FROM json_each(:ids))"
    given = "json_each(:given) AS given"
    is_false = "= 0"
    skip_locked = ""
    collect_prefix = ""
    # In this order: the index gives its rows by id, newest first, so that a page need not look at all of them.
    text_from = "letters_text t CROSS JOIN letters l ON l.id = t.rowid"
    text_matches = "t.letters_text MATCH :words"
    text_key = "t.rowid"
    insert_text = "INSERT INTO letters_text (rowid, text) VALUES (:id, :text)"
    delete_text = f"DELETE FROM letters_text WHERE rowid {in_ids}"  # noqa: S608 - a text of ours
    header_equals = (
        "EXISTS (SELECT 1 FROM json_each(c.headers) h WHERE h.key = :header AND CAST(h.value AS TEXT) = :header_value)"
    )
    header_exists = "EXISTS (SELECT 1 FROM json_each(c.headers) h WHERE h.key = :header)"

    def ids(self, ids: Sequence[int]) -> object:
        return msgspec.json.encode(list(ids)).decode()

    def words(self, words: Sequence[str]) -> str:
        return " ".join(f'"{word}"' for word in words)


DIALECT: Dialect = SqliteDialect()


class SqliteTx:
    """Statements on one connection."""

    dialect = DIALECT

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, **values: Any) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def later(self, sql: str, **values: Any) -> Callable[[], list[Row]]:
        found = self.rows(sql, **values)
        return lambda: found

    def many(self, sql: str, values: Sequence[Mapping[str, Any]]) -> None:
        self._connection.executemany(sql, values)


class SqliteDatabase:
    """One file of a kind that there are migrations for, or memory."""

    def __init__(self, path: Path | None, *, kind: str, clock: Clock) -> None:
        self._path = path or MEMORY / secrets.token_hex() / f"{kind}.db"
        self._in_memory = path is None
        self._kind = kind
        self._clock = clock
        self._writing = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-read")
        self._folder = FolderLock(self._path.parent) if path is not None and kind == "collect" else None
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None

    def open(self) -> None:
        if self._folder is None:
            self._open()
            return
        self._folder.take()
        try:
            self._open()
        except HoldfastError as error:
            self._folder.let_go()
            raise CannotStart(f"collector cannot be opened; '{self._path}': {error.message}") from error

    def _open(self) -> None:
        if not self._in_memory:
            with translated(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = open_writer(self._path, kind=self._kind, create=size_of(self._path) is None)
        if self._kind == "collect":
            self._writer.execute(f"PRAGMA cache_size = -{COLLECT_CACHE_KIB}")
            self._writer.create_scalar_function("now_us", lambda *_: self._clock.now_us(), 0)
        elif not self._in_memory:
            self._reader = open_reader(self._path)
            self._reader.execute(f"PRAGMA cache_size = -{VAULT_READER_CACHE_KIB}")

    def close(self) -> None:
        self._reading.shutdown(wait=True)
        self._writing.shutdown(wait=True)
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        if self._in_memory:
            delete_files(self._path.parent)
        if self._folder is not None:
            self._folder.let_go()

    async def write(self, work: Callable[[Tx], T]) -> T:
        def run() -> T:
            with translated(self._path):
                connection = self._opened(self._writer)
                with transaction(connection):
                    return work(SqliteTx(connection))

        return await asyncio.get_running_loop().run_in_executor(self._writing, run)

    async def read(self, work: Callable[[Tx], T]) -> T:
        # Where there is one connection, one thread uses it.
        threads = self._reading if self._reader is not None else self._writing

        def run() -> T:
            with translated(self._path):
                connection = self._opened(self._reader or self._writer)
                connection.execute("BEGIN")
                try:
                    return work(SqliteTx(connection))
                finally:
                    connection.execute("COMMIT")

        return await asyncio.get_running_loop().run_in_executor(threads, run)

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Look]:
        loop = asyncio.get_running_loop()
        # What is in memory has one connection, on a thread of its own.
        connection = await loop.run_in_executor(self._writing if self._in_memory else None, self._apart)

        async def read(work: Callable[[Tx], T]) -> T:
            def run() -> T:
                with translated(self._path):
                    return work(SqliteTx(connection))

            return await loop.run_in_executor(thread, run)

        with closing_soon(ThreadPoolExecutor(1, thread_name_prefix=f"{self._kind}-look"), connection.close) as thread:
            yield read

    def _apart(self) -> apsw.Connection:
        """A connection that sees this moment; a copy of what is in memory."""
        with translated(self._path):
            if not self._in_memory:
                connection = open_reader(self._path)
                connection.execute("BEGIN")
                connection.execute("SELECT 1 FROM sqlite_schema").fetchall()
                return connection
            connection = apsw.Connection(":memory:")
            with connection.backup("main", self._opened(self._writer), "main") as copy:
                copy.step()
            return connection

    def _opened(self, connection: apsw.Connection | None) -> apsw.Connection:
        if connection is None:
            raise StorageFailed(f"storage failed; the {'collector' if self._kind == 'collect' else 'vault'} is closed")
        return connection
