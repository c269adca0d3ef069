"""`holdfast.Client`: the queues of a server, with the same methods as in process."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Self

import httpx2
import msgspec

from holdfast.core.checks import REQUEST_TIMEOUT_US_MAX
from holdfast.core.requests.queue import VERBS, ErrorReply, Request
from holdfast.errors import (
    BadBody,
    BadIds,
    Forbidden,
    HoldfastError,
    InternalError,
    Invalid,
    NothingToLease,
    QueueMissing,
    ShuttingDown,
    TryAgain,
    Unauthorized,
    UnknownMethod,
    Unreachable,
)
from holdfast.services.queue.queues import Queues

CONNECT_TIMEOUT_S = 10.0
#: A server answers within the request's own timeout; this much longer, and the answer is taken as lost.
ANSWER_TIMEOUT_S = REQUEST_TIMEOUT_US_MAX / 1_000_000 + 30
CONNECTIONS_COUNT_MAX = 1_000

_encode = msgspec.json.Encoder().encode
_error = msgspec.json.Decoder(ErrorReply)
_replies = {name: msgspec.json.Decoder(verb.reply) for name, verb in VERBS.items()}
_ERRORS: dict[int, type[HoldfastError]] = {
    400: Invalid,
    403: Forbidden,
    454: TryAgain,
    455: BadBody,
    500: InternalError,
    501: UnknownMethod,
}


class Client(Queues):
    """`async with holdfast.Client("http://127.0.0.1:8470", token) as queues:`."""

    outlives_its_server = True

    def __init__(self, url: str, token: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        self._http = _Http(url, token, tls)
        super().__init__(self._http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.client.aclose()


class _Http:
    """Calls verbs over HTTP."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None) -> None:
        self._url = url.rstrip("/")
        self.client = httpx2.AsyncClient(
            headers={"content-type": "application/json", **authorization(token)},
            timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(
                max_connections=CONNECTIONS_COUNT_MAX, max_keepalive_connections=CONNECTIONS_COUNT_MAX
            ),
            verify=tls if tls is not None else True,
            trust_env=False,
        )

    async def call(self, verb: str, request: Request) -> msgspec.Struct:
        try:
            answer = await self.client.post(f"{self._url}/v1/{verb}", content=_encode(request))
        except httpx2.InvalidURL as error:
            raise Invalid(f"server URL is invalid; '{self._url}': {error}") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(
                f"server cannot be reached; {self._url}: {str(error) or type(error).__name__}, nothing was sent"
            ) from error
        except httpx2.HTTPError as error:
            raise Unreachable(
                f"server cannot be reached; {self._url}: {str(error) or type(error).__name__}, the outcome is unknown"
            ) from error
        if answer.status_code == 200:
            reply: msgspec.Struct = _replies[verb].decode(answer.content)
            return reply
        raise _error_of(answer.status_code, answer.content, request)


def authorization(token: str) -> dict[str, str]:
    """The header that carries a token. Raises Invalid, which never shows the token."""
    token = token.strip()  # a file ends with a newline
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise Invalid("token is invalid; it is not one word of plain characters, check where it came from")
    return {"authorization": f"Bearer {token}"}


def _error_of(status: int, content: bytes, request: Request) -> HoldfastError:
    try:
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
    if status == 400 and reply.message.startswith("queue does not exist; "):
        return QueueMissing(getattr(request, "queue_name", ""))
    return _ERRORS.get(status, HoldfastError)(reply.message)
