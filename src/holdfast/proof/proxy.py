"""A TCP proxy that misbehaves on purpose: it cuts, goes silent and refuses.

It forwards bytes between a free port on loopback and one server, holds at most one chunk per connection and
direction, and is as faithful as a wire until it is told otherwise. Cutting is a reset (RST), not a polite
end; a trip says when: after so many bytes, or when certain bytes pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self

CHUNK_BYTES = 1 << 16
RECENT_BYTES_MAX = 1 << 16
CONNECT_TIMEOUT_S = 10.0
SENT_TIMEOUT_S = 1.0
SENT_STEP_S = 0.001
WAITING_MAX = 128
Way = Literal["up", "down"]  # up: client to server; down: server to client
Seen = Callable[[bytes], bool]


class Proxy:
    """`async with Proxy("127.0.0.1", 5672) as proxy:` and connect to `proxy.host`, `proxy.port`."""

    def __init__(self, host: str, port: int) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.accepted_count = 0
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

    async def __aexit__(self, *error: object) -> None:
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
        self._trips.append(trip := Trip(way, bytes_left=bytes_count))
        return trip

    def cut_when(self, way: Way, seen: Seen, *, deliver: bool = False) -> Trip:
        """Reset the first connection on which `seen(recent bytes)` is true; once.

        Recent bytes are the chunk and up to 64 KiB before it. With `deliver`, the chunk still reaches the
        receiver (the answer gets lost); without, it does not (the request gets lost).
        """
        self._trips.append(trip := Trip(way, seen=seen, deliver=deliver))
        return trip

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self.accepted_count += 1
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            server.setblocking(False)
            # Known from here on, not from when its task begins: `cut` waits for every task and must have cut its link.
            link = ProxyLink(client, server, gates=self._open, trips=self._trips)
            self._links.add(link)
            task = asyncio.create_task(self._serve(link), name=f"proxy connection {self.accepted_count}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: ProxyLink) -> None:
        try:
            await link.run(self._server)
        finally:
            self._links.discard(link)


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


class Cut(Exception):
    """A trip fired, or somebody cut the connection."""


class ProxyLink:
    """Forwards until both ends have ended, one resets, or it is cut. A reset is passed on as a reset."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        *,
        gates: Mapping[Way, asyncio.Event],
        trips: Sequence[Trip],
    ) -> None:
        self._ends: dict[Way, tuple[socket.socket, socket.socket]] = {
            "up": (client, server),
            "down": (server, client),
        }
        self._gates = gates
        self._trips = trips
        self._cut = asyncio.Event()

    def cut(self) -> None:
        """Reset both ends, soon."""
        self._cut.set()

    async def run(self, server: tuple[str, int]) -> None:
        """Connect to the server and forward. Never raises for what the ends do to each other."""
        reset = True
        try:
            async with asyncio.TaskGroup() as group:
                cutter = group.create_task(self._wait_for_cut())
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.get_running_loop().sock_connect(self._ends["up"][1], server)
                pumps = [group.create_task(self._pump(way)) for way in self._ends]
                await asyncio.wait(pumps)
                cutter.cancel()
            reset = False
        except* (Cut, OSError):
            pass  # whatever happened to one end, the reset below tells the other
        finally:
            for end in self._ends["up"]:
                _close(end, reset=reset)

    async def _wait_for_cut(self) -> None:
        await self._cut.wait()
        raise Cut

    async def _pump(self, way: Way) -> None:
        """Until the sender ends; then tell the receiver."""
        loop = asyncio.get_running_loop()
        source, target = self._ends[way]
        recent = b""
        while chunk := await loop.sock_recv(source, CHUNK_BYTES):
            await self._gates[way].wait()
            for trip in self._trips:
                allowed = trip.inspect(way, recent, chunk)
                if allowed is not None:
                    await loop.sock_sendall(target, chunk[:allowed])
                    await _sent(target)
                    raise Cut
            await loop.sock_sendall(target, chunk)
            recent = (recent + chunk)[-RECENT_BYTES_MAX:]
        await self._gates[way].wait()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


async def _sent(end: socket.socket) -> None:
    """Wait until the peer's kernel has everything: a reset throws away what is still in our send buffer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SENT_TIMEOUT_S):
            # The kernel tells nobody when its buffer is empty: it has to be asked.
            while struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, b"\0\0\0\0"))[0] > 0:  # noqa: ASYNC110
                await asyncio.sleep(SENT_STEP_S)


def _close(end: socket.socket, *, reset: bool) -> None:
    if reset:
        with contextlib.suppress(OSError):
            # Lingering for zero seconds: close() sends RST instead of FIN.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
