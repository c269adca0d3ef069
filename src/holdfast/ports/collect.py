"""What the collector needs of a broker: queues that outlive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from holdfast.ports.broker import Incoming, Intake


class GroupIntake(Intake, Protocol):
    """An intake that settles several at a time."""

    async def ack_all(self, incoming: Sequence[Incoming]) -> Sequence[Incoming]:
        """They are done. Returns those for which that did not work together: acked one by one, each says why."""


class Transport(Protocol):
    """Layer two: durable queues that are acked only after the work, and confirmed publishes."""

    async def check(self, address: str) -> None:
        """Raises Invalid when nothing can be sent to this address as things are."""

    async def declare(self, queues: Sequence[str]) -> None:
        """Make the queues durable, and the dead queue; what is there stays as it is."""

    def open(self, queue: str, *, count_max: int, bytes_max: int) -> AbstractAsyncContextManager[GroupIntake]:
        """Consume from a queue; `count_max` is how many messages may be ours at a time.

        Where messages are pushed, there are so few of them that they weigh at most `bytes_max`, or one at a time; as
        far as the largest one so far can tell.
        """

    async def send(self, address: str, body: bytes, *, message_id: str, attributes: Mapping[str, object]) -> None:
        """Returns when it is stored there. Raises Refused for good, any other HoldfastError for now."""

    async def park(self, body: bytes, *, attributes: Mapping[str, object], reason: str) -> None:
        """Put a message that was taken in before into the dead queue."""

    async def delete(self, queue: str) -> bool:
        """Delete it unless a message is in it or on its way; false when one is. One that is gone is deleted."""
