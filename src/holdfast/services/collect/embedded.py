"""The collector's queues on the embedded queue, in this process or of a server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from holdfast.core.checks import TEXT_CHARACTERS_MAX
from holdfast.core.collect import DEAD_QUEUE
from holdfast.core.item import NewItem
from holdfast.core.policy import RetryPolicy
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import HoldfastError, Invalid, MessageRefused, QueueMissing, TryAgain
from holdfast.ports.broker import Incoming, Subscription
from holdfast.ports.clock import Clock
from holdfast.ports.collect import GroupIntake
from holdfast.services.queue.broker import QueueBroker, QueueIntake
from holdfast.services.queue.queues import Queues

#: Nothing of a transaction may die of its age; whoever gives up is the collector.
EXPIRE_TIMEOUT = "87600h"
LEASE_TIMEOUT = "30s"


class GroupedIntake:
    """Acks that wait at the same time are one request; everything else is the intake's own."""

    def __init__(self, intake: QueueIntake, queues: Queues, queue: str) -> None:
        self._intake = intake
        self._queues = queues
        self._queue = queue
        self._waiting: list[Incoming] = []
        self._round = 0
        self._busy = asyncio.Lock()
        self.take, self.stop, self.ack = intake.take, intake.stop, intake.ack
        self.wait, self.park, self.give_back = intake.wait, intake.park, intake.give_back

    @property
    def trouble(self) -> str:
        return self._intake.trouble

    async def ack_all(self, incoming: Sequence[Incoming]) -> Sequence[Incoming]:
        self._waiting.extend(incoming)
        ours = self._round
        async with self._busy:
            if ours == self._round:  # nobody has begun with ours yet
                self._round += 1
                batch, self._waiting = self._waiting, []
                await self._ack_together(batch)
        return [each for each in incoming if self._intake.holds(each)]

    async def _ack_together(self, batch: Sequence[Incoming]) -> None:
        by_partition: dict[int, list[str]] = {}
        for incoming in batch:
            if (partition := self._intake.partition_of(incoming)) is not None:
                by_partition.setdefault(partition, []).append(str(incoming.tag))
        for partition, ids in by_partition.items():
            try:
                await self._queues.queue_complete(self._queue, ids, partition=partition)
            except HoldfastError:
                continue  # all or none: each is tried by itself, and a bad one is told alone
            self._intake.forget(ids)


class QueueTransport:
    """An address is a queue's name. Attributes stand as JSON in the item's reference."""

    def __init__(self, queues: Queues, *, clock: Clock, lease_timeout: str = LEASE_TIMEOUT) -> None:
        self._queues = queues
        self._broker = QueueBroker(queues, clock=clock)
        self._lease_timeout = lease_timeout

    async def check(self, address: str) -> None:
        await self._queues.queues_info(address)

    async def declare(self, queues: Sequence[str]) -> None:
        await self._make(DEAD_QUEUE, dead_queue="")
        for queue in queues:
            await self._make(queue, dead_queue=DEAD_QUEUE)

    async def _make(self, queue: str, *, dead_queue: str) -> None:
        try:
            await self._queues.queues_info(queue)
            return
        except QueueMissing:
            pass
        try:
            await self._queues.queues_create(
                queue, dead_queue=dead_queue, lease_timeout=self._lease_timeout, expire_timeout=EXPIRE_TIMEOUT
            )
        except Invalid as error:
            # Another process with the same transaction may have been faster.
            if "already exists" not in error.message:
                raise

    @asynccontextmanager
    async def open(self, queue: str, *, count_max: int, bytes_max: int) -> AsyncIterator[GroupIntake]:
        # What is leased is what `take` asks for: nothing is pushed, so `bytes_max` is the caller's own.
        subscription = Subscription(queue=queue, policy=RetryPolicy(), prefetch=count_max, consumer="collector")
        async with self._broker.open(subscription) as intake:
            yield GroupedIntake(intake, self._queues, queue)

    async def send(self, address: str, body: bytes, *, message_id: str, attributes: Mapping[str, object]) -> None:
        reference = msgspec.json.encode({"message-id": message_id, **attributes}).decode()
        # Repeated after a crash while the first is still there, it stays one.
        key = hashlib.sha256(reference.encode() + b"\0" + body).hexdigest()
        item = NewItem(payload=body, reference=reference, kind=str(attributes.get("kind", "")), dedupe_key=key)
        try:
            await self._queues.queue_produce(address, [item])
        except QueueMissing as error:
            raise TryAgain(f"address is gone; {error.message}, create it") from error
        except Invalid as error:
            raise MessageRefused(f"message is not taken; {error.message}") from error

    async def park(self, body: bytes, *, attributes: Mapping[str, object], reason: str) -> None:
        reference = msgspec.json.encode(dict(attributes)).decode()
        source = str(attributes.get("source-queue", ""))
        item = ImportedItem(
            payload=body, reference=reference, death_reason=reason[:TEXT_CHARACTERS_MAX], source_queue=source
        )
        await self._queues.storage_items_import(DEAD_QUEUE, [item])

    async def delete(self, queue: str) -> bool:
        try:
            for logical in (await self._queues.queue_stats(queue)).logical_queues:
                if any(part.total or part.scheduled or part.dying for part in logical.partitions):
                    return False
            await self._queues.queues_delete(queue)
        except QueueMissing:
            return True
        except Invalid as error:
            if "not empty" in error.message:
                return False
            raise
        return True
