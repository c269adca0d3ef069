"""A delivery as a Message, for handlers, policies, routes and people."""

from __future__ import annotations

from holdfast.core.message import Message
from holdfast.engines.rabbitmq.wire.events import Delivery


def read_message(delivery: Delivery, queue: str, *, attempts_max: int = 0) -> Message:
    """What of it can be decoded. The rest is left out here, and travels on as it came."""
    decoded = delivery.decoded()
    headers = decoded.get("headers")
    identity = _text(decoded.get("message_id"))
    return Message(
        body=delivery.body,
        id=identity,
        has_lasting_id=bool(identity),
        queue=queue,
        exchange=delivery.exchange,
        routing_key=delivery.routing_key,
        type=_text(decoded.get("type")),
        correlation_id=_text(decoded.get("correlation_id")),
        content_type=_text(decoded.get("content_type")),
        content_encoding=_text(decoded.get("content_encoding")),
        expiration=_text(decoded.get("expiration")),
        user_id=_text(decoded.get("user_id")),
        headers=headers if isinstance(headers, dict) else {},
        redelivered=delivery.redelivered,
        attempts_max=attempts_max,
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
