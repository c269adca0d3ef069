"""One connection through the proxy: two sockets and a pump for each direction."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Mapping, Sequence

from holdfast.proof.trips import RECENT_BYTES_MAX, Trip, Way

CHUNK_BYTES = 1 << 16
SENT_TIMEOUT_S = 1.0
SENT_STEP_S = 0.001


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
        delay_s: Mapping[Way, float],
        trips: Sequence[Trip],
    ) -> None:
        self._ends: dict[Way, tuple[socket.socket, socket.socket]] = {
            "up": (client, server),
            "down": (server, client),
        }
        self._gates = gates
        self._delay_s = delay_s
        self._trips = trips
        self._half_closed: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._cut = asyncio.Event()

    def cut(self) -> None:
        """Reset both ends, soon."""
        self._cut.set()

    def half_close(self, way: Way) -> None:
        """End one direction, soon."""
        self._half_closed[way].set()

    async def run(self, server: tuple[str, int], *, connect_timeout_s: float) -> None:
        """Connect to the server and forward. Never raises for what the ends do to each other."""
        reset = True
        try:
            async with asyncio.TaskGroup() as group:
                cutter = group.create_task(self._wait_for_cut())
                async with asyncio.timeout(connect_timeout_s):
                    await asyncio.get_running_loop().sock_connect(self._ends["up"][1], server)
                pumps = [group.create_task(self._direction(way)) for way in self._ends]
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

    async def _direction(self, way: Way) -> None:
        """Pump until the sender ends, or this direction is half-closed; then tell the receiver."""
        pump = asyncio.create_task(self._pump(way))
        half_closed = asyncio.create_task(self._half_closed[way].wait())
        try:
            await asyncio.wait([pump, half_closed], return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, half_closed):
                task.cancel()
            await asyncio.wait([pump, half_closed])
        with contextlib.suppress(OSError):
            self._ends[way][1].shutdown(socket.SHUT_WR)

    async def _pump(self, way: Way) -> None:
        loop = asyncio.get_running_loop()
        source, target = self._ends[way]
        recent = b""
        while chunk := await loop.sock_recv(source, CHUNK_BYTES):
            if self._delay_s[way] > 0:
                await asyncio.sleep(self._delay_s[way])
            await self._gates[way].wait()
            allowed = self._inspect(way, recent, chunk)
            if allowed is not None:
                await loop.sock_sendall(target, chunk[:allowed])
                await _sent(target)
                raise Cut
            await loop.sock_sendall(target, chunk)
            recent = (recent + chunk)[-RECENT_BYTES_MAX:]
        await self._gates[way].wait()

    def _inspect(self, way: Way, recent: bytes, chunk: bytes) -> int | None:
        for trip in self._trips:
            allowed = trip.inspect(way, recent, chunk)
            if allowed is not None:
                return allowed
        return None


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
