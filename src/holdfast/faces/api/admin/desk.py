"""One request to /admin on its way: who asks, what was sent, and the row that the ledger gets of a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.roles import Caller
from holdfast.core.selection import ID_MAX
from holdfast.errors import BadBody, Invalid, NotFound
from holdfast.faces.api.authenticator import Authenticator
from holdfast.wiring import VaultApp

T = TypeVar("T")
QUERY_BYTES_MAX = 16_000


class AdminContext:
    """What a handler is given."""

    def __init__(
        self, request: Request, office: VaultApp, door: Authenticator, caller: Caller, *, action: str, body: bytes
    ) -> None:
        self.request = request
        self.door = door
        self.office = office
        self.custody = office.custody
        self.vault = office.vault
        self.caller = caller
        self.action = action
        self._body = body

    @property
    def now_us(self) -> int:
        return self.custody.clock.now_us()

    def act(self, reason: str = "", detail: str = "") -> LedgerAct:
        """Who does what, for the ledger."""
        return LedgerAct(
            actor=self.caller.name, action=self.action, origin=self.caller.origin, reason=reason, detail=detail
        )

    def body(self, kind: type[T]) -> T:
        """The body as a struct. Raises BadBody or Invalid."""
        try:
            return msgspec.json.decode(self._body, type=kind)
        except msgspec.ValidationError as error:
            raise Invalid(f"request is invalid; {error}") from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadBody(f"body is invalid; {error}") from error

    def query(self, kind: type[T], *, also: tuple[str, ...] = ()) -> T:
        """The query as a struct; `also` are the names that somebody else reads. Raises Invalid."""
        values: dict[str, Any] = {}
        for name, value in self.request.query_params.multi_items():
            if name in also:
                continue
            if name in values:
                raise Invalid(f"query is invalid; '{name}' is there twice")
            values[name] = value
        fields = getattr(kind, "__struct_fields__", ())
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise Invalid(f"query is invalid; '{unknown[0][:100]}' is not known, use {', '.join(fields)}")
        if "ids" in values:
            values["ids"] = [part for part in values["ids"].split(",") if part]
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise Invalid(f"query is invalid; {error}") from error

    def number(self, name: str = "id") -> int:
        """An id in the path. Raises NotFound."""
        text = self.request.path_params[name]
        if not text.isascii() or not text.isdigit() or len(text) > 19 or not 0 < int(text) <= ID_MAX:
            raise NotFound(f"there is no such thing; '{text[:50]}' is not an id")
        return int(text)

    def text(self, name: str) -> str:
        """A name in the path."""
        return str(self.request.path_params[name])


Handler = Callable[[AdminContext], Awaitable[msgspec.Struct | list[Any] | Response]]


class Endpoint(NamedTuple):
    """One method of one path. `name` is its line in the table of roles."""

    name: str
    method: str
    path: str
    handler: Handler
    reply: Any
    summary: str
    request: Any = None
    query: tuple[Any, ...] = ()
    is_change: bool = False
    media: str = "application/json"
