"""Which address a letter goes back to, and why: type map, else where it died, redirect, or unknown. Pure.

A type that is there but not in the table is *unknown*: it does not fall through to its headers, because the table was
written by somebody who knows, and a guess would send the letter where nobody expects it. Without a table a letter goes
to the queue that it died in, since an exchange may give copies to queues that have done their work.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.death import DEAD_QUEUES, NO_SOURCE, WAIT_QUEUES, Death, QueueNames, where_it_died
from holdfast.core.letter import Letter
from holdfast.core.message import Address, Headers
from holdfast.core.plan import Place, Target
from holdfast.errors import Invalid

FILE_BYTES_MAX = 1_000_000
NAME_BYTES_MAX = 255
TYPE_HEADER = "MessageType"
WAIT_EXCHANGE = "retry.{queue}"
WAIT_KEY = "retry"
#: Why a letter is kept that tells nothing at all.
NOWHERE = "nothing says where it came from"
#: Why it is kept where whoever started the run may not send it to where it would go.
NOT_FOR_THIS_RUN = "its run may not send to where it would go"


class Mode(StrEnum):
    """Where letters go."""

    ROUTES = "routes"  #: by type, else where they came from; without a routes file as SOURCE
    SOURCE = "source"  #: the queue that they died in, by the default exchange
    EXCHANGE = "exchange"  #: the original exchange and key
    WAIT = "wait"  #: the wait queue of the queue that they died in
    ADDRESS = "address"  #: all to one


class Route(Struct, frozen=True, kw_only=True):
    """Where one letter goes; without an address it is kept, and `why` is the reason."""

    address: Address | None
    why: str
    type: str = ""
    blocked: str = ""  #: why nothing that is sent to the address gets to where it is meant for
    is_told: bool = False  #: by the headers of the letter or `--source`; no address was written for it
    source: str = ""  #: the queue that it died in, where that had to be found out


class RouteTable(Struct, frozen=True, kw_only=True):
    """What a routes file says, with the way that was chosen."""

    routes: Mapping[str, Address] = {}
    type_header: str = TYPE_HEADER
    redirect: Address | None = None
    names: QueueNames = QueueNames()
    wait_exchange: str = WAIT_EXCHANGE
    wait_key: str = WAIT_KEY
    mode: Mode = Mode.ROUTES
    address: Address | None = None
    source: str = ""  #: the queue that letters died in that do not tell it themselves
    allow_copies: bool = False  #: where the headers of a letter lead to several queues, each may get one
    has_table: bool = False  #: a table was given: a type that is not in it is unknown
    only: tuple[str, ...] = ()  #: patterns of the queues that letters may go to, and to no exchange; none: anywhere

    def may_send(self, address: Address) -> bool:
        """Whether letters may go there."""
        if not self.only:
            return True
        return not address.exchange and any(fnmatchcase(address.routing_key, one) for one in self.only)

    def fixed_addresses(self) -> list[Address]:
        """All addresses that are known before the first letter is seen, each once."""
        found = {Mode.ADDRESS: [self.address], Mode.ROUTES: [*self.routes.values(), self.redirect]}.get(self.mode, [])
        return [address for address in dict.fromkeys(found) if address is not None]

    @property
    def goes_to_source(self) -> bool:
        """Whether each letter goes to the queue that it died in."""
        has_file = self.has_table or self.redirect is not None
        return self.mode is Mode.SOURCE or (self.mode is Mode.ROUTES and not has_file)


def find_route(
    headers: Headers,
    table: RouteTable,
    *,
    dead_queue: str,
    kind: str = "",
    sources: Callable[[], Iterable[str]] = tuple,
) -> Route:
    """Where a letter with these headers goes; `kind` is its type where the type header is missing, `sources` are the
    queues that lead to the dead queue."""
    found = headers.get(table.type_header, kind)
    name = found if isinstance(found, str) else ""
    if table.mode is Mode.ADDRESS:
        route = Route(address=table.address, why="all go to one place")
    elif table.mode is Mode.ROUTES and table.has_table and (name or table.type_header in headers):
        address = table.routes.get(name)
        unknown = f"type '{name or '(no text)'}' is not in the route table"
        route = Route(address=address, why=unknown if address is None else "type")
    else:
        died, why = where_it_died(headers, dead_queue, table.names, sources)
        if died is None and table.source:
            died = Death(queue=table.source, reason="", routing_key=table.source)
        route = replace(_told(died, why, table), source=died.queue if died else "")
    if route.address == Address(routing_key=dead_queue):
        route = Route(address=None, why="its route leads back to the dead-letter queue")
    elif route.address is not None and not table.may_send(route.address):
        route = Route(address=None, why=NOT_FOR_THIS_RUN)
    return replace(route, type=name)


def _told(died: Death | None, why: str, table: RouteTable) -> Route:
    """By the queue that it died in."""
    if table.goes_to_source or table.mode is Mode.WAIT:
        if died is None:
            return Route(address=None, why=why)
        if table.goes_to_source:
            return Route(address=Address(routing_key=died.queue), why="the queue it died in", is_told=True)
        exchange = table.wait_exchange.replace("{queue}", died.queue)
        key = table.wait_key.replace("{queue}", died.queue)
        address = Address(exchange=exchange, routing_key=key)
        return Route(address=address, why="the wait queue of the queue it died in", is_told=True)
    if died is not None and (died.exchange or died.routing_key):
        address = Address(exchange=died.exchange, routing_key=died.routing_key)
        return Route(address=address, why="its original exchange and key", is_told=True)
    if table.redirect is not None and table.mode is Mode.ROUTES:
        return Route(address=table.redirect, why="redirect")
    return Route(address=None, why=why if why not in ("", NO_SOURCE) else NOWHERE)


# The file.


class _AddressEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    exchange: str | None = None


class _RoutesFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exchange: str = ""
    type_header: str = TYPE_HEADER
    routes: dict[str, str | _AddressEntry] = {}
    redirect: str | _AddressEntry | None = None
    wait_queues: tuple[str, ...] = WAIT_QUEUES
    dead_queues: tuple[str, ...] = DEAD_QUEUES
    wait_exchange: str = WAIT_EXCHANGE
    wait_key: str = WAIT_KEY


def parse_routes(data: bytes, *, source: str) -> RouteTable:
    """Read a routes file (TOML). Raises Invalid, which names the file and the place in it."""
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Invalid(f"routes file is invalid; {source} is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # also of a number that is too long
        raise Invalid(f"routes file is invalid; {source} is not TOML: {error}") from error
    try:
        file = msgspec.convert(table, _RoutesFile)
    except msgspec.ValidationError as error:
        raise Invalid(f"routes file is invalid; {source}: {error}") from error
    if not file.routes and file.redirect is None:
        raise Invalid(f"routes file is invalid; {source} has an empty [routes] table and no redirect")
    routes = {name: _address(entry, file.exchange, f"{source}: route '{name}'") for name, entry in file.routes.items()}
    for name, text in (("type_header", file.type_header), ("exchange", file.exchange)):
        _checked(text, f"{source}: {name}")
    return RouteTable(
        routes=routes,
        type_header=file.type_header,
        redirect=None if file.redirect is None else _address(file.redirect, file.exchange, f"{source}: redirect"),
        names=QueueNames(wait_queues=file.wait_queues, dead_queues=file.dead_queues),
        wait_exchange=file.wait_exchange,
        wait_key=file.wait_key,
        has_table=bool(file.routes),
    )


def parse_to(text: str) -> Address:
    """`--to`: a queue's name, or `exchange=NAME,key=KEY`. Raises Invalid."""
    if not text.startswith("exchange="):
        return _address(text, "", "address")
    exchange, comma, key = text.removeprefix("exchange=").partition(",key=")
    if not comma:
        raise Invalid(f"address is invalid; '{text}' is not exchange=NAME,key=KEY")
    return _address(_AddressEntry(key=key, exchange=exchange), "", "address")


def _address(entry: str | _AddressEntry, exchange: str, what: str) -> Address:
    if isinstance(entry, _AddressEntry):
        exchange, key = exchange if entry.exchange is None else entry.exchange, entry.key
    else:
        key = entry
    if not key and not exchange:
        raise Invalid(f"routes file is invalid; {what} has neither exchange nor key")
    return Address(exchange=_checked(exchange, what), routing_key=_checked(key, what))


def _checked(text: str, what: str) -> str:
    if len(text.encode()) > NAME_BYTES_MAX:
        raise Invalid(f"routes file is invalid; {what} has a name of more than {NAME_BYTES_MAX} bytes")
    return text


#: Where letters go, by the word of a plan (`Target.kind`) and by that of a recovery: the same ways, two lists of words.
TARGET_MODES = {
    "queue": Mode.SOURCE,
    "wait": Mode.WAIT,
    "original": Mode.EXCHANGE,
    "address": Mode.ADDRESS,
    "type": Mode.ROUTES,
}


def route_letter(
    letter: Letter, target: Target, table: RouteTable, sources: Iterable[str]
) -> tuple[Address | None, str, str]:
    """Where a letter of the vault goes by a target and its table, why, and in which queue it died; no address when
    nothing says where. Of RabbitMQ it is judged by its headers as they were stored, not by what was made of them then.
    """
    if letter.origin == "queue":
        return *_route_item(letter, target), letter.death.queue
    headers, queue = letter.headers, letter.queue
    leading = (target.source,) if target.source else sources
    found = find_route(headers, table, dead_queue=queue, kind=letter.type, sources=lambda: leading)
    source = found.source
    if not source and not found.is_told:
        died, _ = where_it_died(headers, queue, table.names, lambda: leading)
        source = died.queue if died else ""
    return found.address, found.why, source


def route_table(target: Target, names: QueueNames) -> RouteTable:
    """What a target says, as the table that routes are found by."""
    return RouteTable(
        names=names,
        mode=TARGET_MODES[target.kind],
        address=Address(exchange=target.exchange, routing_key=target.routing_key),
        routes={name: _address_of(place) for name, place in target.routes.items()},
        redirect=_address_of(target.redirect) if target.redirect else None,
        type_header=target.type_header or TYPE_HEADER,
        has_table=bool(target.routes),
    )


def _route_item(letter: Letter, target: Target) -> tuple[Address | None, str]:
    """Of an embedded queue: it has no exchanges, and knows where an item died."""
    if target.kind == "address":
        return _queue_of(target.exchange, target.routing_key, "the given queue")
    if target.kind == "type" and letter.type:
        place = target.routes.get(letter.type)
        if place is None:
            return None, f"type '{letter.type}' is not in the route table"
        return _queue_of(place.exchange, place.routing_key, "type")
    if not letter.death.queue:
        return None, NO_SOURCE
    return Address(routing_key=letter.death.queue), "the queue it died in"


def _queue_of(exchange: str, queue: str, why: str) -> tuple[Address | None, str]:
    return (None, "an embedded queue has no exchanges") if exchange else (Address(routing_key=queue), why)


def _address_of(place: Place) -> Address:
    return Address(exchange=place.exchange, routing_key=place.routing_key)
