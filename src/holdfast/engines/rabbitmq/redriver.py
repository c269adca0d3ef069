"""From a delivery to what is published in its place: route, digest, and the changed header table.

Most letters of a queue died of the same cause in the same second, so what their headers tell is decided once and
remembered under the bytes that were read for it. Everything that is not changed keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.death import BROKER_HEADERS, FORKING_HEADERS, RETRY_COUNT
from holdfast.core.death import returns as returns_of
from holdfast.core.message import Address, Message
from holdfast.core.redrive import REDRIVE_ID, REDRIVEN_AT, REDRIVEN_COUNT, Redrive, redrive_ids, redriven
from holdfast.core.routes import Route, RouteTable, find_route
from holdfast.engines.rabbitmq.digest import COUNTS, digest, hash_of
from holdfast.engines.rabbitmq.reading import read_message
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire.events import Delivery
from holdfast.ports.recovery import Taken

REMEMBERED_COUNT_MAX = 4096
#: Headers whose values decide what is changed and where the letter goes; with these the type header.
TELLING = frozenset(
    name.encode()
    for name in (
        *BROKER_HEADERS,
        *FORKING_HEADERS,
        RETRY_COUNT,
        "x-original-exchange",
        "x-original-routing-key",
        "x-original-queue",
        REDRIVEN_COUNT,
    )
)
#: Only whether it is there decides; its value, which differs from letter to letter, does not.
PRESENT = b"x-kept-death"
HAS_SENSITIVE = properties.FLAGS["expiration"] | properties.FLAGS["user_id"]
REDRIVE_ID_NAME = REDRIVE_ID.encode()
REDRIVE_ID_BYTES = 36
#: A header table; or where in it the id of an earlier redrive is, and all the other bytes.
_Key: TypeAlias = bytes | tuple[int, bytes]


class _Plan(Struct, frozen=True):
    """What was decided for all letters whose headers tell the same."""

    route: Route
    dropped: frozenset[bytes]
    dropped_properties: tuple[str, ...]
    fixed: bytes  #: header entries that are set, packed


class _Known(Struct, frozen=True, kw_only=True):
    """What one header table tells, ready to be used for every letter that has the same.

    The id of an earlier redrive is the only thing that differs in tables that are otherwise the same: it is left out of
    what is remembered. `compared` then ends where the id belongs, and `behind` follows it.
    """

    compared: bytes
    behind: bytes | None
    head: bytes  #: the entries of the copy that stand before those of the letter alone: kept ones, then set ones
    rest: bytes
    plan: _Plan
    counts: bool
    returns: int


class Copy(Struct, eq=False, gc=False):
    """A delivery and what is published in its place."""

    delivery: Delivery
    properties: bytes


class Redriver:
    """`taken(delivery)` for every delivery of one run."""

    def __init__(self, redrive: Redrive, routes: RouteTable, *, now: Callable[[], datetime]) -> None:
        self.blocked: Callable[[Address], str] = lambda address: ""  #: why nothing sent there would arrive
        self._redrive = redrive
        self._routes = routes
        self._telling = TELLING | {routes.type_header.encode("utf-8", "surrogateescape")}
        self._now = now
        self._plans: dict[bytes, _Plan] = {}
        self._tables: dict[_Key, _Known] = {}
        self._own = b""  # the entries of a letter alone, up to its id
        self._id_head = _entry(REDRIVE_ID, b"S" + REDRIVE_ID_BYTES.to_bytes(4, "big"))
        self._id_place = len(self._id_head)
        self._id = redrive_ids(redrive.dead_queue)

    def tick(self) -> None:
        """A new batch begins: what is redriven in it carries this moment."""
        self._own = _entry(REDRIVEN_AT, table.encode_value(self._now().isoformat())) + self._id_head

    def taken(self, delivery: Delivery) -> Taken:
        """Never raises: what cannot be read is kept, with the reason."""
        raw, body = delivery.properties, delivery.body
        try:
            start, end = properties.header_span(raw)
        except properties.Unreadable as error:
            return self._unreadable(delivery, f"its properties cannot be read: {error}")
        headers = raw[start:end] or table.EMPTY
        sensitive = raw[1] & HAS_SENSITIVE  # both flags are in the second byte
        # Where the id of an earlier redrive seems to be; `_read_table` makes sure before it believes that.
        place = headers.find(self._id_head) + self._id_place
        last = place + REDRIVE_ID_BYTES
        key: _Key = (place, headers[:place] + headers[last:]) if place >= self._id_place else headers
        known = None if sensitive else self._tables.get(key)
        if known is None:
            try:
                known = self._read_table(delivery, headers, key)
            except properties.Unreadable as error:
                return self._unreadable(delivery, f"its properties cannot be read: {error}")
        plan = known.plan
        plain = properties.without_headers(raw, start, end)
        if known.behind is None:
            mark = hash_of((plain, known.compared), body)
        else:
            mark = hash_of((plain, known.compared, headers[place:last], known.behind), body)
        copy = raw
        if plan.route.address is not None:
            copy = properties.with_headers(
                raw, start, end, (known.head, self._own, self._id(mark).encode(), known.rest)
            )
            if plan.dropped_properties:
                copy = properties.splice(copy, drop=plan.dropped_properties)
        returns = (known.returns if delivery.redelivered else 0) if known.counts else None
        size_bytes = len(raw) + len(copy) + len(body)
        return Taken(Copy(delivery, copy), mark, plan.route, delivery.redelivered, returns, size_bytes)

    def _read_table(self, delivery: Delivery, headers: bytes, key: _Key) -> _Known:
        """What the header table tells; remembered, because most letters of a queue tell the same."""
        found = table.scan(headers)
        telling: list[bytes] = []
        compared: list[bytes] = []
        entries: list[tuple[bytes, bytes]] = []
        for name, first, last in found.entries:
            entry = headers[first:last]
            entries.append((name, entry))
            if name in COUNTS:
                continue
            compared.append(entry)
            if name in self._telling:
                telling.append(entry)
            elif name == PRESENT:
                telling.append(PRESENT)
        rest = headers[found.rest :]
        plan, message = self._plan(delivery, b"".join(telling))
        returns = 0
        if counts := len(compared) < len(entries):
            message = message or read_message(delivery, self._redrive.dead_queue)
            returns = returns_of(replace(message, redelivered=True)) or 0
        compared.sort()
        hole = self._hole(found, compared, headers, key)
        before = compared if hole is None else [*compared[:hole], self._id_head]
        kept = [entry for name, entry in entries if name not in plan.dropped]
        known = _Known(
            compared=b"".join(before) + (rest if hole is None else b""),
            behind=None if hole is None else b"".join(compared[hole + 1 :]) + rest,
            head=b"".join([*kept, plan.fixed]),
            rest=rest,
            plan=plan,
            counts=counts,
            returns=returns,
        )
        if not delivery.properties[1] & HAS_SENSITIVE:
            if len(self._tables) >= REMEMBERED_COUNT_MAX:
                self._tables.clear()
            self._tables[headers if hole is None else key] = known
        return known

    def _hole(self, found: table.Scan, compared: list[bytes], headers: bytes, key: _Key) -> int | None:
        """Which of the entries is the one whose id was left out of the key; None when it is not what it seemed to be.

        If it is, then in every table with the same key: all bytes by which a table is taken apart are in the key.
        """
        own = [(first, last) for name, first, last in found.entries if name == REDRIVE_ID_NAME]
        if isinstance(key, bytes) or len(own) != 1 or REDRIVE_ID_NAME in self._telling:
            return None
        first, last = own[0]
        if (first + self._id_place, last) != (key[0], key[0] + REDRIVE_ID_BYTES):
            return None
        return compared.index(headers[first:last])

    def _plan(self, delivery: Delivery, telling: bytes) -> tuple[_Plan, Message | None]:
        """What was or is decided for letters that tell this; with the letter, when it had to be read for it."""
        raw = delivery.properties
        if raw[1] & HAS_SENSITIVE:
            pieces = properties.split(raw)
            telling += b"\0" + pieces.get("expiration", b"") + b"\0" + pieces.get("user_id", b"")
        plan = self._plans.get(telling)
        if plan is not None:
            return plan, None
        message = read_message(delivery, self._redrive.dead_queue)
        return self._decide(telling, message), message

    def _decide(self, key: bytes, message: Message) -> _Plan:
        route = find_route(message.headers, self._routes, dead_queue=self._redrive.dead_queue)
        if route.address is not None and (why := self.blocked(route.address)):
            route = replace(route, blocked=why)
        change = redriven(message, self._redrive)
        fixed = b"".join(_entry(name, table.encode_value(value)) for name, value in change.put.items())  # type: ignore[arg-type]
        names = (*change.drop, *change.put, REDRIVEN_AT, REDRIVE_ID)
        plan = _Plan(route, frozenset(name.encode() for name in names), change.drop_properties, fixed)
        if len(self._plans) >= REMEMBERED_COUNT_MAX:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _unreadable(self, delivery: Delivery, why: str) -> Taken:
        return Taken(
            Copy(delivery, delivery.properties),
            digest(delivery.properties, delivery.body),
            Route(address=None, why=why),
            delivery.redelivered,
            None,
            len(delivery.properties) + len(delivery.body),
        )


def as_put_back(delivery: Delivery) -> bytes:
    """The properties of a letter that goes back into its own queue: all as it came, but nothing that expires."""
    try:
        return properties.splice(delivery.properties, drop=("expiration",))
    except properties.Unreadable:
        return delivery.properties


def _entry(name: str, value: bytes) -> bytes:
    raw = name.encode()
    return bytes((len(raw),)) + raw + value
