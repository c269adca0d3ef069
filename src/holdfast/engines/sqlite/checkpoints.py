"""The write-ahead log of a queue's file is folded into the file beside the commits, not within one of them.

SQLite's own way is to do it at the end of whichever commit fills the log, which then takes several times as long.
Here another thread does it through a connection of its own. A log that is written without a pause can only start over
when all of it has been folded; so one that has grown to its limit is folded by its writer, which has little left to do.
Where one client is served alone nothing would go on beside it: then its commit folds the log, as SQLite would.

A young log is lengthened by zeros before it is needed: a sync that need not note a new length is about twice as quick.
SQLite takes zeros behind the last frame for what they are: no frame.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import apsw

#: A log of so many pages is folded beside the commits,
BESIDE_PAGES_COUNT = 1_000
#: and one of so many pages by the commit that finds it so.
WITHIN_PAGES_COUNT = 8_000
#: A log is lengthened by so much at once, up to what it holds when it is folded for the first time.
AHEAD_BYTES = 2**20
AHEAD_BYTES_MAX = 5 * 2**20
FRAME_HEADER_BYTES = 24
_ZEROS = bytes(AHEAD_BYTES)


class Checkpoints:
    """Folds the log of one file while its writer is open."""

    def __init__(self, path: Path, writer: apsw.Connection, threads: Executor) -> None:
        self._path = path
        self._writer = writer
        self._threads = threads
        self._beside: apsw.Connection | None = None
        self._lock = threading.Lock()
        self._open = True
        self._ask_at_pages_count = BESIDE_PAGES_COUNT
        self.pages_count = 0
        self._log = f"{path}-wal"
        self._frame_bytes = int(writer.pragma("page_size")) + FRAME_HEADER_BYTES
        self._room_pages_count = 0
        writer.set_wal_hook(self._note)  # also turns SQLite's own way off

    def _note(self, connection: apsw.Connection, name: str, pages_count: int) -> int:
        if pages_count < self.pages_count:
            self._ask_at_pages_count = BESIDE_PAGES_COUNT  # it has started over
        self.pages_count = pages_count
        if pages_count >= self._room_pages_count:
            self._lengthen(pages_count)
        return apsw.SQLITE_OK

    def _lengthen(self, pages_count: int) -> None:
        """Called by the writer after its commit, when nobody else writes the log."""
        try:
            log = os.open(self._log, os.O_WRONLY)
            try:
                end = max(os.fstat(log).st_size, (pages_count + 1) * self._frame_bytes)
                if end < AHEAD_BYTES_MAX:
                    end += os.pwrite(log, _ZEROS, end)
            finally:
                os.close(log)
        except OSError:  # no room, or no such file: then SQLite lengthens it frame by frame, and says what is wrong
            end = AHEAD_BYTES_MAX
        full = end >= AHEAD_BYTES_MAX
        # Some room is left for the next commit, so that it finds the length it needs.
        self._room_pages_count = 2**62 if full else (end - AHEAD_BYTES // 4) // self._frame_bytes

    def after_commit(self, *, alone: bool) -> None:
        """Called after a commit that left a full log; `alone` when nothing else goes on beside it.

        Never raises: the commit stands, and what was not folded now is folded later.
        """
        if alone or self.pages_count >= WITHIN_PAGES_COUNT:
            with suppress(apsw.Error):
                self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        elif self.pages_count >= self._ask_at_pages_count:
            self._ask_at_pages_count = self.pages_count + BESIDE_PAGES_COUNT
            with suppress(RuntimeError):  # the storage is being closed
                self._threads.submit(self._fold)

    def _fold(self) -> None:
        with self._lock, suppress(apsw.Error):
            if not self._open:
                return
            if self._beside is None:
                self._beside = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
                self._beside.execute("PRAGMA synchronous = FULL")
            self._beside.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def close(self) -> None:
        """Let go of the file; waits for a folding that is under way."""
        with self._lock:
            self._open = False
            beside, self._beside = self._beside, None
            if beside is not None:
                beside.close()
