"""`once`: a message that was handled before is a no-op.

The mark is written with the handler's success, never before: right after it, or, where the handler works in a SQL
database that also holds the marks, in the handler's own transaction (`marks.mark_in`). A crash between the two runs
the handler again; nothing is ever skipped that was not handled. A message without a lasting id is run, never matched.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, Protocol

from holdfast.core.message import Message
from holdfast.errors import Invalid
from holdfast.services.consume.worker import Handler, call_loop, is_async
from holdfast.telemetry.events import emit


class Marks(Protocol):
    """Where it is kept which messages were handled."""

    async def has(self, queue: str, key: str) -> bool:
        """Whether this was handled."""

    async def put(self, queue: str, key: str) -> None:
        """It was handled; saying so twice does no harm."""


class MemoryMarks:
    """Marks for tests, and for what may be handled again after a restart."""

    def __init__(self) -> None:
        self._marks: set[tuple[str, str]] = set()

    async def has(self, queue: str, key: str) -> bool:
        return (queue, key) in self._marks

    async def put(self, queue: str, key: str) -> None:
        self._marks.add((queue, key))


class SqlMarks:
    """Marks in a table of a SQL database; `connect` opens a DB-API connection (`sqlite3.connect`, `psycopg.connect`).

    `placeholder` is how the driver writes a parameter: `?` for SQLite, `%s` for PostgreSQL.
    """

    def __init__(self, connect: Callable[[], Any], *, table: str = "holdfast_once", placeholder: str = "?") -> None:
        if not table.isidentifier():
            raise Invalid(f"table is invalid; '{table}' is no plain name")
        if placeholder not in {"?", "%s"}:
            raise Invalid(f"placeholder is invalid; '{placeholder}' is neither ? nor %s")
        self._connect = connect
        key = f"queue_name = {placeholder} AND message_key = {placeholder}"
        values = ", ".join([placeholder] * 3)
        # The table's name is checked above, everything else is a parameter.
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} (queue_name TEXT NOT NULL, message_key TEXT NOT NULL, "
            "handled_at_us BIGINT NOT NULL, PRIMARY KEY (queue_name, message_key))"
        )
        self._find = f"SELECT 1 FROM {table} WHERE {key}"  # noqa: S608
        self._insert = f"INSERT INTO {table} VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608
        self._forget = f"DELETE FROM {table} WHERE handled_at_us < {placeholder}"  # noqa: S608

    def create(self) -> None:
        """Make the table, once, before anything is handled."""
        with self._open() as connection:
            connection.cursor().execute(self._create)
            connection.commit()

    def mark_in(self, connection: Any, message: Message, *, key: str = "") -> bool:
        """Mark inside the caller's own transaction, so that work and mark are committed together.

        False: it is marked already, by somebody who was faster; roll back.
        """
        cursor = connection.cursor()
        cursor.execute(self._insert, (message.queue, key or message.id, time.time_ns() // 1000))
        return bool(cursor.rowcount)

    def forget(self, *, older_than_s: float) -> int:
        """Delete old marks: a message that comes again later than this is handled again. Returns how many."""
        with self._open() as connection:
            cursor = connection.cursor()
            cursor.execute(self._forget, (time.time_ns() // 1000 - round(older_than_s * 1_000_000),))
            connection.commit()
            return int(cursor.rowcount)

    async def has(self, queue: str, key: str) -> bool:
        return await asyncio.to_thread(self._has, queue, key)

    async def put(self, queue: str, key: str) -> None:
        await asyncio.to_thread(self._put, queue, key)

    def _has(self, queue: str, key: str) -> bool:
        with self._open() as connection:
            cursor = connection.cursor()
            cursor.execute(self._find, (queue, key))
            return cursor.fetchone() is not None

    def _put(self, queue: str, key: str) -> None:
        with self._open() as connection:
            connection.cursor().execute(self._insert, (queue, key, time.time_ns() // 1000))
            connection.commit()

    def _open(self) -> AbstractContextManager[Any]:
        return closing(self._connect())


def once(marks: Marks, *, key: Callable[[Message], str] | None = None) -> Callable[[Handler], Handler]:
    """Handle a message once. `key` names it; without one its id does, where that is the same at every attempt.

    `@holdfast.once(marks)` stands below `@app.consumer(…)`.
    """

    def name_of(message: Message) -> str:
        return key(message) if key is not None else message.id if message.has_lasting_id else ""

    async def is_handled(message: Message, name: str) -> bool:
        handled = bool(name) and await marks.has(message.queue, name)
        if handled:
            emit("message.repeated", queue=message.queue, messageId=message.id)
        return handled

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def run(message: Message) -> None:
            name = name_of(message)
            if not await is_handled(message, name):
                await handler(message)  # type: ignore[misc]
                if name:
                    await marks.put(message.queue, name)

        @functools.wraps(handler)
        def run_in_thread(message: Message) -> None:
            name = name_of(message)
            if not call_loop(is_handled(message, name)):
                handler(message)
                if name:
                    call_loop(marks.put(message.queue, name))

        return run if is_async(handler) else run_in_thread

    return wrap
