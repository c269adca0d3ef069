"""The consumer loop: lease, keep the lease alive while it is worked on, settle.

A lease that is not settled is extended until `extend_for_s` has passed, then it runs out by itself and its items go to
somebody else. Nothing is completed that the handler did not complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.core.item import LeasedItem, RetryItem
from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.errors import BadIds, HoldfastError, NothingToLease, ShuttingDown, TryAgain, Unreachable
from holdfast.telemetry.events import emit

if TYPE_CHECKING:
    from holdfast.services.queue.methods import Queues

BACKOFF_S_FIRST = 0.1
BACKOFF_S_MAX = 10.0


class Lease(AbstractAsyncContextManager["Lease"]):
    """Items that are ours for a while. `async with lease:` completes them, or gives them back on an error."""

    def __init__(self, queues: Queues, queue_name: str, partition: int, items: Sequence[LeasedItem]) -> None:
        self.queue_name = queue_name
        self.partition = partition
        self.items = tuple(items)
        self._queues = queues
        self._open = {item.id: item for item in items}

    @property
    def open_items(self) -> list[LeasedItem]:
        """Items that are not settled yet."""
        return list(self._open.values())

    async def complete(self, items: Sequence[LeasedItem] | None = None) -> list[str]:
        """Finish items, or all that are open. Ids whose lease was lost are left out, and returned."""
        ids = self._ids(items)
        lost: list[str] = []
        while ids:
            try:
                await self._queues.queue_complete(self.queue_name, ids, partition=self.partition)
            except BadIds as error:
                # Their lease ran out: somebody else has them or will. The rest is completed at once.
                lost.extend(error.ids)
                for item_id in error.ids:
                    self._open.pop(item_id, None)
                ids = [item_id for item_id in ids if item_id not in set(error.ids)]
                continue
            for item_id in ids:
                self._open.pop(item_id, None)
            break
        return lost

    async def retry(self, items: Sequence[RetryItem | LeasedItem] | None = None) -> None:
        """Give items back, or all that are open; raises BadIds when the lease of one was lost."""
        chosen = self.open_items if items is None else items
        retried = [item if isinstance(item, RetryItem) else RetryItem(id=item.id) for item in chosen]
        if retried:
            await self._queues.queue_retry(self.queue_name, retried, partition=self.partition)
            for item in retried:
                self._open.pop(item.id, None)

    def _ids(self, items: Sequence[LeasedItem] | None) -> list[str]:
        return list(self._open) if items is None else [item.id for item in items]

    async def extend(self) -> None:
        """Let the open items run longer; those whose lease was lost are dropped from it."""
        ids = list(self._open)
        if not ids:
            return
        try:
            await self._queues.queue_extend(self.queue_name, ids, partition=self.partition)
        except BadIds as error:
            for item_id in error.ids:
                self._open.pop(item_id, None)
            await self.extend()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.complete()
        elif isinstance(error, Exception):
            await self.retry()


async def consume(queues: Queues, queue_name: str, *, batch: int, extend_for_s: float) -> AsyncIterator[Lease]:
    """Yield leases without end; an empty queue or a failing server is waited for."""
    info = await queues.queues_info(queue_name)
    lease_s = parse_duration(info.lease_timeout, what="lease timeout") / SECOND_US
    keepers: set[asyncio.Task[None]] = set()
    failures = 0
    try:
        while True:
            try:
                reply = await queues.queue_lease(queue_name, batch_size=batch)
            except NothingToLease:
                continue
            except (TryAgain, Unreachable, ShuttingDown) as error:
                if isinstance(error, ShuttingDown) and not queues.outlives_its_server:
                    raise
                failures += 1
                emit("consumer.waits", queue=queue_name, error=error.message)
                await asyncio.sleep(min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(failures, 16)))
                continue
            failures = 0
            lease = Lease(queues, queue_name, reply.partition, reply.items)
            keeper = asyncio.create_task(_keep(lease, lease_s / 3, extend_for_s))
            keepers.add(keeper)
            keeper.add_done_callback(keepers.discard)
            yield lease
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


async def _keep(lease: Lease, every_s: float, for_s: float) -> None:
    ends_at = asyncio.get_running_loop().time() + for_s
    while lease.open_items and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(every_s)
        try:
            await lease.extend()
        except HoldfastError as error:
            emit("consumer.waits", queue=lease.queue_name, error=error.message)
