"""What a child process has written: the newest lines within a budget, and a way to wait for one of them."""

from __future__ import annotations

import asyncio
import re
from collections import deque

KEPT_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 1 << 16
TAIL_LINES = 20


class ChildOutput:
    """Bytes in, lines out. Older lines are dropped when the budget is used up, and the drop is counted."""

    def __init__(self, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.ended = False
        self.dropped_count = 0
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._lines: deque[str] = deque()
        self._partial = b""
        self._news = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Take in what was read. A line that is too long is kept in pieces."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._keep(line)
        if len(self._partial) > LINE_BYTES_MAX:
            self._keep(self._partial)
            self._partial = b""
        self._wake()

    def end(self) -> None:
        """There will be no more."""
        if self._partial:
            self._keep(self._partial)
            self._partial = b""
        self.ended = True
        self._wake()

    @property
    def lines(self) -> list[str]:
        """The lines that are kept, oldest first."""
        return list(self._lines)

    @property
    def tail(self) -> str:
        """The last few lines, for an error's text."""
        return "\n".join(self.lines[-TAIL_LINES:])

    async def wait_for(self, pattern: str) -> re.Match[str] | None:
        """The first kept line in which `pattern` is found, waiting for it; None when the output ended.

        Has no limit of its own: the caller gives it one.
        """
        seen = self.dropped_count
        while True:
            news = self._news
            for line in self.lines[max(seen - self.dropped_count, 0) :]:
                if found := re.search(pattern, line):
                    return found
            seen = self.dropped_count + len(self._lines)
            if self.ended:
                return None
            await news.wait()

    def _keep(self, line: bytes) -> None:
        self._lines.append(line.decode("utf-8", "replace").rstrip("\r"))
        self._kept_bytes += len(self._lines[-1]) + 1
        while self._kept_bytes > self._kept_bytes_max:
            self._kept_bytes -= len(self._lines.popleft()) + 1
            self.dropped_count += 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
