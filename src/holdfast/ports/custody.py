"""What custody needs of a place with dead-letter queues: letters out of one, and letters published again.

A letter that was taken is ours until it is acked or the source is closed; then it is the broker's again. Of a publish
only *stored* allows a letter to be settled; *unknown* means that it may be there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.core.letter import Content, Letter, NewLetter, Origin
from holdfast.core.message import Address
from holdfast.core.plan import Target


class Caught(Struct, frozen=True, kw_only=True, eq=False):
    """A letter in hand. `failure` says why it can be none; body and properties are kept all the same."""

    letter: NewLetter | None
    body: bytes
    properties: bytes
    failure: str = ""
    tag: object = None


class Source(Protocol):
    """A dead-letter queue that is being emptied."""

    @property
    def trouble(self) -> str:
        """Why nothing can come now; empty when it can."""

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Caught]:
        """Wait for letters; none when none came in time. Raises BrokerError or TryAgain."""

    async def stop(self) -> None:
        """No more letters; what is in hand can still be acked."""

    async def ack(self, caught: Sequence[Caught]) -> list[bool]:
        """Settle them; of each, whether its ack was written. The others come again, as redelivered."""


class DeadQueue(Struct, frozen=True, kw_only=True):
    """A dead-letter queue as its broker knows it."""

    queue: str
    source_queue: str = ""
    ready: int = 0
    consumers: int = 0
    #: Whether reading it without taking costs nothing: no finite delivery limit.
    peek_is_free: bool = False
    note: str = ""


class Parcel(Struct, frozen=True, kw_only=True):
    """One letter on its way out."""

    letter: int
    queue: str
    content: Content
    address: Address
    redrive_id: str
    run: str
    by: str


class Posted(Struct, frozen=True):
    """What became of a publish: `failed` is known not to be stored anywhere."""

    kind: Literal["stored", "failed", "unknown"]
    why: str = ""


class Reach(Struct, frozen=True, kw_only=True):
    """What is known of an address before anything is sent to it."""

    why: str = ""  #: why nothing would arrive; empty when it would, as far as can be told
    queues: tuple[str, ...] | None = None  #: every queue that gets a copy; None when nobody can say
    note: str = ""  #: what could not be looked at


class Post(Protocol):
    """A broker, for custody."""

    origin: Origin  #: which letters are its own

    def source(self, queue: str, *, capacity_count: int) -> AbstractAsyncContextManager[Source]:
        """Empty a queue, with at most so many letters in hand; what is not acked at the end goes back, and where the
        queue counts that, it counts. Raises BrokerError."""

    async def queues(self) -> list[DeadQueue]:
        """The dead-letter queues that are known. Raises BrokerError."""

    async def queue(self, name: str) -> DeadQueue | None:
        """One of them, or None when it is not known or not there."""

    def route(self, letter: Letter, target: Target) -> tuple[Address | None, str]:
        """Where a letter would go, and why; no address when nothing says where."""

    async def look(self, addresses: Sequence[Address]) -> dict[Address, Reach]:
        """Where each leads now. Raises BrokerError."""

    async def ladder_s(self, addresses: Sequence[Address]) -> float | None:
        """How long a letter that goes there and fails every attempt takes until it is dead again, of all the longest;
        None when nothing tells of one of them. Raises BrokerError."""

    async def publish(self, parcels: Sequence[Parcel]) -> list[Posted]:
        """Publish, pipelined, confirmed and mandatory; outcomes in the same order."""

    async def peek(self, queue: str, *, count_max: int) -> list[NewLetter]:
        """Look at the first letters and give all of them back."""
