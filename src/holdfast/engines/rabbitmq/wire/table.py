"""The raw header table: found, added, replaced and removed by name, without touching the bytes of other entries.

A table is its length in four bytes, then entries of name, type and value. Re-encoding one is how clients lose
types (a double becomes a float, an int64 an int8), so nothing here decodes what it only has to carry. `decode`
is for people and policies; a value that cannot be decoded is shown as `Undecodable` and stays as it came.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeAlias

NAME_BYTES_MAX = 255
DEPTH_MAX = 64

#: Type → bytes of the value, for the types of a fixed size. RabbitMQ's reading of them, which differs from the
#: specification (`s` is an int16, `l` a signed int64). `L` is not known to the broker, but has one size everywhere.
FIXED_BYTES = {
    **{ord(kind): 1 for kind in "tbB"},
    **{ord(kind): 2 for kind in "su"},
    **{ord(kind): 4 for kind in "Iif"},
    **{ord(kind): 8 for kind in "lLdT"},
    ord("D"): 5,
    ord("V"): 0,
}
SIZED = frozenset(map(ord, "SxAF"))

#: Type → what AMQP calls it, for people.
KIND_NAMES = {
    "t": "bool", "b": "int8", "B": "uint8", "s": "int16", "u": "uint16", "I": "int32", "i": "uint32", "l": "int64",
    "L": "int64", "f": "float", "d": "double", "D": "decimal", "T": "timestamp", "V": "void", "S": "longstr",
    "x": "bytes", "A": "array", "F": "table",
}  # fmt: skip

EMPTY = b"\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A value that is kept as it came but cannot be shown as anything better than its bytes."""

    raw: bytes
    reason: str


Value: TypeAlias = (
    "bool | int | float | str | bytes | datetime | Decimal | Undecodable | list[Value] | dict[str, Value] | None"
)


@dataclass(frozen=True, slots=True)
class Scan:
    """Where the entries of a table are: (name, start, end) in its bytes; from `rest` on it could not be read."""

    entries: tuple[tuple[bytes, int, int], ...]
    rest: int


def scan(table: bytes) -> Scan:
    """Find the entries, as far as they can be told apart. Never raises: what is unreadable is the rest."""
    entries = []
    position, end = 4, len(table)
    while position < end:
        value = position + 1 + table[position]
        stop = _value_end(table, value)
        if stop is None or stop > end:
            break
        entries.append((table[position + 1 : value], position, stop))
        position = stop
    return Scan(tuple(entries), position)


def _value_end(table: bytes, position: int) -> int | None:
    """Where the value with its type at `position` ends; None when that cannot be told."""
    if position >= len(table):
        return None
    kind = table[position]
    if kind in SIZED:
        if position + 5 > len(table):
            return None
        return position + 5 + int.from_bytes(table[position + 1 : position + 5], "big")
    size = FIXED_BYTES.get(kind)
    return None if size is None else position + 1 + size


def splice(table: bytes, *, put: Mapping[str, bytes] | None = None, drop: Iterable[str] = ()) -> bytes:
    """Take out the entries named in `drop` and `put`, then add those of `put` (encoded by `encode_value`).

    All other entries keep their bytes and their order. New ones stand at the end, but before a part that could
    not be read: behind it nobody would find them.
    """
    put = put or {}
    gone = {_name(name) for name in drop} | {_name(name) for name in put}
    found = scan(table)
    kept = [table[start:end] for name, start, end in found.entries if name not in gone]
    added = [entry(name, value) for name, value in put.items()]
    payload = b"".join([*kept, *added, table[found.rest :]])
    return len(payload).to_bytes(4, "big") + payload


def entry(name: str, value: bytes) -> bytes:
    """An entry of our own; the value is encoded, or begins as one."""
    raw = _name(name)
    return bytes((len(raw),)) + raw + value


def in_order(table: bytes) -> bytes:
    """The same entries, sorted by name; a part that cannot be read stays behind them."""
    found = scan(table)
    entries = [table[start:end] for _, start, end in sorted(found.entries, key=lambda entry: entry[0])]
    return table[:4] + b"".join(entries) + table[found.rest :]


def decode(table: bytes, depth: int = 0) -> dict[str, Value]:
    """The table for people. Never raises; of two entries with one name the first is shown, as the broker reads it."""
    found = scan(table)
    shown: dict[str, Value] = {}
    for name, start, end in found.entries:
        value = decode_value(table[start + 1 + len(name) : end], depth)
        shown.setdefault(name.decode("utf-8", "backslashreplace"), value)
    if found.rest < len(table):
        shown.setdefault("(unreadable)", Undecodable(table[found.rest :], "no such type, or cut short"))
    return shown


def kinds(table: bytes) -> dict[str, str]:
    """Name → what AMQP calls the kind of its value; of two entries with one name the first, as it is shown."""
    found: dict[str, str] = {}
    for name, start, _ in scan(table).entries:
        kind = chr(table[start + 1 + len(name)])
        found.setdefault(name.decode("utf-8", "backslashreplace"), KIND_NAMES.get(kind, kind))
    return found


def decode_value(raw: bytes, depth: int = 0) -> Value:
    """A raw type and value for people."""
    kind, payload = raw[:1], raw[1:]
    try:
        if kind == b"F":
            return _nested(raw, depth) or decode(payload, depth + 1)
        if kind == b"A":
            return _nested(raw, depth) or _decode_array(payload, depth + 1)
        if kind in NUMBERS:
            number: int | float = struct.unpack(NUMBERS[kind], payload)[0]
            return number
        return DECODERS[kind](payload)
    except (KeyError, ValueError, OverflowError, OSError, struct.error) as error:
        return Undecodable(raw, f"{type(error).__name__}: {error}")


def _nested(raw: bytes, depth: int) -> Undecodable | None:
    """A stranger chooses how deep a table is; our stack does not have to follow."""
    return Undecodable(raw, f"nested deeper than {DEPTH_MAX}") if depth >= DEPTH_MAX else None


def _decode_array(payload: bytes, depth: int) -> list[Value]:
    values: list[Value] = []
    position = 4
    while position < len(payload):
        stop = _value_end(payload, position)
        if stop is None or stop > len(payload):
            values.append(Undecodable(payload[position:], "no such type, or cut short"))
            break
        values.append(decode_value(payload[position:stop], depth))
        position = stop
    return values


def _decimal(payload: bytes) -> Value:
    places, value = struct.unpack(">Bi", payload)
    return Decimal(value).scaleb(-places)


def _timestamp(payload: bytes) -> Value:
    return datetime.fromtimestamp(int.from_bytes(payload, "big"), UTC)


#: Type of a number → its layout.
NUMBERS = {
    b"b": ">b",
    b"B": ">B",
    b"s": ">h",
    b"u": ">H",
    b"I": ">i",
    b"i": ">I",
    b"l": ">q",
    b"L": ">q",
    b"f": ">f",
    b"d": ">d",
}
DECODERS: dict[bytes, Callable[[bytes], Value]] = {
    b"t": lambda payload: payload != b"\0",
    b"D": _decimal,
    b"T": _timestamp,
    b"V": lambda payload: None,
    b"x": lambda payload: payload[4:],
    b"S": lambda payload: payload[4:].decode("utf-8"),
}


def encode_value(value: Value) -> bytes:
    """Encode a value of ours: type and value. An integer is an int64, as x-death's own counts are."""
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\1" if value else b"t\0"
        case int():
            return b"l" + struct.pack(">q", value)
        case float():
            return b"d" + struct.pack(">d", value)
        case str():
            return b"S" + _long(value.encode("utf-8", "surrogateescape"))
        case bytes():
            return b"x" + _long(value)
        case datetime():
            return b"T" + struct.pack(">Q", int(value.timestamp()))
        case Undecodable():
            return value.raw
        case list():
            return b"A" + _long(b"".join(encode_value(one) for one in value))
        case dict():
            return b"F" + encode(value)
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be a header value")


def encode(values: Mapping[str, Value]) -> bytes:
    """A table of our own."""
    return splice(EMPTY, put={name: encode_value(value) for name, value in values.items()})


def _long(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def _name(name: str) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > NAME_BYTES_MAX:
        raise ValueError(f"a header name has at most {NAME_BYTES_MAX} bytes, not {len(raw)}")
    return raw
