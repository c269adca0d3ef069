"""Bytes in, events out: finds the frames and puts the messages in them together. No socket, no clock.

It holds at most one frame that is still incomplete, and per channel the parts of one body; both have a limit,
so that whatever the other side sends, memory stays bounded. Anything that is not AMQP raises ProtocolBroken.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from pamqp import base
from pamqp import frame as pamqp_frame
from pamqp.exceptions import PAMQPException

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.wire.events import Cancelled, ClosedByBroker, Confirmed, Event, Method, Returned

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
KINDS = frozenset({METHOD, HEADER, BODY, HEARTBEAT})
END = 0xCE
END_BYTE = b"\xce"

#: RabbitMQ never takes a larger message, whatever its settings.
BODY_BYTES_MAX = 512 * 2**20
#: The broker adds x-death to a header that was just small enough, and delivers it although it is now too large.
FRAME_SLACK_BYTES = 2**20
FRAME_BYTES_MAX = 131_072

DELIVER = b"\0\x3c\0\x3c"
RETURN = b"\0\x3c\0\x32"
ACK = b"\0\x3c\0\x50"
NACK = b"\0\x3c\0\x78"
CANCEL = b"\0\x3c\0\x1e"
CHANNEL_CLOSE = b"\0\x14\0\x28"
CONNECTION_CLOSE = b"\0\x0a\0\x32"

FRAME_START = struct.Struct(">BHI")
UNPACK_FRAME = FRAME_START.unpack_from
UNPACK_CONTENT = struct.Struct(">BHIHHQ").unpack_from
CONTENT_START = struct.Struct(">HHQ")
TAG_AND_BITS = struct.Struct(">QB")
UNPACK_TAG = TAG_AND_BITS.unpack_from
CLOSE_CODE = struct.Struct(">H")
CLOSE_CAUSE = struct.Struct(">HH")


class ProtocolBroken(Exception):
    """The other side sent something that is not AMQP 0-9-1 as we know it."""


@dataclass(slots=True)
class _Content:
    """A message whose header or body is still on its way."""

    kind: bytes
    fields: bytes
    properties: bytes | None = None
    missing: int = 0
    parts: list[bytes] = field(default_factory=list)


class FrameReader:
    """Feed it what came from the socket, in pieces of any size; each call answers the events that are complete."""

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._payload_bytes_max = frame_bytes_max + FRAME_SLACK_BYTES
        self._body_bytes_max = body_bytes_max
        self._rest = bytearray()
        self._wanted = 0
        self._contents: dict[int, _Content] = {}
        # One queue gets its messages from few exchanges and by few keys: the names of the last one are kept, raw
        # (behind the delivery's tag) and as text; and so is how the method begins, with the consumer's tag.
        self._names: tuple[bytes, str, str] = (b"", "", "")
        self._begin: tuple[bytes, str] = (b"", "")

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. Raises ProtocolBroken, and is not to be used after that."""
        if self._rest:
            if len(self._rest) + len(data) < self._wanted:
                self._rest += data
                return []
            data = b"".join((self._rest, data))
            self._rest = bytearray()
        events: list[Event] = []
        position, end = 0, len(data)
        limit = self._payload_bytes_max
        while end - position >= 8:
            kind, channel, size = UNPACK_FRAME(data, position)
            if kind not in KINDS or size > limit:
                self._check(kind, size, data[position : position + 8])
            start = position + 7
            stop = start + size
            if stop >= end:
                break
            if data[stop] != END:
                raise ProtocolBroken("a frame does not end where it should")
            position = stop + 1
            if kind == METHOD:
                if data.startswith(DELIVER, start) and (not self._contents or channel not in self._contents):
                    after = self._deliveries(channel, data, start, stop, events)
                    if after:
                        position = after
                        continue
                self._method(channel, data, start, stop, events)
            elif kind == HEADER:
                self._header(channel, data, start, stop, events)
            elif kind == BODY:
                self._body(channel, data, start, stop, events)
            # A heartbeat is no event: that bytes came is all that it tells.
        if position < end:
            self._keep(data, position)
        return events

    def _deliveries(self, channel: int, data: bytes, start: int, stop: int, events: list[Event]) -> int:
        """The usual case in one go: as many deliveries as follow one another and look like the first, each with its
        header and its only body frame. Answers where they end; 0 when the first is anything else, and is then taken
        apart frame by frame.

        The loop costs what a message costs: it compares what is the same in all of them, and copies nothing twice.
        """
        try:
            self._read_names(data[start + 4 : stop])
        except (struct.error, IndexError):
            return 0
        begin, consumer_tag = self._begin
        names, exchange, routing_key = self._names
        first = position = start - 7
        to_names = 7 + len(begin) + 9
        method_bytes = to_names + len(names) + 1
        # How such a frame begins, and all between its consumer tag and its end but the delivery's tag.
        begin = FRAME_START.pack(METHOD, channel, method_bytes - 8) + begin
        names += END_BYTE
        last = len(data) - method_bytes - 22
        while position <= last and data.startswith(begin, position) and data.startswith(names, position + to_names):
            start = position + method_bytes
            kind, number, size, _, _, body_bytes = UNPACK_CONTENT(data, start)
            header_end = start + 7 + size
            body_start = header_end + 8
            body_end = body_start + body_bytes
            if kind != HEADER or number != channel or size < 14 or not body_bytes or body_end >= len(data):
                break
            if UNPACK_FRAME(data, header_end + 1) != (BODY, channel, body_bytes):
                break
            if data[header_end] != END or data[body_end] != END:
                break
            tag, bits = UNPACK_TAG(data, position + to_names - 9)
            properties, body = data[start + 19 : header_end], data[body_start:body_end]
            events.append(Delivery(channel, tag, bits & 1 == 1, exchange, routing_key, consumer_tag, properties, body))
            position = int(body_end) + 1
        return position if position > first else 0

    def _keep(self, data: bytes, position: int) -> None:
        """Put the incomplete frame aside, and note how much it takes: joining again before that helps nobody."""
        self._rest += memoryview(data)[position:]
        size = 0
        if len(self._rest) >= 7:
            _, _, size = FRAME_START.unpack_from(self._rest)
        self._check(self._rest[0], size, bytes(self._rest[:8]))
        self._wanted = size + 8

    def _check(self, kind: int, size: int, seen: bytes) -> None:
        if kind not in KINDS:
            raise ProtocolBroken(f"not a frame: {seen!r}")
        if size > self._payload_bytes_max:
            raise ProtocolBroken(f"a frame of {size} bytes, at most {self._payload_bytes_max} were agreed")

    def _method(self, channel: int, data: bytes, start: int, stop: int, events: list[Event]) -> None:
        if channel in self._contents:
            raise ProtocolBroken("a method in the middle of a message")
        kind = data[start : start + 4]
        if kind in (DELIVER, RETURN):
            self._contents[channel] = _Content(kind, data[start + 4 : stop])
            return
        decoder = DECODERS.get(kind, _other)
        try:
            events.append(decoder(channel, data[start:stop]))
        except (struct.error, IndexError, ValueError, TypeError, KeyError, PAMQPException, RecursionError) as error:
            raise ProtocolBroken(f"method {kind.hex()} cannot be read: {error}") from error

    def _header(self, channel: int, data: bytes, start: int, stop: int, events: list[Event]) -> None:
        content = self._contents.get(channel)
        if content is None or content.properties is not None:
            raise ProtocolBroken("a content header out of place")
        if stop - start < 14:
            raise ProtocolBroken("a content header cut short")
        size = CONTENT_START.unpack_from(data, start)[2]
        if size > self._body_bytes_max:
            raise ProtocolBroken(f"a body of {size} bytes, at most {self._body_bytes_max} are taken")
        content.properties = data[start + 12 : stop]
        content.missing = size
        if size == 0:
            self._complete(channel, content, b"", events)

    def _body(self, channel: int, data: bytes, start: int, stop: int, events: list[Event]) -> None:
        content = self._contents.get(channel)
        if content is None or content.properties is None:
            raise ProtocolBroken("a body out of place")
        content.missing -= stop - start
        if content.missing < 0:
            raise ProtocolBroken("a body longer than its header says")
        if start == stop:
            return  # nothing arrived, and a list of nothings must not grow
        content.parts.append(data[start:stop])
        if content.missing == 0:
            self._complete(channel, content, b"".join(content.parts), events)  # one that is alone is not copied

    def _complete(self, channel: int, content: _Content, body: bytes, events: list[Event]) -> None:
        del self._contents[channel]
        assert content.properties is not None  # noqa: S101  both callers have set or seen it
        try:
            if content.kind == DELIVER:
                tag, bits = self._read_names(content.fields)
                _, exchange, key = self._names
                redelivered, properties = bits & 1 == 1, content.properties
                events.append(Delivery(channel, tag, redelivered, exchange, key, self._begin[1], properties, body))
            else:
                events.append(_returned(channel, content.fields, content.properties, body))
        except (struct.error, IndexError) as error:
            raise ProtocolBroken(f"method {content.kind.hex()} is cut short") from error

    def _read_names(self, fields: bytes) -> tuple[int, int]:
        """Keep the names of a delivery; answers its tag and its bits."""
        start = 1 + fields[0]
        tag, bits = UNPACK_TAG(fields, start)
        names = fields[start + 9 :]
        if names != self._names[0]:
            exchange, at = _short(names, 0)
            routing_key, _ = _short(names, at)
            self._names = (names, exchange, routing_key)
        begin = DELIVER + fields[:start]
        if begin != self._begin[0]:
            self._begin = (begin, _text(fields[1:start]))
        return tag, bits


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _short(data: bytes, position: int) -> tuple[str, int]:
    end = position + 1 + data[position]
    if end > len(data):
        raise IndexError("short string")
    return _text(data[position + 1 : end]), end


def _returned(channel: int, fields: bytes, properties: bytes, body: bytes) -> Returned:
    (code,) = CLOSE_CODE.unpack_from(fields)
    text, at = _short(fields, 2)
    exchange, at = _short(fields, at)
    routing_key, _ = _short(fields, at)
    return Returned(channel, code, text, exchange, routing_key, properties, body)


def _confirm(channel: int, payload: bytes) -> Event:
    tag, bits = TAG_AND_BITS.unpack_from(payload, 4)
    # The broker's nack has the requeue bit set as well: only the lowest bit says "multiple".
    return Confirmed(channel, tag, bits & 1 == 1, payload.startswith(ACK))


def _closed(channel: int, payload: bytes) -> Event:
    # Not through pamqp: the text holds names that a stranger chose, which need not be UTF-8.
    (code,) = CLOSE_CODE.unpack_from(payload, 4)
    text_end = 7 + payload[6]
    CLOSE_CAUSE.unpack_from(payload, text_end)  # what it was about, which the text says as well
    text = payload[7:text_end].decode("utf-8", "backslashreplace")
    return ClosedByBroker(0 if payload.startswith(CONNECTION_CLOSE) else channel, code, text)


def _other(channel: int, payload: bytes) -> Event:
    raw = FRAME_START.pack(METHOD, channel, len(payload)) + payload + bytes((END,))
    method = pamqp_frame.unmarshal(raw)[2]
    if not isinstance(method, base.Frame):
        raise TypeError("not a method")
    return Method(channel, method)


DECODERS: dict[bytes, Callable[[int, bytes], Event]] = {
    ACK: _confirm,
    NACK: _confirm,
    CANCEL: lambda channel, payload: Cancelled(channel, _short(payload, 4)[0]),
    CHANNEL_CLOSE: _closed,
    CONNECTION_CLOSE: _closed,
}
