"""What is published in the place of a letter, by splicing raw headers: of a delivery in a recovery (route, digest, and
the changed header table), and of a letter of the vault (its own bytes, its edits, and what a redrive changes).

Most letters of a queue died of the same cause in the same second, so what their headers tell is decided once and
remembered under the bytes that were read for it. Everything that is not changed keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.death import (
    BROKER_HEADERS,
    FIRST_ORIGIN,
    FORKING_HEADERS,
    ORIGIN,
    ORIGINAL_FOR,
    PARKED_AT,
    REDRIVE_ID,
    REDRIVEN_AT,
    REDRIVEN_COUNT,
    RETRY_COUNT,
    HeaderChange,
    RedriveStamp,
    redrive_ids,
    redriven,
)
from holdfast.core.death import returns as returns_of
from holdfast.core.letter import Content
from holdfast.core.message import Address, Delivery, Message, Outgoing
from holdfast.core.recovery import RunLetter
from holdfast.core.routes import Route, RouteTable, find_route
from holdfast.engines.rabbitmq.letters import COUNTS, digest, hash_of, read_message
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire.table import Value

#: Neighbours in a queue died at about the same time, and of the same.
REMEMBERED_COUNT_MAX = 1_024
#: A header table may fill a frame of 128 KiB, and differ from letter to letter.
REMEMBERED_BYTES_MAX = 2 * 2**20
#: Headers whose values decide what is changed and where the letter goes; with these the type header.
TELLING = frozenset(
    name.encode()
    for name in (
        *BROKER_HEADERS,
        *FORKING_HEADERS,
        *ORIGIN,
        ORIGINAL_FOR,
        RETRY_COUNT,
        REDRIVEN_COUNT,
    )
)
#: Only whether they are there decides; their values, which differ from letter to letter, do not.
PRESENT = frozenset(name.encode() for name in ("x-kept-death", PARKED_AT, *FIRST_ORIGIN))
HAS_SENSITIVE = properties.FLAGS["expiration"] | properties.FLAGS["user_id"]
HAS_TYPE = properties.FLAGS["type"]
COPIES = "{address} gives a copy to each of {queues}; that needs --allow-copies (allow_copies in a schedule)"
REDRIVE_ID_NAME = REDRIVE_ID.encode()
REDRIVE_ID_BYTES = 36


K = TypeVar("K")
T = TypeVar("T")


class _KnownTables(dict[K, T]):
    """Forgets all when it becomes too much: letters are like those that came just before, if like any."""

    _bytes = 0

    def put(self, key: K, value: T, size_bytes: int) -> None:
        """Remember it; `size_bytes` is what that takes."""
        self._bytes += size_bytes
        if len(self) >= REMEMBERED_COUNT_MAX or self._bytes > REMEMBERED_BYTES_MAX:
            self.clear()
            self._bytes = size_bytes
        self[key] = value


class _Plan(Struct, frozen=True):
    """What was decided for all letters whose headers tell the same; no plan of the vault."""

    route: Route
    dropped: frozenset[bytes]
    dropped_properties: tuple[str, ...]
    fixed: bytes  #: header entries that are set, packed


class _HeaderEnd(Struct, frozen=True):
    """Where the header table of a letter ends, and where in it the id of an earlier redrive is; if none, at its end."""

    hole: int
    hole_end: int
    end: int


class _KnownHeaders(Struct, frozen=True, kw_only=True):
    """What the properties of a letter tell up to the end of its headers, for every letter that has the same.

    The id of an earlier redrive is the only thing that differs in tables that are otherwise the same: it is left out of
    what is remembered. `compared` then ends where the id belongs, and `behind` follows it.
    """

    front: _HeaderEnd
    plain: bytes  #: the properties before the headers, as if there were none
    compared: bytes
    behind: bytes
    compared_bytes: int  #: of all that is compared but for what follows the headers
    head: bytes  #: the copy, up to the size of its headers
    entries: bytes  #: of the copy, before those of the letter alone: kept ones, then set ones
    rest: bytes
    table_bytes: int  #: of the copy's headers, but for those of the letter alone
    plan: _Plan
    counts: bool
    returns: int


class RabbitRedriver:
    """`letter(delivery)` for every delivery of one run; see `ports.broker.Redriver`."""

    def __init__(
        self,
        redrive: RedriveStamp,
        routes: RouteTable,
        *,
        now: Callable[[], datetime],
        blocked: Callable[[Address], str] = lambda address: "",
        receivers: Callable[[Address], Sequence[str]] = lambda address: (),
        sources: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`blocked` says why nothing sent there would arrive, `receivers` which queues get a copy, `sources` which ones
        lead to the dead-letter queue."""
        self._blocked = blocked
        self._receivers = receivers
        self._sources = sources
        self._redrive = redrive
        self._routes = routes
        self._type_header = routes.type_header.encode("utf-8", "surrogateescape")
        self._telling = TELLING | {self._type_header}
        self._now = now
        self._plans: _KnownTables[bytes, _Plan] = _KnownTables()
        self._known: _KnownTables[bytes, _KnownHeaders] = _KnownTables()
        self._last = _HeaderEnd(0, 0, 0)  # of the letter before: most letters of a queue are made alike
        self._own = b""  # the entries of a letter alone, up to its id
        self._id_head = table.entry(REDRIVE_ID, b"S" + REDRIVE_ID_BYTES.to_bytes(4, "big"))
        self._id_place = len(self._id_head)
        self._id = redrive_ids(redrive.dead_queue)

    def tick(self) -> None:
        """A new batch begins: what is redriven in it carries this moment."""
        self._own = _entry(REDRIVEN_AT, self._now().isoformat()) + self._id_head

    def letter(self, delivery: Delivery) -> RunLetter:
        """Never raises: what cannot be read is kept, with the reason."""
        raw, body, front = delivery.properties, delivery.body, self._last
        known = self._known.get(_key(raw, front))
        if known is None or known.front != front:
            try:
                known = self._look(delivery)
            except properties.Unreadable as error:
                return self._unreadable(delivery, f"its properties cannot be read: {error}")
            front = known.front
        tail = raw[front.end :]
        compared = (known.plain, tail, known.compared, raw[front.hole : front.hole_end], known.behind)
        mark = hash_of(known.compared_bytes + len(tail), compared, body)
        plan, own = known.plan, self._own
        copy = raw
        if plan.route.address is not None:
            size = (known.table_bytes + len(own)).to_bytes(4, "big")
            copy = b"".join((known.head, size, known.entries, own, self._id(mark).encode(), known.rest, tail))
            if plan.dropped_properties:
                copy = properties.splice(copy, drop=plan.dropped_properties)
        returns = (known.returns if delivery.redelivered else 0) if known.counts else None
        size_bytes = len(raw) + len(copy) + len(body)
        return RunLetter(delivery, copy, mark, plan.route, delivery.redelivered, returns, size_bytes)

    def read(self, delivery: Delivery) -> Message:
        return read_message(delivery, self._redrive.dead_queue)

    def put_back(self, letter: RunLetter) -> Outgoing:
        delivery = letter.delivery
        try:
            raw = properties.splice(delivery.properties, drop=("expiration",))
        except properties.Unreadable:
            raw = delivery.properties
        return Outgoing("", self._redrive.dead_queue, raw, delivery.body, letter)

    def _look(self, delivery: Delivery) -> _KnownHeaders:
        """At a letter that is made otherwise than the one before. Raises Unreadable."""
        raw = delivery.properties
        start, end = properties.header_span(raw)
        # Where the id of an earlier redrive seems to be; `_read` makes sure before it believes that.
        hole = raw.find(self._id_head, start, end) + self._id_place
        front = _HeaderEnd(hole, hole + REDRIVE_ID_BYTES, end) if hole >= self._id_place else _HeaderEnd(end, end, end)
        known = self._known.get(_key(raw, front))
        if known is None or known.front != front:
            known = self._read(delivery, start, front)
        self._last = known.front
        return known

    def _read(self, delivery: Delivery, start: int, front: _HeaderEnd) -> _KnownHeaders:
        """What the headers tell; remembered, because most letters of a queue tell the same."""
        raw, end = delivery.properties, front.end
        headers = raw[start:end] or table.EMPTY
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
            elif name in PRESENT:
                telling.append(name)
        rest = headers[found.rest :]
        deciding = self._deciding(raw, entries)
        plan, message = self._plan(delivery, b"".join(telling), deciding)
        returns = 0
        if counts := len(compared) < len(entries):
            message = message or read_message(delivery, self._redrive.dead_queue)
            returns = returns_of(replace(message, redelivered=True)) or 0
        compared.sort()
        if front.hole < end and (own := self._own_entry(found, headers, front.hole - start)):
            place = compared.index(own)
            before, behind = [*compared[:place], self._id_head], b"".join(compared[place + 1 :]) + rest
        else:
            front, before, behind = _HeaderEnd(end, end, end), compared, rest
        kept = b"".join([*(entry for name, entry in entries if name not in plan.dropped), plan.fixed])
        plain = properties.before_headers(raw, start, has_headers=False)
        known = _KnownHeaders(
            front=front,
            plain=plain,
            compared=(joined := b"".join(before)),
            behind=behind,
            compared_bytes=len(plain) + len(joined) + front.hole_end - front.hole + len(behind),
            head=properties.before_headers(raw, start, has_headers=True),
            entries=kept,
            rest=rest,
            table_bytes=len(kept) + REDRIVE_ID_BYTES + len(rest),
            plan=plan,
            counts=counts,
            returns=returns,
        )
        if not deciding:
            key = _key(raw, front)
            self._known.put(key, known, len(key) + known.compared_bytes + len(known.head) + known.table_bytes)
        return known

    def _deciding(self, raw: bytes, entries: Sequence[tuple[bytes, bytes]]) -> int:
        """The flags of properties behind the headers that decide something: what was read is not remembered without."""
        flags = raw[0] << 8 | raw[1]
        if self._routes.has_table and flags & HAS_TYPE and all(name != self._type_header for name, _ in entries):
            return flags & (HAS_SENSITIVE | HAS_TYPE)
        return flags & HAS_SENSITIVE

    def _own_entry(self, found: table.Scan, headers: bytes, hole: int) -> bytes:
        """The entry whose id was left out of what is remembered; nothing when it is not what it seemed to be.

        If it is, then in every letter with the same bytes elsewhere: all by which a table is taken apart are there.
        """
        own = [(first, last) for name, first, last in found.entries if name == REDRIVE_ID_NAME]
        if len(own) != 1 or REDRIVE_ID_NAME in self._telling:
            return b""
        first, last = own[0]
        is_own = (first + self._id_place, last) == (hole, hole + REDRIVE_ID_BYTES)
        return headers[first:last] if is_own else b""

    def _plan(self, delivery: Delivery, telling: bytes, deciding: int) -> tuple[_Plan, Message | None]:
        """What was or is decided for letters that tell this; with the letter, when it had to be read for it.

        Properties with the flags `deciding` tell something as well.
        """
        if deciding:
            pieces = properties.split(delivery.properties)
            told = [piece for name, piece in pieces.items() if properties.FLAGS[name] & deciding]
            telling += b"\0".join((b"", deciding.to_bytes(2, "big"), *told))
        if (known := self._plans.get(telling)) is not None:
            return known, None
        message = read_message(delivery, self._redrive.dead_queue)
        route = self._route(message)
        change = redriven(message, self._redrive)
        fixed = _fixed(change)
        plan = _Plan(route, _gone(change), change.drop_properties, fixed)
        self._plans.put(telling, plan, 2 * len(telling) + len(fixed))  # twice: the route may name what the headers do
        return plan, message

    def _route(self, message: Message) -> Route:
        dead_queue, kind = self._redrive.dead_queue, message.type if self._routes.has_table else ""
        route = find_route(message.headers, self._routes, dead_queue=dead_queue, kind=kind, sources=self._sources)
        address = route.address
        if address is None:
            return route
        if why := self._blocked(address):
            return replace(route, blocked=why)
        if route.is_told and not self._routes.allow_copies and len(queues := self._receivers(address)) > 1:
            # Nobody wrote this address down for it: all but one of them may have done their work on it.
            return replace(route, address=None, why=COPIES.format(address=address, queues=", ".join(queues)))
        return route

    def _unreadable(self, delivery: Delivery, why: str) -> RunLetter:
        return RunLetter(
            delivery,
            delivery.properties,
            digest(delivery.properties, delivery.body),
            Route(address=None, why=why),
            delivery.redelivered,
            None,
            len(delivery.properties) + len(delivery.body),
        )


def _key(raw: bytes, front: _HeaderEnd) -> bytes:
    """All properties up to the end of the headers, but for the id of an earlier redrive."""
    return raw[: front.hole] + raw[front.hole_end : front.end]


class Rewriter:
    """What is published of letters of the vault; `user` is whom the broker knows us as.

    Most letters of a task died of the same cause, so what is made of a header table is remembered under its bytes.
    """

    def __init__(self, user: str) -> None:
        self._user = user
        self._known: _KnownTables[tuple[str, str, str, bytes], tuple[bytes, bytes]] = _KnownTables()

    def properties(self, content: Content, stamp: RedriveStamp, redrive_id: str, *, at: datetime) -> bytes:
        """Raises Unreadable, ValueError or TypeError for what cannot be written."""
        raw = content.properties
        start, end = properties.header_span(raw)
        own = _entry(REDRIVEN_AT, at.isoformat()) + _entry(REDRIVE_ID, redrive_id)
        if content.put or content.drop or (raw[0] << 8 | raw[1]) & HAS_SENSITIVE:
            change = self._change(raw, stamp)
            raw = properties.splice(raw, drop=change.drop_properties)
            raw = properties.splice_headers(raw, put=dict(content.put), drop=content.drop)  # type: ignore[arg-type]
            start, end = properties.header_span(raw)
            kept, rest = _changed(raw[start:end], change)
        else:
            key = (stamp.run, stamp.by, stamp.dead_queue, raw[start:end])
            if (known := self._known.get(key)) is None:
                known = _changed(raw[start:end], self._change(raw, stamp))
                self._known.put(key, known, 2 * (end - start))
            kept, rest = known
        return properties.with_headers(raw, start, end, (kept, own, rest))

    def _change(self, raw: bytes, stamp: RedriveStamp) -> HeaderChange:
        letter = read_message(Delivery(0, 0, False, "", "", "", raw, b""), stamp.dead_queue)
        return redriven(letter, replace(stamp, user=self._user))


def _changed(headers: bytes, change: HeaderChange) -> tuple[bytes, bytes]:
    """The entries that stand before those of a letter alone, and the part that nobody can read behind them."""
    found, gone = table.scan(headers), _gone(change)
    kept = [headers[first:last] for name, first, last in found.entries if name not in gone]
    return b"".join([*kept, _fixed(change)]), headers[found.rest :]


def _gone(change: HeaderChange) -> frozenset[bytes]:
    """The headers that a redrive takes away or writes anew."""
    return frozenset(name.encode() for name in (*change.drop, *change.put, REDRIVEN_AT, REDRIVE_ID))


def _fixed(change: HeaderChange) -> bytes:
    """The headers that a redrive sets, but for those of a letter alone."""
    return b"".join(_entry(name, value) for name, value in change.put.items())  # type: ignore[arg-type]


def _entry(name: str, value: Value) -> bytes:
    return table.entry(name, table.encode_value(value))
