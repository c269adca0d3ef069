"""What killed a message, read from its headers, and which headers our publishes and redrives change. Pure.

Attempts are counted in `x-retry-count`. The broker's own `x-death` is trusted from clients on RabbitMQ 3 and begins
anew on 4, so it counts only until our next publish: that adds it to our count and takes it off.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.checks import ATTEMPTS_MAX
from holdfast.core.message import Headers, Message
from holdfast.core.policy import Failure, clean, head

RETRY_COUNT = "x-retry-count"
ORIGINAL_EXCHANGE = "x-original-exchange"
ORIGINAL_KEY = "x-original-routing-key"
ORIGINAL_QUEUE = "x-original-queue"
ORIGIN = (ORIGINAL_EXCHANGE, ORIGINAL_KEY, ORIGINAL_QUEUE)
#: The dead queue for which these three are true.
ORIGINAL_FOR = "x-original-for"
#: Where what stood in them before is kept.
FIRST_ORIGIN = ("x-first-original-exchange", "x-first-original-routing-key", "x-first-original-queue")
PARKED_AT = "x-parked-at"
KEPT_EXPIRATION = "x-kept-expiration"
KEPT_DEATH_BYTES_MAX = 4 * 1024
TOLD_BYTES_MAX = 1024
NAMES_COUNT_MAX = 1024
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
#: What a redrive takes off, and what tells who a letter is and where it has been: no edit may touch them.
DROPPED_HEADERS = (*BROKER_HEADERS, *FORKING_HEADERS, RETRY_COUNT, ORIGINAL_FOR)
STORY_HEADERS = (
    REDRIVEN_AT, REDRIVEN_BY, REDRIVEN_FROM, REDRIVEN_COUNT, REDRIVE_ID, REDRIVE_RUN, *ORIGIN, *FIRST_ORIGIN
)  # fmt: skip
REDRIVES_COUNT_MAX = 2**31
VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
NAMESPACE = uuid.UUID("7a2f6f0c-6a3a-5f0e-9d55-7d9a7c0d3f11")

#: Names of queues where a message only sits out its delay (to have expired there is no death), and of dead queues.
WAIT_QUEUES, DEAD_QUEUES = ("*.retry", "*.retry.*"), ("*.dlq",)
#: Why a letter is kept that does not tell in which queue it died.
NO_SOURCE = "nothing says in which queue it died"

HeaderValue = str | int | list[str]


class Death(Struct, frozen=True, kw_only=True):
    """Where, why, when and how often a message died."""

    queue: str
    reason: str
    count: int = 1
    exchange: str = ""
    routing_key: str = ""
    at: datetime | None = None
    expiration: str = ""  #: that it had until then


class QueueNames(Struct, frozen=True, kw_only=True):
    """By which names queues are known in which nothing fails: a message waits in them, or is dead already."""

    wait_queues: tuple[str, ...] = WAIT_QUEUES
    dead_queues: tuple[str, ...] = DEAD_QUEUES

    def is_wait_queue(self, queue: str) -> bool:
        """Whether a queue of this name only holds messages for a while."""
        return _fits(queue[:TOLD_BYTES_MAX], self.wait_queues)

    def is_main(self, queue: str) -> bool:
        """Whether messages can fail in a queue of this name."""
        return not (self.is_wait_queue(queue) or _fits(queue[:TOLD_BYTES_MAX], self.dead_queues))


@lru_cache(NAMES_COUNT_MAX)
def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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
    names: QueueNames = QueueNames()


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
        exchange=as_text(entry.get("exchange")),
        routing_key=as_text(keys[0]) if isinstance(keys, list) and keys else "",
        at=at if isinstance(at, datetime) else None,
        expiration=as_text(entry.get("original-expiration")),
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


def newest_death(headers: Headers, dead_queue: str, names: QueueNames) -> Death | None:
    """The first entry of x-death that is neither of a wait queue nor of a dead queue.

    By the order of the list, never by the times: the broker does not renew the time of an entry when it counts on.
    """
    dead = (dead_queue, headers.get(ORIGINAL_FOR))
    return next((one for one in deaths(headers) if one.queue not in dead and names.is_main(one.queue)), None)


def where_it_died(
    headers: Headers, dead_queue: str, names: QueueNames, sources: Callable[[], Iterable[str]] = tuple
) -> tuple[Death | None, str]:
    """The queue in which a letter of this dead queue died and the address that it was consumed from, else why nobody
    can say. `sources` are the queues that lead to the dead queue, by the topology; asked only where nothing else tells.
    """
    noted, noted_for = _noted(headers, dead_queue), as_text(headers.get(ORIGINAL_FOR))
    if noted is not None and noted_for == dead_queue:
        return noted, ""
    if (death := newest_death(headers, dead_queue, names)) is not None:
        return death, ""
    if noted_for not in ("", dead_queue):
        if noted is not None and any(one.queue == noted_for for one in deaths(headers)):
            return noted, ""  # from that dead queue the broker sent it here
        return None, f"it was parked into '{noted_for[:TOLD_BYTES_MAX]}', and nothing says how it came here"
    leading = set(sources())
    if noted is not None and PARKED_AT in headers and (noted.queue in leading or dead_queue == f"{noted.queue}.dlq"):
        return noted, ""
    if len(leading) == 1:
        return Death(queue=leading.pop(), reason=""), ""
    return None, f"{NO_SOURCE}, and {len(leading)} queues lead here" if leading else NO_SOURCE


def _noted(headers: Headers, dead_queue: str) -> Death | None:
    exchange, key, queue = (as_text(headers.get(name)) for name in ORIGIN)
    return Death(queue=queue, reason="", exchange=exchange, routing_key=key) if queue not in ("", dead_queue) else None


def came_back(message: Message, wait_queues: Collection[str]) -> bool:
    """Whether it came through a wait queue of its own: whatever came another way is here for the first time, and what
    its headers tell is of another queue, or of another life."""
    found = deaths(message.headers)
    return bool(found) and found[0].queue in wait_queues


def attempts_used(message: Message, wait_queues: Collection[str]) -> int:
    """How often a handler of this queue has run this message: our count, and rejections since our last publish."""
    if not came_back(message, wait_queues):
        return 0
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


def as_first_seen(message: Message, wait_queues: Collection[str]) -> Message:
    """What came back through a wait queue of its own, with the address and the expiration that it had before.

    The broker wrote them down when it was rejected; a publish of ours, in headers.
    """
    if not came_back(message, wait_queues):
        return message
    here = next((death for death in deaths(message.headers) if death.queue == message.queue), None)
    if here is None and message.headers.get(ORIGINAL_QUEUE) == message.queue:
        exchange, key = (as_text(message.headers.get(name)) for name in (ORIGINAL_EXCHANGE, ORIGINAL_KEY))
        expiration = as_text(message.headers.get(KEPT_EXPIRATION))
        here = Death(queue=message.queue, reason="", exchange=exchange, routing_key=key, expiration=expiration)
    if here is None:
        return message
    return replace(
        message,
        exchange=here.exchange,
        routing_key=here.routing_key,
        expiration=message.expiration or here.expiration,
    )


def published(message: Message, *, user: str = "", wait_queues: Collection[str] = ()) -> HeaderChange:
    """What every publish of ours changes: nothing that expires, forks, is refused, or passes for the broker's own."""
    headers = message.headers
    put: dict[str, HeaderValue] = {}
    properties = []
    if message.expiration:
        properties.append("expiration")
        put[KEPT_EXPIRATION] = message.expiration
    if message.user_id and message.user_id != user:
        properties.append("user_id")
        put["x-kept-user-id"] = message.user_id
    if copies := _texts(headers.get("CC")):
        put["x-kept-cc"] = copies
    found = [death for death in deaths(headers) if not (death.queue in wait_queues and death.reason == "expired")]
    if found and "x-kept-death" not in headers:
        put["x-kept-death"] = _as_json(found)
    return HeaderChange(put=put, drop=(*BROKER_HEADERS, *FORKING_HEADERS), drop_properties=tuple(properties))


def retried(
    message: Message, failure: Failure, *, dead_queue: str, user: str = "", wait_queues: Collection[str] = ()
) -> HeaderChange:
    """The headers of a message that goes to its wait queue after `message.attempt` failed."""
    change = published(message, user=user, wait_queues=wait_queues)
    origin = _origin(message, dead_queue, wait_queues)
    return replace(change, put={**change.put, **origin, RETRY_COUNT: message.attempt, **_error(failure)})


def parked(
    message: Message,
    failure: Failure,
    *,
    used: int,
    reason: str,
    at: datetime,
    by: str,
    dead_queue: str,
    user: str = "",
    wait_queues: Collection[str] = (),
) -> HeaderChange:
    """The headers of a message that goes to its dead queue. `used` is the count that it came with, and keeps."""
    change = published(message, user=user, wait_queues=wait_queues)
    notes: dict[str, HeaderValue] = {
        **_origin(message, dead_queue, wait_queues),
        PARKED_AT: at.isoformat(),
        "x-parked-by": head(clean(by), TOLD_BYTES_MAX),
        "x-parked-reason": reason,
    }
    return replace(change, put={**change.put, RETRY_COUNT: used, **_error(failure), **notes})


def _error(failure: Failure) -> dict[str, HeaderValue]:
    return {"x-error-type": failure.type, "x-error-message": failure.message, "x-error-stack": failure.stack}


def _origin(message: Message, dead_queue: str, wait_queues: Collection[str]) -> dict[str, HeaderValue]:
    """Where it was consumed from when it first failed in this queue, for the dead queue that it goes to. Coming back
    through the queue's own wait queue it has that already."""
    headers, queue = message.headers, message.queue
    if headers.get(ORIGINAL_FOR) == dead_queue and headers.get(ORIGINAL_QUEUE) == queue:
        return {}
    here = Death(queue=queue, reason="", exchange=message.exchange, routing_key=message.routing_key)
    found = deaths(headers)
    if found and found[0].queue in wait_queues:  # the broker brought it back: its note is of the first time
        here = next((death for death in found if death.queue == queue), here)
    return {**_moved(headers, here), ORIGINAL_FOR: dead_queue}


def _moved(headers: Headers, death: Death) -> dict[str, HeaderValue]:
    """All three are written anew, halves of two places would be a third; the first that stood there are kept."""
    before: dict[str, object] = {}
    if not any(name in headers for name in FIRST_ORIGIN):
        before = {first: headers[name] for first, name in zip(FIRST_ORIGIN, ORIGIN, strict=True) if name in headers}
    return {
        **{name: value if isinstance(value, str) else str(value)[:TOLD_BYTES_MAX] for name, value in before.items()},
        **dict(zip(ORIGIN, (death.exchange, death.routing_key, death.queue), strict=True)),
    }


def _is_rejection(death: Death, queue: str) -> bool:
    return death.queue == queue and death.reason == "rejected"


def _as_json(found: list[Death]) -> str:
    """As many entries as fit, newest first."""
    entries: list[dict[str, object]] = []
    text = "[]"
    for death in found:
        entries.append(
            {
                "queue": death.queue,
                "reason": death.reason,
                "count": death.count,
                "exchange": death.exchange,
                "routing-keys": [death.routing_key],
                "time": death.at.isoformat() if death.at else None,
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


def as_text(value: object) -> str:
    """What somebody else wrote, where it is text; else none."""
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
    headers, dead_queue, names = message.headers, redrive.dead_queue, redrive.names
    waits = [death.queue for death in deaths(headers) if names.is_wait_queue(death.queue)]
    change = published(message, user=redrive.user, wait_queues=frozenset(waits))
    # x-death is taken off: what it tells is written down, unless something that counts here stands there.
    is_noted = headers.get(ORIGINAL_FOR) == dead_queue and _noted(headers, dead_queue) is not None
    died = None if is_noted else newest_death(headers, dead_queue, names)
    put: dict[str, HeaderValue] = {
        **change.put,
        **(_moved(headers, died) if died else {}),
        REDRIVEN_BY: redrive.by,
        REDRIVEN_FROM: dead_queue,
        REDRIVEN_COUNT: redriven_count(message) + 1,
        REDRIVE_RUN: redrive.run,
    }
    return replace(change, put=put, drop=DROPPED_HEADERS)
