"""A delivery as a Message, for handlers, policies, routes and people.

The digest by which a letter is recognised when it is delivered again: its body, properties and headers.

A quorum queue sorts the header table of what it gives back, makes an empty table of none, and writes its counts into
it: so headers are taken in the order of their names, no table is an empty one, and the counts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from holdfast.core.message import Delivery, Message
from holdfast.engines.rabbitmq.wire import properties, table

DIGEST_BYTES = 16
#: A larger body is not copied to be hashed in one go.
JOINED_BYTES_MAX = 16_384
#: What changes from delivery to delivery of one and the same message.
COUNTS = frozenset((b"x-delivery-count", b"x-acquired-count"))


def digest(raw: bytes, body: bytes) -> bytes:
    """Of a message's raw properties and its body. Never raises: what cannot be read counts as it came."""
    try:
        start, end = properties.header_span(raw)
    except properties.Unreadable:
        return hash_of(len(raw), (raw,), body)
    headers = raw[start:end] or table.EMPTY
    found = table.scan(headers)
    # An entry begins with the length of its name, so this is not the order of names; but it is one and the same.
    entries = sorted(headers[first:last] for name, first, last in found.entries if name not in COUNTS)
    plain = properties.before_headers(raw, start, has_headers=False)
    head = (plain, raw[end:], *entries, headers[found.rest :])
    return hash_of(sum(map(len, head)), head, body)


def hash_of(head_bytes: int, head: Sequence[bytes], body: bytes) -> bytes:
    """Of everything but the body, so many bytes in pieces and in an order that redeliveries keep, and of the body."""
    start = head_bytes.to_bytes(8, "big")
    if len(body) <= JOINED_BYTES_MAX:
        return blake2b(b"".join((start, *head, body)), digest_size=DIGEST_BYTES).digest()
    made = blake2b(b"".join((start, *head)), digest_size=DIGEST_BYTES)
    made.update(body)
    return made.digest()


def read_message(delivery: Delivery, queue: str, *, attempts_max: int = 0) -> Message:
    """What of it can be decoded. The rest is left out here, and travels on as it came."""
    decoded = properties.decode(delivery.properties)
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
