"""What a redrive changes of a letter, and the id by which its copies can be told. Pure.

The id is derived, not random: the same letter redriven again after a crash carries the same one, without memory.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.death import (
    ORIGINAL_EXCHANGE,
    ORIGINAL_KEY,
    ORIGINAL_QUEUE,
    RETRY_COUNT,
    HeaderChange,
    HeaderValue,
    deaths,
    published,
)
from holdfast.core.message import Message

REDRIVEN_AT = "x-redriven-at"
REDRIVEN_BY = "x-redriven-by"
REDRIVEN_FROM = "x-redriven-from"
REDRIVEN_COUNT = "x-redriven-count"
REDRIVE_ID = "x-redrive-id"
REDRIVE_RUN = "x-redrive-run"
REDRIVES_COUNT_MAX = 2**31
VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
NAMESPACE = uuid.UUID("7a2f6f0c-6a3a-5f0e-9d55-7d9a7c0d3f11")


class RedriveStamp(Struct, frozen=True, kw_only=True):
    """What all letters of one run have in common."""

    run: str
    by: str
    dead_queue: str
    user: str = ""  #: whom the broker knows us as: his own user id may stay
    is_wait_queue: Callable[[str], bool] = lambda queue: False


def redrive_id(dead_queue: str, digest: bytes) -> str:
    """One id per letter and redrive: of the dead-letter queue and the letter's digest, its redrive count included."""
    return redrive_ids(dead_queue)(digest)


def redrive_ids(dead_queue: str) -> Callable[[bytes], str]:
    """The ids of one dead-letter queue, by the digests of its letters.

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


def redriven_headers(message: Message, redrive: RedriveStamp, *, at: datetime, digest: bytes) -> HeaderChange:
    """All of it, for one letter."""
    change = redriven(message, redrive)
    own: dict[str, HeaderValue] = {
        REDRIVEN_AT: at.isoformat(),
        REDRIVE_ID: redrive_id(redrive.dead_queue, digest),
    }
    return replace(change, put=change.put | own)
