"""What may be asked of Holdfast, said once: a request is a class, and `declare` gives it a name, a place and a role.

```python
@declare("letters.search", "GET /admin/letters", role=Role.VIEWER, about="queue")
class SearchLetters(Request[LettersReply], frozen=True, kw_only=True):
    \"\"\"Find letters, newest first.\"\"\"
```

From REQUESTS follow the routes of HTTP and what decodes them, the check of roles and of the queues that a token is held
to, `/openapi.json`, and what a client can call. What answers a request says so with `handles`, in a service; a command
is made of it with `asks`, in `faces/cli`. docs/architecture.md says how to add one. Pure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum, IntEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from msgspec import Struct, structs

from holdfast.core.plan import Place, Target
from holdfast.core.selection import ID_MAX
from holdfast.errors import BadBody, Forbidden, Invalid, NotFound

JSON = "application/json"
BYTES = "application/octet-stream"

EMPTY_BODY = "body is empty; a JSON object is expected"
#: What is answered piece by piece.
Stream = AsyncGenerator[bytes, None]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C", bound="type[Request[Any]]")
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V", bound=Struct)


class Role(IntEnum):
    """Each may do what the ones before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Access(Enum):
    """What a request is about that names no queue, and so what of it a caller gets who is held to some queues."""

    ALL = "all"  #: what is of all queues: nothing
    EACH = "each"  #: a list: whoever answers leaves out what is of others
    FOUND = "found"  #: one thing, whose queues are known when it is found: whoever answers checks them then
    ITSELF = "itself"  #: who asks: everything


class Caller(Struct, frozen=True, kw_only=True):
    """Who a request comes from. `queues` are patterns; none means all queues."""

    name: str
    role: Role
    queues: tuple[str, ...] = ()
    origin: str = ""

    def may_touch(self, queue: str) -> bool:
        """Whether this caller's patterns let him at a queue."""
        return not self.queues or any(fnmatchcase(queue, pattern) for pattern in self.queues)

    def may_send(self, place: Place) -> bool:
        """Whether his patterns let him send there: to queues, and to no exchange, which may lead anywhere."""
        return not self.queues or (not place.exchange and self.may_touch(place.routing_key))

    def may_see(self, queue: str) -> bool:
        """Whether what is of a queue is for this caller; what is of no one queue may be of any."""
        return not self.queues or (queue != "" and self.may_touch(queue))

    def check_queue(self, queue: str) -> None:
        """Who is held to some queues names one of them. Raises Forbidden."""
        if not self.may_see(queue):
            raise Forbidden(f"forbidden; {self.held}, name one of them")

    def check_all_queues(self) -> None:
        """What is of all queues is not for a caller who is held to some. Raises Forbidden."""
        if self.queues:
            raise Forbidden(f"forbidden; {self.held}, and this is of all: it needs a token for all queues")

    def check_places(self, named: object) -> None:
        """Who is held to some queues makes nothing go to another place. Raises Forbidden."""
        for place in _places(named):
            if not self.may_send(place):
                where = f"exchange '{place.exchange}'" if place.exchange else f"queue '{place.routing_key}'"
                raise Forbidden(f"forbidden; {self.held}, it cannot send letters to {where}, nor anything else")

    @property
    def held(self) -> str:
        """What a caller who is held to some queues is told."""
        return f"this token is for the queues {', '.join(self.queues)} alone"


class Token(Struct, frozen=True, kw_only=True):
    """An API token as it is kept: never itself, only its hash."""

    name: str
    role: Role
    hash: str
    made_at: datetime
    made_by: str
    expires_at: datetime | None = None
    queues: tuple[str, ...] = ()
    revoked_at: datetime | None = None


class Request(Struct, Generic[R_co], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that can be asked; its parameter is what is answered."""

    declared: ClassVar[Declared]


class Declared:
    """A request's name, its place in HTTP, and who may ask. `limit` says which limit its body has."""

    def __init__(
        self,
        name: str,
        http: str,
        role: Role,
        about: str | Access,
        request: type[Request[Any]],
        options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.method, _, self.path = http.partition(" ")
        self.role = role
        self.about = about
        self.request = request
        self.reply = _reply_of(request)
        self.names: tuple[str, ...] = options.get("names", ())
        self.limit: str = options.get("limit", "other")
        self.media: str = options.get("media", JSON)
        self.schema: str = options.get("schema", "")
        self.redrives: bool = options.get("redrives", False)
        self.is_change: bool = options.get("is_change", self.method != "GET")

    def needs(self, redrive_role: Role = Role.OPERATOR) -> Role:
        """The role that it takes in an installation in which redriving takes `redrive_role`."""
        return max(self.role, redrive_role) if self.redrives else self.role

    def check_queues(self, request: Request[Any], caller: Caller) -> None:
        """Whether a caller who is held to some queues may ask this, as far as the request says. Raises Forbidden."""
        if not caller.queues:
            return
        if self.about is Access.ALL:
            caller.check_all_queues()
        elif isinstance(self.about, str):
            caller.check_queue(next(iter(_values(request, self.about)), ""))
        caller.check_places([value for path in self.names for value in _values(request, path)])

    @property
    def sentence(self) -> str:
        """What it does: the first paragraph of its docstring."""
        return " ".join(inspect.cleandoc(self.request.__doc__ or "").split("\n\n")[0].split("\n"))

    @cached_property
    def in_path(self) -> tuple[str, ...]:
        """The fields that stand in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @cached_property
    def fields(self) -> tuple[structs.FieldInfo, ...]:
        """The others: in the body, or of a GET in the query."""
        return tuple(field for field in structs.fields(self.request) if field.name not in self.in_path)

    @cached_property
    def body(self) -> type[Struct] | None:
        """What its body is decoded as; None when it has none."""
        if self.method == "GET" or not self.fields:
            return None
        # Requests that add nothing to a common form have its schema.
        kind = next(one for one in self.request.__mro__ if inspect.get_annotations(one))
        if not self.in_path and not self.schema:
            return kind
        make: Any = msgspec.field  # its stubs do not know that it takes both
        fields = [(f.name, f.type, make(default=f.default, default_factory=f.default_factory)) for f in self.fields]
        more = {"__doc__": self.request.__doc__}
        return msgspec.defstruct(
            self.schema or kind.__name__, fields, namespace=more, kw_only=True, forbid_unknown_fields=True
        )

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Any]:
        """Decodes its body; where nothing stands in the path, straight to the request."""
        return msgspec.json.Decoder(self.body if self.in_path and self.body else self.request)


def _values(source: Any, path: str) -> list[Any]:
    """What stands at a path of fields, in each of a list; nothing where something on the way was left out."""
    found = [source]
    for name in path.split("."):
        found = [getattr(one, name) for one in found if isinstance(one, Struct)]
        found = [one for value in found for one in (value if isinstance(value, list) else [value])]
    return found


def _places(named: object) -> Iterator[Place]:
    """All places in what names some; a text is a queue."""
    match named:
        case str() if named:
            yield Place(routing_key=named)
        case Place():
            yield named
        case Target():
            yield from named.places()
        case list() | tuple():
            for one in named:
                yield from _places(one)


def _reply_of(request: type) -> Any:
    """What stands in the brackets of the nearest base that has some."""
    for base in request.__mro__:
        for one in base.__dict__.get("__orig_bases__", ()):
            found = get_args(one)
            if found and not isinstance(found[0], TypeVar):
                return found[0]
    raise TypeError(f"{request.__name__} does not say what is answered")


#: All of them, by name. Each module of this package adds its own when it is imported.
REQUESTS: dict[str, Declared] = {}
#: What answers each.
HANDLERS: dict[type[Request[Any]], Callable[..., Any]] = {}


def declare(name: str, http: str, *, role: Role, about: str | Access, **options: Any) -> Callable[[C], C]:
    """Make a class a request that can be asked, at `METHOD /path`; fields that the path names stand in it.

    `about` is the field with the queue that it is about, `names` are those with other places where it makes something
    go: to these a token is held that is held to queues. `limit` is which limit the body has, `media` what is answered
    if not JSON, `schema` what the body is called in the document, `redrives` that the settings may leave it to admins,
    `is_change` whether who is refused is written down.
    """

    def register(request: C) -> C:
        request.declared = REQUESTS[name] = Declared(name, http, role, about, request, options)
        return request

    return register


def handles(request: type[Request[Any]]) -> Callable[[F], F]:
    """Mark the function that answers a request."""

    def register(function: F) -> F:
        HANDLERS[request] = function
        return function

    return register


def view(kind: type[V], source: Struct, **others: Any) -> V:
    """A `kind` of what the source has under the same names, and of the others."""
    for name in kind.__struct_fields__:
        if name not in others:
            others[name] = getattr(source, name)
    return kind(**others)


def declared_under(prefix: str) -> dict[str, Declared]:
    """Those whose path begins so, in their order."""
    return {name: one for name, one in REQUESTS.items() if one.path.startswith(prefix)}


# --- a request on its way -------------------------------------------------------------------------------------


class WireRequest(NamedTuple):
    """A request as it travels: by which method, the values in its path, its query, and its body."""

    method: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes

    def target(self, path: str) -> str:
        """The path with its query, for a URL."""
        where = path.format(**{name: quote(text, safe="") for name, text in self.names.items()})
        return f"{where}?{urlencode(self.query)}" if self.query else where


_encode = msgspec.json.Encoder().encode
#: What is longer goes as a body: a server takes 8 KiB of URL.
QUERY_BYTES_MAX = 4 * 1024


def to_wire(request: Request[Any]) -> WireRequest:
    """A request, written down. What a GET leaves at its default is left out."""
    declared = request.declared
    if declared.method != "GET" and not declared.in_path:
        return WireRequest(declared.method, {}, {}, _encode(request))
    names = {name: str(getattr(request, name)) for name in declared.in_path}
    if declared.method != "GET":
        values = msgspec.to_builtins(request)
        rest = {key: value for key, value in values.items() if key not in names}
        return WireRequest(declared.method, names, {}, _encode(rest))
    query = {one.name: getattr(request, one.name) for one in declared.fields}
    set_ones = {one.name: query[one.name] for one in declared.fields if query[one.name] != one.default}
    texts = {name: _text(value) for name, value in set_ones.items()}
    if len(form := urlencode(texts).encode()) > QUERY_BYTES_MAX:
        return WireRequest("POST", names, {}, form)
    return WireRequest("GET", names, texts, b"")


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(map(str, value))
        case datetime():
            return value.isoformat()
    return str(value)


def from_wire(
    declared: Declared, names: Mapping[str, str], query: Iterable[tuple[str, str]], body: bytes
) -> Request[Any]:
    """The request that was written down; a query that is too long for a URL is the body of a POST. Raises NotFound,
    Invalid, BadBody."""
    made: Request[Any]
    given: dict[str, Any] = {name: _in_path(declared, name, names[name]) for name in declared.in_path}
    if declared.body is not None:
        read = _read_body(declared, body)
        if isinstance(read, declared.request):
            return read
        made = declared.request(**given, **{one.name: getattr(read, one.name) for one in declared.fields})
        return made
    if declared.fields:
        given |= _read_query(declared, [*query, *parse_qsl(body.decode("latin-1"), keep_blank_values=True)])
    try:
        made = msgspec.convert(given, declared.request, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"query is invalid; {error}") from error
    return made


def _in_path(declared: Declared, name: str, text: str) -> Any:
    """A text, or an id. Raises NotFound."""
    kind = next(one.type for one in structs.fields(declared.request) if one.name == name)
    if kind is str or str in get_args(kind):
        return text
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not 0 < int(text) <= ID_MAX:
        raise NotFound(f"there is no such thing; '{text[:50]}' is not an id")
    return int(text)


def _read_body(declared: Declared, body: bytes) -> Any:
    if not body:
        raise BadBody(EMPTY_BODY)
    try:
        return declared.decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(f"request is invalid; {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadBody(f"body is invalid; {error}") from error


def _read_query(declared: Declared, query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    fields = [one.name for one in declared.fields]
    for name, value in query:
        if name in values:
            raise Invalid(f"query is invalid; '{name}' is there twice")
        values[name] = value
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise Invalid(f"query is invalid; '{unknown[0][:100]}' is not known, use {', '.join(fields)}")
    if "ids" in values:
        values["ids"] = [part for part in values["ids"].split(",") if part]
    return values
