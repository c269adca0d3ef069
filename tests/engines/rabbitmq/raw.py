"""Raw AMQP for the tests, without the code under test: every header type, frames as a broker would send them, and a
client."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from pamqp import base
from pamqp import commands as amqp
from pamqp.frame import marshal

from holdfast.engines.rabbitmq.wire import table

#: Name → type and value, exactly as on the wire. All of these a broker takes and gives back unchanged.
HEADERS: dict[str, bytes] = {
    "bool-true": b"t\1",
    "bool-false": b"t\0",
    "int8": b"b" + struct.pack(">b", -7),
    "uint8": b"B" + struct.pack(">B", 200),
    "int16": b"s" + struct.pack(">h", -300),
    "uint16": b"u" + struct.pack(">H", 60_000),
    "int32": b"I" + struct.pack(">i", 5),
    "uint32": b"i" + struct.pack(">I", 4_000_000_000),
    "int64": b"l" + struct.pack(">q", 3),
    "int64-big": b"l" + struct.pack(">q", 2**62 + 1),
    "float": b"f" + struct.pack(">f", 1.1),
    "double": b"d" + struct.pack(">d", 1.1),
    "double-infinite": b"d" + struct.pack(">d", 1e300),
    "decimal": b"D" + struct.pack(">Bi", 2, 12345),
    "text": b"S" + struct.pack(">I", 5) + "häm!".encode(),
    "text-empty": b"S\0\0\0\0",
    "text-not-utf8": b"S" + struct.pack(">I", 4) + b"\xff\xfe\0\x80",
    "bytes": b"x" + struct.pack(">I", 3) + b"\0\1\xff",
    "timestamp": b"T" + struct.pack(">Q", 1_700_000_000),
    "timestamp-ms": b"T" + struct.pack(">Q", 1_700_000_000_000),
    "timestamp-huge": b"T" + struct.pack(">Q", 2**63),
    "void": b"V",
    "table-empty": b"F\0\0\0\0",
    "array-empty": b"A\0\0\0\0",
    "table": b"F" + table.encode({"n": 1, "deep": {"x": [True, None]}}),
    "array": b"A" + struct.pack(">I", 11) + b"b\1" + b"l" + struct.pack(">q", 9),
    "k" * 200: b"S\0\0\0\1v",
    "schlüssel": b"I\0\0\0\1",
}


def header_table(entries: dict[str, bytes]) -> bytes:
    """A raw table of raw entries, made without the code under test."""
    payload = b"".join(bytes((len(name.encode()),)) + name.encode() + value for name, value in entries.items())
    return struct.pack(">I", len(payload)) + payload


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def short(text: str) -> bytes:
    """A short string."""
    raw = text.encode()
    return bytes((len(raw),)) + raw


def deliver(channel: int, tag: int, properties: bytes, body: bytes) -> list[bytes]:
    """The frames of a delivery."""
    return [marshal(amqp.Basic.Deliver("ctag", tag, False, "x", "k"), channel), *content(channel, properties, body)]


def returned(channel: int, properties: bytes, body: bytes, *, exchange: str = "x", key: str = "k") -> list[bytes]:
    """The frames of a return."""
    return [marshal(amqp.Basic.Return(312, "NO_ROUTE", exchange, key), channel), *content(channel, properties, body)]


def content(channel: int, properties: bytes, body: bytes, *, part_bytes: int = 100) -> list[bytes]:
    """The header and body frames of a message."""
    header = frame(2, channel, struct.pack(">HHQ", 60, 0, len(body)) + properties)
    parts = [body[at : at + part_bytes] for at in range(0, len(body), part_bytes)]
    return [header, *(frame(3, channel, part) for part in parts)]


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    """A confirm."""
    return marshal(amqp.Basic.Ack(tag, multiple), channel)


class SocketClient:
    """An AMQP client of a few lines on a blocking socket: one connection, one channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")

    @classmethod
    @contextmanager
    def open(cls, port: int, vhost: str) -> Iterator[SocketClient]:
        """Log in as guest."""
        with socket.create_connection(("127.0.0.1", port), 10.0) as sock:
            client = cls(sock)
            sock.sendall(b"AMQP\0\0\x09\x01")
            client.read()
            client.say(0, amqp.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"))
            client.read()
            client.say(0, amqp.Connection.TuneOk(10, 131_072, 0))
            client.say(0, amqp.Connection.Open(vhost))
            client.read()
            client.say(1, amqp.Channel.Open())
            client.read()
            try:
                yield client
            finally:
                client._file.close()

    def say(self, channel: int, method: base.Frame) -> None:
        """Send a method."""
        self._socket.sendall(marshal(method, channel))

    def read(self) -> tuple[int, bytes]:
        """The next frame: kind and payload."""
        kind, _, size = struct.unpack(">BHI", self._file.read(7))
        payload = self._file.read(size)
        assert self._file.read(1) == b"\xce"
        return kind, payload

    def publish(self, queue: str, properties: bytes, body: bytes) -> None:
        """Publish to a queue and wait for the confirm."""
        self.say(1, amqp.Confirm.Select())
        self.read()
        self.say(1, amqp.Basic.Publish(routing_key=queue, mandatory=True))
        self._socket.sendall(b"".join(content(1, properties, body, part_bytes=100_000)))
        _, payload = self.read()
        assert payload[:4] == b"\0\x3c\0\x50", "not confirmed"

    def get(self, queue: str) -> tuple[bytes, bytes]:
        """Take one message: its raw properties and its body."""
        self.say(1, amqp.Basic.Get(queue=queue, no_ack=True))
        _, method = self.read()
        assert method[:4] == b"\0\x3c\0\x47", "the queue is empty"
        _, header = self.read()
        size = struct.unpack(">Q", header[4:12])[0]
        body = b""
        while len(body) < size:
            body += self.read()[1]
        return header[12:], body
