"""A database in PostgreSQL that several servers share: the vault in a schema of its own, or what collectors know.

Statements run in threads. The vault's writers take turns by an advisory lock, because the ledger is a chain: it is
opened `serial`, with one connection that writes and one that reads. Collectors hold each other up only where they
want the same row. A transaction is a pipeline: only what gives rows is waited for, and what was sent before goes along.
It speaks to libpq as the queues' connections do, because cursors cost more than the statements.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from holdfast.engines.postgres.connection import (
    APPLICATION,
    BINARY_FORMATS,
    CONNECT_TIMEOUT_S,
    SESSION,
    bigints,
    encoded,
    failed,
    migrate,
    server_of,
)
from holdfast.errors import StorageFailed
from holdfast.ports.database import Dialect, Look, Row, Tx, closing_soon
from holdfast.proof import crash_point

T = TypeVar("T")
SCHEMA = "holdfast_vault"
LOCK = b"SELECT pg_advisory_xact_lock(1212106564, -3)"
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
PREPARED_COUNT_MAX = 200

_NAMED = re.compile(r"(?<![:\w]):([a-z][a-z0-9_]*)")

Connection = psycopg.Connection[Row]
Link = tuple[Connection, dict[object, bytes]]  #: a connection, and the statements that are prepared on it, by name
_KINDS = ((int, 20), (bytes, 17), (list, 1016))  #: bigint, bytea, bigint[]


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
def _translated(sql: str) -> tuple[bytes, tuple[str, ...], bool]:
    """With numbers for its values, their names in this order, and whether it gives rows."""
    numbers: dict[str, int] = {}
    text = _NAMED.sub(lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", sql)
    is_change = re.sub(r"--.*\n", "", sql).startswith(("INSERT", "UPDATE", "DELETE"))
    return text.encode(), tuple(numbers), not is_change or "RETURNING" in sql


def _kind(value: object) -> int:
    """The number of its type in PostgreSQL; of a text 0: it may be JSON as well."""
    return next((number for kind, number in _KINDS if isinstance(value, kind)), 0)


class PostgresTx:
    """Statements that go to one connection together. After an error of its server the connection has to be closed."""

    dialect = DIALECT

    def __init__(self, connection: Connection, prepared: dict[object, bytes]) -> None:
        self._pq = connection.pgconn
        self._loaders = Transformer(connection)
        self._prepared = prepared  # on this connection: the names of statements
        self._results: list[PGresult] = []
        self._sent_count = 0

    def rows(self, sql: str, **values: Any) -> list[Row]:
        return self.later(sql, **values)()

    def later(self, sql: str, **values: Any) -> Callable[[], list[Row]]:
        text, names, gives_rows = _translated(sql)
        self.send(text, *[values[name] for name in names])
        number = self._sent_count
        return (lambda: self._rows(number)) if gives_rows else list

    def many(self, sql: str, values: Sequence[Mapping[str, Any]]) -> None:
        for each in values:
            self.later(sql, **each)

    def send(self, text: bytes, *values: Any) -> None:
        """Queue a statement."""
        kinds = [_kind(value) for value in values]
        given = [bigints(value) if isinstance(value, list) else encoded(value) for value in values]
        name = self._prepared.get(key := (text, *kinds))
        if name is None and len(self._prepared) < PREPARED_COUNT_MAX:
            name = self._prepared[key] = b"%d" % len(self._prepared)
            self._pq.send_prepare(name, text, kinds)
            self._sent_count += 1
        if name is None:
            self._pq.send_query_params(text, given, kinds, BINARY_FORMATS[len(values)], 1)
        else:
            self._pq.send_query_prepared(name, given, BINARY_FORMATS[len(values)], 1)
        self._sent_count += 1

    def receive(self, *, sync: bool = False) -> PGresult:
        """Send what is queued, and wait for all answers; gives the last statement's. `sync`: no others follow."""
        pq = self._pq
        if sync:
            pq.pipeline_sync()
        else:
            pq.send_flush_request()
        count = self._sent_count + sync
        sending = pq.flush()
        poll = select.poll()
        while len(self._results) < count:
            if sending or pq.is_busy():
                poll.register(pq.socket, select.POLLIN | (select.POLLOUT if sending else 0))
                [(_, events)] = poll.poll()
                if events & ~select.POLLOUT:
                    pq.consume_input()
                sending = sending and pq.flush()
            elif (result := pq.get_result()) is not None:  # None ends the answers to one statement
                if result.status == ExecStatus.FATAL_ERROR:
                    raise error_from_result(result)
                self._results.append(result)
        return self._results[self._sent_count - 1]

    def _rows(self, number: int) -> list[Row]:
        if len(self._results) < number:
            self.receive()
        result = self._results[number - 1]
        self._loaders.set_pgresult(result)
        return self._loaders.load_rows(0, result.ntuples, tuple)


class PostgresDatabase:
    """The tables of one kind: "vault" or "collect". `serial`: one writer at a time, of all servers."""

    def __init__(self, url: str, *, kind: str, serial: bool) -> None:
        self._url = url
        self._kind = kind
        self._serial = serial
        self._server = server_of(url)
        self._writing = ThreadPoolExecutor(1 if serial else CONNECTIONS_COUNT_MAX, thread_name_prefix=f"{kind}-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-read") if serial else self._writing
        self._idle: dict[bool, list[Link]] = {True: [], False: []}  #: of those that may only read, or write
        self._closed = False

    def open(self) -> None:
        asyncio.run(migrate(self._url, kind=self._kind, schema=SCHEMA if self._kind == "vault" else "holdfast"))

    def close(self) -> None:
        self._closed = True
        self._reading.shutdown(wait=True)
        self._writing.shutdown(wait=True)
        for idle in self._idle.values():
            while idle:
                idle.pop()[0].close()

    async def write(self, work: Callable[[Tx], T]) -> T:
        def run(tx: PostgresTx) -> T:
            tx.send(b"BEGIN")
            if self._serial:
                tx.send(LOCK)
            result = work(tx)
            crash_point("postgres.before_commit")
            tx.send(b"COMMIT")
            if tx.receive(sync=True).command_status != b"COMMIT":
                raise StorageFailed(f"storage failed; {self._server}: the transaction was rolled back, try again")
            crash_point("postgres.after_commit")
            return result

        return await self._do(run, reads=False)

    async def read(self, work: Callable[[Tx], T]) -> T:
        def run(tx: PostgresTx) -> T:
            tx.send(b"BEGIN")  # all statements of a look see the same, where that was asked for
            result = work(tx)
            tx.send(b"COMMIT")
            tx.receive(sync=True)
            return result

        return await self._do(run, reads=self._serial)

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Look]:
        loop = asyncio.get_running_loop()

        def translated(step: Callable[[], T]) -> T:
            try:
                return step()
            except (psycopg.Error, OSError) as error:
                raise failed(error, self._server) from error

        def apart() -> Connection:
            connection = self._connect(reads=True)
            connection.execute("SET idle_in_transaction_session_timeout = 0")
            connection.execute("BEGIN")
            connection.execute("SELECT 1")  # from now on it sees this moment
            connection.pgconn.enter_pipeline_mode()
            return connection

        connection = await asyncio.to_thread(translated, apart)
        prepared: dict[object, bytes] = {}

        async def read(work: Callable[[Tx], T]) -> T:
            def run() -> T:
                tx = PostgresTx(connection, prepared)
                result = work(tx)
                tx.receive(sync=True)
                return result

            return await loop.run_in_executor(thread, translated, run)

        with closing_soon(ThreadPoolExecutor(1, thread_name_prefix=f"{self._kind}-look"), connection.close) as thread:
            yield read

    async def _do(self, work: Callable[[PostgresTx], T], *, reads: bool) -> T:
        def run() -> T:
            if self._closed:
                raise StorageFailed(f"storage failed; the {'vault' if self._serial else 'collector'} is closed")
            try:
                connection, prepared = link = self._take(reads=reads)
                tx = PostgresTx(connection, prepared)
                try:
                    result = work(tx)
                except psycopg.Error:
                    connection.close()  # what was prepared along with it may not be there
                    raise
                except BaseException:
                    with suppress(psycopg.Error):
                        tx.send(b"ROLLBACK")
                        tx.receive(sync=True)
                    raise
                finally:
                    self._give_back(link, reads=reads)
                return result
            except (psycopg.Error, OSError) as error:
                raise failed(error, self._server) from error

        return await asyncio.get_running_loop().run_in_executor(self._reading if reads else self._writing, run)

    def _take(self, *, reads: bool) -> Link:
        """An idle connection that still is one; or a new one."""
        idle = self._idle[reads]
        while idle:
            connection, prepared = idle.pop()
            # An idle server that says something says goodbye.
            readable, _, _ = select.select([connection.fileno()], [], [], 0)
            if not readable:
                return connection, prepared
            connection.close()
        connection = self._connect(reads=reads)
        connection.pgconn.enter_pipeline_mode()
        return connection, {}

    def _give_back(self, link: Link, *, reads: bool) -> None:
        """Keep it for the next one, unless something happened to it."""
        if link[0].pgconn.transaction_status == TransactionStatus.IDLE:
            self._idle[reads].append(link)
        else:
            link[0].close()

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
