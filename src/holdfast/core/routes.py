"""Which address a letter goes back to, and why: type map, our own notes, x-death, redirect, or unknown. Pure.

A type that is there but not in the table is *unknown*: it does not fall through to x-death, because the table was
written by somebody who knows, and a guess would send the letter where nobody expects it.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.death import ORIGINAL_EXCHANGE, ORIGINAL_KEY, ORIGINAL_QUEUE, Death, deaths
from holdfast.core.message import Address, Headers
from holdfast.errors import Invalid

FILE_BYTES_MAX = 1_000_000
NAME_BYTES_MAX = 255
TYPE_HEADER = "MessageType"
#: Names of queues where a message only sits out its delay: to have expired there is no death.
WAIT_QUEUES = ("*.retry", "*.retry.*")
WAIT_EXCHANGE = "retry.{queue}"
WAIT_KEY = "retry"
#: Why a letter is kept that tells nothing at all.
NOWHERE = "nothing says where it came from"


class Mode(StrEnum):
    """Where letters go."""

    ROUTES = "routes"  #: by type, else where they came from
    SOURCE = "source"  #: the queue that they died in, by the default exchange
    EXCHANGE = "exchange"  #: the original exchange and key
    WAIT = "wait"  #: the wait queue of the queue that they died in
    PLACE = "place"  #: all to one address


class Route(Struct, frozen=True, kw_only=True):
    """Where one letter goes; without an address it is kept, and `why` is the reason."""

    address: Address | None
    why: str
    type: str = ""
    source_queue: str = ""
    blocked: str = ""  #: why nothing that is sent to the address gets to where it is meant for


class RouteTable(Struct, frozen=True, kw_only=True):
    """What a routes file says, with the way that was chosen."""

    routes: Mapping[str, Address] = {}
    type_header: str = TYPE_HEADER
    redirect: Address | None = None
    wait_queues: tuple[str, ...] = WAIT_QUEUES
    wait_exchange: str = WAIT_EXCHANGE
    wait_key: str = WAIT_KEY
    mode: Mode = Mode.ROUTES
    place: Address | None = None
    has_table: bool = False  #: a table was given: a type that is not in it is unknown

    def fixed_addresses(self) -> list[Address]:
        """All addresses that are known before the first letter is seen, each once."""
        if self.mode is Mode.PLACE:
            return [self.place] if self.place else []
        found = list(self.routes.values()) if self.mode is Mode.ROUTES else []
        if self.redirect is not None and self.mode is Mode.ROUTES:
            found.append(self.redirect)
        return list(dict.fromkeys(found))

    def is_wait_queue(self, queue: str) -> bool:
        """Whether a queue of this name only holds messages for a while."""
        return any(fnmatch.fnmatchcase(queue, pattern) for pattern in self.wait_queues)


def find_route(headers: Headers, table: RouteTable, *, dead_queue: str) -> Route:
    """Where a letter with these headers goes."""
    kind = headers.get(table.type_header)
    name = kind if isinstance(kind, str) else ""
    route = _route(headers, name, table, dead_queue)
    if route.address is not None and _is_queue(route.address, dead_queue):
        return Route(address=None, why="its route leads back to the dead-letter queue", type=name)
    return route


def _route(headers: Headers, name: str, table: RouteTable, dead_queue: str) -> Route:
    source = _source_queue(headers, table, dead_queue)
    if table.mode is Mode.PLACE:
        return Route(address=table.place, why="all go to one place", type=name, source_queue=source)
    if table.mode is Mode.SOURCE or table.mode is Mode.WAIT:
        if not source:
            return Route(address=None, why="nothing says in which queue it died", type=name)
        if table.mode is Mode.SOURCE:
            return Route(
                address=Address(routing_key=source), why="the queue it died in", type=name, source_queue=source
            )
        exchange = table.wait_exchange.replace("{queue}", source)
        key = table.wait_key.replace("{queue}", source)
        place = Address(exchange=exchange, routing_key=key)
        return Route(address=place, why="the wait queue of the queue it died in", type=name, source_queue=source)
    if table.mode is Mode.ROUTES and table.has_table and table.type_header in headers:
        address = table.routes.get(name)
        if address is None:
            shown = name or "(no text)"
            return Route(address=None, why=f"type '{shown}' is not in the route table", type=name, source_queue=source)
        return Route(address=address, why="type", type=name, source_queue=source)
    if (address := _original(headers)) is not None:
        return Route(address=address, why="its original exchange and key", type=name, source_queue=source)
    if (death := _died(headers, table, dead_queue)) is not None and (death.routing_key or death.exchange):
        address = Address(exchange=death.exchange, routing_key=death.routing_key)
        return Route(address=address, why="x-death", type=name, source_queue=source)
    if table.redirect is not None and table.mode is Mode.ROUTES:
        return Route(address=table.redirect, why="redirect", type=name, source_queue=source)
    return Route(address=None, why=NOWHERE, type=name)


def _original(headers: Headers) -> Address | None:
    exchange, key = headers.get(ORIGINAL_EXCHANGE), headers.get(ORIGINAL_KEY)
    if not isinstance(exchange, str) or not isinstance(key, str) or not (exchange or key):
        return None
    return Address(exchange=exchange, routing_key=key)


def _died(headers: Headers, table: RouteTable, dead_queue: str) -> Death | None:
    """The newest death that is one: not in a wait queue, and not in the dead-letter queue itself."""
    for death in deaths(headers):
        if death.queue != dead_queue and not table.is_wait_queue(death.queue):
            return death
    return None


def _source_queue(headers: Headers, table: RouteTable, dead_queue: str) -> str:
    queue = headers.get(ORIGINAL_QUEUE)
    if isinstance(queue, str) and queue and queue != dead_queue:
        return queue
    death = _died(headers, table, dead_queue)
    return death.queue if death else ""


def _is_queue(address: Address, queue: str) -> bool:
    return not address.exchange and address.routing_key == queue


# The file.


class _Place(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    exchange: str | None = None


class _RoutesFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exchange: str = ""
    type_header: str = TYPE_HEADER
    routes: dict[str, str | _Place] = {}
    redirect: str | _Place | None = None
    wait_queues: tuple[str, ...] = WAIT_QUEUES
    wait_exchange: str = WAIT_EXCHANGE
    wait_key: str = WAIT_KEY


def parse_routes(data: bytes, *, source: str) -> RouteTable:
    """Read a routes file (TOML). Raises Invalid, which names the file and the place in it."""
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Invalid(f"routes file is invalid; {source} is not UTF-8 at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Invalid(f"routes file is invalid; {source} is not TOML: {error}") from error
    try:
        file = msgspec.convert(table, _RoutesFile)
    except msgspec.ValidationError as error:
        raise Invalid(f"routes file is invalid; {source}: {error}") from error
    if not file.routes and file.redirect is None:
        raise Invalid(f"routes file is invalid; {source} has an empty [routes] table and no redirect")
    routes = {name: _address(place, file.exchange, f"{source}: route '{name}'") for name, place in file.routes.items()}
    for name, text in (("type_header", file.type_header), ("exchange", file.exchange)):
        _checked(text, f"{source}: {name}")
    return RouteTable(
        routes=routes,
        type_header=file.type_header,
        redirect=None if file.redirect is None else _address(file.redirect, file.exchange, f"{source}: redirect"),
        wait_queues=file.wait_queues,
        wait_exchange=file.wait_exchange,
        wait_key=file.wait_key,
        has_table=bool(file.routes),
    )


def parse_place(text: str) -> Address:
    """`--to`: a queue's name, or `exchange=NAME,key=KEY`. Raises Invalid."""
    if not text.startswith("exchange="):
        return _address(text, "", "address")
    exchange, comma, key = text.removeprefix("exchange=").partition(",key=")
    if not comma:
        raise Invalid(f"address is invalid; '{text}' is not exchange=NAME,key=KEY")
    return _address(_Place(key=key, exchange=exchange), "", "address")


def _address(place: str | _Place, exchange: str, what: str) -> Address:
    if isinstance(place, _Place):
        exchange, key = exchange if place.exchange is None else place.exchange, place.key
    else:
        key = place
    if not key and not exchange:
        raise Invalid(f"routes file is invalid; {what} has neither exchange nor key")
    return Address(exchange=_checked(exchange, what), routing_key=_checked(key, what))


def _checked(text: str, what: str) -> str:
    if len(text.encode()) > NAME_BYTES_MAX:
        raise Invalid(f"routes file is invalid; {what} has a name of more than {NAME_BYTES_MAX} bytes")
    return text
