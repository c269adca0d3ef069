"""What a program says of a message that it publishes, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from secrets import token_hex
from typing import Any, TypedDict, cast

from msgspec import Struct, UnsetType

from holdfast.core.bodies import Body, encode_body
from holdfast.core.message import Address, Message
from holdfast.core.moments import microseconds
from holdfast.core.policy import delay_us
from holdfast.errors import Invalid

PUBLISH_TIMEOUT = "30s"
PRIORITY_MAX = 255
TEXTS = frozenset({"queue", "id", "correlation_id", "type", "content_type", "reply_to", "exchange", "routing_key"})


class MessageOptions(TypedDict, total=False):
    """What can be said of one message, or of many alike."""

    exchange: str
    routing_key: str
    correlation_id: str
    type: str
    headers: Mapping[str, Any] | None
    priority: int | None
    content_type: str
    reply_to: str
    in_: str | float | None
    at: datetime | None
    expiration: str | float | None
    timeout: str | float
    repeat: bool


class PublishOptions(MessageOptions, total=False):
    """What can be said of one message."""

    id: str


class PublishOrder(Struct, frozen=True, kw_only=True):
    """The same, read: where to, when, for how long, and the message but for its body."""

    to: Address
    like: dict[str, Any]
    content_type: str
    at_us: int
    timeout_s: float
    repeats: bool

    def message(self, body: Body | UnsetType, message_id: str = "") -> Message:
        """One message, with an id of its own unless it has one. Raises Invalid."""
        if isinstance(body, UnsetType):
            raise Invalid("body is missing; give what is to be published as the second argument or as body=")
        raw, content_type = encode_body(body, self.content_type)
        return Message(body=raw, id=message_id or token_hex(16), content_type=content_type, **self.like)


def read_order(queue: str, options: PublishOptions, *, now_us: int) -> PublishOrder:
    """Raises Invalid for what makes no sense on any broker, TypeError for an option that there is not."""
    if not options.keys() <= PublishOptions.__optional_keys__:
        unknown = min(options.keys() - PublishOptions.__optional_keys__)
        raise TypeError(f"publish() got an unexpected keyword argument '{unknown}'")
    for name, given in (("queue", queue), *options.items()):
        if name in TEXTS and not isinstance(given, str):
            raise Invalid(f"{name} is invalid; it is a text, not '{type(given).__name__}'")
    if options.get("expiration") is not None:
        raise Invalid(
            "expiration is not possible; a message that expires may be lost, leave it out and let its queue expire it "
            "into a dead queue (x-message-ttl on RabbitMQ, expire_timeout on an embedded queue)"
        )
    priority = options.get("priority")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= PRIORITY_MAX):
        raise Invalid(f"priority is invalid; {priority!r} is not a number from 0 to {PRIORITY_MAX}")
    timeout_s = delay_us(options.get("timeout", PUBLISH_TIMEOUT), what="timeout") / 1_000_000
    if not timeout_s:
        raise Invalid("timeout is invalid; it must be more than nothing")
    return PublishOrder(
        to=_address(queue, options),
        like={
            "correlation_id": options.get("correlation_id", ""),
            "type": options.get("type", ""),
            "reply_to": options.get("reply_to", ""),
            "priority": priority,
            "headers": _headers(options.get("headers")),
        },
        content_type=options.get("content_type", ""),
        at_us=_at_us(options, now_us),
        timeout_s=timeout_s,
        repeats=options.get("repeat", True),
    )


def _address(queue: str, options: PublishOptions) -> Address:
    exchange, key = options.get("exchange", ""), options.get("routing_key", "")
    if queue and (exchange or key):
        raise Invalid("address is not clear; give a queue, or exchange= and routing_key=, not both")
    if not (queue or exchange or key):
        raise Invalid("address is missing; give a queue, or exchange= and routing_key=")
    return Address(exchange=exchange, routing_key=queue or key)


def _headers(headers: object) -> dict[str, object]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise Invalid("headers are invalid; give a dict whose keys are texts")
    return dict(headers)


def _at_us(options: PublishOptions, now_us: int) -> int:
    in_, at = options.get("in_"), cast(object, options.get("at"))
    if in_ is not None and at is not None:
        raise Invalid("moment is not clear; give in_= or at=, not both")
    if in_ is not None:
        after_us = delay_us(in_, what="in_")
        return now_us + after_us if after_us else 0
    if at is None:
        return 0
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise Invalid("at is invalid; give a datetime with its timezone")
    return microseconds(at)
