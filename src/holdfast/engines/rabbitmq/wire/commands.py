"""Commands in, bytes out. What is sent for every message is packed here; everything else goes through pamqp."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pamqp import base
from pamqp import frame as pamqp_frame

from holdfast.engines.rabbitmq.wire.frames import BODY, HEADER, METHOD

PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"
HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
END = b"\xce"
FRAME_OVERHEAD_BYTES = 8
CONTENT_START_BYTES = 12
MANDATORY = b"\1"
PUBLISH = b"\0\x3c\0\x28\0\0"
NAMES_MAX = 1024

FRAME_START = struct.Struct(">BHI")
CONTENT_HEADER = struct.Struct(">BHIHHQ")
SETTLE = struct.Struct(">BHIHHQBB")

ACK_ID, NACK_ID = 80, 120


class Unsendable(ValueError):
    """A publish that no broker would take: it is refused here, before it can close the connection for others."""


def method(channel: int, value: base.Frame) -> bytes:
    """The frame of a rare method."""
    return pamqp_frame.marshal(value, channel)


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    """basic.ack: the message `tag`, or all up to it, is settled."""
    return SETTLE.pack(METHOD, channel, 13, 60, ACK_ID, tag, int(multiple), 0xCE)


def nack(channel: int, tag: int, *, multiple: bool, requeue: bool) -> bytes:
    """basic.nack, never basic.reject: from RabbitMQ 4.3 on a reject counts towards the delivery limit."""
    return SETTLE.pack(METHOD, channel, 13, 60, NACK_ID, tag, int(multiple) | int(requeue) << 1, 0xCE)


class PublishEncoder:
    """Packs publishes for one channel: always mandatory. `properties` and `body` go in as they are."""

    def __init__(self, channel: int, *, frame_bytes_max: int) -> None:
        self._channel = channel
        self._part_bytes_max = frame_bytes_max - FRAME_OVERHEAD_BYTES
        # The frames of the publish method, by exchange and key: there are few of them in a run.
        self._methods: dict[tuple[str, str], bytes] = {}

    def pieces(self, exchange: str, routing_key: str, properties: bytes, body: bytes) -> Sequence[bytes | memoryview]:
        """All frames of one publish, to be joined with those of others: a body is then copied once. Raises
        Unsendable."""
        start = self._methods.get((exchange, routing_key)) or self._method(exchange, routing_key)
        size = CONTENT_START_BYTES + len(properties)
        if size > self._part_bytes_max:
            raise Unsendable(f"properties of {len(properties)} bytes do not fit into a frame of {self._part_bytes_max}")
        header = CONTENT_HEADER.pack(HEADER, self._channel, size, 60, 0, len(body))
        if not body:
            return start, header, properties, END
        if len(body) <= self._part_bytes_max:
            return start, header, properties, END, FRAME_START.pack(BODY, self._channel, len(body)), body, END
        return (start, header, properties, END, *self._parts(body))

    def _parts(self, body: bytes) -> list[bytes | memoryview]:
        view = memoryview(body)
        pieces: list[bytes | memoryview] = []
        for position in range(0, len(body), self._part_bytes_max):
            part = view[position : position + self._part_bytes_max]
            pieces += (FRAME_START.pack(BODY, self._channel, len(part)), part, END)
        return pieces

    def _method(self, exchange: str, routing_key: str) -> bytes:
        payload = PUBLISH + _short("exchange", exchange) + _short("routing key", routing_key) + MANDATORY
        frame = FRAME_START.pack(METHOD, self._channel, len(payload)) + payload + END
        if len(self._methods) >= NAMES_MAX:
            self._methods.clear()
        self._methods[exchange, routing_key] = frame
        return frame


def _short(what: str, text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    if len(raw) > 255:
        raise Unsendable(f"the {what} has {len(raw)} bytes, 255 are allowed")
    return bytes((len(raw),)) + raw
