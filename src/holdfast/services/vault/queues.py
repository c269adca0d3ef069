"""An embedded dead queue, for custody: a letter is leased, stored, and completed; redriven, it is produced again."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from holdfast.core.item import Item, LeasedItem, NewItem
from holdfast.core.letter import (
    ERROR_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    DeathStory,
    Fingerprinter,
    Letter,
    NewLetter,
    Origin,
    clip,
    fingerprint,
)
from holdfast.core.message import Address
from holdfast.core.moments import microseconds
from holdfast.core.plan import Retries, Target
from holdfast.errors import BadIds, HoldfastError, Invalid, NothingToLease, QueueMissing
from holdfast.ports.custody import Caught, DeadQueue, Parcel, Posted, Reach
from holdfast.services.queue.queues import Queues

LEASE_COUNT_MAX = 200
LIST_COUNT_MAX = 1_000


class QueuePost:
    """The embedded queues: known as dead-letter queues are those that another queue names as its dead queue."""

    origin: Origin = "queue"

    def __init__(self, queues: Queues, *, grouped: Fingerprinter = fingerprint, retries: Retries | None = None) -> None:
        self._queues = queues
        self._retries = retries or Retries()
        self._grouped = grouped

    @asynccontextmanager
    async def source(self, queue: str, *, capacity_count: int) -> AsyncIterator[QueueSource]:
        del capacity_count  # a lease takes as many as it is asked for
        await self._queues.queues_info(queue)  # raises QueueMissing
        yield QueueSource(self._queues, queue, self._grouped)

    async def queues(self) -> list[DeadQueue]:
        sources: dict[str, str] = {}
        pivot = ""
        while True:
            page = await self._queues.queues_list(pivot=pivot, limit=LIST_COUNT_MAX)
            for info in page:
                if info.dead_queue:
                    sources.setdefault(info.dead_queue, info.queue_name)
            if len(page) < LIST_COUNT_MAX:
                break
            pivot = page[-1].queue_name + "\x01"
        return [await self._dead_queue(name, source) for name, source in sorted(sources.items())]

    async def queue(self, name: str) -> DeadQueue | None:
        return next((one for one in await self.queues() if one.queue == name), None)

    async def _dead_queue(self, name: str, source: str) -> DeadQueue:
        (logical,) = (await self._queues.queue_stats(name)).logical_queues[:1]
        ready = sum(partition.total for partition in logical.partitions)
        return DeadQueue(queue=name, source_queue=source, ready=ready, peek_is_free=True)

    def route(self, letter: Letter, target: Target) -> tuple[Address | None, str]:
        if target.kind == "address":
            return _named(target.exchange, target.routing_key, "the given queue")
        if target.kind == "type" and letter.type:
            place = target.routes.get(letter.type)
            if place is None:
                return None, f"type '{letter.type}' is not in the route table"
            return _named(place.exchange, place.routing_key, "type")
        if not letter.death.queue:
            return None, "nothing says in which queue it died"
        return Address(routing_key=letter.death.queue), "the queue it died in"

    async def look(self, addresses: Sequence[Address]) -> dict[Address, Reach]:
        found: dict[Address, Reach] = {}
        for address in dict.fromkeys(addresses):
            try:
                await self._queues.queues_info(address.routing_key)
                found[address] = Reach(queues=(address.routing_key,))
            except (QueueMissing, Invalid) as error:
                found[address] = Reach(why=error.message, queues=())
        return found

    async def ladder_s(self, addresses: Sequence[Address]) -> float | None:
        """By the settings: a queue knows how often an item is tried, but not after which delays."""
        ladders = []
        for address in dict.fromkeys(addresses):
            info = await self._queues.queues_info(address.routing_key)
            ladders.append(self._retries.ladder_s(attempts=info.max_attempts))
        known = [ladder for ladder in ladders if ladder is not None]
        return max(known) if known and len(known) == len(ladders) else None

    async def publish(self, parcels: Sequence[Parcel]) -> list[Posted]:
        return [await self._produce(parcel) for parcel in parcels]

    async def _produce(self, parcel: Parcel) -> Posted:
        story = msgspec.json.decode(parcel.content.properties, type=dict[str, str])
        item = NewItem(
            payload=parcel.content.body,
            encoding=story.get("encoding", ""),
            kind=story.get("kind", ""),
            reference=story.get("reference", ""),
            # As long as the copy is in its queue, the same redrive does not make a second one.
            dedupe_key=parcel.redrive_id,
        )
        try:
            await self._queues.queue_produce(parcel.address.routing_key, [item])
        except QueueMissing as error:
            return Posted("failed", error.message)
        except HoldfastError as error:
            return Posted("unknown", error.message)
        return Posted("stored")

    async def peek(self, queue: str, *, count_max: int) -> list[NewLetter]:
        info = await self._queues.queues_info(queue)
        found: list[NewLetter] = []
        for partition in info.partitions:
            items = await self._queues.storage_items_list(
                queue, partition=partition.partition, limit=max(1, count_max - len(found))
            )
            found += [_letter(queue, item, redelivered=False, grouped=self._grouped) for item in items]
        return found[:count_max]


def _named(exchange: str, queue: str, why: str) -> tuple[Address | None, str]:
    return (None, "an embedded queue has no exchanges") if exchange else (Address(routing_key=queue), why)


class _Tag(NamedTuple):
    partition: int
    item: str


class QueueSource:
    """Leases of one dead queue."""

    trouble = ""

    def __init__(self, queues: Queues, queue: str, grouped: Fingerprinter) -> None:
        self._queues = queues
        self._queue = queue
        self._grouped = grouped

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Caught]:
        try:
            reply = await self._queues.queue_lease(
                self._queue,
                batch_size=min(count_max, LEASE_COUNT_MAX),
                request_timeout=f"{max(10, round(timeout_s * 1000))}ms",
            )
        except NothingToLease:
            return []
        caught = []
        for leased in reply.items:
            item = await self._story(leased, reply.partition)
            letter = _letter(self._queue, item, redelivered=leased.attempts > 1, grouped=self._grouped)
            caught.append(
                Caught(
                    letter=letter, body=letter.body, properties=letter.properties, tag=_Tag(reply.partition, leased.id)
                )
            )
        return caught

    async def stop(self) -> None:
        """Nothing comes that was not asked for."""

    async def _story(self, leased: LeasedItem, partition: int) -> Item:
        """The lease does not tell how it died; the listing does."""
        items = await self._queues.storage_items_list(self._queue, partition=partition, pivot=leased.id, limit=1)
        if items and items[0].id == leased.id:
            return items[0]
        return Item(
            id=leased.id,
            payload=leased.payload,
            kind=leased.kind,
            encoding=leased.encoding,
            reference=leased.reference,
        )

    async def ack(self, caught: Sequence[Caught]) -> list[bool]:
        written = []
        for one in caught:
            tag = one.tag
            assert isinstance(tag, _Tag)  # noqa: S101 - set in `take`
            try:
                await self._queues.queue_complete(self._queue, [tag.item], partition=tag.partition)
                written.append(True)
            except BadIds:
                written.append(False)  # the lease ran out: it is leased again, and recognised
        return written


def _letter(queue: str, item: Item, *, redelivered: bool, grouped: Fingerprinter) -> NewLetter:
    reason, _, error = item.death_reason.partition("; ")
    error_type, _, error_message = error.partition(": ")
    at_us = microseconds(item.died_at) if item.died_at else 0
    death = DeathStory(
        queue=item.source_queue,
        reason=clip(reason, NAME_CHARACTERS_MAX),
        count=item.death_attempts,
        first_at_us=at_us,
        last_at_us=at_us,
        error_type=clip(error_type, NAME_CHARACTERS_MAX),
        error_message=clip(error_message, ERROR_CHARACTERS_MAX),
    )
    group = grouped(item.kind, death)
    story = {"kind": item.kind, "encoding": item.encoding, "reference": item.reference, "id": item.id}
    properties = msgspec.json.encode(story)
    made = hashlib.blake2b(properties, digest_size=16)
    made.update(item.payload)
    return NewLetter(
        queue=queue,
        origin="queue",
        body=item.payload,
        properties=properties,
        digest=made.digest(),
        death=death,
        message_id=item.id,
        type=item.kind,
        routing_key=queue,
        shown={"kind": item.kind, "encoding": item.encoding, "reference": item.reference},
        redelivered=redelivered,
        redrive_id=clip(item.former_key, NAME_CHARACTERS_MAX),  # the key that `publish` gave it
        group=group.key,
        group_title=group.title,
    )
