"""`holdfast.Client`: the queues of a server, with the same methods as in process; and every other request by `call`.

The services of this process answer requests too, the vault by `VaultClient`: with the same checks, roles and rows in
the ledger. Either way an answer or an error is the same.
"""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any, Protocol, Self, TypeVar, cast

import httpx2
import msgspec

from holdfast.core.checks import REQUEST_TIMEOUT_US_MAX, without_passwords
from holdfast.core.requests.declare import JSON, Caller, Request, Stream, WireRequest, from_wire, to_wire
from holdfast.core.requests.queue import ErrorReply
from holdfast.core.requests.vault import Problem
from holdfast.errors import (
    BadBody,
    BadIds,
    CannotStart,
    Conflict,
    Forbidden,
    HoldfastError,
    InternalError,
    Invalid,
    NotFound,
    NothingToLease,
    QueueMissing,
    ShuttingDown,
    TryAgain,
    Unauthorized,
    UnknownMethod,
    Unreachable,
)
from holdfast.services.queue.queues import Queues
from holdfast.services.vault.admin import VaultApp

CONNECT_TIMEOUT_S = 10.0
#: A server answers within the request's own timeout; this much longer, and the answer is taken as lost.
ANSWER_TIMEOUT_S = REQUEST_TIMEOUT_US_MAX / 1_000_000 + 30
CONNECTIONS_COUNT_MAX = 1_000

R = TypeVar("R")

_error = msgspec.json.Decoder(ErrorReply)
_problem = msgspec.json.Decoder(Problem)
_ERRORS = {kind.code: kind for kind in (Invalid, Forbidden, TryAgain, BadBody, InternalError, UnknownMethod)}
_PROBLEMS = {kind.code: kind for kind in (Invalid, Forbidden, NotFound, Conflict)}


class RequestClient(Protocol):
    """Who answers requests, here or far away."""

    async def call(self, request: Request[R]) -> R:
        """Raises HoldfastError."""


class Client(Queues):
    """`async with holdfast.Client("http://127.0.0.1:8470", token) as queues:`."""

    outlives_its_server = True

    def __init__(self, url: str, token: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(self)
        self._url = url.rstrip("/")
        self._http = httpx2.AsyncClient(
            headers={"content-type": JSON, **authorization(token)},
            timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(
                max_connections=CONNECTIONS_COUNT_MAX, max_keepalive_connections=CONNECTIONS_COUNT_MAX
            ),
            verify=tls or not url.lower().startswith("http:"),  # nobody to trust without TLS: to read them takes long
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def call(self, request: Request[R]) -> R:
        """Ask anything that the server answers: the verbs, results, and what /admin has."""
        declared, written = request.declared, to_wire(request)
        url = f"{self._url}{written.target(declared.path)}"
        if declared.reply is Stream:
            return cast(R, self._stream(written, url, request))
        try:
            answer = await self._http.request(written.method, url, content=written.body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise _error_of(answer.status_code, answer.content, request)
        reply = answer.content if declared.reply is bytes else _decoder(declared.reply).decode(answer.content)
        return cast(R, reply)

    async def _stream(self, written: WireRequest, url: str, request: Request[Any]) -> Stream:
        try:
            async with self._http.stream(written.method, url, content=written.body) as answer:
                if answer.status_code != 200:
                    raise _error_of(answer.status_code, await answer.aread(), request)
                async for chunk in answer.aiter_bytes():
                    yield chunk
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> HoldfastError:
        if isinstance(error, httpx2.InvalidURL):
            return Invalid(f"server URL is invalid; '{without_passwords(self._url)}': {error}")
        is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        outcome = "nothing was sent" if is_unsent else "the outcome is unknown"
        place, why = without_passwords(self._url), str(error) or type(error).__name__
        unreachable = Unreachable(f"server cannot be reached; {place}: {why}, {outcome}")
        unreachable.is_unsent = is_unsent
        return unreachable


class VaultClient:
    """The vault of this process, asked by somebody."""

    def __init__(self, vault: VaultApp, caller: Caller) -> None:
        self._vault = vault
        self._caller = caller

    async def call(self, request: Request[R]) -> R:
        """What the vault answers. Raises HoldfastError as a server would tell it."""
        written = to_wire(request)
        try:  # what cannot be sent to a server is refused here too
            checked = from_wire(request.declared, written.names, written.query.items(), written.body)
            return await self._vault.call(checked, self._caller)
        except HoldfastError as error:
            raise _error_of_problem(Problem.of(error)) from error


@cache
def _decoder(reply: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(reply)


def authorization(token: str) -> dict[str, str]:
    """The header that carries a token. Raises Invalid, which never shows the token."""
    token = token.strip()  # a file ends with a newline
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise Invalid("token is invalid; it is not one word of plain characters, check where it came from")
    return {"authorization": f"Bearer {token}"}


def _error_of(status: int, content: bytes, request: Request[Any]) -> HoldfastError:
    try:
        if request.declared.path.startswith("/admin/"):
            return _error_of_problem(_problem.decode(content))
        reply = _error.decode(content)
    except msgspec.DecodeError:
        return Unreachable(f"server answered strangely; HTTP {status}, is this a Holdfast server?")
    if status == 401:
        return Unauthorized()
    if status == 453:
        return ShuttingDown()
    if ids := reply.details.get("ids"):
        return BadIds(reply.message, ids=ids)
    if reply.message == str(NothingToLease()):
        return NothingToLease()
    if reply.code_text == CannotStart.code_text:
        return CannotStart(reply.message)
    if status == 400 and reply.message.startswith("queue does not exist; "):
        return QueueMissing(getattr(request, "queue_name", ""))
    return _ERRORS.get(status, HoldfastError)(reply.message)


def _error_of_problem(problem: Problem) -> HoldfastError:
    if problem.status == 401:
        return Unauthorized()
    error = _PROBLEMS.get(problem.status, HoldfastError)(problem.detail)
    error.code, error.code_text = problem.status, problem.title
    return error
