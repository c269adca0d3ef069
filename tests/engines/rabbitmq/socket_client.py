"""An AMQP client of a few lines on a blocking socket, to compare bytes without the code under test."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from pamqp import base
from pamqp import commands as amqp
from pamqp import frame as pamqp_frame

from tests.engines.rabbitmq.raw import content, frame, short


class SocketClient:
    """One connection, one channel."""

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
        self._socket.sendall(pamqp_frame.marshal(method, channel))

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
        method = b"\0\x3c\0\x28\0\0" + short("") + short(queue) + b"\1"
        self._socket.sendall(frame(1, 1, method) + b"".join(content(1, properties, body, part_bytes=100_000)))
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
