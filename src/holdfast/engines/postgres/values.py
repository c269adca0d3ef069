"""Parameters in PostgreSQL's binary format, written by hand: for a batch of payloads that is ten times cheaper than
adapting them one by one, and a payload goes over the wire as the bytes that it is.

Every whole number is a `bigint` and every text a `text`; the statements in `sql/` cast their parameters to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack
from typing import TypeAlias

#: What a statement takes: arrays are encoded by the functions below and are bytes by then.
Value: TypeAlias = int | str | bytes | None

_BIGINT = Struct(">q").pack
_HEADER = Struct(">iiiii").pack
_LENGTH = Struct(">i").pack
_NULL = _LENGTH(-1)
_BYTEA_OID, _BIGINT_OID, _TEXT_OID = 17, 20, 25
_BIGINT_BYTES = 8


def encoded(value: Value) -> bytes | None:
    """One parameter."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return _BIGINT(value)
    return None if value is None else value.encode()


def bigints(numbers: Sequence[int]) -> bytes:
    """A `bigint[]`."""
    flat = [0] * (2 * len(numbers))
    flat[0::2] = [_BIGINT_BYTES] * len(numbers)
    flat[1::2] = numbers
    return _header(_BIGINT_OID, len(numbers)) + pack(">" + "iq" * len(numbers), *flat)


def byteas(payloads: Sequence[bytes]) -> bytes:
    """A `bytea[]`."""
    return _variable(_BYTEA_OID, payloads)


def texts(strings: Sequence[str]) -> bytes:
    """A `text[]`. Texts of one request are mostly the same: one kind, no reference."""
    if len(set(strings)) == 1:
        data = strings[0].encode()
        return _header(_TEXT_OID, len(strings)) + (_LENGTH(len(data)) + data) * len(strings)
    return _variable(_TEXT_OID, [string.encode() for string in strings])


def texts_or_null(strings: Sequence[str]) -> bytes:
    """A `text[]` in which an empty text is NULL: what a partial unique index leaves out."""
    parts = [_header(_TEXT_OID, len(strings), nulls=1)]
    for string in strings:
        data = string.encode()
        parts += (_LENGTH(len(data)), data) if data else (_NULL,)
    return b"".join(parts)


def _variable(oid: int, elements: Sequence[bytes]) -> bytes:
    parts = [b""] * (2 * len(elements))
    parts[0::2] = [_LENGTH(len(element)) for element in elements]
    parts[1::2] = elements
    return _header(oid, len(elements)) + b"".join(parts)


def _header(oid: int, count: int, *, nulls: int = 0) -> bytes:
    # One dimension of `count` elements that are numbered from 1; an empty array has no dimension.
    return _HEADER(1, nulls, oid, count, 1) if count else pack(">iii", 0, 0, oid)
