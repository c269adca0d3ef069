"""A message as a handler sees it: a body of bytes, and what came with it. Nothing here is parsed or re-encoded."""

from __future__ import annotations

from collections.abc import Mapping

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
    headers: Headers = {}
    redelivered: bool = False
    attempt: int = 1
    attempts_max: int = 0

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure now parks it."""
        return 0 < self.attempts_max <= self.attempt
