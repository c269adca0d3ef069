"""What is made of a delivery: a Message for handlers, policies, routes and people; a letter for the vault; its digest.

By the digest of its body, properties and headers a letter is recognised when it is delivered again. A quorum queue
sorts the header table of what it gives back, makes an empty table of none, and writes its counts into it: so headers
are taken in one fixed order, no table is an empty one, and the counts are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from math import isfinite

from holdfast.core.death import (
    PARKED_AT,
    REDRIVE_ID,
    QueueNames,
    as_text,
    deaths,
    redriven_count,
    where_it_died,
)
from holdfast.core.letter import (
    ERROR_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    REASON_CHARACTERS_MAX,
    DeathStory,
    Fingerprinter,
    JsonValue,
    Kinds,
    NewLetter,
    clip,
)
from holdfast.core.message import Delivery, Message
from holdfast.core.moments import microseconds
from holdfast.core.policy import REASON_POISON
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire.table import Undecodable, Value
from holdfast.errors import MessageRefused

LETTER_BYTES_MAX = 64 * 1024 * 1024

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
    headers, priority, sent_at = (decoded.get(name) for name in ("headers", "priority", "timestamp"))
    identity = as_text(decoded.get("message_id"))
    return Message(
        body=delivery.body,
        id=identity,
        has_lasting_id=bool(identity),
        queue=queue,
        exchange=delivery.exchange,
        routing_key=delivery.routing_key,
        type=as_text(decoded.get("type")),
        correlation_id=as_text(decoded.get("correlation_id")),
        content_type=as_text(decoded.get("content_type")),
        content_encoding=as_text(decoded.get("content_encoding")),
        expiration=as_text(decoded.get("expiration")),
        user_id=as_text(decoded.get("user_id")),
        reply_to=as_text(decoded.get("reply_to")),
        app_id=as_text(decoded.get("app_id")),
        priority=priority if isinstance(priority, int) else None,
        timestamp=sent_at if isinstance(sent_at, datetime) else None,
        headers=headers if isinstance(headers, dict) else {},
        redelivered=delivery.redelivered,
        attempts_max=attempts_max,
    )


def new_letter(delivery: Delivery, queue: str, grouped: Fingerprinter, names: QueueNames) -> NewLetter:
    """A delivery with everything that its headers tell. Raises MessageRefused."""
    if len(delivery.body) > LETTER_BYTES_MAX:
        size = len(delivery.body)
        raise MessageRefused(f"its body has {size} bytes, {LETTER_BYTES_MAX} is the most that a letter may have")
    decoded = properties.decode(delivery.properties)
    if isinstance(unreadable := decoded.get("(unreadable)"), Undecodable):
        raise MessageRefused(f"its properties cannot be read: {unreadable.reason}")
    headers = decoded.pop("headers", None)
    headers = headers if isinstance(headers, dict) else {}
    death = _death(headers, queue, names)
    kind = as_text(decoded.get("type")) or as_text(headers.get("MessageType"))
    shown = {clip(name, NAME_CHARACTERS_MAX): plain(value) for name, value in headers.items()}
    group = grouped(kind, death, shown, queue)
    return NewLetter(
        queue=clip(queue, NAME_CHARACTERS_MAX),
        origin="rabbitmq",
        body=delivery.body,
        properties=delivery.properties,
        digest=digest(delivery.properties, delivery.body),
        death=death,
        message_id=clip(as_text(decoded.get("message_id")), NAME_CHARACTERS_MAX),
        type=clip(kind, NAME_CHARACTERS_MAX),
        exchange=clip(delivery.exchange, NAME_CHARACTERS_MAX),
        routing_key=clip(delivery.routing_key, NAME_CHARACTERS_MAX),
        shown={name: plain(value) for name, value in decoded.items()},
        headers=shown,
        redelivered=delivery.redelivered,
        redrive_id=clip(as_text(headers.get(REDRIVE_ID)), NAME_CHARACTERS_MAX),
        redriven_count=redriven_count(Message(body=b"", headers=headers)),
        group=group.key,
        group_title=group.title,
    )


def _death(headers: Mapping[str, Value], dead_queue: str, names: QueueNames) -> DeathStory:
    """A parking takes x-death off: whatever tells of a main queue there is newer than that, and counts instead."""
    found, source = deaths(headers), where_it_died(headers, dead_queue, names)[0]
    died = [microseconds(death.at) for death in found if death.at]
    failed = [death for death in found if death.queue != dead_queue and names.is_main(death.queue)]
    is_parked = not failed and "x-parked-reason" in headers
    last = _moment_us(headers.get(PARKED_AT)) if is_parked else 0
    last = last or max(died, default=0)
    parked = as_text(headers.get("x-parked-reason"))
    reason = parked if is_parked else (failed or found)[0].reason if found else ""
    retries = headers.get("x-retry-count")
    count = retries if isinstance(retries, int) and not isinstance(retries, bool) else 0
    # Neither a parking nor whoever put it here after its last wait has counted the run that made him do it.
    is_uncounted = parked != REASON_POISON if is_parked else bool(found) and names.is_wait_queue(found[0].queue)
    count += sum(death.count for death in failed) + is_uncounted
    return DeathStory(
        queue=clip(source.queue if source else "", NAME_CHARACTERS_MAX),
        reason=clip(reason, REASON_CHARACTERS_MAX),
        count=min(max(0, count), 2**31),
        first_at_us=min([*died, last] if last else died, default=0),
        last_at_us=last,
        error_type=clip(as_text(headers.get("x-error-type")), REASON_CHARACTERS_MAX),
        error_message=clip(as_text(headers.get("x-error-message")), ERROR_CHARACTERS_MAX),
        error_stack=clip(as_text(headers.get("x-error-stack")), ERROR_CHARACTERS_MAX),
    )


def _moment_us(value: object) -> int:
    try:
        return microseconds(datetime.fromisoformat(value)) if isinstance(value, str) else 0
    except (ValueError, OverflowError):
        return 0


def kinds_of(raw: bytes) -> Kinds:
    """What AMQP calls the kinds of a message's properties and headers; nothing for what cannot be read."""
    try:
        pieces = properties.split(raw)
    except properties.Unreadable:
        return Kinds()
    headers = pieces.pop("headers", table.EMPTY)
    return Kinds({name: properties.KIND_NAMES[properties.KINDS[name]] for name in pieces}, table.kinds(headers))


def plain(value: Value) -> JsonValue:
    """A header value as JSON, for people and filters: what JSON has no word for is named by its kind."""
    if type(value) is str:  # nearly always
        return clip(value, len(value))
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case str():
            return clip(value, len(value))
        case float():
            return value if isfinite(value) else {"double": str(value)}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case datetime():
            return {"timestamp": value.isoformat()}
        case Decimal():
            return {"decimal": str(value)}
        case list():
            return [plain(one) for one in value]
        case dict():
            return {clip(name, NAME_CHARACTERS_MAX): plain(one) for name, one in value.items()}
        case Undecodable():
            return {"undecodable": base64.b64encode(value.raw).decode()}
