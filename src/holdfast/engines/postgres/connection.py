"""Connections to PostgreSQL: how one is opened, speaks and fails, a pool of them, and today's schema.

A connection is always in pipeline mode: statements are queued and sent together, so that a whole commit is one round
trip. It speaks to libpq through `psycopg.pq`, because a cursor's bookkeeping per statement costs more than the
statement. Every statement comes from `sql/`, is prepared once per connection, and takes and gives binary values.

Parameters are written in PostgreSQL's binary format by hand: for a batch of payloads that is ten times cheaper than
adapting them one by one, and a payload goes over the wire as the bytes that it is. Every whole number is a `bigint` and
every text a `text`; the statements cast their parameters to that.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from struct import Struct, pack
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from holdfast.errors import CannotStart, HoldfastError, StorageFailed, Unstorable
from holdfast.ports.database import migrations, statements

PACKAGE: Final = "holdfast.engines.postgres"
SQL: Final = {"begin": b"BEGIN", "commit": b"COMMIT", "rollback": b"ROLLBACK"} | {
    name: text.encode() for name, text in statements(PACKAGE).items()
}

CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 60.0
APPLICATION = "holdfast"

#: Nothing is ever found by reading a whole table; the planner must not think otherwise of a table that was small
#: when it was last looked at. Generic plans, because planning anew would cost more than running.
SESSION = (
    "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_mergejoin = off; SET jit = off; "
    "SET plan_cache_mode = force_generic_plan; SET synchronous_commit = on; "
    "SET default_transaction_isolation = 'read committed'; SET client_encoding = 'UTF8'; "
    "SET lock_timeout = '20s'; SET idle_in_transaction_session_timeout = '60s'"
)

Rows = list[tuple[Any, ...]]
BINARY_FORMATS = tuple((1,) * count for count in range(32))

#: What a statement takes: arrays are encoded by the functions below and are bytes by then.
Value: TypeAlias = int | str | bytes | None

_BIGINT = Struct(">q").pack
_HEADER = Struct(">iiiii").pack
_LENGTH = Struct(">i").pack
_NULL = _LENGTH(-1)
_BYTEA_OID, _BIGINT_OID, _TEXT_OID = 17, 20, 25
_BIGINT_BYTES = 8

#: What the SQL function `holdfast.hold_queue` raises for a queue that is gone or was made anew.
QUEUE_MISSING_STATE = "HF404"

#: Classes of states that the data is to blame for: a value that is invalid, or beyond a limit.
_UNSTORABLE = ("22", "54")

_WHAT_HAPPENED = {
    "40P01": "a deadlock was broken up",
    "40001": "another transaction came first",
    "53100": "the disk is full",
    "53300": "it has too many connections",
    "25006": "the database is read-only",
    "55P03": "a lock was not given in time",
    "57P01": "it was shut down",
    "57P02": "it crashed and restarts",
    "57P03": "it is starting up",
}

MIGRATIONS = migrations(PACKAGE)
SERVER_VERSION_MIN = 15

_LOCK = "SELECT pg_advisory_xact_lock(1212106564, -2)"
_BEGINNING = "CREATE SCHEMA IF NOT EXISTS {schema}; CREATE TABLE IF NOT EXISTS {table} (version integer NOT NULL)"


async def connect(url: str) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """A new connection in autocommit; raises psycopg.Error or OSError."""
    return await psycopg.AsyncConnection.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name=APPLICATION,
        keepalives_idle=30,
        keepalives_interval=10,
        keepalives_count=3,
        tcp_user_timeout=30_000,
    )


class PipelineConnection:
    """A connection that one caller uses at a time. After any exception from it, `close` it and take another."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], *, server: str) -> None:
        self._connection = connection
        self._server = server
        self._pq = connection.pgconn
        self._rows = Transformer(connection)
        self._prepared: set[str] = set()
        self._awaited: list[bool] = []  # of each answer that is due: whether its rows are wanted

    @classmethod
    async def open(cls, url: str, *, server: str) -> PipelineConnection:
        """Connect; raises StorageFailed."""
        try:
            connection = await connect(url)
            try:
                await connection.execute(SESSION)
                connection.pgconn.enter_pipeline_mode()
            except BaseException:
                await connection.close()
                raise
        except (psycopg.Error, OSError) as error:
            raise failed(error, server) from error
        return cls(connection, server=server)

    @property
    def usable(self) -> bool:
        """Whether the next transaction can begin on it. An idle server that says something says goodbye."""
        if self._awaited or self._pq.transaction_status != TransactionStatus.IDLE:
            return False
        readable, _, _ = select.select([self._pq.socket], [], [], 0)
        return not readable

    async def close(self) -> None:
        """Let go of it, whatever state it is in."""
        await self._connection.close()

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, statement: str, values: Sequence[Value] = ()) -> None:
        """Queue a statement of `sql/`; its answer comes with the next `receive`."""
        name = statement.encode()
        try:
            if statement not in self._prepared:
                self._pq.send_prepare(name, SQL[statement])
                self._prepared.add(statement)
                self._awaited.append(False)
            self._pq.send_query_prepared(name, [encoded(value) for value in values], BINARY_FORMATS[len(values)], 1)
        except (psycopg.Error, OSError) as error:
            raise failed(error, self._server) from error
        self._awaited.append(True)

    async def receive(self, *, sync: bool) -> list[PGresult]:
        """Send what is queued and wait for every answer. `sync` ends the pipeline: after an error, and at a commit.

        Raises what `refused` makes of the first error; the transaction is then lost.
        """
        try:
            if sync:
                self._pq.pipeline_sync()
            else:
                self._pq.send_flush_request()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                results = await self._exchange(len(self._awaited) + sync)
        except TimeoutError as error:
            raise StorageFailed(
                f"storage failed; {self._server} has not answered for {ANSWER_TIMEOUT_S:.0f} s, try again"
            ) from error
        except (psycopg.Error, OSError) as error:
            raise failed(error, self._server) from error
        wanted, self._awaited = self._awaited, []
        for result in results:
            if result.status in (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED):
                raise refused(result, self._server)
        return [result for result, want in zip(results, wanted, strict=False) if want]

    async def _exchange(self, count: int) -> list[PGresult]:
        """Both directions at once: a server that waits for us to read would never read what we send."""
        pq = self._pq
        results: list[PGresult] = []
        sending = bool(pq.flush())
        while len(results) < count:
            if sending or pq.is_busy():
                readable, writable = await self._ready(writing=sending)
                if writable:
                    sending = bool(pq.flush())
                if readable:
                    pq.consume_input()
                continue
            result = pq.get_result()
            # None ends the answers to one statement.
            if result is not None:
                results.append(result)
        return results

    async def _ready(self, *, writing: bool) -> tuple[bool, bool]:
        loop, descriptor = asyncio.get_running_loop(), self._pq.socket
        event: asyncio.Future[None] = loop.create_future()
        seen = [False, False]

        def wake(index: int) -> None:
            seen[index] = True
            if not event.done():
                event.set_result(None)

        loop.add_reader(descriptor, wake, 0)
        if writing:
            loop.add_writer(descriptor, wake, 1)
        try:
            await event
        finally:
            loop.remove_reader(descriptor)
            if writing:
                loop.remove_writer(descriptor)
        return seen[0], seen[1]

    def rows(self, result: PGresult) -> Rows:
        """The rows of an answer as tuples."""
        self._rows.set_pgresult(result)
        return self._rows.load_rows(0, result.ntuples, tuple)


class Pool:
    """Connections to one database, made when they are needed."""

    def __init__(self, url: str, *, server: str, connections_max: int) -> None:
        self._url = url
        self._server = server
        self._free = asyncio.Semaphore(connections_max)
        self._idle: list[PipelineConnection] = []
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[PipelineConnection]:
        """A connection for this caller alone; raises StorageFailed. Whatever is raised inside, it is closed."""
        async with self._free:
            connection = await self._take()
            try:
                yield connection
            except BaseException:
                # Its state is unknown, and its idle sisters may have lost the same server.
                await connection.close()
                await self._close_unusable()
                raise
            if self._closed or not connection.usable:
                await connection.close()
            else:
                self._idle.append(connection)

    async def _take(self) -> PipelineConnection:
        if self._closed:
            raise StorageFailed(f"storage failed; {self._server} is closed")
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            await connection.close()
        return await PipelineConnection.open(self._url, server=self._server)

    async def _close_unusable(self) -> None:
        for connection in [connection for connection in self._idle if not connection.usable]:
            self._idle.remove(connection)
            await connection.close()

    def open(self) -> None:
        """Give out connections (again)."""
        self._closed = False

    async def close(self) -> None:
        """Close what is idle; what is in use is closed by its user."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()


# --- values -----------------------------------------------------------------------------------------------------------


def encoded(value: Value) -> bytes | None:
    """One parameter."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return _BIGINT(value)
    return None if value is None else value.encode()


def bigints(numbers: Sequence[int]) -> bytes:
    """A `bigint[]`."""
    flat = [0] * (2 * len(numbers))
    flat[0::2] = [_BIGINT_BYTES] * len(numbers)
    flat[1::2] = numbers
    return _header(_BIGINT_OID, len(numbers)) + pack(">" + "iq" * len(numbers), *flat)


def byteas(payloads: Sequence[bytes]) -> bytes:
    """A `bytea[]`."""
    return _variable(_BYTEA_OID, payloads)


def texts(strings: Sequence[str]) -> bytes:
    """A `text[]`. Texts of one request are mostly the same: one kind, no reference."""
    if len(set(strings)) == 1:
        data = strings[0].encode()
        return _header(_TEXT_OID, len(strings)) + (_LENGTH(len(data)) + data) * len(strings)
    return _variable(_TEXT_OID, [string.encode() for string in strings])


def texts_or_null(strings: Sequence[str]) -> bytes:
    """A `text[]` in which an empty text is NULL: what a partial unique index leaves out."""
    parts = [_header(_TEXT_OID, len(strings), nulls=1)]
    for string in strings:
        data = string.encode()
        parts += (_LENGTH(len(data)), data) if data else (_NULL,)
    return b"".join(parts)


def _variable(oid: int, elements: Sequence[bytes]) -> bytes:
    parts = [b""] * (2 * len(elements))
    parts[0::2] = [_LENGTH(len(element)) for element in elements]
    parts[1::2] = elements
    return _header(oid, len(elements)) + b"".join(parts)


def _header(oid: int, count: int, *, nulls: int = 0) -> bytes:
    # One dimension of `count` elements that are numbered from 1; an empty array has no dimension.
    return _HEADER(1, nulls, oid, count, 1) if count else pack(">iii", 0, 0, oid)


# --- errors -----------------------------------------------------------------------------------------------------------


class QueueGone(HoldfastError):
    """The generation is not in the database; the caller knows the queue's name."""


def server_of(url: str) -> str:
    """Where a URL leads, for people: user, host, port and database, and never the password."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "PostgreSQL"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    port = parts.get("port") or 5432
    user = parts.get("user") or "the system's user"
    return f"PostgreSQL at {host}:{port}, database '{parts.get('dbname') or user}', user '{user}'"


def failed(error: Exception, server: str) -> StorageFailed:
    """The connection did not come about or broke."""
    if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        # libpq's text would quote the URL, with the password in it.
        return StorageFailed(f"storage failed; {server}: the URL is not a valid one, try again")
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    what = _WHAT_HAPPENED.get(state or "") or _first_line(error) or "the connection is lost"
    if isinstance(error, psycopg.DataError) or (state or "")[:2] in _UNSTORABLE:
        return Unstorable(f"storage failed; {server}: {what}")
    return StorageFailed(f"storage failed; {server}: {what}, try again")


def refused(result: PGresult, server: str) -> HoldfastError:
    """The server answered with an error."""
    if result.status == ExecStatus.PIPELINE_ABORTED:
        return StorageFailed(f"storage failed; {server}: an earlier statement failed, try again")
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode("ascii", "replace")
    if state == QUEUE_MISSING_STATE:
        return QueueGone("queue is gone")
    text = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
    what = _WHAT_HAPPENED.get(state) or text or "the connection is lost"
    return StorageFailed(f"storage failed; {server}: {what}, try again")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else ""


# --- the schema -------------------------------------------------------------------------------------------------------


async def migrate(url: str, *, kind: str = "queue", schema: str = "holdfast") -> None:
    """Make or upgrade the tables of a kind. Raises CannotStart with what to do."""
    server = server_of(url)
    try:
        connection = await connect(url)
    except (psycopg.Error, OSError) as error:
        detail = failed(error, server).message.removeprefix("storage failed; ").removesuffix(", try again")
        raise CannotStart(f"storage cannot be reached; {detail}, check that it runs and the URL") from error
    try:
        if connection.info.server_version < SERVER_VERSION_MIN * 10_000:
            raise CannotStart(
                f"PostgreSQL is too old; {server} has version {connection.info.server_version // 10_000} "
                f"and {SERVER_VERSION_MIN} is needed, upgrade it"
            )
        async with connection.transaction():
            await connection.execute(_LOCK)
            await _upgrade(connection, server, kind, schema)
    except psycopg.errors.InsufficientPrivilege as error:
        raise CannotStart(
            f"storage cannot be prepared; {server}: {error.diag.message_primary}, let the user create a schema "
            "in the database"
        ) from error
    except psycopg.Error as error:
        detail = failed(error, server).message.removeprefix("storage failed; ")
        raise CannotStart(f"storage cannot be prepared; {detail}") from error
    finally:
        await connection.close()


async def _upgrade(
    connection: psycopg.AsyncConnection[tuple[object, ...]], server: str, kind: str, schema: str
) -> None:
    steps = MIGRATIONS[kind]
    table = f"{schema}.collect_schema_version" if kind == "collect" else f"{schema}.schema_version"
    exists = await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (table,))
    row = await exists.fetchone()
    if row is None or not row[0]:
        await connection.execute(_BEGINNING.format(schema=schema, table=table).encode())
    await connection.execute(f"SET LOCAL search_path = {schema}, public".encode())
    found = await (await connection.execute(f"SELECT max(version) FROM {table}".encode())).fetchone()  # noqa: S608 - our own name
    version = int(str(found[0] or 0)) if found else 0
    newest = max(steps)
    if version > newest:
        raise CannotStart(
            f"schema is too new; {server} has version {version} and this program knows {newest}, use a newer Holdfast"
        )
    for number, step in steps.items():
        if number > version:
            await connection.execute(step.encode())
    if version == 0:
        await connection.execute(f"INSERT INTO {table} VALUES (%s)".encode(), (newest,))  # noqa: S608
    elif version < newest:
        await connection.execute(f"UPDATE {table} SET version = %s".encode(), (newest,))  # noqa: S608
