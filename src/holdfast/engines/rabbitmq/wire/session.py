"""One AMQP connection as a state machine: handshake, tuning, channels, closing. Bytes in, events out.

It answers by itself what has only one answer (start, tune, close) and leaves its bytes in `take()`. It knows no
socket and no clock: who owns those sends what it gives, and watches heartbeats.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeVar

from pamqp import base
from pamqp import commands as amqp

from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire.events import ORDINARY, ClosedByBroker, Event, Method
from holdfast.engines.rabbitmq.wire.frames import FRAME_BYTES_MAX, FrameReader, ProtocolBroken
from holdfast.engines.rabbitmq.wire.table import Value

F = TypeVar("F", bound=base.Frame)

CHANNEL_MAX = 2047
#: RabbitMQ 4.1 and later refuse a smaller frame size.
FRAME_BYTES_MIN = 8192

CAPABILITIES = {
    "authentication_failure_close": True,  # else a wrong password is just a closed socket
    "basic.nack": True,
    "connection.blocked": True,
    "consumer_cancel_notify": True,
    "publisher_confirms": True,
}


def _any_name(kind: type[F]) -> type[F]:
    """A method that carries names, without pamqp's opinion on names.

    pamqp takes letters, digits and a few signs; the broker takes any UTF-8 of up to 255 bytes, and so a queue that
    somebody made may be called anything.
    """
    # No __slots__ of its own: pamqp reads there what has to be sent.
    return type(kind.__name__, (kind,), {"validate": lambda self: None})


ExchangeDeclare = _any_name(amqp.Exchange.Declare)
ExchangeDelete = _any_name(amqp.Exchange.Delete)
ExchangeBind = _any_name(amqp.Exchange.Bind)
ExchangeUnbind = _any_name(amqp.Exchange.Unbind)
QueueDeclare = _any_name(amqp.Queue.Declare)
QueueDelete = _any_name(amqp.Queue.Delete)
QueueBind = _any_name(amqp.Queue.Bind)
QueueUnbind = _any_name(amqp.Queue.Unbind)
Consume = _any_name(amqp.Basic.Consume)


class State(enum.Enum):
    """Where a connection stands."""

    NEW = "new"
    GREETING = "waiting for the broker's greeting"
    LOGIN = "logging in"
    OPENING = "opening the virtual host"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are and what we ask for. The password is in no text of it."""

    user: str = "guest"
    password: str = field(default="guest", repr=False)
    mechanism: str = "PLAIN"
    vhost: str = "/"
    heartbeat_s: int = 30
    frame_bytes_max: int = FRAME_BYTES_MAX
    channel_max: int = CHANNEL_MAX
    name: str = "holdfast"


class HandshakeFailed(Exception):
    """The broker does not offer what we need; nothing was sent that it could have used."""


class AmqpSession:
    """`start()`, then `feed()` what comes and send what `take()` gives."""

    def __init__(self, login: Login) -> None:
        self.state = State.NEW
        self.server_properties: dict[str, Value] = {}
        self.frame_bytes_max = login.frame_bytes_max
        self.heartbeat_s = login.heartbeat_s
        self.channel_max = login.channel_max
        self.blocked: str | None = None  #: why the broker reads nothing more from us; None while it does
        self._login = login
        self._reader = FrameReader()
        self._replies: list[bytes] = []
        self._channels: set[int] = set()
        self._next_channel = 1

    @property
    def version(self) -> str:
        """The broker's version, as it says: "3.10.8"; empty before the greeting."""
        return str(self.server_properties.get("version", ""))

    def start(self) -> bytes:
        """What is sent first."""
        self.state = State.GREETING
        return commands.PROTOCOL_HEADER

    def take(self) -> bytes:
        """What is to be sent now; each byte is given once."""
        data = b"".join(self._replies)
        self._replies.clear()
        return data

    def feed(self, data: bytes) -> list[Event]:
        """The events of these bytes. Raises ProtocolBroken or HandshakeFailed; the session is then over."""
        if self.state is State.GREETING:
            _check_greeting(data)
        events = self._reader.feed(data)
        if not set(map(type, events)) <= ORDINARY:
            for event in events:
                if isinstance(event, ClosedByBroker):
                    self._closed(event.channel)
                elif isinstance(event, Method) and event.channel == 0:
                    self._about_connection(event.method)
        return events

    def open_channel(self) -> int:
        """Ask for a channel and answer its number; a Method event with channel.open-ok says that it is open."""
        if len(self._channels) >= self.channel_max:
            raise HandshakeFailed(f"all {self.channel_max} channels of this connection are in use")
        # Numbers go round instead of being used again at once, so that an old answer never meets a new channel.
        while self._next_channel in self._channels:
            self._next_channel = self._next_channel % self.channel_max + 1
        number = self._next_channel
        self._next_channel = number % self.channel_max + 1
        self._channels.add(number)
        self._send(number, amqp.Channel.Open())
        return number

    def close(self) -> None:
        """Ask for the end of the connection."""
        if self.state is State.OPEN:
            self.state = State.CLOSING
            self._send(0, amqp.Connection.Close(200, "done", 0, 0))

    def release(self, number: int) -> None:
        """A channel is closed on both sides; its number is free."""
        self._channels.discard(number)

    def _send(self, channel: int, method: base.Frame) -> None:
        self._replies.append(commands.method(channel, method))

    def _closed(self, channel: int) -> None:
        if channel:
            self._send(channel, amqp.Channel.CloseOk())
            self.release(channel)
        else:
            self._send(0, amqp.Connection.CloseOk())
            self.state = State.CLOSED

    def _about_connection(self, method: base.Frame) -> None:
        match self.state, method:
            case State.GREETING, amqp.Connection.Start():
                self._answer_start(method)
            case State.LOGIN, amqp.Connection.Tune():
                self._answer_tune(method)
            case State.OPENING, amqp.Connection.OpenOk():
                self.state = State.OPEN
            case State.CLOSING, amqp.Connection.CloseOk():
                self.state = State.CLOSED
            case _, amqp.Connection.Blocked():
                self.blocked = str(method.reason)
            case _, amqp.Connection.Unblocked():
                self.blocked = None
            case _, amqp.Connection.Secure():
                raise HandshakeFailed(
                    "the broker wants a second step of the login, which PLAIN and EXTERNAL do not have"
                )
            case _:
                raise ProtocolBroken(f"{method.name} while {self.state.value}")

    def _answer_start(self, method: amqp.Connection.Start) -> None:
        self.server_properties = dict(method.server_properties)  # type: ignore[arg-type]
        offered = str(method.mechanisms).split()
        if self._login.mechanism not in offered:
            raise HandshakeFailed(f"the broker offers {' '.join(offered)}, not {self._login.mechanism}")
        response = ""
        if self._login.mechanism == "PLAIN":
            response = f"\0{self._login.user}\0{self._login.password}"
        self._send(
            0,
            amqp.Connection.StartOk(
                client_properties={
                    "product": "Holdfast",
                    "connection_name": self._login.name,
                    "capabilities": dict(CAPABILITIES),
                },
                mechanism=self._login.mechanism,
                response=response,
            ),
        )
        self.state = State.LOGIN

    def _answer_tune(self, method: amqp.Connection.Tune) -> None:
        self.channel_max = _smaller(self._login.channel_max, method.channel_max)
        self.frame_bytes_max = _smaller(self._login.frame_bytes_max, method.frame_max)
        self.heartbeat_s = _smaller(self._login.heartbeat_s, method.heartbeat) if self._login.heartbeat_s else 0
        self._send(0, amqp.Connection.TuneOk(self.channel_max, self.frame_bytes_max, self.heartbeat_s))
        self._send(0, amqp.Connection.Open(self._login.vhost))
        self.state = State.OPENING


def _smaller(ours: int, theirs: int) -> int:
    """Zero means "no limit" here."""
    return min(ours, theirs) if ours and theirs else ours or theirs


def _check_greeting(data: bytes) -> None:
    """Say what is there instead of a broker, when that can be told."""
    if data.startswith(b"AMQP"):
        version = ".".join(str(number) for number in data[5:8])
        raise ProtocolBroken(f"it speaks another AMQP ({version}), not 0-9-1")
    if data.startswith((b"\x15\x03", b"\x16\x03")):
        raise ProtocolBroken("it speaks TLS; use amqps://")
    if data.startswith(b"HTTP/"):
        raise ProtocolBroken("it speaks HTTP; is that the port of the management API?")
