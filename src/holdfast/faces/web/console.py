"""What all pages of the console share: who visits, what may be asked for him, forms, errors, and the routes.

A page is a function that is given a `Visit`, asks what it needs with the same requests that programs use (`/admin`,
`/v1`), and renders what it is answered. Role and queues are checked by the vault where `/admin` is asked; for `/v1`
`Visit.ask` sees to that, as `faces/api` does for HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from holdfast.core.requests.declare import Access, Caller, Request, Role, from_wire
from holdfast.core.requests.queue import QueueRequest
from holdfast.core.requests.vault import Problem
from holdfast.errors import BadDeadQueue, BadMethod, Forbidden, HoldfastError, InternalError, Invalid, Unauthorized
from holdfast.faces.api.authenticator import Authenticator
from holdfast.faces.api.endpoints import LazyCollector
from holdfast.faces.web.rendering import asset, render
from holdfast.services.changes import Changes
from holdfast.services.queue.service import QueueService
from holdfast.services.vault.access import WebSession
from holdfast.services.vault.admin import VaultApp
from holdfast.telemetry.events import emit

HTML = "text/html; charset=utf-8"
#: Nothing from elsewhere, nothing inline; what a stranger sent is text on these pages and stays text.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "vary": "hx-request, cookie",
}
ASSET_AGE_S = 365 * 24 * 3600
FORM_FIELDS_COUNT_MAX = 20_000
NOTICE_COOKIE = "holdfast_notice"
NOTICE_AGE_S = 30
NOTICE_CHARACTERS_MAX = 500
SIGN_IN = "/sign-in"
#: The bar on top of every page, in this order; each page says by which of these words it is found there.
BAR = (
    "Overview",
    "Letters",
    "Groups",
    "Redrives",
    "Queues",
    "Recovery",
    "Topology",
    "Results",
    "Ledger",
    "Settings",
)

R = TypeVar("R")
F = TypeVar("F", bound="Callable[[Visit], Awaitable[Response]]")


class Console(NamedTuple):
    """What pages are made from."""

    vault_app: VaultApp
    service: QueueService
    authenticator: Authenticator
    collector: LazyCollector | None
    changes: Changes
    version: str


class PageRoute(NamedTuple):
    """One page, or one form of it."""

    method: str
    path: str
    show: Callable[[Visit], Awaitable[Response]]
    is_open: bool
    form_of: type[Request[Any]] | None
    bar: str
    needs: type[Request[Any]] | None


PAGES: list[PageRoute] = []


def page(
    place: str,
    *,
    is_open: bool = False,
    form_of: type[Request[Any]] | None = None,
    bar: str = "",
    needs: type[Request[Any]] | None = None,
) -> Callable[[F], F]:
    """Make a function a page, at `METHOD /path`. `is_open` needs no sign-in; `form_of` is a request that may be large,
    which its form makes: the form may be as large, for whom the request is. `bar` is the word in the bar that leads
    here, for those who may ask what it `needs`."""
    method, _, path = place.partition(" ")

    def register(show: F) -> F:
        PAGES.append(PageRoute(method, path, show, is_open, form_of, bar, needs))
        return show

    return register


class Visit:
    """A browser's request for a page, and who makes it."""

    def __init__(self, console: Console, http: HttpRequest, caller: Caller | None, form: Mapping[str, str]) -> None:
        self.console = console
        self.http = http
        self._caller = caller
        self.form = form  #: the last value of each field
        self.form_items: list[tuple[str, str]] = []  #: all of them
        self.status = 200
        self.notice = ""  #: what is said on top of the page
        self.is_refused = False  #: whether that is why nothing was done
        self.mark = ""  #: up to which look at what changes the page has everything

    @property
    def caller(self) -> Caller:
        """Who visits. Raises Unauthorized on a page that needs no sign-in."""
        if self._caller is None:
            raise Unauthorized
        return self._caller

    @cached_property
    def session(self) -> WebSession | None:
        """The session of the browser; none where no token is needed."""
        return self.console.authenticator.session(self.http.scope)

    @property
    def path(self) -> str:
        """Path and query, as they were asked for."""
        return _asked(self.http)

    @property
    def query(self) -> dict[str, str]:
        """What of the query is filled in."""
        return {name: value for name, value in self.http.query_params.multi_items() if value}

    def name(self, name: str) -> str:
        """A part of the path."""
        return str(self.http.path_params[name])

    def number(self, name: str) -> int:
        """A field of a form that is a whole number. Raises Invalid."""
        text = self.form.get(name, "").strip().replace("\u202f", "").replace(",", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise Invalid(f"{name} is invalid; '{text[:40]}' is not a whole number")
        return int(text)

    def read(self, request: type[Request[R]], **given: object) -> Request[R]:
        """A request from the query of this page, as a program would make it. Raises Invalid."""
        known = {one.name for one in request.declared.fields}
        query = {name: value for name, value in self.query.items() if name in known}
        query |= {name: str(value) for name, value in given.items() if value not in (None, "")}
        names = {name: str(given.get(name, self.http.path_params.get(name))) for name in request.declared.in_path}
        return cast("Request[R]", from_wire(request.declared, names, query.items(), b""))

    def made(self, request: type[Request[R]], **given: object) -> Request[R]:
        """A request of what a page gives, with all that is said of its fields, as a program's. Raises Invalid."""
        try:
            return msgspec.convert(given, request, strict=False)
        except msgspec.ValidationError as error:
            raise Invalid(f"form is invalid; {error}") from error

    def may(self, request: type[Request[Any]]) -> bool:
        """Whether the visitor may ask this at all; what he may not is not shown to him."""
        declared = request.declared
        is_enough = self.caller.role >= declared.needs(self.console.authenticator.redrive_role)
        return is_enough and not (self.caller.queues and declared.about is Access.ALL)

    @property
    def bar(self) -> list[tuple[str, str]]:
        """Path and word of the pages that the visitor may see."""
        found = [one for one in PAGES if one.bar and (one.needs is None or self.may(one.needs))]
        return [(one.path, one.bar) for one in sorted(found, key=lambda one: BAR.index(one.bar))]

    def check_role(self, request: type[Request[Any]]) -> None:
        """Whether the visitor's role may ask this: before a form is shown that asks it. Raises Forbidden."""
        need, role = request.declared.needs(self.console.authenticator.redrive_role), self.caller.role
        if role < need:
            raise Forbidden(f"forbidden; '{request.declared.name}' needs the role {need.word}, you are {role.word}")

    async def ask(self, request: Request[R]) -> R:
        """What a program is answered that asks this with the visitor's token. Raises HoldfastError; what was refused is
        in the ledger."""
        if request.declared.path.startswith("/admin/"):
            return await self.console.vault_app.call(request, self.caller)
        try:
            return await self._ask_service(request)
        except Forbidden as error:
            names = {"queue": str(getattr(request, "queue_name", ""))}
            await self.console.vault_app.note_denied(request.declared, names, self.caller, error)
            raise

    async def _ask_service(self, request: Request[R]) -> R:
        declared, console, caller = request.declared, self.console, self.caller
        self.check_role(type(request))
        if declared.path.startswith("/v1/results"):
            if console.collector is None:
                raise Invalid("results are not collected here; this server has no collector")
            return await (await console.collector.results()).call(request, caller)
        declared.check_queues(request, caller)
        try:
            return await console.service.call(cast("QueueRequest[R]", request), caller)
        except BadDeadQueue as error:
            raise error if caller.may_touch(error.source_queue) else Invalid(error.unnamed) from None

    def page(self, template: str, *, title: str, **values: Any) -> Response:
        """The page, whole; a browser that wants a part of it takes that part."""
        notice = self.notice or _notice_of(self.http)
        text = render(template, {"visit": self, "title": title, "notice": notice, "console": self.console, **values})
        response = Response(text, self.status, PAGE_HEADERS, media_type=HTML)
        if not self.notice and notice:
            response.delete_cookie(NOTICE_COOKIE)
        return response

    def refuse(self, error: HoldfastError) -> None:
        """Nothing was done: the page is shown again with the reason on top, and whoever wrote something keeps it.
        Raises what is no matter of what was written."""
        told = Problem.of(error)
        if told.status >= 500 or isinstance(error, Forbidden | Unauthorized):
            raise error
        what, _, more = error.message.partition(";")
        self.status, self.is_refused = told.status, True
        self.notice = " ".join(f"{text[:1].upper()}{text[1:]}." for one in (what, more) if (text := one.strip(" .")))

    def redirect(self, path: str, notice: str = "") -> Response:
        """After a change: to where its effect is seen, with what is said there on top."""
        response = RedirectResponse(path, 303, PAGE_HEADERS)
        if notice:
            text = quote(notice[:NOTICE_CHARACTERS_MAX], safe="")
            response.set_cookie(NOTICE_COOKIE, text, max_age=NOTICE_AGE_S, httponly=True, samesite="strict")
        return response

    @property
    def csrf(self) -> str:
        """What every form of the session carries."""
        return self.session.csrf if self.session else ""

    @property
    def role(self) -> Role | None:
        """What the visitor is; None before the sign-in."""
        return self._caller.role if self._caller else None

    @property
    def is_part(self) -> bool:
        """Whether a page that is open asks, for those of its parts that are about what changed."""
        return "hx-request" in self.http.headers

    @property
    def is_signed_in(self) -> bool:
        return self._caller is not None


def _asked(http: HttpRequest) -> str:
    """Path and query as they came: what is taken apart and put together again may be another address."""
    path, query = http.scope["raw_path"].decode("latin-1"), http.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _notice_of(http: HttpRequest) -> str:
    return unquote(http.cookies.get(NOTICE_COOKIE, ""))[:NOTICE_CHARACTERS_MAX]


# --- routes ---------------------------------------------------------------------------------------------------


def console_routes(console: Console) -> list[Route]:
    """The routes of all pages; one path takes all of its methods."""
    paths: dict[str, dict[str, PageRoute]] = {}
    for one in PAGES:
        paths.setdefault(one.path, {})[one.method] = one
    # What has no names in its path first: `/letters/search` is no letter.
    ordered = sorted(paths.items(), key=lambda item: ("{" in item[0], "{" in item[0] and -len(item[0])))
    routes = [Route(path, _answering(console, methods)) for path, methods in ordered]
    for route in routes:
        route.methods = None
    return [*routes, Route("/static/{version}/{name}", _static)]


def _answering(console: Console, methods: Mapping[str, PageRoute]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(http: HttpRequest) -> Response:
        found = methods.get("GET" if http.method == "HEAD" else http.method)
        try:
            if found is None:
                raise BadMethod(http.method, list(methods))
            return await _show(console, found, http)
        except HoldfastError as error:
            await console.authenticator.slow_down(http.scope, error)
            return error_page(console, http, error)
        except Exception as error:  # noqa: BLE001 - no stack trace leaves the server; the log has it
            emit("server.bug", method=http.url.path, error=repr(error), traceback=error)
            return error_page(console, http, InternalError("internal error; the server's log has the details"))

    return answer


async def _show(console: Console, found: PageRoute, http: HttpRequest) -> Response:
    authenticator = console.authenticator
    caller = None
    with _let_in(found):
        caller = authenticator.caller(http.scope)
    items: list[tuple[str, str]] = []
    if http.method == "POST":
        authenticator.check_form(http.scope)
        items = _form_items(await http.body())
        if not found.is_open:
            authenticator.check_page_of_session(http.scope, dict(items).get("csrf"))
    visit = Visit(console, http, caller, dict(items))
    visit.form_items = items
    if caller is not None:
        visit.mark = await console.changes.begin()
    page = await found.show(visit)
    if http.method != "POST" and not found.is_open:
        authenticator.caller(http.scope)  # it may have waited
    return page


@contextmanager
def _let_in(found: PageRoute) -> Iterator[None]:
    """A page that is open is shown to whoever comes."""
    try:
        yield
    except Unauthorized:
        if not found.is_open:
            raise


def _form_items(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=FORM_FIELDS_COUNT_MAX, errors="strict"
        )
    except (UnicodeDecodeError, ValueError) as error:
        raise Invalid(
            f"form is invalid; it is not urlencoded UTF-8, or has more than {FORM_FIELDS_COUNT_MAX} fields"
        ) from error


def wants_page(http: HttpRequest) -> bool:
    """Whether a browser asks, which shows a page to a person; a program is told in JSON."""
    return "text/html" in http.headers.get("accept", "")


def error_page(console: Console, http: HttpRequest, error: HoldfastError) -> Response:
    """What went wrong, as a page; who is not signed in is sent to sign in."""
    if isinstance(error, Unauthorized):
        return _to_sign_in(http)
    told = Problem.of(error)
    caller = None
    with _quietly():
        caller = console.authenticator.caller(http.scope)
    visit = Visit(console, http, caller, {})
    visit.status = told.status
    what, _, more = error.message.partition(";")
    response = visit.page(
        "error.html", title=HTTPStatus(told.status).phrase, what=what.strip(), more=more.strip(), told=told
    )
    if isinstance(error, BadMethod):
        response.headers["allow"] = error.allowed
    return response


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except HoldfastError:
        pass  # an error page is shown to whoever caused the error


def _to_sign_in(http: HttpRequest) -> Response:
    if http.headers.get("sec-fetch-site") == "cross-site" and http.method == "GET":
        # A link on another site: the browser keeps the session's cookie back until it comes from a page of ours.
        return Response(render("again.html", {"path": _asked(http)}), 200, PAGE_HEADERS, HTML)
    path = _asked(http)
    where = f"{SIGN_IN}?{urlencode({'next': path})}" if http.method == "GET" and path != "/" else SIGN_IN
    if http.headers.get("hx-request"):
        return Response(status_code=200, headers={"hx-redirect": SIGN_IN, **PAGE_HEADERS})
    return RedirectResponse(where, 303, PAGE_HEADERS)


async def _static(http: HttpRequest) -> Response:
    found = asset(http.path_params["name"])
    if found is None:
        return Response("there is no such file", 404, media_type="text/plain")
    age = ASSET_AGE_S if http.path_params["version"] == found.version else 0
    return Response(
        found.content, media_type=found.media_type, headers={"cache-control": f"public, max-age={age}, immutable"}
    )
