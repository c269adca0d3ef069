"""A TCP proxy that misbehaves on purpose: it cuts, half-closes, delays, goes silent and refuses.

It forwards bytes between a free port on loopback and one server, holds at most one chunk per connection and
direction, and is as faithful as a wire until it is told otherwise. Cutting is a reset (RST), not a polite
end.
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from holdfast.proof.link import ProxyLink
from holdfast.proof.trips import Seen, Trip, Way

CONNECT_TIMEOUT_S = 10.0
WAITING_MAX = 128


class Proxy:
    """`async with Proxy("127.0.0.1", 5672) as proxy:` and connect to `proxy.host`, `proxy.port`."""

    def __init__(self, host: str, port: int) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.accepted_count = 0
        self.delay_s: dict[Way, float] = {"up": 0.0, "down": 0.0}
        self._server = (host, port)
        self._open: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._trips: list[Trip] = []
        self._links: set[ProxyLink] = set()
        # Not a TaskGroup: a proxy may be opened in one task (a fixture) and closed in another.
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        self.resume()
        self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        await self.cut()

    @property
    def connected_count(self) -> int:
        """How many connections are open now."""
        return len(self._links)

    async def cut(self) -> int:
        """Reset every connection, both ends; new ones are still accepted. Returns how many were cut."""
        count = len(self._links)
        for link in self._links:
            link.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)
        return count

    def half_close(self, way: Way) -> None:
        """On every connection, end one direction: the receiver sees the end, the sender is no longer read."""
        for link in self._links:
            link.half_close(way)

    def pause(self, *ways: Way) -> None:
        """Go silent: connections stay open and take what the kernel's buffers hold; nothing is forwarded."""
        for way in ways or self._open:
            self._open[way].clear()

    def resume(self, *ways: Way) -> None:
        """Forward again, beginning with what was held."""
        for way in ways or self._open:
            self._open[way].set()

    def accept(self) -> None:
        """Take new connections (again), on the same port as before."""
        if self._accepting is not None:
            return
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        self._listener.bind((self.host, self.port))
        self._listener.listen(WAITING_MAX)
        self.port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._listener), name="proxy accepts")

    async def refuse(self) -> None:
        """Refuse new connections, as a server that is down does; the open ones go on."""
        if self._accepting is None or self._listener is None:
            return
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        self._accepting = self._listener = None

    def cut_after(self, way: Way, bytes_count: int) -> Trip:
        """Reset the connection on which, from now on, exactly `bytes_count` bytes went that way; once.

        The bytes of all connections are counted together. `await trip.fired.wait()` tells when it happened.
        """
        return self._arm(Trip(way, bytes_left=bytes_count))

    def cut_when(self, way: Way, seen: Seen, *, deliver: bool = False) -> Trip:
        """Reset the first connection on which `seen(recent bytes)` is true; once.

        Recent bytes are the chunk and up to 64 KiB before it. With `deliver`, the chunk still reaches the
        receiver (the answer gets lost); without, it does not (the request gets lost).
        """
        return self._arm(Trip(way, seen=seen, deliver=deliver))

    def _arm(self, trip: Trip) -> Trip:
        self._trips.append(trip)
        return trip

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self.accepted_count += 1
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            server.setblocking(False)
            # Known from here on, not from when its task begins: `cut` waits for every task and must have cut its link.
            link = ProxyLink(client, server, gates=self._open, delay_s=self.delay_s, trips=self._trips)
            self._links.add(link)
            task = asyncio.create_task(self._serve(link), name=f"proxy connection {self.accepted_count}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: ProxyLink) -> None:
        try:
            await link.run(self._server, connect_timeout_s=CONNECT_TIMEOUT_S)
        finally:
            self._links.discard(link)
