"""The brokers that the suite runs over: each can be sent to, and be asked what is parked and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import holdfast
from holdfast.core.item import Item, NewItem

QUEUE = "work"


class Letter(NamedTuple):
    """A parked message: its body, why it was parked, and by which error."""

    body: bytes
    reason: str
    error: str


class Stand(Protocol):
    """A broker for one test."""

    def app(self, *, stop_timeout: str = "10s") -> holdfast.App:
        """An app on this broker."""

    async def send(self, *bodies: bytes, queue: str = QUEUE) -> None:
        """Put messages into a queue that has been declared."""

    async def parked(self, queue: str = QUEUE) -> list[Letter]:
        """What is in the queue's dead queue."""

    async def left(self, queue: str = QUEUE) -> int:
        """How many messages the queue has, ours and waiting ones included."""


class QueueStand:
    """The embedded queue. The app opens it; what is asked goes through the app while it runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._app: holdfast.App | None = None

    def app(self, *, stop_timeout: str = "10s") -> holdfast.App:
        self._app = holdfast.App(self.url, stop_timeout=stop_timeout)
        return self._app

    @property
    def queues(self) -> holdfast.Queues:
        assert self._app is not None
        return self._app.queues

    async def send(self, *bodies: bytes, queue: str = QUEUE) -> None:
        await self.queues.queue_produce(queue, [NewItem(payload=body, reference="ref", kind="kind") for body in bodies])

    async def parked(self, queue: str = QUEUE) -> list[Letter]:
        return [letter_of(item) for item in await items_of(self.queues, f"{queue}.dlq")]

    async def left(self, queue: str = QUEUE) -> int:
        return await count_of(self.queues, queue)


async def items_of(queues: holdfast.Queues, queue: str) -> Sequence[Item]:
    """What is in a queue now."""
    return await queues.storage_items_list(queue)


async def count_of(queues: holdfast.Queues, queue: str) -> int:
    """How many items a queue has, in sight or on their way."""
    (logical,) = (await queues.queue_stats(queue)).logical_queues
    return sum(part.total + part.scheduled + part.dying for part in logical.partitions)


def letter_of(item: Item) -> Letter:
    """A dead item, read as a letter."""
    reason, _, error = item.death_reason.partition("; ")
    return Letter(item.payload, reason, error)
