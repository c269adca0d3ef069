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
from holdfast.core.letter import JsonValue, Letter
from holdfast.core.message import Address, Headers
from holdfast.core.plan import Place, Target
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
    address, why = _route(headers, name, table, dead_queue)
    if address == Address(routing_key=dead_queue):
        address, why = None, "its route leads back to the dead-letter queue"
    return Route(address=address, why=why, type=name)


def _route(headers: Headers, name: str, table: RouteTable, dead_queue: str) -> tuple[Address | None, str]:
    if table.mode is Mode.PLACE:
        return table.place, "all go to one place"
    if table.mode is Mode.SOURCE or table.mode is Mode.WAIT:
        source = _source_queue(headers, table, dead_queue)
        if not source:
            return None, "nothing says in which queue it died"
        if table.mode is Mode.SOURCE:
            return Address(routing_key=source), "the queue it died in"
        exchange = table.wait_exchange.replace("{queue}", source)
        key = table.wait_key.replace("{queue}", source)
        return Address(exchange=exchange, routing_key=key), "the wait queue of the queue it died in"
    if table.mode is Mode.ROUTES and table.has_table and table.type_header in headers:
        address = table.routes.get(name)
        return address, f"type '{name or '(no text)'}' is not in the route table" if address is None else "type"
    if (address := _original(headers)) is not None:
        return address, "its original exchange and key"
    if (death := _died(headers, table, dead_queue)) is not None and (death.routing_key or death.exchange):
        return Address(exchange=death.exchange, routing_key=death.routing_key), "x-death"
    if table.redirect is not None and table.mode is Mode.ROUTES:
        return table.redirect, "redirect"
    return None, NOWHERE


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


TARGET_MODES = {
    "queue": Mode.SOURCE,
    "wait": Mode.WAIT,
    "original": Mode.EXCHANGE,
    "address": Mode.PLACE,
    "type": Mode.ROUTES,
}


def route_letter(letter: Letter, target: Target) -> tuple[Address | None, str]:
    """Where a letter of the vault goes by a target, and why; no address when nothing says where."""
    if letter.origin == "queue":
        return _route_item(letter, target)
    found = find_route(_telling(letter, target), route_table(target), dead_queue=letter.queue)
    return found.address, found.why


def route_table(target: Target) -> RouteTable:
    """What a target says, as the table that routes are found by."""
    return RouteTable(
        mode=TARGET_MODES[target.kind],
        place=Address(exchange=target.exchange, routing_key=target.routing_key),
        routes={name: _address_of(place) for name, place in target.routes.items()},
        redirect=_address_of(target.redirect) if target.redirect else None,
        type_header=target.type_header or TYPE_HEADER,
        has_table=bool(target.routes),
    )


def _telling(letter: Letter, target: Target) -> dict[str, JsonValue]:
    """The headers by which a letter finds its way."""
    told: dict[str, JsonValue] = {ORIGINAL_QUEUE: letter.death.queue} if letter.death.queue else {}
    for name in (ORIGINAL_EXCHANGE, ORIGINAL_KEY):
        value = letter.headers.get(name)
        if isinstance(value, str):
            told[name] = value
    if target.kind not in ("original", "type"):
        return told
    header = target.type_header or TYPE_HEADER
    typed: dict[str, JsonValue] = {header: letter.type} if letter.type and header not in letter.headers else {}
    return {**letter.headers, **told, **typed}


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
        return None, "nothing says in which queue it died"
    return Address(routing_key=letter.death.queue), "the queue it died in"


def _queue_of(exchange: str, queue: str, why: str) -> tuple[Address | None, str]:
    return (None, "an embedded queue has no exchanges") if exchange else (Address(routing_key=queue), why)


def _address_of(place: Place) -> Address:
    return Address(exchange=place.exchange, routing_key=place.routing_key)
