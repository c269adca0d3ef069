"""A database in PostgreSQL that several servers share: the vault in a schema of its own, or what collectors know.

Statements run in threads. The vault's writers take turns by an advisory lock, because the ledger is a chain: it is
opened `serial`, with one connection that writes and one that reads. Collectors hold each other up only where they
want the same row. A transaction is a pipeline: only what gives rows is waited for, and what was sent before goes along.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from holdfast.engines.postgres.connection import (
    APPLICATION,
    CONNECT_TIMEOUT_S,
    PACKAGE,
    SESSION,
    failed,
    migrate,
    place_of,
)
from holdfast.errors import CannotStart, StorageFailed
from holdfast.ports.database import Dialect, Row, Tx, migrations
from holdfast.proof import crash_point

T = TypeVar("T")
MIGRATIONS = migrations(PACKAGE, kind="vault")
SCHEMA = "holdfast_vault"
LOCK = "SELECT pg_advisory_xact_lock(1212106564, -3)"
SETTINGS = {
    "vault": (
        f"SET search_path = {SCHEMA}; SET synchronous_commit = on; SET lock_timeout = '20s'; "
        "SET client_encoding = 'UTF8'; SET idle_in_transaction_session_timeout = '60s'; SET jit = off"
    ),
    "collect": f"{SESSION}; SET search_path = holdfast",
}

#: All statements of a look see one and the same moment.
READ_SETTINGS = "SET default_transaction_isolation = 'repeatable read'; SET default_transaction_read_only = on"
CONNECTIONS_COUNT_MAX = 4

_NAMED = re.compile(r"(?<![:\w]):([a-z][a-z0-9_]*)")

Connection = psycopg.Connection[Row]


class PostgresDialect:
    """How PostgreSQL says it."""

    shared = True
    in_ids = "= ANY(CAST(:ids AS bigint[]))"
    given = "json_array_elements(CAST(:given AS json)) AS given (value)"
    is_false = "= false"
    skip_locked = "FOR UPDATE SKIP LOCKED"
    collect_prefix = "collect_"
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


DIALECT: Dialect = PostgresDialect()


@lru_cache(maxsize=512)
def _translated(sql: str) -> tuple[bytes, bool]:
    """In psycopg's words, and whether it gives rows."""
    is_change = re.sub(r"--.*\n", "", sql).startswith(("INSERT", "UPDATE", "DELETE"))
    return _NAMED.sub(r"%(\1)s", sql.replace("%", "%%")).encode(), not is_change or "RETURNING" in sql


class PostgresTx:
    """Statements on one connection."""

    dialect = DIALECT

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, **values: Any) -> list[Row]:
        return self.later(sql, **values)()

    def later(self, sql: str, **values: Any) -> Callable[[], list[Row]]:
        text, gives_rows = _translated(sql)
        cursor = self._connection.execute(text, values)
        return cursor.fetchall if gives_rows else list

    def many(self, sql: str, values: Sequence[Mapping[str, Any]]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_translated(sql)[0], values)


class PostgresDatabase:
    """The tables of one kind: "vault" or "collect". `serial`: one writer at a time, of all servers."""

    def __init__(self, url: str, *, kind: str, serial: bool) -> None:
        self._url = url
        self._kind = kind
        self._serial = serial
        self._place = place_of(url)
        self._writing = ThreadPoolExecutor(1 if serial else CONNECTIONS_COUNT_MAX, thread_name_prefix=f"{kind}-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-read") if serial else self._writing
        self._idle: dict[bool, list[Connection]] = {True: [], False: []}  #: of those that may only read, or write
        self._closed = False

    def open(self) -> None:
        if self._kind == "collect":
            asyncio.run(migrate(self._url, kind="collect"))
            return
        try:
            with self._connect(reads=False) as connection, connection.transaction():
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
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    async def write(self, work: Callable[[Tx], T]) -> T:
        def run(connection: Connection) -> T:
            try:
                with connection.pipeline():
                    connection.execute("BEGIN")
                    if self._serial:
                        connection.execute(LOCK)
                    result = work(PostgresTx(connection))
                    crash_point("postgres.before_commit")
                    committed = connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            if committed.statusmessage != "COMMIT":
                raise StorageFailed(f"storage failed; {self._place}: the transaction was rolled back, try again")
            crash_point("postgres.after_commit")
            return result

        return await self._do(run, reads=False)

    async def read(self, work: Callable[[Tx], T]) -> T:
        def run(connection: Connection) -> T:
            if not self._serial:
                return work(PostgresTx(connection))
            with connection.transaction():
                return work(PostgresTx(connection))

        return await self._do(run, reads=self._serial)

    async def _do(self, work: Callable[[Connection], T], *, reads: bool) -> T:
        def run() -> T:
            if self._closed:
                raise StorageFailed(f"storage failed; the {'vault' if self._serial else 'collector'} is closed")
            try:
                connection = self._take(reads=reads)
                try:
                    return work(connection)
                finally:
                    self._give_back(connection, reads=reads)
            except (psycopg.Error, OSError) as error:
                raise failed(error, self._place) from error

        return await asyncio.get_running_loop().run_in_executor(self._reading if reads else self._writing, run)

    def _take(self, *, reads: bool) -> Connection:
        """An idle connection that still is one; or a new one."""
        idle = self._idle[reads]
        while idle:
            connection = idle.pop()
            # An idle server that says something says goodbye.
            readable, _, _ = select.select([connection.fileno()], [], [], 0)
            if not readable:
                return connection
            connection.close()
        return self._connect(reads=reads)

    def _give_back(self, connection: Connection, *, reads: bool) -> None:
        """Keep it for the next one, unless something happened to it."""
        if connection.info.transaction_status == TransactionStatus.IDLE:
            self._idle[reads].append(connection)
        else:
            connection.close()

    def _connect(self, *, reads: bool) -> Connection:
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            application_name=f"{APPLICATION} {self._kind}",
            keepalives_idle=30,
            tcp_user_timeout=30_000,
        )
        try:
            connection.execute(SETTINGS[self._kind].encode())
            if reads:
                connection.execute(READ_SETTINGS)
        except BaseException:
            connection.close()
            raise
        return connection
