"""What killed a message, read from its headers, and which headers our publishes and redrives change. Pure.

Attempts are counted in `x-retry-count`. The broker's own `x-death` is trusted from clients on RabbitMQ 3 and begins
anew on 4, so it counts only until our next publish: that adds it to our count and takes it off.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Collection
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.checks import ATTEMPTS_MAX
from holdfast.core.item import Item
from holdfast.core.message import Headers, Message
from holdfast.core.policy import Failure, clean, head

RETRY_COUNT = "x-retry-count"
ORIGINAL_EXCHANGE = "x-original-exchange"
ORIGINAL_KEY = "x-original-routing-key"
ORIGINAL_QUEUE = "x-original-queue"
KEPT_DEATH_BYTES_MAX = 4 * 1024
NAME_BYTES_MAX = 1024
DEATH = "x-death"
DELIVERY_COUNT = "x-delivery-count"
#: From 4.3 on: also what was given back on purpose, which the other no longer counts.
ACQUIRED_COUNT = "x-acquired-count"
#: The broker's own notes. Sent along they would be taken for its own, or make it drop the message as a cycle.
BROKER_HEADERS = (
    DEATH,
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
    DELIVERY_COUNT,
    ACQUIRED_COUNT,
)
#: These send copies to further queues, or delay the message by a plugin.
FORKING_HEADERS = ("CC", "BCC", "x-delay")

REDRIVEN_AT = "x-redriven-at"
REDRIVEN_BY = "x-redriven-by"
REDRIVEN_FROM = "x-redriven-from"
REDRIVEN_COUNT = "x-redriven-count"
REDRIVE_ID = "x-redrive-id"
REDRIVE_RUN = "x-redrive-run"
REDRIVES_COUNT_MAX = 2**31
VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
NAMESPACE = uuid.UUID("7a2f6f0c-6a3a-5f0e-9d55-7d9a7c0d3f11")

HeaderValue = str | int | list[str]


class Death(Struct, frozen=True, kw_only=True):
    """Where, why, when and how often a message died."""

    queue: str
    reason: str
    count: int = 1
    exchange: str = ""
    routing_key: str = ""
    at: datetime | None = None

    @classmethod
    def of_item(cls, item: Item) -> Death | None:
        """The death of an item that lies in a dead queue of the embedded queue."""
        if not item.source_queue:
            return None
        return cls(queue=item.source_queue, reason=item.death_reason, count=item.death_attempts, at=item.died_at)


class HeaderChange(Struct, frozen=True, kw_only=True):
    """What a publish changes: headers to set and to take off, properties to take off. Everything else stays."""

    put: dict[str, HeaderValue]
    drop: tuple[str, ...]
    drop_properties: tuple[str, ...] = ()


class RedriveStamp(Struct, frozen=True, kw_only=True):
    """What all letters of one run have in common."""

    run: str
    by: str
    dead_queue: str
    user: str = ""  #: whom the broker knows us as: his own user id may stay
    is_wait_queue: Callable[[str], bool] = lambda queue: False


def deaths(headers: Headers) -> list[Death]:
    """The entries of x-death that can be read, newest first. A stranger may have written it: nothing is believed."""
    entries = headers.get(DEATH)
    return [death for entry in entries if (death := _death(entry))] if isinstance(entries, list) else []


def _death(entry: object) -> Death | None:
    if not isinstance(entry, dict):
        return None
    queue, reason, keys, at = (entry.get(name) for name in ("queue", "reason", "routing-keys", "time"))
    if not isinstance(queue, str) or not isinstance(reason, str):
        return None
    return Death(
        queue=queue,
        reason=reason,
        count=_count(entry.get("count")),
        exchange=_text(entry.get("exchange")),
        routing_key=_text(keys[0]) if isinstance(keys, list) and keys else "",
        at=at if isinstance(at, datetime) else None,
    )


def is_of_cycle(headers: Headers, queue: str, wait_queues: Collection[str]) -> bool:
    """Whether x-death tells of nothing but rejections in this queue and waits: what the broker itself writes there.

    RabbitMQ 3 believes what a stranger wrote into it, and drops a message over an entry that it cannot read, or that
    says that the message has expired in this queue before.
    """
    if DEATH not in headers:
        return True
    entries = headers[DEATH]
    found = deaths(headers)
    return (
        isinstance(entries, list)
        and len(found) == len(entries)
        and all(isinstance(entry.get("count"), int) for entry in entries if isinstance(entry, dict))
        and all(
            death.reason == "expired" if death.queue in wait_queues else _is_rejection(death, queue) for death in found
        )
    )


def first_death(headers: Headers) -> Death | None:
    """The oldest death: the one that the broker names as the first, else the last of the list."""
    found = deaths(headers)
    queue, reason = headers.get("x-first-death-queue"), headers.get("x-first-death-reason")
    for death in found:
        if (death.queue, death.reason) == (queue, reason):
            return death
    return found[-1] if found else None


def attempts_used(message: Message) -> int:
    """How often a handler of this queue has run this message: our count, and rejections since our last publish."""
    return min(ATTEMPTS_MAX, _count(message.headers.get(RETRY_COUNT)) + rejections(message))


def rejections(message: Message) -> int:
    """How often it was rejected in this queue since our last publish."""
    return sum(death.count for death in deaths(message.headers) if _is_rejection(death, message.queue))


def returns(message: Message, *, with_rejections: bool = False) -> int | None:
    """How often a quorum queue had this message back; None where nobody counts.

    On a first delivery the header, if any, is left over from another queue. `with_rejections`: this broker counts
    rejections there too, and carries the count round through the wait queue (4.0 to 4.2).
    """
    headers = message.headers
    if DELIVERY_COUNT not in headers and ACQUIRED_COUNT not in headers:
        return None
    count = _count(headers.get(DELIVERY_COUNT)) if message.redelivered else 0
    return max(0, count - rejections(message)) if with_rejections else count


def published(message: Message, *, user: str = "", wait_queues: Collection[str] = ()) -> HeaderChange:
    """What every publish of ours changes: nothing that expires, forks, is refused, or passes for the broker's own."""
    headers = message.headers
    put: dict[str, HeaderValue] = dict(_origin(message, wait_queues))
    properties = []
    if message.expiration:
        properties.append("expiration")
        put["x-kept-expiration"] = message.expiration
    if message.user_id and message.user_id != user:
        properties.append("user_id")
        put["x-kept-user-id"] = message.user_id
    if copies := _texts(headers.get("CC")):
        put["x-kept-cc"] = copies
    found = [death for death in deaths(headers) if not (death.queue in wait_queues and death.reason == "expired")]
    if found and "x-kept-death" not in headers:
        put["x-kept-death"] = _as_json(found)
    return HeaderChange(put=put, drop=(*BROKER_HEADERS, *FORKING_HEADERS), drop_properties=tuple(properties))


def retried(message: Message, failure: Failure, *, user: str = "", wait_queues: Collection[str] = ()) -> HeaderChange:
    """The headers of a message that goes to its wait queue after `message.attempt` failed."""
    change = published(message, user=user, wait_queues=wait_queues)
    return replace(change, put={**change.put, RETRY_COUNT: message.attempt, **_error(failure)})


def parked(
    message: Message,
    failure: Failure,
    *,
    used: int,
    reason: str,
    at: datetime,
    by: str,
    user: str = "",
    wait_queues: Collection[str] = (),
) -> HeaderChange:
    """The headers of a message that goes to its dead queue. `used` is the count that it came with, and keeps."""
    change = published(message, user=user, wait_queues=wait_queues)
    notes: dict[str, HeaderValue] = {
        "x-parked-at": at.isoformat(),
        "x-parked-by": head(clean(by), NAME_BYTES_MAX),
        "x-parked-reason": reason,
    }
    return replace(change, put={**change.put, RETRY_COUNT: used, **_error(failure), **notes})


def _error(failure: Failure) -> dict[str, HeaderValue]:
    return {"x-error-type": failure.type, "x-error-message": failure.message, "x-error-stack": failure.stack}


def _origin(message: Message, wait_queues: Collection[str]) -> dict[str, HeaderValue]:
    """Where it was consumed from when it first failed. All three or none: halves of two places would be a third."""
    if any(name in message.headers for name in (ORIGINAL_EXCHANGE, ORIGINAL_KEY, ORIGINAL_QUEUE)):
        return {}
    first = first_death(message.headers)
    if first is not None and first.queue in wait_queues:
        first = None  # somebody sent it through the wait queue: that is no place where it failed
    first = first or Death(queue=message.queue, reason="", exchange=message.exchange, routing_key=message.routing_key)
    return {ORIGINAL_EXCHANGE: first.exchange, ORIGINAL_KEY: first.routing_key, ORIGINAL_QUEUE: first.queue}


def _is_rejection(death: Death, queue: str) -> bool:
    return death.queue == queue and death.reason == "rejected"


def _as_json(found: list[Death]) -> str:
    """As many entries as fit, newest first."""
    entries: list[dict[str, object]] = []
    text = "[]"
    for death in found:
        at = death.at.isoformat() if death.at else None
        entries.append(
            {
                "queue": death.queue,
                "reason": death.reason,
                "count": death.count,
                "exchange": death.exchange,
                "routing-keys": [death.routing_key],
                "time": at,
            }
        )
        longer = json.dumps(entries, separators=(",", ":"))
        if len(longer) > KEPT_DEATH_BYTES_MAX:
            break
        text = longer
    return text


def _count(value: object) -> int:
    """A count that somebody else wrote: a whole number from 0 to the limit, or 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return min(max(value, 0), ATTEMPTS_MAX)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def redrive_ids(dead_queue: str) -> Callable[[bytes], str]:
    """The ids of one dead-letter queue, by the digests of its letters, each of which has its redrive count in it.

    An id is derived, not random: the same letter redriven again after a crash carries the same one, without memory.

    uuid5, written out: the library's own takes three times as long, and this is asked for every letter.
    """
    name = dead_queue.encode("utf-8", "surrogateescape")
    named = hashlib.sha1(NAMESPACE.bytes + name + b"\0", usedforsecurity=False)

    def made(digest: bytes) -> str:
        hashed = named.copy()
        hashed.update(digest.hex().encode())
        number = hashed.hexdigest()
        return f"{number[:8]}-{number[8:12]}-5{number[13:16]}-{VARIANTS[number[16]]}{number[17:20]}-{number[20:32]}"

    return made


def redriven_count(message: Message) -> int:
    """How often it was redriven before."""
    count = message.headers.get(REDRIVEN_COUNT)
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < REDRIVES_COUNT_MAX else 0


def redriven(message: Message, redrive: RedriveStamp) -> HeaderChange:
    """What every copy of this letter changes but for its moment and its id, which differ from letter to letter."""
    waits = [death.queue for death in deaths(message.headers) if redrive.is_wait_queue(death.queue)]
    change = published(message, user=redrive.user, wait_queues=frozenset(waits))
    put: dict[str, HeaderValue] = dict(change.put)
    if not deaths(message.headers):
        # Nothing tells where it failed. That it lies in a dead-letter queue does not make that its origin.
        for name in (ORIGINAL_EXCHANGE, ORIGINAL_KEY, ORIGINAL_QUEUE):
            put.pop(name, None)
    put |= {
        REDRIVEN_BY: redrive.by,
        REDRIVEN_FROM: redrive.dead_queue,
        REDRIVEN_COUNT: redriven_count(message) + 1,
        REDRIVE_RUN: redrive.run,
    }
    return replace(change, put=put, drop=(*change.drop, RETRY_COUNT))
