"""The raw property list of a message: what follows the body size in a content header.

It is two bytes of flags, then the properties that are there, in their fixed order. `splice` adds, replaces and
removes named properties without touching the bytes of the others; `decode` is for people and policies only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from holdfast.engines.rabbitmq.wire import table
from holdfast.engines.rabbitmq.wire.table import Undecodable, Value

#: Name → what it is (s: short string, F: table, o: octet, T: timestamp), in wire order; the first has flag bit 15.
KINDS: Mapping[str, str] = {
    "content_type": "s",
    "content_encoding": "s",
    "headers": "F",
    "delivery_mode": "o",
    "priority": "o",
    "correlation_id": "s",
    "reply_to": "s",
    "expiration": "s",
    "message_id": "s",
    "timestamp": "T",
    "type": "s",
    "user_id": "s",
    "app_id": "s",
    "cluster_id": "s",
}
KIND_NAMES: Mapping[str, str] = {"s": "shortstr", "F": "table", "o": "octet", "T": "timestamp"}
FLAGS: Mapping[str, int] = {name: 1 << (15 - index) for index, name in enumerate(KINDS)}

HAS_CONTENT_TYPE = FLAGS["content_type"]
HAS_CONTENT_ENCODING = FLAGS["content_encoding"]
HAS_HEADERS = FLAGS["headers"]
HAS_DELIVERY_MODE = FLAGS["delivery_mode"]
KNOWN_FLAGS = sum(FLAGS.values())

NONE = b"\0\0"
PERSISTENT = b"\2"


class Unreadable(ValueError):
    """The property list is cut short or has flags that nobody knows. It can be carried, but not changed."""


def split(raw: bytes) -> dict[str, bytes]:
    """Name → raw bytes of every property that is there, in wire order. Raises Unreadable."""
    if len(raw) < 2:
        raise Unreadable("no property flags")
    flags = int.from_bytes(raw[:2], "big")
    if flags & ~KNOWN_FLAGS:
        raise Unreadable(f"unknown property flags {flags & ~KNOWN_FLAGS:#06x}")
    pieces = {}
    position = 2
    for name, flag in FLAGS.items():
        if flags & flag:
            end = _end(raw, position, KINDS[name])
            if end > len(raw):
                raise Unreadable(f"cut short in {name}")
            pieces[name] = raw[position:end]
            position = end
    if position != len(raw):
        raise Unreadable(f"{len(raw) - position} bytes too many")
    return pieces


def _end(raw: bytes, position: int, kind: str) -> int:
    if kind == "s":
        return position + 1 + (raw[position] if position < len(raw) else 0)
    if kind == "F":
        return position + 4 + int.from_bytes(raw[position : position + 4], "big")
    return position + (1 if kind == "o" else 8)


def header_span(raw: bytes) -> tuple[int, int]:
    """Where the header table begins and ends; both the same where there is none. Raises Unreadable."""
    try:
        flags = raw[0] << 8 | raw[1]
        position = 2
        if flags & HAS_CONTENT_TYPE:
            position += 1 + raw[position]
        if flags & HAS_CONTENT_ENCODING:
            position += 1 + raw[position]
    except IndexError as error:
        raise Unreadable("cut short") from error
    end = position
    if flags & HAS_HEADERS:
        end += 4 + int.from_bytes(raw[position : position + 4], "big")
    if end > len(raw) or flags & ~KNOWN_FLAGS:
        raise Unreadable("cut short in headers, or unknown property flags")
    return position, end


def before_headers(raw: bytes, start: int, *, has_headers: bool) -> bytes:
    """What stands before a header table that begins at `start`, or would."""
    flags = raw[0] | HAS_HEADERS >> 8 if has_headers else raw[0] & ~(HAS_HEADERS >> 8)
    return bytes((flags, raw[1])) + raw[2:start]


def with_headers(raw: bytes, start: int, end: int, entries: Sequence[bytes]) -> bytes:
    """The same list with a header table of these entries, in pieces, in place of the one at `start` to `end`."""
    size = sum(map(len, entries)).to_bytes(4, "big")
    return b"".join((before_headers(raw, start, has_headers=True), size, *entries, raw[end:]))


def join(pieces: Mapping[str, bytes]) -> bytes:
    """The property list of raw pieces."""
    flags = 0
    for name in pieces:
        flags |= FLAGS[name]
    return flags.to_bytes(2, "big") + b"".join(pieces[name] for name in FLAGS if name in pieces)


def splice(raw: bytes, *, put: Mapping[str, bytes] | None = None, drop: Iterable[str] = ()) -> bytes:
    """Remove the properties named in `drop`, set those of `put` (encoded by `encode_value`). Raises Unreadable."""
    pieces = split(raw)
    for name in drop:
        pieces.pop(name, None)
    pieces.update(put or {})
    return join(pieces)


def splice_headers(raw: bytes, *, put: Mapping[str, Value] | None = None, drop: Iterable[str] = ()) -> bytes:
    """Remove the headers named in `drop`, set those of `put`; every other byte stays. Raises Unreadable.

    A message without a header table gets one only when there is something to put into it.
    """
    pieces = split(raw)
    if "headers" not in pieces and not put:
        return raw
    encoded = {name: table.encode_value(value) for name, value in (put or {}).items()}
    pieces["headers"] = table.splice(pieces.get("headers", table.EMPTY), put=encoded, drop=drop)
    return join(pieces)


def persistent(raw: bytes) -> bytes:
    """The same properties with delivery mode 2: any other is lost by a restart, confirmed or not. Raises Unreadable."""
    try:
        # The usual case, without taking the list apart: it is asked for every message.
        flags = raw[0] << 8
        if flags & HAS_DELIVERY_MODE:
            position = 2
            if flags & HAS_CONTENT_TYPE:
                position += 1 + raw[position]
            if flags & HAS_CONTENT_ENCODING:
                position += 1 + raw[position]
            if flags & HAS_HEADERS:
                position += 4 + int.from_bytes(raw[position : position + 4], "big")
            if raw[position] == 2:
                return raw
    except IndexError as error:
        raise Unreadable("cut short") from error
    return splice(raw, put={"delivery_mode": PERSISTENT})


def canonical(raw: bytes) -> bytes:
    """The same properties with their headers in the order of their names; what cannot be read stays as it is.

    RabbitMQ 4 sorts the table of what it gives back, and quorum queues do: only so can two lists be compared.
    """
    try:
        pieces = split(raw)
    except Unreadable:
        return raw
    if "headers" in pieces:
        pieces["headers"] = table.in_order(pieces["headers"])
    return join(pieces)


def encode_value(name: str, value: str | int | datetime | Mapping[str, Value]) -> bytes:
    """The raw bytes of one property. Raises ValueError or TypeError for a value that it cannot have."""
    match KINDS[name], value:
        case "s", str():
            text = value.encode("utf-8", "surrogateescape")
            if len(text) > table.NAME_BYTES_MAX:
                raise ValueError(f"{name} has at most {table.NAME_BYTES_MAX} bytes, not {len(text)}")
            return bytes((len(text),)) + text
        case "o", int():
            return value.to_bytes(1, "big")
        case "T", datetime():
            return int(value.timestamp()).to_bytes(8, "big")
        case "T", int():
            return value.to_bytes(8, "big")
        case "F", dict():
            return table.encode(value)
        case kind, _:
            raise TypeError(f"{name} ({kind}) cannot be a {type(value).__name__}")


def encode(values: Mapping[str, str | int | datetime | Mapping[str, Value]]) -> bytes:
    """A property list of our own."""
    return join({name: encode_value(name, value) for name, value in values.items()})


def decode(raw: bytes) -> dict[str, Value]:
    """The properties for people, `headers` as a dict. Never raises: what cannot be read is shown as such."""
    try:
        pieces = split(raw)
    except Unreadable as error:
        return {"(unreadable)": Undecodable(raw, str(error))}
    return {name: _decode_value(KINDS[name], piece) for name, piece in pieces.items()}


def _decode_value(kind: str, piece: bytes) -> Value:
    try:
        if kind == "s":
            return piece[1:].decode("utf-8")
        if kind == "F":
            return dict(table.decode(piece))
        if kind == "o":
            return piece[0]
        return datetime.fromtimestamp(int.from_bytes(piece, "big"), UTC)
    except (ValueError, OverflowError, OSError) as error:
        return Undecodable(piece, f"{type(error).__name__}: {error}")
