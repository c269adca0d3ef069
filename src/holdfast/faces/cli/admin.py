"""How commands reach custody: over HTTP to a server, or through the same application in this process.

Either way the same endpoints answer, so the command line shows the same numbers as everybody else.
"""

from __future__ import annotations

import getpass
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import msgspec
import typer

from holdfast.errors import Forbidden, HoldfastError, Unauthorized, Unreachable
from holdfast.faces.cli import command as checks
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode

if TYPE_CHECKING:  # it takes a tenth of a second, which `--help` need not wait for
    import httpx2

TIMEOUT_S = 600.0
LIST_COUNT_DEFAULT = 50
PANEL = "Which letters"
STATES = ("captured", "redriving", "redriven", "resolved", "came_back", "archived", "discarded")


class Admin:
    """/admin, for commands. Every method raises HoldfastError with what the server said."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, **query: object) -> Any:
        """A GET; empty values are left out."""
        return msgspec.json.decode(await self.raw(path, **query))

    async def raw(self, path: str, **query: object) -> bytes:
        """The bytes that a GET answers."""
        params = {name: _text(value) for name, value in query.items() if value not in (None, "", ())}
        return (await self._send("GET", path, params=params)).content

    async def post(self, path: str, body: object = None) -> Any:
        """A POST of JSON."""
        content = msgspec.json.encode({} if body is None else body)
        return msgspec.json.decode((await self._send("POST", path, content=content)).content)

    async def delete(self, path: str) -> Any:
        """A DELETE."""
        return msgspec.json.decode((await self._send("DELETE", path)).content)

    async def lines(self, path: str, **query: object) -> AsyncIterator[bytes]:
        """JSON Lines as they come."""
        params = {name: _text(value) for name, value in query.items() if value not in (None, "", ())}
        async with self._client.stream("GET", path, params=params) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise _error(answer)
            async for line in answer.aiter_lines():
                if line:
                    yield line.encode() + b"\n"

    async def _send(self, method: str, path: str, **more: Any) -> httpx2.Response:
        import httpx2

        try:
            answer = await self._client.request(method, path, **more)
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"server cannot be reached; {self._client.base_url}: {what}") from error
        if answer.status_code != 200:
            raise _error(answer)
        return answer


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _error(answer: httpx2.Response) -> HoldfastError:
    try:
        detail = str(msgspec.json.decode(answer.content)["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return Unreachable(f"server answered strangely; HTTP {answer.status_code}, is this a Holdfast server?")
    if answer.status_code == 401:
        return Unauthorized()
    if answer.status_code == 403:
        return Forbidden(detail)
    failed = CommandFailed(detail)
    failed.code = answer.status_code
    if failed.code in HTTPStatus.__members__.values():
        failed.code_text = HTTPStatus(failed.code).phrase
    return failed


@asynccontextmanager
async def open_admin(session: CommandContext) -> AsyncIterator[Admin]:
    """Custody at --url. Raises CannotStart."""
    import httpx2

    url = session.settings.storages[0].url
    scheme = urlsplit(url).scheme
    if scheme in {"http", "https"}:
        headers = {"authorization": f"Bearer {session.token(url)}"}
        async with httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, verify=session.tls() or True
        ) as client:
            yield Admin(client)
        return
    if scheme in {"amqp", "amqps"}:
        raise BadUsage("letters are kept in a vault; --url names its storage or server, HOLDFAST_BROKER_URL the broker")
    from holdfast.faces.api.app import make_app
    from holdfast.services.queue.queues import Queues
    from holdfast.wiring import open_office, open_service

    storages = {storage.name: storage.url for storage in session.settings.storages}
    async with open_service(storages) as service, open_office(session.settings, Queues(service)) as office:
        app = make_app(service, admin_token_hash=None, version="", office=office, name_here=f"cli:{_user()}")
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=TIMEOUT_S) as client:
            yield Admin(client)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: a container
        return "nobody"


def quoted(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


# --- the options that say which letters -----------------------------------------------------------------------


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=PANEL, show_default=False)


FILTERS: dict[str, Any] = {
    "ids": Annotated[str, _option("Ids, separated by commas.")],
    "queue": Annotated[str, _option("The dead-letter queue it was captured from.")],
    "source_queue": Annotated[str, _option("The queue it died in.")],
    "type": Annotated[str, _option("The message type.")],
    "death_reason": Annotated[str, _option("Why it died: rejected, expired, attempts, …")],
    "error": Annotated[str, _option("A part of the error's type or message.")],
    "group": Annotated[str, _option("The key of a failure group.")],
    "state": Annotated[str, _option("captured, redriving, redriven, resolved, came_back, archived or discarded.")],
    "header": Annotated[str, _option("NAME, or NAME=VALUE of a header.")],
    "text": Annotated[str, _option("Words in the body or the error.")],
    "older_than": Annotated[str, _option("Died at least so long ago: 90m, 24h.")],
}

Filtered = Callable[..., Coroutine[Any, Any, ExitCode | None]]


def filtered(body: Filtered) -> Filtered:
    """Give a command the options of FILTERS; its second parameter gets what was set."""
    session, _filters, *own = inspect.signature(body, eval_str=True).parameters.values()

    async def run(given_session: CommandContext, **given: Any) -> ExitCode | None:
        filters = {name: given.pop(name) for name in FILTERS}
        _check_filters(filters)
        name, _, value = filters["header"].partition("=")
        filters |= {"header": name, "header_value": value, "reason": filters.pop("death_reason")}
        return await body(given_session, {key: text for key, text in filters.items() if text}, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, keyword, default="", annotation=hint) for name, hint in FILTERS.items()]
    parameters = [session, *(one.replace(kind=keyword) for one in own), *options]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by `command`
    run.__doc__ = body.__doc__
    return run


def _check_filters(filters: dict[str, str]) -> None:
    checks.duration(filters["older_than"], option="--older-than")
    if filters["state"]:
        checks.one_of(filters["state"], STATES, option="--state")


def as_selection(filters: dict[str, str]) -> dict[str, object]:
    """What was set, as the body of a request. Raises BadUsage."""
    selection: dict[str, object] = dict(filters)
    if "ids" in filters:
        try:
            selection["ids"] = [int(part) for part in filters["ids"].split(",") if part.strip()]
        except ValueError as error:
            raise BadUsage("--ids takes whole numbers with commas between them") from error
    if not selection:
        raise BadUsage("no letters were named; use --ids, --group, --queue or another filter")
    return selection
