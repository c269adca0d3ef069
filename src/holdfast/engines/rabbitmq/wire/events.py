"""What the wire reports: the values that come out when bytes go in."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct
from pamqp import base

from holdfast.core.message import Delivery


class Returned(Struct, frozen=True):
    """The broker gave a publish back, unroutable. It comes before that publish's ack."""

    channel: int
    code: int
    text: str
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class Confirmed(Struct, frozen=True, gc=False):
    """The broker has (`ack`) or has not (`not ack`) taken over the publish `tag`, or all up to it."""

    channel: int
    tag: int
    multiple: bool
    ack: bool


class Cancelled(Struct, frozen=True):
    """The broker ended a consumer: its queue is gone, or it held a message for too long."""

    channel: int
    consumer_tag: str


class ClosedByBroker(Struct, frozen=True):
    """The broker closed a channel, or the connection (0); the reply has been queued. Whatever was in flight on it is
    unknown. Also its answer to a refused login."""

    channel: int
    code: int
    text: str


class Method(Struct, frozen=True):
    """Any other method: answers to what we asked for, and on channel 0 what concerns the connection."""

    channel: int
    method: base.Frame


#: What comes for every message: nothing of it changes the state of a channel or a connection.
ORDINARY = frozenset({Delivery, Confirmed, Returned})

Event: TypeAlias = Delivery | Returned | Confirmed | Cancelled | ClosedByBroker | Method
