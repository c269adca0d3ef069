"""The vault in a SQLite file: one thread writes, another reads beside it. Without a path it is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from holdfast.engines.sqlite.connection import open_reader, open_writer, transaction, translated
from holdfast.errors import StorageFailed
from holdfast.ports.database import Dialect, Row, Tx

T = TypeVar("T")
CACHE_KIB = 65_536
MEMORY = Path(":memory:")


class SqliteDialect:
    """How SQLite says it."""

    in_ids = "IN (SELECT value FROM json_each(:ids))"
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


class SqliteTx:
    """Statements on one connection."""

    def __init__(self, connection: apsw.Connection, dialect: Dialect) -> None:
        self.dialect = dialect
        self.moved: list[Any] = []
        self._connection = connection

    def rows(self, sql: str, **values: Any) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def many(self, sql: str, values: Sequence[Mapping[str, Any]]) -> None:
        self._connection.executemany(sql, values)


class SqliteDatabase:
    """One file, or memory."""

    def __init__(self, path: Path | None) -> None:
        self.dialect: Dialect = SqliteDialect()
        self._path = path or MEMORY
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="vault-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="vault-read")
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None

    def open(self) -> None:
        in_memory = self._path == MEMORY
        if not in_memory:
            with translated(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        create = in_memory or not self._path.exists()
        self._writer = open_writer(self._path, kind="vault", create=create)
        if in_memory:
            return
        self._reader = open_reader(self._path)
        self._reader.execute(f"PRAGMA cache_size = -{CACHE_KIB}")

    def close(self) -> None:
        self._reading.shutdown(wait=True)
        self._writing.shutdown(wait=True)
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    async def write(self, work: Callable[[Tx], T]) -> T:
        def run() -> T:
            with translated(self._path):
                connection = self._open(self._writer)
                with transaction(connection):
                    return work(SqliteTx(connection, self.dialect))

        return await asyncio.get_running_loop().run_in_executor(self._writing, run)

    async def read(self, work: Callable[[Tx], T]) -> T:
        # In memory there is one connection, and one thread that uses it.
        threads = self._reading if self._reader is not None else self._writing

        def run() -> T:
            with translated(self._path):
                connection = self._open(self._reader or self._writer)
                connection.execute("BEGIN")
                try:
                    return work(SqliteTx(connection, self.dialect))
                finally:
                    connection.execute("COMMIT")

        return await asyncio.get_running_loop().run_in_executor(threads, run)

    def _open(self, connection: apsw.Connection | None) -> apsw.Connection:
        if connection is None:
            raise StorageFailed("storage failed; the vault is closed")
        return connection
