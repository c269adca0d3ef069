"""The vault in PostgreSQL, in a schema of its own: several servers share it.

One connection writes and one reads, each in a thread of its own. Writers take turns by an advisory lock, because the
ledger is a chain.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import psycopg

from holdfast.engines.postgres.connection import APPLICATION, CONNECT_TIMEOUT_S, PACKAGE, failed, place_of
from holdfast.errors import CannotStart, StorageFailed
from holdfast.ports.database import Dialect, Row, Tx, migrations
from holdfast.proof import crash_point

T = TypeVar("T")
MIGRATIONS = migrations(PACKAGE, kind="vault")
SCHEMA = "holdfast_vault"
LOCK = "SELECT pg_advisory_xact_lock(1212106564, -3)"
SETTINGS = (
    f"SET search_path = {SCHEMA}; SET synchronous_commit = on; SET lock_timeout = '20s'; SET client_encoding = 'UTF8'; "
    "SET idle_in_transaction_session_timeout = '60s'; SET jit = off"
)

#: All statements of a look see one and the same moment.
READ_SETTINGS = "SET default_transaction_isolation = 'repeatable read'; SET default_transaction_read_only = on"

_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)")

Connection = psycopg.Connection[Row]


class PostgresDialect:
    """How PostgreSQL says it."""

    in_ids = "= ANY(CAST(:ids AS bigint[]))"
    text_from = "letters_text t JOIN letters l ON l.id = t.letter"
    text_matches = "t.words @@ to_tsquery('simple', :words)"
    text_key = "l.id"
    insert_text = "INSERT INTO letters_text (letter, words) VALUES (:id, to_tsvector('simple', :text))"
    delete_text = f"DELETE FROM letters_text WHERE letter {in_ids}"  # noqa: S608 - a text of ours
    header_equals = "CAST(c.headers AS jsonb) ->> CAST(:header AS text) = :header_value"
    header_exists = "CAST(c.headers AS jsonb) -> CAST(:header AS text) IS NOT NULL"

    def ids(self, ids: Sequence[int]) -> object:
        return list(ids)

    def words(self, words: Sequence[str]) -> str:
        return " & ".join(f"'{word}'" for word in words)


@lru_cache(maxsize=512)
def _translated(sql: str) -> str:
    return _NAMED.sub(r"%(\1)s", sql.replace("%", "%%"))


class PostgresTx:
    """Statements on one connection."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self.dialect = dialect
        self.moved: list[Any] = []
        self._connection = connection

    def rows(self, sql: str, **values: Any) -> list[Row]:
        cursor = self._connection.execute(_translated(sql).encode(), values)
        return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, values: Sequence[Mapping[str, Any]]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_translated(sql).encode(), values)


class PostgresDatabase:
    """One database."""

    def __init__(self, url: str) -> None:
        self.dialect: Dialect = PostgresDialect()
        self._url = url
        self._place = place_of(url)
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="vault-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="vault-read")
        self._connections: dict[str, Connection] = {}
        self._closed = False

    def open(self) -> None:
        try:
            with self._connect() as connection, connection.transaction():
                connection.execute(LOCK)
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
                connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version bigint NOT NULL)")
                row = connection.execute("SELECT max(version) FROM schema_version").fetchone()
                version = int(row[0] or 0) if row else 0
                if version > max(MIGRATIONS):
                    raise CannotStart(
                        f"schema is too new; the vault in {self._place} has version {version} and this program knows "
                        f"{max(MIGRATIONS)}, use a newer Holdfast"
                    )
                for number, step in MIGRATIONS.items():
                    if number > version:
                        connection.execute(step.encode())
                        connection.execute("INSERT INTO schema_version VALUES (%s)", (number,))
        except (psycopg.Error, OSError) as error:
            detail = failed(error, self._place).message.removeprefix("storage failed; ")
            raise CannotStart(f"vault cannot be prepared; {detail}") from error

    def close(self) -> None:
        self._closed = True
        self._reading.shutdown(wait=True)
        self._writing.shutdown(wait=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def write(self, work: Callable[[Tx], T]) -> T:
        def run(connection: Connection) -> T:
            connection.execute(LOCK)
            result = work(PostgresTx(connection, self.dialect))
            crash_point("postgres.before_commit")
            return result

        return await self._do("write", self._writing, run)

    async def read(self, work: Callable[[Tx], T]) -> T:
        return await self._do("read", self._reading, lambda found: work(PostgresTx(found, self.dialect)))

    async def _do(self, name: str, threads: ThreadPoolExecutor, work: Callable[[Connection], T]) -> T:
        def run() -> T:
            if self._closed:
                raise StorageFailed("storage failed; the vault is closed")
            try:
                connection = self._connections.get(name)
                if connection is None or connection.closed:
                    connection = self._connections[name] = self._connect()
                    if name == "read":
                        connection.execute(READ_SETTINGS)
                with connection.transaction():
                    return work(connection)
            except (psycopg.Error, OSError) as error:
                self._forget(name)
                raise failed(error, self._place) from error

        return await asyncio.get_running_loop().run_in_executor(threads, run)

    def _forget(self, name: str) -> None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.close()

    def _connect(self) -> Connection:
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            application_name=f"{APPLICATION} vault",
            keepalives_idle=30,
            tcp_user_timeout=30_000,
        )
        try:
            connection.execute(SETTINGS)
        except BaseException:
            connection.close()
            raise
        return connection
