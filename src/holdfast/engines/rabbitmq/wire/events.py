"""What the wire reports: the values that come out when bytes go in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pamqp import base

from holdfast.core.message import Delivery


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
