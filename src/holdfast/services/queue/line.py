"""The line in front of a queue: requests come in, wait, and are answered.

A line knows who waits and for how long; what is done for them, and when, is `logical.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import cast

from holdfast.core.item import NewItem, PlacedItem
from holdfast.core.queue import QueueRecord
from holdfast.errors import HoldfastError, Invalid, TryAgain
from holdfast.ports.clock import Clock
from holdfast.ports.queues import Operation, Release, Result
from holdfast.services.queue.alarm import Alarm
from holdfast.services.queue.hooks import Activity
from holdfast.services.queue.lane import Lane
from holdfast.services.queue.waiting import LeaseAnswer, Waiting, WaitingLease, WaitingOperation, WaitingProduce

LEASES_WAITING_COUNT_MAX = 1_000
PRODUCES_WAITING_COUNT_MAX = 10_000
PRODUCES_WAITING_BYTES_MAX = 256 * 2**20
OPERATION_TIMEOUT_US = 60_000_000
#: A batch of more items is not committed on the event loop's thread: it would hold up whoever comes next.
INLINE_ITEMS_COUNT_MAX = 200


class Line(ABC):
    """Requests of one queue that wait for their turn."""

    def __init__(self, record: QueueRecord, lanes: Sequence[Lane], *, clock: Clock, activity: Activity) -> None:
        self.record = record
        self.lanes = tuple(lanes)
        self.clock = clock
        self.activity = activity
        self.produces: deque[WaitingProduce] = deque()
        self.leases: dict[str, WaitingLease] = {}
        self._produce_bytes = 0
        self._closed_with: HoldfastError | None = None
        self._wakes = {lane: asyncio.Event() for lane in self.lanes}
        self._alarm = Alarm(clock, self._on_alarm)

    @abstractmethod
    async def _turn(self) -> bool:
        """One turn of the loop, made by the only client; false when it has to be made by the loop itself."""

    @abstractmethod
    def _on_alarm(self) -> None:
        """A moment has come."""

    async def produce(self, items: Sequence[NewItem], *, byte_count: int, timeout_us: int) -> list[PlacedItem]:
        """Store items; returns after their commit. Raises TryAgain, and then none is acknowledged."""
        self._check_open()
        if (
            len(self.produces) >= PRODUCES_WAITING_COUNT_MAX
            or self._produce_bytes + byte_count > PRODUCES_WAITING_BYTES_MAX
        ):
            raise TryAgain("queue is overloaded; try again later")
        if not any(lane.healthy for lane in self.lanes):
            raise self._unavailable()
        waiting = WaitingProduce(items, byte_count, self.clock.now_us() + timeout_us)
        self.produces.append(waiting)
        self._produce_bytes += byte_count
        return cast(list[PlacedItem], await self._served(waiting))

    async def operate(
        self,
        operation: Operation,
        *,
        partition: int,
        settles: bool = False,
        timeout_us: int = OPERATION_TIMEOUT_US,
    ) -> Result:
        """Carry out an operation on its partition. Raises TryAgain, and then nothing is acknowledged."""
        self._check_open()
        lane = self.lane_of(partition)
        if not lane.healthy:
            raise self._unavailable()
        waiting = WaitingOperation(operation, self.clock.now_us() + timeout_us, settles=settles)
        lane.bound.append(waiting)
        return cast(Result, await self._served(waiting, lane))

    async def lease(self, client_id: str, batch_size: int, *, timeout_us: int) -> LeaseAnswer:
        """Wait for items. Raises NothingToLease when the time is up."""
        self._check_open()
        if client_id in self.leases:
            raise Invalid("duplicate client id; a client cannot make multiple leased requests to the same queue")
        if len(self.leases) >= LEASES_WAITING_COUNT_MAX:
            raise TryAgain("queue is overloaded; try again later")
        waiting = WaitingLease(client_id, batch_size, self.clock.now_us() + timeout_us)
        self.leases[client_id] = waiting
        try:
            await self._join_line(waiting, others=self.activity.count)
            return cast(LeaseAnswer, await waiting.future)
        except asyncio.CancelledError:
            # The answer and the disconnection crossed: nobody will ever hear of these leases.
            if waiting.future.done() and not waiting.future.cancelled() and waiting.future.exception() is None:
                answer = cast(LeaseAnswer, waiting.future.result())
                self._release(answer.partition, [item.id for item in answer.items])
            raise
        finally:
            # Answered, timed out or disconnected: from here on it is given nothing, and its name is free.
            if self.leases.get(client_id) is waiting:
                del self.leases[client_id]

    async def _served(self, waiting: Waiting, lane: Lane | None = None) -> object:
        self.activity.count += 1
        try:
            await self._join_line(waiting, others=self.activity.count - 1, lane=lane)
            return await waiting.future
        except asyncio.CancelledError:
            waiting.future.cancel()  # nothing is done any more for a client that has gone
            raise
        finally:
            self.activity.count -= 1

    async def _join_line(self, waiting: Waiting, *, others: int, lane: Lane | None = None) -> None:
        """Wake the loop; or, where nobody else is being served, carry the request out here and now."""
        if not others and len(self.lanes) == 1 and waiting.weight <= INLINE_ITEMS_COUNT_MAX:
            await asyncio.sleep(0)  # whoever is ready joins the same commit
            free = self.activity.count <= 1 and not waiting.taken and not waiting.future.done()
            if free and await self._turn() and waiting.future.done():
                return  # else it may be a lease that got nothing: it waits, and its time runs out
        self.wake(lane)
        self._alarm.ring_at(waiting.deadline_us)

    def _check_open(self) -> None:
        if self._closed_with is not None:
            raise self._closed_with

    def _unavailable(self) -> TryAgain:
        return TryAgain(
            f"partition is failing; the storage of queue '{self.record.name}' cannot be used now, try again"
        )

    def lane_of(self, partition: int) -> Lane:
        """The lane of a partition; raises Invalid."""
        for lane in self.lanes:
            if partition in lane.partitions:
                return lane
        raise Invalid(f"partition is invalid; '{partition}' is not a valid partition")

    def wake(self, lane: Lane | None = None) -> None:
        """There may be something to do."""
        if lane is not None:
            self._wakes[lane].set()
            return
        for wake in self._wakes.values():
            wake.set()

    def _release(self, partition: int, ids: Sequence[str]) -> None:
        if self._closed_with is None:
            lane = self.lane_of(partition)
            deadline_us = self.clock.now_us() + OPERATION_TIMEOUT_US
            lane.bound.append(WaitingOperation(Release(partition, ids), deadline_us, settles=False))
            self.wake(lane)

    def _untaken(self) -> list[Waiting]:
        waiting: list[Waiting] = [*self.produces, *self.leases.values()]
        for lane in self.lanes:
            waiting.extend(lane.bound)
        return [one for one in waiting if not one.taken and not one.future.done()]

    def forget_produce(self, waiting: WaitingProduce) -> None:
        """A produce request has left the line."""
        self._produce_bytes -= waiting.byte_count
