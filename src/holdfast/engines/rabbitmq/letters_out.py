"""A letter of the vault as it is published again: its own bytes, its edits, and what a redrive changes.

Most letters of a task died of the same cause, so what is made of a header table is remembered under its bytes.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from holdfast.core.death import HeaderChange
from holdfast.core.letter import Content, JsonValue
from holdfast.core.message import Message
from holdfast.core.redrive import REDRIVE_ID, REDRIVEN_AT, RedriveStamp, redriven
from holdfast.core.routes import RouteTable
from holdfast.engines.rabbitmq.lane import Outgoing
from holdfast.engines.rabbitmq.redriver import HAS_SENSITIVE
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire.table import Value
from holdfast.ports.custody import Parcel

REWRITTEN_COUNT_MAX = 4_096


class Rewriter:
    """`outgoing(parcel, at=now)`; `user` is whom the broker knows us as."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._known: dict[tuple[str, str, str, bytes], tuple[bytes, bytes]] = {}

    def outgoing(self, parcel: Parcel, *, at: datetime) -> Outgoing:
        """Raises Unreadable, ValueError or TypeError for what cannot be written."""
        content = parcel.content
        raw = content.properties
        own = _rewritten_entry(REDRIVEN_AT, at.isoformat()) + _rewritten_entry(REDRIVE_ID, parcel.redrive_id)
        start, end = properties.header_span(raw)
        if content.put or content.drop or raw[1] & HAS_SENSITIVE:
            raw = self._edited(parcel, own)
        else:
            kept, rest = self._remembered(parcel, raw[start:end] or table.EMPTY)
            raw = properties.with_headers(raw, start, end, (kept, own, rest))
        return Outgoing(parcel.address.exchange, parcel.address.routing_key, raw, content.body)

    def _remembered(self, parcel: Parcel, headers: bytes) -> tuple[bytes, bytes]:
        """The entries that stand before those of this letter alone, and the part that nobody can read behind them."""
        key = (parcel.run, parcel.by, parcel.queue, headers)
        known = self._known.get(key)
        if known is None:
            change = self._change(parcel)
            found = table.scan(headers)
            gone = {name.encode() for name in (*change.drop, *change.put, REDRIVEN_AT, REDRIVE_ID)}
            kept = [headers[first:last] for name, first, last in found.entries if name not in gone]
            put = [_rewritten_entry(name, _wire(value)) for name, value in change.put.items()]
            known = b"".join([*kept, *put]), headers[found.rest :]
            if len(self._known) >= REWRITTEN_COUNT_MAX:
                self._known.clear()
            self._known[key] = known
        return known

    def _edited(self, parcel: Parcel, own: bytes) -> bytes:
        change = self._change(parcel)
        change = replace(change, drop=(*change.drop, REDRIVEN_AT, REDRIVE_ID))
        raw = apply(parcel.content, change)
        start, end = properties.header_span(raw)
        headers = raw[start:end] or table.EMPTY
        rest = table.scan(headers).rest
        return properties.with_headers(raw, start, end, (headers[4:rest], own, headers[rest:]))

    def _change(self, parcel: Parcel) -> HeaderChange:
        decoded = properties.decode(parcel.content.properties)
        headers = decoded.get("headers")
        message = Message(
            body=b"",
            queue=parcel.queue,
            expiration=_text(decoded.get("expiration")),
            user_id=_text(decoded.get("user_id")),
            headers=headers if isinstance(headers, dict) else {},
        )
        redrive = RedriveStamp(
            run=parcel.run,
            by=parcel.by,
            dead_queue=parcel.queue,
            user=self._user,
            is_wait_queue=RouteTable().is_wait_queue,
        )
        return redriven(message, redrive)


def apply(content: Content, change: HeaderChange) -> bytes:
    """The raw properties of a letter with its edits, then with what a redrive changes."""
    raw = properties.splice(content.properties, drop=change.drop_properties)
    edits: dict[str, Value] = {name: _wire(value) for name, value in content.put.items()}
    raw = properties.splice_headers(raw, put=edits, drop=content.drop)
    put: dict[str, Value] = {name: _wire(value) for name, value in change.put.items()}
    return properties.splice_headers(raw, put=put, drop=change.drop)


def _wire(value: JsonValue | list[str]) -> Value:
    if isinstance(value, list):
        return [_wire(one) for one in value]
    if isinstance(value, dict):
        return {name: _wire(one) for name, one in value.items()}
    return value


def _rewritten_entry(name: str, value: Value) -> bytes:
    raw = name.encode()
    return bytes((len(raw),)) + raw + table.encode_value(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
