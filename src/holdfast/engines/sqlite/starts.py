"""Starts of messages in one SQLite file, which the processes of one machine share.

A commit here outlives the process, not the machine: nothing waits for the disk. What a power cut takes along are a few
starts, and with them a few attempts that are not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import apsw

from holdfast.engines.sqlite.connection import SQL, fetch_all, json_list, open_writer, transaction, translated
from holdfast.errors import CannotStart, StorageFailed
from holdfast.ports.clock import Clock

FILE = "starts.db"
#: What was begun so long ago, and so many starts ago, is forgotten: its message went another way.
KEPT_US = 30 * 24 * 3600 * 1_000_000
KEPT_COUNT_MAX = 100_000
PRUNED_EVERY = 10_000
BUSY_TIMEOUT_MS = 500


class SqliteStarts:
    """See `holdfast.ports.broker.Starts`. In line: a commit takes less than the way to a thread and back."""

    def __init__(self, folder: Path, *, clock: Clock) -> None:
        """Raises CannotStart."""
        self._path = folder / FILE
        self._clock = clock
        self._ended: list[int] = []
        self._flush_due = False
        self._begun_count = 0
        self._db = self._open()

    def begin(self, queue: str, key: bytes) -> int:
        with translated(self._path), transaction(self._db):
            self._forget_ended()
            if self._begun_count % PRUNED_EVERY == 0:
                self._db.execute(SQL["starts_prune"], (self._clock.now_us() - KEPT_US, KEPT_COUNT_MAX)).fetchall()
            ((number,),) = fetch_all(self._db, "starts_insert", (queue, key, self._clock.now_us()))
        self._ended.clear()
        self._begun_count += 1
        return int(number)

    def end(self, numbers: Iterable[int]) -> None:
        self._ended += numbers
        if self._ended and not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)  # all that ends in this round of the loop in one commit

    def left(self, queue: str, key: bytes) -> Sequence[int]:
        ended = set(self._ended)
        with translated(self._path):
            return [number for (number,) in fetch_all(self._db, "starts_find", (queue, key)) if number not in ended]

    def close(self) -> None:
        self._flush()
        self._db.close()

    def _flush(self) -> None:
        self._flush_due = False
        if not self._ended:
            return
        try:
            with translated(self._path), transaction(self._db):
                self._forget_ended()
        except StorageFailed:
            return  # the next start tries again, and says so if it cannot
        self._ended.clear()

    def _forget_ended(self) -> None:
        if self._ended:
            self._db.execute(SQL["starts_delete"], (json_list(self._ended),)).fetchall()

    def _open(self) -> apsw.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            db = open_writer(self._path, kind="starts", create=True)
            with translated(self._path):
                db.execute("PRAGMA synchronous = NORMAL").fetchall()
                db.set_busy_timeout(BUSY_TIMEOUT_MS)  # the event loop waits
        except (OSError, StorageFailed) as error:
            text = error.message if isinstance(error, StorageFailed) else error.strerror
            raise CannotStart(f"store of starts cannot be opened; '{self._path}': {text}") from error
        return db
