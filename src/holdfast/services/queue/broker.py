"""The embedded queue as a broker: a delivery is a lease, waiting is the schedule, parking is the dead queue.

Attempts are counted by the queue itself, when it leases: also the one that ended with its process. A lease is extended
for as long as its message is worked on; one that runs out all the same is somebody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from holdfast.core.checks import BATCH_COUNT_MAX, TEXT_CHARACTERS_MAX
from holdfast.core.item import LeasedItem, RetryItem
from holdfast.core.message import Message
from holdfast.core.moments import moment
from holdfast.core.policy import Park, Wait
from holdfast.errors import (
    BadIds,
    HoldfastError,
    Invalid,
    NotOurs,
    QueueMissing,
)
from holdfast.ports.broker import Incoming, Subscription
from holdfast.ports.clock import Clock
from holdfast.services.queue.queues import Leaser, Queues, lease_s
from holdfast.telemetry.events import emit

DEAD_SUFFIX = ".dlq"


class QueueBroker:
    """Queues, in this process or of a server, for consumers."""

    def __init__(self, queues: Queues, *, clock: Clock) -> None:
        self.queues = queues
        self._clock = clock

    async def missing(self, subscription: Subscription) -> list[str]:
        """What keeps a retry or a parking from being safe."""
        name, attempts = subscription.queue, subscription.policy.attempts
        try:
            info = await self.queues.queues_info(name)
        except QueueMissing:
            return [f"queue '{name}' does not exist, create it or use --declare"]
        found = []
        if not info.dead_queue:
            found.append(f"queue '{name}' has no dead_queue, what is parked would be deleted; set one or use --declare")
        if 0 < info.max_attempts < attempts:
            found.append(
                f"queue '{name}' lets an item die after max_attempts = {info.max_attempts}, "
                f"the consumer wants {attempts} attempts; make them agree"
            )
        return found

    async def declare(self, subscription: Subscription) -> None:
        """Make the queue and its dead queue, or give the queue one."""
        name, dead_queue = subscription.queue, subscription.queue + DEAD_SUFFIX
        if not await self._exists(dead_queue):
            await self._create(dead_queue)
        if not await self._exists(name):
            await self._create(name, dead_queue=dead_queue)
        if not (await self.queues.queues_info(name)).dead_queue:
            await self.queues.queues_update(name, dead_queue=dead_queue)

    async def _exists(self, name: str) -> bool:
        try:
            await self.queues.queues_info(name)
        except QueueMissing:
            return False
        return True

    async def _create(self, name: str, *, dead_queue: str = "") -> None:
        try:
            await self.queues.queues_create(name, dead_queue=dead_queue)
        except Invalid as error:
            # Another process with the same consumers may have been faster.
            if "already exists" not in error.message:
                raise

    @asynccontextmanager
    async def open(self, subscription: Subscription) -> AsyncIterator[QueueIntake]:
        """Lease from the queue. Raises QueueMissing."""
        every_s = await lease_s(self.queues, subscription.queue) / 3
        intake = QueueIntake(self.queues, subscription, clock=self._clock)
        keeper = asyncio.create_task(intake.keep_alive(every_s), name=f"leases of {subscription.queue}")
        try:
            yield intake
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


class QueueIntake:
    """Leases of one queue, each item settled by itself."""

    def __init__(self, queues: Queues, subscription: Subscription, *, clock: Clock) -> None:
        self._queues = queues
        self._queue = subscription.queue
        self._attempts_max = subscription.policy.attempts
        self._clock = clock
        self._open: dict[str, int] = {}  # item id → partition
        self._stopped = asyncio.Event()
        self._leases = Leaser(queues, subscription.queue, stopped=self._stopped)

    @property
    def trouble(self) -> str:
        return self._leases.trouble

    async def take(self, count_max: int) -> Sequence[Incoming]:
        """Wait for items. Raises QueueMissing when the queue is gone, ShuttingDown when the service ends."""
        reply = await self._leases.next(min(count_max, BATCH_COUNT_MAX))
        return () if reply is None else [self._incoming(item, reply.partition) for item in reply.items]

    def _incoming(self, item: LeasedItem, partition: int) -> Incoming:
        self._open[item.id] = partition
        used = max(0, item.attempts - 1)  # the queue counts when it leases
        message = Message(
            body=item.payload,
            id=item.id,
            queue=self._queue,
            routing_key=self._queue,
            type=item.kind,
            reference=item.reference,
            correlation_id=item.reference,
            content_encoding=item.encoding,
            redelivered=used > 0,
            attempt=used + 1,
            attempts_max=self._attempts_max,
        )
        return Incoming(message=message, used=used, tag=item.id)

    async def stop(self) -> None:
        self._stopped.set()

    async def begin(self, incoming: Incoming) -> None:
        """The lease has counted it."""

    async def ack(self, incoming: Incoming) -> None:
        item_id, partition = self._place(incoming)
        try:
            await self._queues.queue_complete(self._queue, [item_id], partition=partition)
        except (BadIds, QueueMissing) as error:
            self._open.pop(item_id, None)
            raise NotOurs(error.message) from error
        self._open.pop(item_id, None)

    async def wait(self, incoming: Incoming, wait: Wait) -> None:
        retry_at = moment(self._clock.now_us() + wait.delay_us)
        await self._retry(incoming, lambda item_id: RetryItem(id=item_id, retry_at=retry_at))

    async def park(self, incoming: Incoming, park: Park) -> None:
        """Raises Invalid while the queue has no dead queue: there a death is a deletion."""
        try:
            info = await self._queues.queues_info(self._queue)
        except QueueMissing as error:
            raise NotOurs(error.message) from error
        if not info.dead_queue:
            raise Invalid(f"queue has no dead_queue; what is parked of '{self._queue}' would be deleted, set one")
        reason = f"{park.reason}; {park.failure}"[:TEXT_CHARACTERS_MAX]
        await self._retry(incoming, lambda item_id: RetryItem(id=item_id, dead=True, reason=reason))

    async def give_back(self, incoming: Incoming) -> None:
        await self._retry(incoming, lambda item_id: RetryItem(id=item_id))

    async def _retry(self, incoming: Incoming, how: Callable[[str], RetryItem]) -> None:
        item_id, partition = self._place(incoming)
        try:
            await self._queues.queue_retry(self._queue, [how(item_id)], partition=partition)
        except (BadIds, QueueMissing) as error:
            self._open.pop(item_id, None)
            raise NotOurs(error.message) from error
        self._open.pop(item_id, None)

    def partition_of(self, incoming: Incoming) -> int | None:
        """Where an item that is ours lies; None when it is ours no longer."""
        return self._open.get(str(incoming.tag))

    def holds(self, incoming: Incoming) -> bool:
        """Whether an item is ours still."""
        return str(incoming.tag) in self._open

    def forget(self, ids: Sequence[str]) -> None:
        """These were completed by somebody who does so for many at a time."""
        for item_id in ids:
            self._open.pop(item_id, None)

    def _place(self, incoming: Incoming) -> tuple[str, int]:
        item_id = str(incoming.tag)
        partition = self._open.get(item_id)
        if partition is None:
            raise NotOurs(f"lease is lost; item '{item_id}' of queue '{self._queue}'")
        return item_id, partition

    async def keep_alive(self, every_s: float) -> None:
        """Extend what is open, for as long as it is."""
        while True:
            await asyncio.sleep(every_s)
            for partition in set(self._open.values()):
                try:
                    await self._extend(partition)
                except HoldfastError as error:
                    emit("consumer.waits", queue=self._queue, error=error.message)

    async def _extend(self, partition: int) -> None:
        """All or none is extended at a time: an id that was lost, or settled meanwhile, is left out the next time."""
        while ids := [item_id for item_id, place in self._open.items() if place == partition][:BATCH_COUNT_MAX]:
            try:
                await self._queues.queue_extend(self._queue, ids, partition=partition)
                return
            except BadIds as error:
                gone = set(error.ids) & set(ids)
                if not gone:
                    raise
                for item_id in gone:
                    self._open.pop(item_id, None)
