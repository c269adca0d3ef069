"""`/admin` and `/v1/results`: the routes of the declared requests, behind the same authenticator as the verbs; and
`/openapi.json`, which tells of them.

A route decodes its request, has the service answer it, and encodes the reply. `/admin` tells problems by RFC 9457,
`/v1/results` as the verbs do. Nothing is decided here but what is HTTP's own: sessions of browsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import cache
from typing import Any, NamedTuple

import msgspec
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from holdfast.core.moments import moment
from holdfast.core.requests.declare import (
    BYTES,
    HANDLERS,
    JSON,
    Caller,
    Declared,
    Role,
    Stream,
    declared_under,
    from_wire,
    handles,
)
from holdfast.core.requests.queue import VERBS, ErrorReply
from holdfast.core.requests.results import PAGE_COUNT_MAX, ListResults
from holdfast.core.requests.vault import (
    ActionReply,
    CloseSession,
    LinkReply,
    LinkSession,
    OpenSession,
    Problem,
    ReadSession,
    SessionReply,
)
from holdfast.errors import (
    BadMethod,
    Conflict,
    Forbidden,
    HoldfastError,
    InternalError,
    Invalid,
    NotFound,
    Unauthorized,
)
from holdfast.faces.api.authenticator import COOKIE, CSRF_HEADER, Authenticator, Scope, cookie_of, link_path
from holdfast.faces.api.verbs import error_headers
from holdfast.services.collect.service import CollectService
from holdfast.services.vault.access import SESSION_S, WebSession
from holdfast.services.vault.admin import VaultApp, act_of
from holdfast.telemetry.events import emit

PROBLEM = "application/problem+json"
EVENTS = "text/event-stream"
#: As bytes to keep, never as a page to show: a body is whatever a stranger sent.
ATTACHED = {"content-disposition": "attachment"}

ERROR_CODES = {
    400: "The request cannot be carried out as it stands; nothing changed",
    401: "A valid token is required",
    403: "Not allowed",
    404: "No such thing",
    405: "Another HTTP method; the Allow header says which",
    453: "The server is stopping; try another one",
    454: "Nothing was acknowledged; try again",
    455: "The body is not a UTF-8 JSON object",
    500: "A bug; the server's log has the details",
}
PROBLEMS = {
    400: "The request cannot be carried out as it stands; nothing changed",
    401: "A valid token is required",
    403: "The role of this token is too low, or it is for other queues",
    404: "No such thing",
    405: "Another method",
    409: "What the caller saw is no longer so; nothing was done",
    500: "A bug; the server's log has the details",
    502: "The broker said no or cannot be reached",
    503: "The vault cannot be reached, or the server stops; try again",
}
#: Ids stand in one text with commas.
IDS = {"type": "string", "pattern": "^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$"}

_encode = msgspec.json.Encoder().encode

Schemas = dict[Any, dict[str, Any]]
Answer = Callable[[HttpRequest], Awaitable[Response]]


class _Any(PathConvertor):
    """Any text, slashes and line breaks included: a queue may be called anything."""

    regex = "(?s:.+)"


register_url_convertor("any", _Any())


# --- /admin ---------------------------------------------------------------------------------------------------


def admin_routes(vault_app: VaultApp, authenticator: Authenticator) -> list[Route]:
    """The routes of all endpoints; one path takes all of its methods."""
    routes = [
        any_method(_matching(path), _admin(vault_app, authenticator, found))
        for path, found in _by_path("/admin/").items()
    ]
    return [*routes, any_method("/admin/{path:any}", _admin(vault_app, authenticator, {}))]


def any_method(path: str, answer: Answer) -> Route:
    """A route that is asked whatever the method is, and says itself which are meant."""
    route = Route(path, answer)
    route.methods = None
    return route


def _by_path(prefix: str) -> dict[str, dict[str, Declared]]:
    """The endpoints below it, by path and then by method."""
    paths: dict[str, dict[str, Declared]] = {}
    for declared in declared_under(prefix).values():
        paths.setdefault(declared.path, {})[declared.method] = declared
    return paths


def _matching(path: str) -> str:
    """Names may hold a slash; ids and hashes may not."""
    return path.replace("{queue}", "{queue:any}").replace("{name}", "{name:any}").replace("{key}", "{key:any}")


def _admin(vault_app: VaultApp, authenticator: Authenticator, methods: dict[str, Declared]) -> Answer:
    async def answer(http: HttpRequest) -> Response:
        try:
            return await _admin_answer(vault_app, authenticator, methods, http)
        except HoldfastError as error:
            await authenticator.slow_down(http.scope, error)
            return problem(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - no stack trace leaves the server; the log has it
            return problem(_bug(http, error))

    return answer


async def _admin_answer(
    vault_app: VaultApp, authenticator: Authenticator, methods: dict[str, Declared], http: HttpRequest
) -> Response:
    caller = authenticator.caller(http.scope)
    declared = methods.get("GET" if http.method == "HEAD" else http.method)
    if http.method == "POST" and (asked := methods.get("GET")) is not None and asked.limit == "ids":
        declared = asked  # more ids than a URL takes
    if declared is None:
        if not methods:
            raise NotFound(f"there is nothing here; '{http.url.path[:200]}' is no path of /admin")
        raise BadMethod(http.method, list(methods))
    try:
        authenticator.check_page_of_session(http.scope)
        vault_app.check(declared, caller)
        body_sent = b"" if http.method == "GET" else await http.body()
        request = from_wire(declared, http.path_params, http.query_params.multi_items(), body_sent)
        if declared.path.startswith("/admin/session"):
            page: Response = await HANDLERS[declared.request](
                _SessionContext(http, vault_app, authenticator, caller), request
            )
            return page
        reply = await vault_app.answer(request, caller)
        if not declared.is_change:
            authenticator.caller(http.scope)  # it may have waited: for a broker, or for its turn
        if declared.reply is Stream:
            reply = _while_let_in(authenticator, http.scope, caller, reply, whole=declared.media != EVENTS)
        return _response(declared, reply)
    except Forbidden as error:
        await vault_app.note_denied(declared, http.path_params, caller, error)
        raise


def _response(declared: Declared, reply: Any) -> Response:
    if isinstance(reply, bytes):
        return Response(reply, media_type=declared.media, headers=ATTACHED)
    if declared.media == JSON:
        return Response(_encode(reply), media_type=JSON)
    return StreamingResponse(reply, media_type=declared.media, headers=None if declared.media == EVENTS else ATTACHED)


async def _while_let_in(
    authenticator: Authenticator, scope: Scope, caller: Caller, chunks: Stream, *, whole: bool = True
) -> Stream:
    """The chunks, until the caller would not be let in any more; what is to be whole is then cut off, as an error."""
    try:
        with authenticator.while_let_in(scope, caller, is_endless=not whole):
            async for chunk in chunks:
                authenticator.caller(scope)
                yield chunk
    except Unauthorized:
        if whole:
            raise


def problem(error: HoldfastError) -> Response:
    """An error as RFC 9457 has it."""
    body = Problem.of(error)
    headers = {"www-authenticate": "Bearer"} if body.status == 401 else error_headers(error)
    return Response(_encode(body), body.status, media_type=PROBLEM, headers=headers)


def _bug(http: HttpRequest, error: Exception) -> InternalError:
    emit("server.bug", method=http.url.path, error=repr(error), traceback=error)
    return InternalError("internal error; the server's log has the details")


# --- /admin/session: a browser opens a session with a token and is known by a cookie from then on -------------


class _SessionContext(NamedTuple):
    """A request of a browser."""

    http: HttpRequest
    vault_app: VaultApp
    authenticator: Authenticator
    caller: Caller

    def reply(self, session: WebSession) -> bytes:
        """Who the session belongs to."""
        return _encode(
            SessionReply(
                name=self.caller.name,
                role=self.caller.role.word,
                queues=list(self.caller.queues),
                csrf_token=session.csrf,
                expires_at=moment(session.expires_at_us),
            )
        )

    def cookie(self, secret: str, age_s: int) -> dict[str, str]:
        """What makes the browser keep it, or forget it."""
        return {"set-cookie": self.authenticator.cookie(self.http.scope, secret, age_s)}


@handles(OpenSession)
async def _open_session(context: _SessionContext, request: OpenSession) -> Response:
    token = context.authenticator.token_of(context.http.scope)
    sessions = context.authenticator.sessions
    if not token or sessions is None:
        raise Conflict("session is not opened; it is opened with a token in the Authorization header")
    secret, session = sessions.open(token)
    await context.vault_app.vault.ledger.append(act_of(request, context.caller), outcome="done")
    return Response(context.reply(session), media_type=JSON, headers=context.cookie(secret, SESSION_S))


@handles(ReadSession)
async def _show_session(context: _SessionContext, request: ReadSession) -> Response:
    sessions = context.authenticator.sessions
    session = sessions.find(cookie_of(context.http.scope)) if sessions else None
    if session is None:
        raise NotFound("session does not exist; open one with POST /admin/session")
    return Response(context.reply(session), media_type=JSON)


@handles(CloseSession)
async def _close_session(context: _SessionContext, request: CloseSession) -> Response:
    sessions = context.authenticator.sessions
    closed = sessions is not None and sessions.close(cookie_of(context.http.scope))
    if closed:
        await context.vault_app.vault.ledger.append(act_of(request, context.caller), outcome="done")
    return Response(_encode(ActionReply(int(closed))), media_type=JSON, headers=context.cookie("", 0))


@handles(LinkSession)
async def _link_session(context: _SessionContext, request: LinkSession) -> Response:
    authenticator, scope = context.authenticator, context.http.scope
    if not authenticator.needs_token:
        return Response(_encode(LinkReply(path="/", expires_at=None)), media_type=JSON)
    links = authenticator.check_link(scope)
    token = authenticator.token_of(scope)
    if not token:
        raise Conflict("link is not made; it is made with a token in the Authorization header")
    secret, expires_at_us = links.make(token)
    await context.vault_app.vault.ledger.append(act_of(request, context.caller), outcome="done")
    return Response(_encode(LinkReply(path=link_path(secret), expires_at=moment(expires_at_us))), media_type=JSON)


# --- /v1/results ----------------------------------------------------------------------------------------------


class LazyCollector:
    """A collector that is opened once, when somebody needs it. `close` ends it."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[CollectService]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._results: CollectService | None = None
        self._closed = False

    async def results(self) -> CollectService:
        """The results. Raises CannotStart with what to configure."""
        async with self._lock:
            if self._closed:
                raise Invalid("collector is closed; the server is stopping")
            if self._results is None:
                self._results = await self._stack.enter_async_context(self._make())
            return self._results

    async def close(self) -> None:
        """End it, if it was opened."""
        async with self._lock:
            self._closed = True
            await self._stack.aclose()


def results_routes(collector: LazyCollector, authenticator: Authenticator) -> list[Route]:
    """The routes below /v1/results. Where it has nothing to resume, the collector is opened when it is asked for."""
    return [
        any_method(path, _results(collector, authenticator, found)) for path, found in _by_path("/v1/results").items()
    ]


def _results(collector: LazyCollector, authenticator: Authenticator, methods: dict[str, Declared]) -> Answer:
    async def answer(http: HttpRequest) -> Response:
        declared = methods.get("GET" if http.method == "HEAD" else http.method)
        if declared is None:
            authenticator.check(http.scope, Role.VIEWER)
            raise BadMethod(http.method, list(methods))
        caller = authenticator.check(http.scope, declared.role)
        try:
            results = await collector.results()
            if declared.request is ListResults:
                request: Any = _page_of(http)
            else:
                body = (await http.body() or b"{}") if declared.method == "POST" else b""
                query = http.query_params.multi_items() if declared.fields and declared.method == "GET" else ()
                request = from_wire(declared, http.path_params, query, body)
            reply = await results.call(request, caller)
            if not declared.is_change:
                authenticator.caller(http.scope)
            if declared.media != BYTES:
                return _response(declared, reply)
            return await _begun(_while_let_in(authenticator, http.scope, caller, reply))
        except HoldfastError:
            raise
        except Exception as error:
            raise _bug(http, error) from error

    return answer


def _page_of(http: HttpRequest) -> ListResults:
    limit = http.query_params.get("limit", str(PAGE_COUNT_MAX))
    if not (limit.isascii() and limit.isdigit()):
        raise Invalid(f"limit is invalid; {limit[:20]!r} is not a whole number")
    unfinished = http.query_params.get("unfinished", "") == "true"
    return ListResults(after=http.query_params.get("after", ""), unfinished=unfinished, limit=int(limit[:9]))


async def _begun(chunks: AsyncIterator[bytes]) -> Response:
    # The first bytes before the status: what is wrong with the request can still be said.
    first = await anext(chunks, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(body(), media_type=BYTES, headers=ATTACHED)


# --- /openapi.json, made from the same requests and the types that they are decoded with -----------------------


@cache
def document(version: str) -> bytes:
    """The OpenAPI 3.1 document."""
    requests = [*VERBS.values(), *declared_under("/v1/results").values(), *declared_under("/admin/").values()]
    types: list[Any] = [Problem, ErrorReply]
    for declared in requests:
        types += [declared.reply] * (declared.media == JSON) + [declared.body] * (declared.body is not None)
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        _require(schema)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for declared in requests:
        paths.setdefault(declared.path, {})[declared.method.lower()] = _operation(declared, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Holdfast",
                "version": version,
                "summary": "A durable queue with leases, retries and dead queues",
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
                },
            },
        }
    )


def _require(schema: dict[str, Any]) -> None:
    """A field whose default is refused is required, and has none."""
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        if default == ():
            del field["default"]  # none at all is left out, not an empty one
            continue
        size = len(default) if isinstance(default, str | list) else default
        least = field.get("minLength", field.get("minItems", field.get("minimum")))
        if size is not None and least is not None and size < least:
            del field["default"]
            schema["required"] = [*schema.get("required", []), name]


def _operation(declared: Declared, schemas: Schemas) -> dict[str, Any]:
    is_admin = declared.path.startswith("/admin/")
    operation: dict[str, Any] = {
        "operationId": f"admin.{declared.name}" if is_admin else declared.name,
        "summary": declared.sentence.removesuffix("."),
        "responses": _responses(declared, schemas, is_admin=is_admin),
        "security": [{"token": []}, {"session": []}] if is_admin else [{"token": []}],
    }
    if declared.name not in VERBS:
        operation["description"] = _need(declared, is_admin=is_admin)
    if parameters := _parameters(declared):
        operation["parameters"] = parameters
    if declared.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(schemas[declared.body])}
    return operation


def _responses(declared: Declared, schemas: Schemas, *, is_admin: bool) -> dict[str, Any]:
    reply = schemas[declared.reply] if declared.media == JSON else {"type": "string"}
    if declared.media == BYTES and not is_admin:
        reply = {"type": "string", "format": "binary"}
    told, media, kind = (PROBLEMS, PROBLEM, Problem) if is_admin else (ERROR_CODES, JSON, ErrorReply)
    errors = {
        str(code): {"description": text, "content": _content(schemas[kind], media)} for code, text in told.items()
    }
    return {"200": {"description": "Done", "content": _content(reply, declared.media)}, **errors}


def _content(schema: dict[str, Any], media: str = JSON) -> dict[str, Any]:
    return {media: {"schema": schema}}


def _need(declared: Declared, *, is_admin: bool) -> str:
    role = f"Needs the role {declared.role.word}."
    if declared.redrives:
        role = f"{role} The settings may say admin."
    is_by_cookie = is_admin and declared.is_change
    return f"{role} By session cookie it needs the header {CSRF_HEADER}." if is_by_cookie else role


def _parameters(declared: Declared) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in declared.in_path
    ]
    in_query = []
    for one in declared.fields if declared.method == "GET" else ():
        schema = msgspec.json.schema(one.type)
        text = schema.pop("description")
        schema = IDS if one.name == "ids" else schema
        in_query.append({"name": one.name, "in": "query", "required": False, "description": text, "schema": schema})
    return in_path + in_query
