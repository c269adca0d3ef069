"""One connection of a client: requests are taken from its bytes and served one after the other.

The verbs are called from here and answered in one write; every other request goes to the ASGI application (`AppCall`).
What comes while a request is being served waits in a bounded buffer, and nothing is begun for a client that does not
take its answers. Deadlines are moments that the server looks at now and then: a request makes no timer.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import Invalid
from holdfast.faces.api.head import (
    ChunkedBody,
    RequestHead,
    RequestRefused,
    check_lines,
    check_partial,
    read_head,
)
from holdfast.faces.api.verbs import VerbCall, error_body
from holdfast.telemetry.events import emit

if TYPE_CHECKING:
    from holdfast.faces.api.listener import HttpServer

#: What may wait behind a request that is being served; then the client is no longer read from.
PIPELINED_BYTES_MAX = 64 * 1024
#: A head that is not longer is kept, for the next request that begins with the very same bytes.
KEPT_HEAD_BYTES_MAX = 2048
#: An oversized body is read to its end, so that the client hears why; one that never ends is cut off here.
DRAINED_BYTES_MAX = 1 << 30
#: After the last answer the client may still be sending: closed at once, it might never see that answer.
LINGER_S = 2.0
LINGER_BYTES_MAX = 1 << 20
#: A body of whoever has not shown a token.
STRANGER_BODY_BYTES_MAX = 64 * 1024
#: An answer that is larger counts among the bytes of all connections until its client has taken it.
ANSWER_BYTES_FREE = 64 * 1024

VERBS_PATH = "/v1/"
HEALTH_PATH = "/health"
READS = frozenset({"GET", "HEAD"})
RESULTS_PATH = "/v1/results/"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ConnectionState(enum.IntEnum):
    """What a connection waits for."""

    HEAD = 0
    BODY = 1
    ANSWER = 2
    END = 3  #: of the client's sending, after the last answer


def _status_line(code: int) -> bytes:
    phrase = HTTPStatus(code).phrase if code in HTTPStatus.__members__.values() else ""
    return f"HTTP/1.1 {code} {phrase}\r\n".encode()


STATUS_LINES = {code: _status_line(code) for code in range(100, 600)}
#: A body is what a stranger sent, and an answer may hold a secret: no browser guesses what it is, keeps it, or runs it.
SAFE_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}
SAFE_LINES = b"".join(b"%b: %b\r\n" % header for header in SAFE_HEADERS.items())
#: The heads of the answers of verbs, up to the length.
VERB_HEADS = {
    code: b"%b%bcontent-type: application/json\r\ncontent-length: " % (line, SAFE_LINES)
    for code, line in STATUS_LINES.items()
}


class HttpConnection(asyncio.Protocol):
    """One connection. `deadline_s` is when the server ends it, by the event loop's clock."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._among = server.strangers  # where it is while it waits for a request; later among those with a token
        self.transport = cast(asyncio.Transport, None)  # until connection_made
        self.beginning: asyncio.Task[None] | None = None  # while TLS is being begun
        self.deadline_s = math.inf
        self.is_gone = False
        self._state = ConnectionState.HEAD
        self._pending: bytes | bytearray = b""  # what has come and is in no request yet
        self._is_paused = False  # reading
        self._searched = 0  # so much of it holds no end of a head
        self._advancing = False
        self._base: dict[str, Any] = {}
        self._kept = b""
        self._kept_head = cast(RequestHead, None)
        self._head = cast(RequestHead, None)
        self._call: VerbCall | None = None
        self._chunks: ChunkedBody | None = None
        self._left = 0  # of a body with a length
        self._body = bytearray()
        self._body_at_s = 0.0  # when it began
        self._held = 0  # bytes that count among those of all connections
        self._size = 0  # of the body so far, whether it was kept or not
        self._limit = 0  # of the body
        self._refused: RequestRefused | None = None  # what its request is answered with, once it is there
        self._keeps_alive = True
        self._task: asyncio.Task[None] | None = None
        self._app_call: AppCall | None = None
        self._writable: asyncio.Future[None] | None = None  # while the client does not take its answer
        self._unsent: float = math.inf  # bytes of answers, when last looked at

    # --- the transport ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._base = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": self._server.scheme,
            "root_path": "",
            "server": self._server.address,
            "client": _address(transport.get_extra_info("peername")),
        }
        self.deadline_s = self._server.now_s + self._server.limits.first_byte_timeout_s
        self._server.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        self._server.discard(self)
        self._among.pop(self, None)
        if self._task is None:
            self._hold(0)  # else whoever works on the body holds it until then
        self.resume_writing()
        if self._app_call is not None:
            self._app_call.disconnect()
        elif self._task is not None and self._call is not None and (self._call.waits or self._call.caller is None):
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._pending:
            self._pending = data
        elif isinstance(self._pending, bytearray):
            self._pending += data
        else:
            self._pending = bytearray(self._pending) + data
        if self._state <= ConnectionState.BODY:
            self._advance()
        if self._state is ConnectionState.END:
            self._size += len(data)
            self._pending = b""
            if self._size > LINGER_BYTES_MAX:
                self.transport.abort()
        else:
            self._read_on()

    def _read_on(self) -> None:
        """Read from the client, unless what came has to wait already: for an answer, or until the client takes one."""
        is_waiting = self._state is ConnectionState.ANSWER or self._writable is not None
        most = 0 if self._among is self._server.strangers else PIPELINED_BYTES_MAX
        if self._is_paused != (is_waiting and len(self._pending) > most):
            self._is_paused = not self._is_paused
            (self.transport.pause_reading if self._is_paused else self.transport.resume_reading)()

    def eof_received(self) -> bool:
        return False  # the transport closes: who sends no more is gone

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._server.loop.create_future()
            self._await_reader()
            self._hold(max(self._held, int(self._unsent)), always=True)

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None
            if self._state is ConnectionState.ANSWER:
                self.deadline_s = math.inf
                return
            self._hold(0)
            if self._state is ConnectionState.HEAD:
                self._rest()

    def _await_reader(self) -> None:
        """Answers wait for the client: it has so long to take some more of them."""
        self._unsent = self.transport.get_write_buffer_size()
        self.deadline_s = self._server.now_s + self._server.limits.body_timeout_s

    # --- requests ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take in what has come, until it is used up or a request is being served."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._pending and self._state <= ConnectionState.BODY and self._writable is None and not self.is_gone:
                if self._state is ConnectionState.BODY:
                    self._take_body()
                elif not self._take_head():
                    break
        except RequestRefused as error:
            self._refuse(error)
        finally:
            self._advancing = False

    def _take_head(self) -> bool:
        data = self._pending
        end = data.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            check_partial(data)
            check_lines(data, max(0, self._searched - 1))
            if not self._searched:
                self.deadline_s = self._server.now_s + self._server.limits.headers_timeout_s
            self._searched = len(data)
            if not self._hold(len(data)):
                raise _busy()
            return False
        end, self._searched = end + 4, 0
        head = bytes(data[:end])
        self._pending = data[end:]
        if head != self._kept:
            self._kept_head = read_head(head, self._base)
            self._kept = head if end <= KEPT_HEAD_BYTES_MAX else b""
        self._begin(self._kept_head)
        return True

    def _begin(self, head: RequestHead) -> None:
        """A head is there: who calls, and how much of a body there may be."""
        self._head, path = head, head.path
        self._keeps_alive = head.keeps_alive
        self._size, self._refused, self._limit = 0, None, STRANGER_BODY_BYTES_MAX
        if self._server.is_full and path != HEALTH_PATH:
            raise RequestRefused(503, "server is full; all connections are in use, try again later")
        if path.startswith(VERBS_PATH) and not f"{path}/".startswith(RESULTS_PATH):
            self._call = call = self._server.verbs.begin(path[len(VERBS_PATH) :], head.scope)
            if call.caller is not None:
                self._is_known()
                self._limit = call.body_bytes_max
        else:
            self._call = None
            if head.length is None or head.length > STRANGER_BODY_BYTES_MAX:
                self._limit = self._server.larger_bodies(head)
        length = head.length
        if head.expects and self._call is not None and self._call.caller is None:
            length, self._keeps_alive = 0, False  # told before it sends: whether it then does is not known
        if length == 0:
            self._serve(b"")
        elif length is not None and length == len(self._pending) and length <= self._limit and self._hold(length):
            body, self._pending, self._size = self._pending, b"", length
            self._serve(body)
        else:
            self._expect_body(length)

    def show(self, head: RequestHead) -> None:
        """A request of it was served: with a valid token it goes after those that have shown none."""
        if self._among is self._server.strangers and self._server.verbs.knows(head.scope):
            self._is_known()

    def _is_known(self) -> None:
        self._among.pop(self, None)
        self._among = self._server.idle

    def _hold(self, count: int, *, always: bool = False) -> bool:
        """Whether so many bytes of this connection may be held now, beside those of all others. Half of what all may
        hold is for those with a token. What is there already is held `always`."""
        server, more = self._server, count - self._held
        others = server.held_bytes - self._held
        most = server.limits.bodies_bytes_max // (2 if self._among is server.strangers else 1)
        if more > 0 and others and others + count > most and not always:
            return False
        server.held_bytes += more
        self._held = count
        return True

    def _expect_body(self, length: int | None) -> None:
        self._state = ConnectionState.BODY
        self._chunks, self._left = (ChunkedBody(), 0) if length is None else (None, length)
        self._body_at_s = self._server.now_s
        self.deadline_s = self._body_at_s + self._server.limits.body_timeout_s
        if self._head.expects and not self._pending:
            self.transport.write(CONTINUE)

    def _take_body(self) -> None:
        data = self._pending
        before = len(self._body)
        if self._chunks is not None:
            end = self._chunks.take(data, self._body)
        else:
            piece = data[: self._left]
            self._body += piece
            self._left -= len(piece)
            end = None if self._left else len(piece)
        self._pending = b"" if end is None else data[end:]
        self._size += len(self._body) - before
        if self._call is not None and self._call.caller is None:
            self._body.clear()  # it is refused, whatever its body is
        limits = self._server.limits
        self.deadline_s = self._body_at_s + limits.body_timeout_s + self._size / limits.body_bytes_per_s_min
        if self._size > self._limit or not self._hold(len(self._body)):
            if self._size <= self._limit:
                self._refused, self._limit = _busy(), -1
            self._body.clear()
            self._hold(0)
            if self._size > (DRAINED_BYTES_MAX if self._among is self._server.idle else LINGER_BYTES_MAX):
                self._keeps_alive, end = False, 0
        if end is not None:
            body, self._body = self._body, bytearray()
            self._serve(body)

    def _serve(self, body: bytes | bytearray) -> None:
        """A request is there as a whole."""
        self._state = ConnectionState.ANSWER
        self.deadline_s = math.inf
        if self._among is self._server.idle:
            self._among.pop(self, None)  # a stranger may have to make room also while he is answered
        if self._refused is not None:
            self._refuse(self._refused, closes=self._head.method == "HEAD")
            return
        if self._call is not None:
            work: Coroutine[Any, Any, None] = self._serve_verb(self._call, body if self._call.caller else b"")
        else:
            self._app_call = AppCall(self, self._head, body, self._limit if self._size > self._limit else None)
            work = self._app_call.serve(self._server.app)
        self._task = self._server.loop.create_task(work)

    async def _serve_verb(self, call: VerbCall, body: bytes | bytearray) -> None:
        try:
            code, reply, headers = await self._server.verbs.answer(call, body, self._size)
        except asyncio.CancelledError:
            self._hold(0)
            raise
        except Exception as error:  # noqa: BLE001 - a bug: nobody may wait for ever
            emit("server.bug", method=call.verb, error=repr(error), traceback=error)
            self.answered(whole=False)
            return
        if self.is_gone:
            self.answered()
        elif not self.has_room(reply) and call.reads:
            self._refuse(_busy(), closes=call.method == "HEAD")
        else:
            end = b"\r\n\r\n" if self.keeps_alive else b"\r\nconnection: close\r\n\r\n"
            end = b"".join(f"\r\n{name}: {text}".encode() for name, text in headers.items()) + end if headers else end
            shown = reply if call.method != "HEAD" else b""
            self.transport.write(b"%b%d%b%b" % (VERB_HEADS[code], len(reply), end, shown))
            self.answered()

    def has_room(self, answer: bytes) -> bool:
        """Whether an answer may be held until its client has taken it; a small one always may."""
        return len(answer) <= ANSWER_BYTES_FREE or self._hold(len(answer))

    def answered(self, *, whole: bool = True) -> None:
        """The answer is with the transport, as a whole or not: the next request may begin, if there is to be one."""
        self._task = self._app_call = None
        if self.is_gone or self._writable is None:
            self._hold(0)  # else what is left of the answer is held
        if self.is_gone:
            return
        if not whole:
            self.transport.abort()
        elif self._keeps_alive and not self._server.is_closing:
            self._state = ConnectionState.HEAD
            self._among.pop(self, None)
            self._among[self] = None  # the last of those that may have to make room
            self._rest()
        else:
            self._end()

    def _rest(self) -> None:
        """Between two requests; the next one may be there already."""
        if self._writable is not None:
            return  # nothing is begun for a client that does not take its answers
        self.deadline_s = self._server.now_s + self._server.limits.idle_timeout_s
        if self._pending:
            self._advance()
            self._read_on()

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow; false once said, it is in the head of the answer."""
        if self._server.is_closing:
            self._keeps_alive = False
        return self._keeps_alive

    async def writable(self) -> None:
        """Wait until the client takes more of its answer, or is gone."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    # --- the end ----------------------------------------------------------------------------------------------

    def _refuse(self, error: RequestRefused, *, closes: bool = True) -> None:
        """Answer what cannot be served; where nobody knows what follows it, that is the end of the connection."""
        self._keeps_alive &= not closes
        body = error_body(error)
        retry = b"" if error.code != 503 else b"\r\nretry-after: 1"
        close = b"" if self.keeps_alive else b"\r\nconnection: close"
        self.transport.write(b"%b%d%b%b\r\n\r\n%b" % (VERB_HEADS[error.code], len(body), retry, close, body))
        self.answered()

    def _end(self) -> None:
        """No more requests: what still comes is thrown away until the client has seen the last answer."""
        self._state, self._pending, self._size = ConnectionState.END, b"", 0
        self._body.clear()
        self._unsent = math.inf
        self.deadline_s = self._server.now_s + LINGER_S
        self._read_on()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def stop(self) -> None:
        """The server stops: a request that is being served is answered, and is the last; what has no end ends."""
        if self._app_call is not None and self._app_call.is_endless:
            self._app_call.disconnect()
        if self._state is ConnectionState.HEAD:
            self.deadline_s = self._server.now_s + LINGER_S
            self._state = ConnectionState.END
            self.transport.close()

    def abort(self) -> None:
        """End it at once, also while TLS is being begun."""
        if self.beginning is not None:
            self.beginning.cancel()
        else:
            self.transport.abort()

    def expire(self) -> None:
        """The deadline has passed."""
        if self.transport.get_write_buffer_size() < self._unsent and self._is_sending():
            self._await_reader()
        elif self._is_sending() or self._state is ConnectionState.END:
            self.transport.abort()
        elif self._state is ConnectionState.BODY or self._pending:
            emit("server.slow", what="the body" if self._state is ConnectionState.BODY else "the headers")
            self._refuse(RequestRefused(408, "request is too slow; it was not there in time, nothing was done"))
        else:
            self.transport.close()

    def _is_sending(self) -> bool:
        return self.transport.get_write_buffer_size() > 0


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _busy() -> RequestRefused:
    return RequestRefused(503, "server is busy; the bodies of all requests are too many bytes now, try again")


class AppCall:
    """A request to the ASGI application, and its answer."""

    def __init__(
        self, connection: HttpConnection, head: RequestHead, body: bytes | bytearray, exceeded: int | None
    ) -> None:
        self._connection = connection
        self._head = head
        self._body: bytes | None = bytes(body)
        self._exceeded = exceeded  # the limit that the body was larger than
        self._start: bytes | None = None  # the head of the answer, until something of its body is there
        self._status = 0
        self._chunked = False
        self.is_endless = False
        self._done = asyncio.Event()

    async def serve(self, app: Any) -> None:
        """Have it answered; a bug is told to the log alone."""
        try:
            await app({**self._head.scope, "state": {}}, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - no stack trace leaves the server
            emit("server.bug", method=self._head.path, error=repr(error), traceback=error)
            if not self._status and not self._connection.is_gone:
                await self._send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
                await self._send({"type": "http.response.body"})
        finally:
            self._connection.answered(whole=self._done.is_set())

    def disconnect(self) -> None:
        """Nobody will hear the rest."""
        self._body = None
        self._done.set()

    async def _receive(self) -> dict[str, Any]:
        if self._exceeded is not None:
            raise Invalid(f"body is too large; {self._exceeded} bytes is the maximum")
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._done.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        connection = self._connection
        if connection.is_gone:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._start = self._head_of(message["headers"])
            if self._status < 400:
                connection.show(self._head)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._head.method == "HEAD":
            body = b""
        elif self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        start, self._start = self._start, None
        if start is not None and not connection.has_room(body) and self._head.method in READS and not more:
            start, body = self._busy()
        connection.transport.write(start + body if start is not None else body)
        if more:
            await connection.writable()
        else:
            self._done.set()

    def _busy(self) -> tuple[bytes, bytes]:
        error = _busy()
        self._status, body = error.code, error_body(error)
        told = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), b"retry-after": b"1"}
        return self._head_of(told.items()), body

    def _head_of(self, headers: Any) -> bytes:
        names = {name.lower() for name, _ in headers}
        self.is_endless = any(value.startswith(b"text/event-stream") for _, value in headers)
        parts = [STATUS_LINES[self._status]]
        headers = [*headers, *((name, value) for name, value in SAFE_HEADERS.items() if name not in names)]
        parts += [b"%b: %b\r\n" % (name, value) for name, value in headers]
        has_body = self._status >= 200 and self._status not in (204, 304)
        if has_body and b"content-length" not in names:
            self._chunked = self._head.scope["http_version"] == "1.1"
            if self._chunked:
                parts.append(b"transfer-encoding: chunked\r\n")
        if not self._connection.keeps_alive:
            parts.append(b"connection: close\r\n")
        return b"".join([*parts, b"\r\n"])
