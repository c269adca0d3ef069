"""The HTTP server: it listens, keeps the connections, looks at their deadlines, and ends them when it stops."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ssl import SSLContext

from msgspec import Struct
from starlette.types import ASGIApp

from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.faces.api.connection import HttpConnection
from holdfast.faces.api.head import RequestHead
from holdfast.faces.api.verbs import Verbs
from holdfast.settings import TIMEOUTS, Settings
from holdfast.telemetry.events import emit

BACKLOG = 2048
STOP_TIMEOUT_S = 30
#: How often deadlines are looked at.
LOOK_S = 0.5
#: How often it is told that connections were ended to make room.
TELL_S = 10.0
#: Files that a server needs beside those of its storages: brokers, blobs, logs.
FILES_COUNT = 64
#: So many connections more than there may be are for those who ask how the server is.
RESERVE_COUNT = 8


class HttpLimits(Struct, frozen=True, kw_only=True):
    """What a client may take, and for how long."""

    connections_max: int = 1_000
    bodies_bytes_max: int = 256_000_000
    first_byte_timeout_s: float = 10.0
    headers_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_bytes_per_s_min: int = 10_000
    idle_timeout_s: float = 75.0

    @classmethod
    def of(cls, settings: Settings) -> HttpLimits:
        """As the settings say, and never more connections than there can be: storages need files, too."""
        files = FILES_COUNT + 3 * settings.open_files_max * len(settings.storages)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
        timeouts = {f"{key}_s": parse_duration(getattr(settings, key), what=key) / SECOND_US for key in TIMEOUTS}
        return cls(
            connections_max=min(settings.connections_max, max(limit - files, limit // 4)),
            bodies_bytes_max=settings.bodies_bytes_max,
            body_bytes_per_s_min=settings.body_bytes_per_s_min,
            **timeouts,
        )


class HttpServer:
    """The connections of one listening socket. `app` serves what is no verb; `larger_bodies` says how large a body may
    be that a stranger may not send."""

    def __init__(
        self,
        app: ASGIApp,
        verbs: Verbs,
        larger_bodies: Callable[[RequestHead], int],
        *,
        limits: HttpLimits | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        self.app = app
        self.verbs = verbs
        self.larger_bodies = larger_bodies
        self.limits = limits or HttpLimits()
        self._tls = tls
        self.scheme = "https" if tls else "http"
        self.address: tuple[str, int] | None = None
        self.is_closing = False
        self.loop = asyncio.get_running_loop()
        self.now_s = self.loop.time()  # as of the last look
        #: Connections that wait for a request, the one that waits longest first: of clients that have shown no token,
        self.strangers: dict[HttpConnection, None] = {}
        #: and of those that have.
        self.idle: dict[HttpConnection, None] = {}
        self.held_bytes = 0  # of requests that are not answered yet, and of large answers that are not taken yet
        self._connections: set[HttpConnection] = set()
        self._none_left = asyncio.Event()
        self._ended_count = 0  # to make room, since that was told
        self._told_at_s = -TELL_S

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve until the end of this; then answer whoever waits, and close."""
        self.address = listener.getsockname()[:2]
        listener.setblocking(False)
        listener.listen(BACKLOG)
        stop_accepting: Callable[[], object]
        if self._tls is None:
            server = await self.loop.create_server(lambda: HttpConnection(self), sock=listener, backlog=BACKLOG)
            stop_accepting = server.close
        else:
            stop_accepting = self.loop.create_task(self._accept(listener, self._tls)).cancel
        look = self.loop.create_task(self._look())
        try:
            yield
        finally:
            stop_accepting()
            await self._stop()
            look.cancel()

    async def _accept(self, listener: socket.socket, tls: SSLContext) -> None:
        """Clients that begin with TLS are counted from the first moment: some never go on."""
        while True:
            try:
                client, _ = await self.loop.sock_accept(listener)
            except OSError:  # gone already, or there are no more files: others end
                await asyncio.sleep(LOOK_S)
                continue
            connection = HttpConnection(self)
            connection.beginning = self.loop.create_task(self._begin_tls(connection, client, tls))
            self.add(connection)

    async def _begin_tls(self, connection: HttpConnection, client: socket.socket, tls: SSLContext) -> None:
        try:
            await self.loop.connect_accepted_socket(
                lambda: connection, client, ssl=tls, ssl_handshake_timeout=self.limits.headers_timeout_s
            )
        except (OSError, asyncio.CancelledError) as error:
            client.close()
            self.discard(connection)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            connection.beginning = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.now_s = self.loop.time()
            self._tell()
            for connection in list(self._connections):
                if connection.deadline_s < self.now_s:
                    self._expire(connection)

    def _expire(self, connection: HttpConnection) -> None:
        try:
            connection.expire()
        except Exception as error:  # noqa: BLE001 - the deadlines of all others are looked at all the same
            emit("server.bug", method="a deadline", error=repr(error), traceback=error)
            self.discard(connection)

    async def _stop(self) -> None:
        self.is_closing = True
        for connection in list(self._connections):
            if connection.beginning is None:
                connection.stop()
            else:
                connection.abort()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while self._connections:
                    self._none_left.clear()
                    await self._none_left.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()

    # --- how many there may be --------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether what is left is for those who ask how the server is."""
        return len(self._connections) > self.limits.connections_max

    def add(self, connection: HttpConnection) -> None:
        """A client has come; where there is no room, the one that has been idle longest goes. Strangers leave a
        quarter to those with a token, who leave an eighth to newcomers."""
        if connection in self._connections:
            return  # since it began TLS
        self._connections.add(connection)
        self.strangers[connection] = None
        most, strangers = self.limits.connections_max, len(self.strangers)
        if strangers <= most - most // 4 and len(self._connections) <= most:
            return
        if self.idle and strangers <= most // 8:
            self._end(next(iter(self.idle)))
        elif strangers > RESERVE_COUNT or len(self._connections) > most + RESERVE_COUNT:
            self._end(next(iter(self.strangers)))

    def _end(self, connection: HttpConnection) -> None:
        self.discard(connection)
        connection.abort()
        self._ended_count += 1
        self._tell()

    def _tell(self) -> None:
        if self._ended_count and self.now_s >= self._told_at_s + TELL_S:
            emit("server.crowded", count=self._ended_count, most=self.limits.connections_max)
            self._ended_count, self._told_at_s = 0, self.now_s

    def discard(self, connection: HttpConnection) -> None:
        """It has gone."""
        self._connections.discard(connection)
        self.strangers.pop(connection, None)
        self.idle.pop(connection, None)
        if not self._connections:
            self._none_left.set()
