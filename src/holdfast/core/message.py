"""A message in the forms that brokers and handlers share: delivered, seen, published, and what became of that.

A body is bytes. Nothing here is parsed or re-encoded; only engines turn one form into another.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

#: Header values for people and policies; what travels on is the raw bytes that an engine keeps.
Headers = Mapping[str, object]


class Address(Struct, frozen=True, kw_only=True):
    """Where a message is published to. A queue by its name: the default exchange and the name as key."""

    exchange: str = ""
    routing_key: str = ""

    def __str__(self) -> str:
        return f"exchange '{self.exchange}' with key '{self.routing_key}'" if self.exchange else self.routing_key


class Message(Struct, frozen=True, kw_only=True):
    """What was sent, and which attempt at it this is."""

    body: bytes
    id: str = ""
    #: Whether the id stays the same from attempt to attempt: only then can a message be recognised by it.
    has_lasting_id: bool = False
    queue: str = ""
    exchange: str = ""
    routing_key: str = ""
    type: str = ""
    reference: str = ""
    correlation_id: str = ""
    content_type: str = ""
    content_encoding: str = ""
    expiration: str = ""
    user_id: str = ""
    reply_to: str = ""
    app_id: str = ""
    priority: int | None = None
    timestamp: datetime | None = None
    headers: Headers = {}
    redelivered: bool = False
    attempt: int = 1
    #: False: it came again and the broker cannot say how often: whoever worked on it may have ended with his process.
    attempt_is_certain: bool = True
    attempts_max: int = 0

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure now parks it."""
        return 0 < self.attempts_max <= self.attempt


class Delivery(Struct, eq=False, gc=False):
    """A message from a queue, as it came: `properties` are the broker's own bytes.

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
    own: Any = None  #: the broker's own, where the bytes are not all


class OutcomeKind(enum.Enum):
    """What became of one publish."""

    CONFIRMED = "confirmed"  #: stored, durably
    RETURNED = "returned"  #: unroutable: no queue has it
    NACKED = "nacked"  #: the broker says that it did not take it (another queue of a fanout still may have)
    REFUSED = "refused"  #: it cannot be published as it is: the broker closed the channel over it, and over it alone
    UNKNOWN = "unknown"  #: no answer: it may be stored or not


class Outcome(Struct, frozen=True):
    """What became of one publish, and what the broker said about it."""

    kind: OutcomeKind
    code: int = 0
    text: str = ""

    @property
    def stored(self) -> bool:
        """The only answer after which a source may be settled."""
        return self.kind is OutcomeKind.CONFIRMED


CONFIRMED = Outcome(OutcomeKind.CONFIRMED)


class Published(Struct, frozen=True, kw_only=True):
    """What a queue has durably now: its id, and how often it was sent until that was confirmed."""

    id: str
    sent_count: int = 1


class Outgoing(Struct, eq=False, gc=False):
    """A message to publish, once. `properties` are the broker's own bytes; the publisher sets delivery mode 2 in them.

    Not for the garbage collector: a batch holds its messages by its timer alone, which goes with the last outcome. So
    what it was made from must not hold it.
    """

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    made_from: Any = None  #: the sender's own
    once: bool = False  #: it is not sent again by itself, whatever becomes of the first
    # The publisher's own, while the message is on its way and after.
    batch: Any = None  #: who waits for it
    outcome: Outcome | None = None
    size_bytes: int = 0  #: what it counts for in the window
    sent_count: int = 0
