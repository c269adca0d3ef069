"""`/v1/results`: collected results over HTTP. The door is that of the verbs; nothing is decided here.

The collector is opened when it is first asked for, and at the start where it has something to resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from holdfast.core.requests.results import AbandonResultRequest, StartResultRequest
from holdfast.errors import BadBody, HoldfastError, InternalError, Invalid
from holdfast.faces.api.authenticator import Authenticator
from holdfast.services.collect.service import PAGE_COUNT_MAX, CollectService, LocalResults, Results
from holdfast.telemetry.events import emit

BODY_BYTES_MAX = 6_000_000

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LazyCollector:
    """A collector that is opened once, when somebody needs it. `close` ends it."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[CollectService]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._open: AbstractAsyncContextManager[CollectService] | None = None
        self._results: Results | None = None
        self._closed = False

    async def results(self) -> Results:
        """The results. Raises CannotStart with what to configure."""
        async with self._lock:
            if self._closed:
                raise Invalid("collector is closed; the server is stopping")
            if self._results is None:
                opening = self._make()
                self._results = LocalResults(await opening.__aenter__())
                self._open = opening
            return self._results

    async def close(self) -> None:
        """End it, if it was opened."""
        async with self._lock:
            self._closed = True
            if self._open is not None:
                opened, self._open = self._open, None
                await opened.__aexit__(None, None, None)


def routes(opening: LazyCollector, *, door: Authenticator) -> list[Route]:
    """The routes below /v1/results."""

    def checked(handle: Callable[[Request, Results], Coroutine[Any, Any, Response]], need: str) -> Handler:
        async def answer(request: Request) -> Response:
            door.check(request.scope, need)
            try:
                return await handle(request, await opening.results())
            except HoldfastError:
                raise
            except Exception as error:
                emit("server.bug", method=request.url.path, error=repr(error), traceback=error)
                raise InternalError("internal error; the server's log has the details") from error

        return answer

    return [Route(path, checked(handle, need), methods=[method]) for path, method, handle, need in PATHS]


async def _page(request: Request, results: Results) -> Response:
    limit = request.query_params.get("limit", str(PAGE_COUNT_MAX))
    if not (limit.isascii() and limit.isdigit()):
        raise Invalid(f"limit is invalid; {limit[:20]!r} is not a whole number")
    return _json(await results.page(after=request.query_params.get("after", ""), limit=int(limit[:9])))


async def _start(request: Request, results: Results) -> Response:
    return _json(await results.start(await _body(request, StartResultRequest)))


async def _show(request: Request, results: Results) -> Response:
    return _json(await results.show(request.path_params["id"]))


async def _gaps(request: Request, results: Results) -> Response:
    return _json(await results.gaps(request.path_params["id"]))


async def _abandon(request: Request, results: Results) -> Response:
    wanted = await _body(request, AbandonResultRequest)
    return _json(await results.abandon(request.path_params["id"], reason=wanted.reason))


async def _stream(request: Request, results: Results) -> Response:
    chunks = results.stream(request.path_params["id"], request.path_params["series"])
    # The first bytes before the status: what is wrong with the request can still be said.
    first = await anext(chunks, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(body(), media_type="application/octet-stream")


async def _body(request: Request, kind: type[T]) -> T:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > BODY_BYTES_MAX:
            raise Invalid(f"body is too large; {BODY_BYTES_MAX} bytes is the maximum")
    try:
        return msgspec.json.decode(bytes(content) or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"request is invalid; {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"body is invalid; {error}") from error


def _json(value: msgspec.Struct) -> Response:
    return Response(_encode(value), media_type="application/json")


#: Path, method, what answers, and its line in the table of roles; the more specific path stands first.
PATHS: list[tuple[str, str, Callable[[Request, Results], Coroutine[Any, Any, Response]], str]] = [
    ("/v1/results", "GET", _page, "results.list"),
    ("/v1/results", "POST", _start, "results.start"),
    ("/v1/results/{id}/gaps", "GET", _gaps, "results.gaps"),
    ("/v1/results/{id}/abandon", "POST", _abandon, "results.abandon"),
    ("/v1/results/{id}/{series}", "GET", _stream, "results.read"),
    ("/v1/results/{id}", "GET", _show, "results.show"),
]
