"""What the wire reports: the values that come out when bytes go in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct
from pamqp import base

from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.table import Value


class Delivery(Struct, eq=False, gc=False):
    """A message from a queue, as it came: `properties` are the raw bytes of its content header.

    Names are decoded so that bytes which are not UTF-8 survive the way back (surrogateescape). It holds nothing that
    could hold it, and there are thousands: the garbage collector need not look at them.
    """

    channel: int
    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    consumer_tag: str
    properties: bytes
    body: bytes

    def decoded(self) -> dict[str, Value]:
        """The properties for people and policies; see `wire.properties.decode`."""
        return properties.decode(self.properties)


@dataclass(frozen=True, slots=True)
class Returned:
    """The broker gave a publish back, unroutable. It comes before that publish's ack."""

    channel: int
    code: int
    text: str
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has (`ack`) or has not (`not ack`) taken over the publish `tag`, or all up to it."""

    channel: int
    tag: int
    multiple: bool
    ack: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The broker ended a consumer: its queue is gone, or it held a message for too long."""

    channel: int
    consumer_tag: str


@dataclass(frozen=True, slots=True)
class ChannelClosedByBroker:
    """The broker closed a channel; the reply has been queued. Whatever was in flight on it is unknown."""

    channel: int
    code: int
    text: str
    class_id: int
    method_id: int


@dataclass(frozen=True, slots=True)
class ConnectionClosedByBroker:
    """The broker closed the connection; the reply has been queued. Also its answer to a refused login."""

    code: int
    text: str
    class_id: int
    method_id: int
    channel: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """Any other method: answers to what we asked for."""

    channel: int
    method: base.Frame


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The broker lives."""

    channel: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """The connection can be used."""

    channel: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """The broker has no memory or disk left: it reads nothing more from this connection (reason), or again (None)."""

    reason: str | None
    channel: int = 0


#: What comes for every message: nothing of it changes the state of a channel or a connection.
ORDINARY = frozenset({Delivery, Confirmed, Returned})

Event: TypeAlias = (
    Delivery
    | Returned
    | Confirmed
    | Cancelled
    | ChannelClosedByBroker
    | ConnectionClosedByBroker
    | Method
    | Heartbeat
    | Opened
    | Blocked
)
