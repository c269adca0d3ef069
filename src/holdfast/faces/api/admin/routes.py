"""/admin: every endpoint behind the same door, answering problems by RFC 9457. Roles come from one table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import NAME_CHARACTERS_MAX, clip
from holdfast.core.requests.roles import Caller
from holdfast.errors import (
    BadBody,
    BrokerError,
    Forbidden,
    HoldfastError,
    InternalError,
    Invalid,
    NotFound,
    ShuttingDown,
    TryAgain,
)
from holdfast.faces.api.admin import books, letters, queues, redrives, session
from holdfast.faces.api.admin.desk import AdminContext, Endpoint
from holdfast.faces.api.admin.views import Problem
from holdfast.faces.api.authenticator import Authenticator
from holdfast.telemetry.events import emit
from holdfast.wiring import VaultApp

BODY_BYTES_MAX = 96 * 1024 * 1024
PROBLEM = "application/problem+json"
ID_DIGITS_MAX = 20
ENDPOINTS: tuple[Endpoint, ...] = (
    *queues.ENDPOINTS,
    *letters.ENDPOINTS,
    *redrives.ENDPOINTS,
    *books.ENDPOINTS,
    *session.ENDPOINTS,
)

_encode = msgspec.json.Encoder().encode


class _Any(Convertor[str]):
    """Any text, slashes and line breaks included: a queue may be called anything."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any", _Any())


def admin_routes(office: VaultApp, door: Authenticator) -> list[Route]:
    """The routes of all endpoints; one path takes all of its methods."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [
        Route(_matching(path), _answering(office, door, methods), methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        for path, methods in paths.items()
    ]
    elsewhere = _answering(office, door, {})
    return [*routes, Route("/admin/{path:any}", elsewhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]


def _matching(path: str) -> str:
    """Names may hold a slash; ids and hashes may not."""
    return path.replace("{queue}", "{queue:any}").replace("{name}", "{name:any}").replace("{key}", "{key:any}")


def _answering(
    office: VaultApp, door: Authenticator, methods: dict[str, Endpoint]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await _answered(office, door, methods, request)
        except HoldfastError as error:
            return problem(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - no stack trace leaves the server; the log has it
            emit("server.bug", method=request.url.path, error=repr(error), traceback=error)
            return problem(InternalError("internal error; the server's log has the details"))

    return answer


async def _answered(office: VaultApp, door: Authenticator, methods: dict[str, Endpoint], request: Request) -> Response:
    caller = door.caller(request.scope)
    endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
    if endpoint is None:
        if not methods:
            raise NotFound(f"there is nothing here; '{request.url.path[:200]}' is no path of /admin")
        body = Problem(
            type="about:blank", title="Method Not Allowed", status=405, detail=f"use {', '.join(sorted(methods))}"
        )
        return Response(_encode(body), 405, media_type=PROBLEM, headers={"allow": ", ".join(sorted(methods))})
    try:
        door.check_page_of_session(request.scope)
        need = office.needs[endpoint.name]
        if caller.role < need:
            raise Forbidden(f"forbidden; '{endpoint.name}' needs the role {need.word}, you are {caller.role.word}")
        desk = AdminContext(request, office, door, caller, action=endpoint.name, body=await _body(request))
        reply = await endpoint.handler(desk)
    except Forbidden as error:
        if endpoint.is_change:
            await _note_denied(office, caller, endpoint, request, error)
        raise
    if isinstance(reply, Response):
        return reply
    return Response(_encode(reply), media_type="application/json")


async def _note_denied(
    office: VaultApp, caller: Caller, endpoint: Endpoint, request: Request, error: Forbidden
) -> None:
    """Who was refused what, and of which letter or queue, as far as the path says."""
    act = LedgerAct(actor=caller.name, action=endpoint.name, origin=caller.origin, detail=error.message)
    names = request.path_params
    letter = names.get("id", "") if endpoint.path.startswith("/admin/letters/") else ""
    await office.vault.ledger.append(
        act,
        outcome="denied",
        queue=clip(names.get("queue", ""), NAME_CHARACTERS_MAX),
        letters=letter if letter.isascii() and letter.isdigit() and len(letter) < ID_DIGITS_MAX else "",
    )


async def _body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise Invalid(f"body is too large; more than {BODY_BYTES_MAX} bytes were sent")
        chunks.append(chunk)
    return b"".join(chunks)


def problem(error: HoldfastError) -> Response:
    """An error as RFC 9457 has it; its type is the constant part of its text."""
    status = _status(error)
    constant, _, _ = error.message.partition(";")
    body = Problem(
        type=f"urn:holdfast:{constant.strip().lower().replace(' ', '-')[:80]}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        ids=list(error.ids),
    )
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(_encode(body), status, media_type=PROBLEM, headers=headers)


def _status(error: HoldfastError) -> int:
    match error:
        case BrokerError():
            return 502
        case BadBody():
            return 400
        case ShuttingDown() | TryAgain():
            return 503
    return error.code if 400 <= error.code < 600 and error.code in HTTPStatus.__members__.values() else 500
