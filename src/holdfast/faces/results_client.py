"""The results of a server, for the command line: the same methods as in process."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, TypeVar

import httpx2
import msgspec

from holdfast.core.requests.queue import ErrorReply
from holdfast.core.requests.results import AbandonResultRequest, GapsReply, ResultsReply, ResultView, StartResultRequest
from holdfast.errors import CannotStart, HoldfastError, Invalid, TryAgain, Unauthorized, Unreachable
from holdfast.faces.client import authorization
from holdfast.services.collect.service import PAGE_COUNT_MAX

TIMEOUT_S = 60.0
_ERRORS: dict[int, type[HoldfastError]] = {400: Invalid, 454: TryAgain}

T = TypeVar("T")


class ResultsClient:
    """`async with ResultsClient(url, token) as results:`."""

    def __init__(self, url: str, token: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        self._url = f"{url.rstrip('/')}/v1/results"
        self._client = httpx2.AsyncClient(
            headers={"content-type": "application/json", **authorization(token)},
            timeout=TIMEOUT_S,
            verify=tls if tls is not None else True,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def start(self, request: StartResultRequest) -> ResultView:
        return await self._call("POST", "", ResultView, msgspec.json.encode(request))

    async def page(self, *, after: str = "", limit: int = PAGE_COUNT_MAX) -> ResultsReply:
        return await self._call("GET", f"?after={after}&limit={limit}", ResultsReply)

    async def show(self, transaction: str) -> ResultView:
        return await self._call("GET", f"/{transaction}", ResultView)

    async def gaps(self, transaction: str) -> GapsReply:
        return await self._call("GET", f"/{transaction}/gaps", GapsReply)

    async def abandon(self, transaction: str, *, reason: str) -> ResultView:
        body = msgspec.json.encode(AbandonResultRequest(reason=reason))
        return await self._call("POST", f"/{transaction}/abandon", ResultView, body)

    async def stream(self, transaction: str, series: str) -> AsyncGenerator[bytes, None]:
        try:
            async with self._client.stream("GET", f"{self._url}/{transaction}/{series}") as answer:
                if answer.status_code != 200:
                    raise _error_of(answer.status_code, await answer.aread())
                async for chunk in answer.aiter_bytes():
                    yield chunk
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    async def _call(self, method: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        try:
            answer = await self._client.request(method, self._url + path, content=body)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise _error_of(answer.status_code, answer.content)
        return msgspec.json.decode(answer.content, type=kind)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"server cannot be reached; {self._url}: {str(error) or type(error).__name__}")


def _error_of(status: int, content: bytes) -> HoldfastError:
    try:
        reply = msgspec.json.decode(content, type=ErrorReply)
    except msgspec.DecodeError:
        return Unreachable(f"server answered strangely; HTTP {status}, is this a Holdfast server?")
    if status == 401:
        return Unauthorized()
    if reply.code_text == CannotStart.code_text:
        return CannotStart(reply.message)
    return _ERRORS.get(status, HoldfastError)(reply.message)
