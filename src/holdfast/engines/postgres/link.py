"""One connection to PostgreSQL, always in pipeline mode: statements are queued and sent together, so that a whole
commit is one round trip.

It speaks to libpq through `psycopg.pq`, because a cursor's bookkeeping per statement costs more than the statement.
Every statement comes from `sql/`, is prepared once per connection, and takes and gives binary values.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from holdfast.engines.postgres.errors import failed, refused
from holdfast.engines.postgres.values import Value, encoded
from holdfast.engines.sql_files import statements
from holdfast.errors import StorageFailed

PACKAGE: Final = "holdfast.engines.postgres"
SQL: Final = {name: text.encode() for name, text in statements(PACKAGE).items()}

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
_BINARY_FORMATS = tuple((1,) * count for count in range(32))


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

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], *, place: str) -> None:
        self._connection = connection
        self._place = place
        self._pq = connection.pgconn
        self._rows = Transformer(connection)
        self._prepared: set[str] = set()
        self._awaited: list[bool] = []  # of each answer that is due: whether its rows are wanted

    @classmethod
    async def open(cls, url: str, *, place: str) -> PipelineConnection:
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
            raise failed(error, place) from error
        return cls(connection, place=place)

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
            self._pq.send_query_prepared(name, [encoded(value) for value in values], _BINARY_FORMATS[len(values)], 1)
        except (psycopg.Error, OSError) as error:
            raise failed(error, self._place) from error
        self._awaited.append(True)

    async def receive(self, *, sync: bool) -> list[PGresult]:
        """Send what is queued and wait for every answer. `sync` ends the pipeline: after an error, and at a commit.

        Raises what `errors.refused` makes of the first error; the transaction is then lost.
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
                f"storage failed; {self._place} has not answered for {ANSWER_TIMEOUT_S:.0f} s, try again"
            ) from error
        except (psycopg.Error, OSError) as error:
            raise failed(error, self._place) from error
        wanted, self._awaited = self._awaited, []
        for result in results:
            if result.status in (ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED):
                raise refused(result, self._place)
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
