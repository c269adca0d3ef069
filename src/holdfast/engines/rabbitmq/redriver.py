"""From a delivery to what is published in its place: route, digest, and the changed header table.

Most letters of a queue died of the same cause in the same second, so what their headers tell is decided once and
remembered under the bytes that were read for it. Everything that is not changed keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from holdfast.core.death import BROKER_HEADERS, FORKING_HEADERS, RETRY_COUNT
from holdfast.core.death import returns as returns_of
from holdfast.core.message import Message
from holdfast.core.redrive import REDRIVE_ID, REDRIVEN_AT, REDRIVEN_COUNT, Redrive, redrive_id, redriven
from holdfast.core.routes import Route, RouteTable, find_route
from holdfast.engines.rabbitmq.digest import COUNTS, digest, digest_of
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
        "x-redriven-at",
        "x-redriven-by",
        "x-redriven-from",
        REDRIVEN_COUNT,
        REDRIVE_ID,
        "x-redrive-run",
        "x-kept-expiration",
        "x-kept-user-id",
        "x-kept-cc",
        "x-kept-death",
    )
)
HAS_SENSITIVE = properties.FLAGS["expiration"] | properties.FLAGS["user_id"]


class _Plan:
    """What was decided for all letters whose headers tell the same."""

    __slots__ = ("dropped", "dropped_properties", "fixed", "route")

    def __init__(
        self, route: Route, dropped: frozenset[bytes], dropped_properties: tuple[str, ...], fixed: bytes
    ) -> None:
        self.route = route
        self.dropped = dropped
        self.dropped_properties = dropped_properties
        self.fixed = fixed  # header entries that are set, packed


class Copy:
    """A delivery and what is published in its place."""

    __slots__ = ("delivery", "properties")

    def __init__(self, delivery: Delivery, raw: bytes) -> None:
        self.delivery = delivery
        self.properties = raw


class Redriver:
    """`taken(delivery)` for every delivery of one run."""

    def __init__(self, redrive: Redrive, routes: RouteTable, *, now: Callable[[], datetime]) -> None:
        self._redrive = redrive
        self._routes = routes
        self._telling = TELLING | {routes.type_header.encode("utf-8", "surrogateescape")}
        self._now = now
        self._plans: dict[bytes, _Plan] = {}
        self._at = b""

    def tick(self) -> None:
        """A new batch begins: what is redriven in it carries this moment."""
        self._at = _entry(REDRIVEN_AT, table.encode_value(self._now().isoformat()))

    def taken(self, delivery: Delivery) -> Taken:
        """Never raises: what cannot be read is kept, with the reason."""
        raw = delivery.properties
        try:
            pieces = properties.split(raw)
        except properties.Unreadable as error:
            return self._unreadable(delivery, f"its properties cannot be read: {error}")
        headers = pieces.pop("headers", table.EMPTY)
        found = table.scan(headers)
        telling_names = self._telling
        entries: list[tuple[bytes, bytes]] = []
        telling: list[bytes] = []
        compared: list[bytes] = []
        counts = False
        for name, start, end in found.entries:
            entry = headers[start:end]
            entries.append((name, entry))
            if name in COUNTS:
                counts = True
                continue
            compared.append(entry)
            if name in telling_names:
                telling.append(entry)
        rest = headers[found.rest :]
        plain = properties.join(pieces)
        mark = digest_of(plain, compared, rest, delivery.body)
        message: Message | None = None
        key = b"".join(telling)
        if int.from_bytes(raw[:2], "big") & HAS_SENSITIVE:
            key += b"\0" + pieces.get("expiration", b"") + b"\0" + pieces.get("user_id", b"")
        plan = self._plans.get(key)
        if plan is None:
            message = read_letter(delivery, self._redrive.dead_queue)
            plan = self._decide(key, message)
        route = plan.route
        copy = raw
        if route.address is not None:
            kept = [entry for name, entry in entries if name not in plan.dropped]
            own = _entry(REDRIVE_ID, table.encode_value(redrive_id(self._redrive.dead_queue, mark)))
            payload = b"".join((*kept, plan.fixed, self._at, own, rest))
            pieces["headers"] = len(payload).to_bytes(4, "big") + payload
            for unwanted in plan.dropped_properties:
                pieces.pop(unwanted, None)
            copy = properties.join(pieces)
        returned: int | None = None
        if counts:
            returned = returns_of(message or read_letter(delivery, self._redrive.dead_queue))
        return Taken(
            Copy(delivery, copy),
            mark,
            route,
            redelivered=delivery.redelivered,
            returns=returned,
            size_bytes=len(raw) + len(copy) + len(delivery.body),
        )

    def _decide(self, key: bytes, message: Message) -> _Plan:
        route = find_route(message.headers, self._routes, dead_queue=self._redrive.dead_queue)
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
            redelivered=delivery.redelivered,
            returns=None,
            size_bytes=len(delivery.properties) + len(delivery.body),
        )


def read_letter(delivery: Delivery, dead_queue: str) -> Message:
    """A delivery for routes and people. What cannot be decoded is left out here, and travels on as it came."""
    decoded = delivery.decoded()
    headers = decoded.get("headers")
    return Message(
        body=delivery.body,
        id=_text(decoded.get("message_id")),
        queue=dead_queue,
        exchange=delivery.exchange,
        routing_key=delivery.routing_key,
        type=_text(decoded.get("type")),
        correlation_id=_text(decoded.get("correlation_id")),
        content_type=_text(decoded.get("content_type")),
        content_encoding=_text(decoded.get("content_encoding")),
        expiration=_text(decoded.get("expiration")),
        user_id=_text(decoded.get("user_id")),
        headers=headers if isinstance(headers, dict) else {},
        redelivered=delivery.redelivered,
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
