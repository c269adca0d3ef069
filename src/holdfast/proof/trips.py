"""When a connection is to be cut: after so many bytes, or when certain bytes pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

Way = Literal["up", "down"]  # up: client to server; down: server to client
Seen = Callable[[bytes], bool]

RECENT_BYTES_MAX = 1 << 16


class Trip:
    """A cut that waits for its moment; it fires once."""

    def __init__(
        self, way: Way, *, bytes_left: int | None = None, seen: Seen | None = None, deliver: bool = False
    ) -> None:
        self.fired = asyncio.Event()
        self._way = way
        self._bytes_left = bytes_left
        self._seen = seen
        self._deliver = deliver

    def inspect(self, way: Way, recent: bytes, chunk: bytes) -> int | None:
        """How many bytes of `chunk` still go through before the cut; None when it is not to be cut now."""
        if way != self._way or self.fired.is_set():
            return None
        if self._bytes_left is not None:
            if len(chunk) < self._bytes_left:
                self._bytes_left -= len(chunk)
                return None
            self.fired.set()
            return self._bytes_left
        if self._seen is not None and self._seen(recent + chunk):
            self.fired.set()
            return len(chunk) if self._deliver else 0
        return None
