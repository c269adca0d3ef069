"""For users' tests: queues in memory with a clock that only moves when it is told to."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from holdfast.core.item import Item, LeasedItem, cause_of
from holdfast.errors import NothingToLease
from holdfast.ports.clock import Timer
from holdfast.services.queue.queues import Queues
from holdfast.wiring import open_queues

#: Where a frozen clock starts: 2030-01-01.
START_US = 1_893_456_000_000_000
#: What a call sets off in memory (a lease ends, an item dies, it moves to its dead queue) is done after fewer turns of
#: the event loop than this.
TURNS_COUNT = 50
#: How long `assert_dead` waits for an item that is on its way.
ARRIVE_TIMEOUT_S = 1.0
ARRIVE_POLL_S = 0.01


class _Call:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def make(self) -> None:
        if self.callback is not None:
            self.callback()

    def cancel(self) -> None:
        self.callback = None


class FrozenClock:
    """A clock for tests. `advance` moves it, fires what was due on the way, and lets the consequences happen."""

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self._calls: list[tuple[int, int, _Call]] = []
        self._count = 0

    def now_us(self) -> int:
        return self._now_us

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        call = _Call(callback)
        if delay_us <= 0:
            asyncio.get_running_loop().call_soon(call.make)  # what is due need not wait until the clock moves
            return call
        self._count += 1
        heapq.heappush(self._calls, (self._now_us + delay_us, self._count, call))
        return call

    async def advance(self, seconds: float) -> None:
        """Move on by so many seconds, stopping at every armed call."""
        end_us = self._now_us + round(seconds * 1_000_000)
        while self._calls and self._calls[0][0] <= end_us:
            at_us, _, call = heapq.heappop(self._calls)
            self._now_us = max(self._now_us, at_us)
            if call.callback is not None:
                asyncio.get_running_loop().call_soon(call.make)
                await self._consequences()
        self._now_us = end_us
        await self._consequences()

    async def _consequences(self) -> None:
        """Whoever can tell when all of them have happened may wait for that instead."""
        for _ in range(TURNS_COUNT):
            await asyncio.sleep(0)


@asynccontextmanager
async def memory_queues(clock: FrozenClock | None = None) -> AsyncIterator[Queues]:
    """Queues in memory, on a frozen clock."""
    async with open_queues("memory://", clock=clock or FrozenClock()) as queues:
        yield queues


async def drain(queues: Queues, queue_name: str) -> list[LeasedItem]:
    """Lease and complete everything that can be leased now."""
    drained: list[LeasedItem] = []
    while any(one.total > one.total_leased for one in (await queues.queue_stats(queue_name)).partitions):
        try:
            reply = await queues.queue_lease(queue_name, batch_size=1000, request_timeout="10ms")
        except NothingToLease:
            break
        drained.extend(reply.items)
        await queues.queue_complete(queue_name, [item.id for item in reply.items], partition=reply.partition)
    return drained


async def assert_dead(queues: Queues, dead_queue: str, *, source_queue: str, reason: str | None = None) -> list[Item]:
    """There are dead letters of that queue (with that reason), or there will be in a moment; returns them."""
    deadline_s = time.monotonic() + ARRIVE_TIMEOUT_S
    while not (letters := await _dead(queues, dead_queue, source_queue, reason)):
        if time.monotonic() > deadline_s:
            raise AssertionError(
                f"no item of '{source_queue}' died into '{dead_queue}'" + (f" of {reason}" if reason else "")
            )
        await asyncio.sleep(ARRIVE_POLL_S)
    return letters


async def _dead(queues: Queues, dead_queue: str, source_queue: str, reason: str | None) -> list[Item]:
    info = await queues.queues_info(dead_queue)
    return [
        item
        for partition in info.partitions
        for item in await queues.storage_items_list(dead_queue, partition=partition.partition)
        if item.source_queue == source_queue and reason in {None, item.death_reason, cause_of(item)}
    ]
