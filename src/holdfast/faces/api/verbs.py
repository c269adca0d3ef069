"""`POST /v1/<noun>.<verb>`: a bare ASGI application, because this is the hot path.

It reads the body within its limit, checks the token, turns JSON into a request, calls the service and turns the reply
or the error into JSON. It decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from holdfast.core.requests.declare import Role
from holdfast.core.requests.queue import VERBS, ErrorReply, LeaseReply, LeaseRequest, QueueRequest
from holdfast.errors import BadBody, Forbidden, HoldfastError, InternalError, Invalid, UnknownMethod
from holdfast.faces.api.authenticator import Authenticator
from holdfast.services.queue.service import QueueService
from holdfast.telemetry.events import emit
from holdfast.telemetry.prometheus import Requests

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: An oversized body is read to its end, so that the client hears why; one that never ends is cut off here.
DRAINED_BYTES_MAX = 1 << 30

_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])  # raw: a number that is too large is JSON all the same
_JSON_HEADER = (b"content-type", b"application/json")


class Verbs:
    """The verbs of the queue service over HTTP."""

    def __init__(
        self,
        service: QueueService,
        *,
        authenticator: Authenticator,
        body_bytes_max: Mapping[str, int],
        requests: Requests,
    ) -> None:
        self._service = service
        self._authenticator = authenticator
        self._requests = requests
        self._decoders = {name: verb.decoder for name, verb in VERBS.items()}
        self._roles = {name: verb.needs(authenticator.redrive_role) for name, verb in VERBS.items()}
        self._limits = {name: body_bytes_max[verb.limit] for name, verb in VERBS.items()}
        self._default_limit = body_bytes_max["other"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        verb: str = scope["path"].removeprefix("/v1/")
        known = verb if verb in VERBS else "unknown"
        try:
            reply = await self._reply(verb, scope, receive)
        except _Disconnected:
            self._requests.count(known, 499, time.perf_counter() - started_s)
            return
        except HoldfastError as error:
            await _send(send, error.code, error_body(error))
            self._requests.count(known, error.code, time.perf_counter() - started_s)
            return
        await _send(send, 200, reply)
        self._requests.count(known, 200, time.perf_counter() - started_s)

    async def _reply(self, verb: str, scope: Scope, receive: Receive) -> bytes:
        # What nobody has declared takes an admin.
        caller = self._authenticator.check(scope, self._roles.get(verb, Role.ADMIN))
        body = await _read(receive, self._limits.get(verb, self._default_limit))
        if scope["method"] != "POST":
            raise Invalid(f"method is invalid; use POST, not {scope['method']}")
        if (decoder := self._decoders.get(verb)) is None:
            raise UnknownMethod(f"method is unknown; there is no '{verb}'")
        request = _decode(decoder, body)
        if caller.queues and not caller.may_touch(getattr(request, "queue_name", "")):
            raise Forbidden(f"forbidden; this token is for the queues {', '.join(caller.queues)} alone")
        try:
            if isinstance(request, LeaseRequest):
                return _encode(await self._lease(request, receive))
            return _encode(await self._service.call(request))
        except (HoldfastError, _Disconnected):
            raise
        except Exception as error:
            emit("server.bug", method=verb, error=repr(error), traceback=error)
            raise InternalError("internal error; the server's log has the details") from error

    async def _lease(self, request: LeaseRequest, receive: Receive) -> LeaseReply:
        """The reply; when the client goes away before it, or in the same moment, nothing stays leased."""
        working = asyncio.ensure_future(self._service.call(request))
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _Disconnected
            reply = working.result()
            if leaving.done():
                self._service.manager.give_back(reply)
                raise _Disconnected
            return reply
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


class _Disconnected(Exception):
    """The client went away while it waited."""


def _decode(decoder: msgspec.json.Decoder[QueueRequest[Any]], body: bytes) -> QueueRequest[Any]:
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise BadBody("body is invalid; it is not UTF-8") from error
    except msgspec.ValidationError as error:
        # The typed decoder stops at the first wrong type; whether the whole is JSON is a question of its own.
        _check_object(body)
        raise Invalid(f"request is invalid; {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadBody(f"body is invalid; {error}") from error


def _check_object(body: bytes) -> None:
    """The body is UTF-8, JSON, and an object; raises BadBody."""
    try:
        body.decode()
        _object.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody("body is invalid; a JSON object is expected") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadBody(f"body is invalid; {error}") from error


async def _read(receive: Receive, bytes_max: int) -> bytes:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > bytes_max:
            raise _too_large(len(body), bytes_max)
        return body
    chunks, count = [body], len(body)
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        count += len(message.get("body", b""))
        if count > DRAINED_BYTES_MAX:
            break
        if count <= bytes_max:
            chunks.append(message.get("body", b""))
        else:
            chunks.clear()
    if count > bytes_max:
        raise _too_large(count, bytes_max)
    return b"".join(chunks)


def _too_large(count: int, bytes_max: int) -> Invalid:
    return Invalid(f"body is too large; {count} bytes were sent, {bytes_max} is the maximum")


def error_body(error: HoldfastError) -> bytes:
    """An error as JSON."""
    details = {"ids": list(error.ids)} if error.ids else {}
    return _encode(ErrorReply(code=error.code, code_text=error.code_text, message=error.message, details=details))


async def _send(send: Send, status: int, body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_JSON_HEADER, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
