"""Requests that wait for their turn, each with the future that answers it.

The line in front of a queue: requests come in, wait, and are answered.

A line knows who waits and for how long; what is done for them, and when, is `logical_queue.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from holdfast.core.item import LeasedItem, NewItem, PlacedItem, QueueRecord, partition_of
from holdfast.errors import HoldfastError, Invalid, TryAgain
from holdfast.ports.clock import Clock, Timer
from holdfast.ports.queue_store import Operation, Produced, Release, Result
from holdfast.services.queue.storage_share import StorageShare


class InFlight:
    """How many requests are being served in the whole process: alone, one is served without a thread."""

    def __init__(self) -> None:
        self.count = 0
        self.lone_count = 0  # requests in a row that had no company


class EarliestTimer:
    """Rings once at the earliest moment that was asked for; ringing too early is harmless."""

    def __init__(self, clock: Clock, heard: Callable[[], None]) -> None:
        self._clock = clock
        self._heard = heard
        self._timer: Timer | None = None
        self._at_us = 0

    def ring_at(self, at_us: int) -> None:
        """Ring at that moment, unless it rings before; 0 asks for nothing."""
        if not at_us or (self._timer is not None and self._at_us <= at_us):
            return
        self.off()
        self._at_us = at_us
        self._timer = self._clock.call_later(at_us - self._clock.now_us(), self._ring)

    def off(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._heard()


class Waiting:
    """A request in line. `taken` while its commit runs: from then on only the commit answers it."""

    __slots__ = ("deadline_us", "future", "taken", "weight")

    def __init__(self, deadline_us: int, weight: int) -> None:
        self.deadline_us = deadline_us
        self.weight = weight  # about how many items it touches
        self.taken = False
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def answer(self, result: object) -> bool:
        """Answer it; false when nobody waits for the answer any more."""
        if self.future.done():
            return False
        self.future.set_result(result)
        return True

    def fail(self, error: BaseException) -> None:
        """Answer it with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class WaitingProduce(Waiting):
    """Items that want a partition."""

    __slots__ = ("byte_count", "items")

    def __init__(self, items: Sequence[NewItem], byte_count: int, deadline_us: int) -> None:
        super().__init__(deadline_us, len(items))
        self.items = items
        self.byte_count = byte_count


class WaitingLease(Waiting):
    """A client that wants items."""

    __slots__ = ("batch_size", "client_id")

    def __init__(self, client_id: str, batch_size: int, deadline_us: int) -> None:
        super().__init__(deadline_us, batch_size)
        self.client_id = client_id
        self.batch_size = batch_size


class WaitingOperation(Waiting):
    """An operation that belongs to one partition; `settles` when it is a client's complete, retry or extend."""

    __slots__ = ("operation", "settles")

    def __init__(self, operation: Operation, deadline_us: int, *, settles: bool) -> None:
        super().__init__(deadline_us, weight_of(operation))
        self.operation = operation
        self.settles = settles


class LeaseAnswer:
    """What a lease request is answered with."""

    __slots__ = ("items", "partition")

    def __init__(self, partition: int, items: list[LeasedItem]) -> None:
        self.partition = partition
        self.items = items


class CommitBatch:
    """One commit's worth: operations for the store and, beside each, whom its result answers."""

    __slots__ = ("leases", "operations", "produces", "singles", "weight")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.weight = 0  # about how many items it touches
        self.produces: dict[int, list[WaitingProduce]] = {}  # index of the operation → requests, in order
        self.leases: dict[int, list[WaitingLease]] = {}
        self.singles: dict[int, WaitingOperation] = {}

    def answer_produces(self, index: int, produced: Produced) -> None:
        """Give every producer of one operation the ids of its own items."""
        partition, position = self.operations[index].partition, 0
        for waiting in self.produces[index]:
            ids = produced.ids[position : position + len(waiting.items)]
            position += len(waiting.items)
            waiting.answer((ids, partition))

    def requests(self) -> list[Waiting]:
        """Everybody who waits for this commit."""
        everybody: list[Waiting] = list(self.singles.values())
        for produces in self.produces.values():
            everybody.extend(produces)
        for leases in self.leases.values():
            everybody.extend(leases)
        return everybody


def weight_of(operation: Operation) -> int:
    """About how many items an operation touches."""
    things = getattr(operation, "ids", None) or getattr(operation, "items", None) or ()
    return len(things) or getattr(operation, "count_max", 0)


def placed(ids: Sequence[str], items: Sequence[NewItem], partition: int) -> list[PlacedItem]:
    """Where produced items are. A dedupe key that is there already may be in another partition: the id says where."""
    return [
        PlacedItem(item_id, partition_of(item_id) if item.dedupe_key else partition)
        for item_id, item in zip(ids, items, strict=True)
    ]


LEASES_WAITING_COUNT_MAX = 1_000
PRODUCES_WAITING_COUNT_MAX = 10_000
PRODUCES_WAITING_BYTES_MAX = 256 * 2**20
OPERATION_TIMEOUT_US = 60_000_000
#: A batch of more items is not committed on the event loop's thread: it would hold up whoever comes next.
INLINE_ITEMS_COUNT_MAX = 200
#: After so many requests in a row that were alone, the next one no longer looks round first for company,
LONE_COUNT_SURE = 16
#: but every so many it does, so that whatever else runs in the process gets its turn.
LONE_COUNT_YIELD = 8


class WaitingRequests(ABC):
    """Requests of one queue that wait for their turn."""

    def __init__(self, record: QueueRecord, lanes: Sequence[StorageShare], *, clock: Clock, activity: InFlight) -> None:
        self.record = record
        self.lanes = tuple(lanes)
        self.clock = clock
        self.activity = activity
        self.produces: deque[WaitingProduce] = deque()
        self.leases: dict[str, WaitingLease] = {}
        self._produce_bytes = 0
        self._closed_with: HoldfastError | None = None
        self._wakes = {lane: asyncio.Event() for lane in self.lanes}
        self._alarm = EarliestTimer(clock, self._on_alarm)

    @abstractmethod
    def _nobody_else(self, weight: int) -> bool:
        """Whether a request of that weight is all there is to do, and can be carried out without being suspended."""

    @abstractmethod
    async def _produce_alone(self, items: Sequence[NewItem]) -> list[PlacedItem]:
        """Store items at once, without the line and the loop."""

    @abstractmethod
    async def _lease_alone(self, batch_size: int) -> LeaseAnswer | None:
        """Lease items at once; none when it has to wait."""

    @abstractmethod
    async def _operate_alone(self, operation: Operation) -> Result:
        """Carry an operation out at once."""

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
        if self._nobody_else(len(items)) and (self._is_sure() or await self._look_round(len(items))):
            return await self._produce_alone(items)
        self._check_open()
        waiting = WaitingProduce(items, byte_count, self.clock.now_us() + timeout_us)
        self.produces.append(waiting)
        self._produce_bytes += byte_count
        ids, partition = cast(tuple[Sequence[str], int], await self._served(waiting))
        return placed(ids, items, partition)

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
        weight = weight_of(operation)
        if self._nobody_else(weight) and (self._is_sure() or await self._look_round(weight)):
            return await self._operate_alone(operation)
        self._check_open()
        waiting = WaitingOperation(operation, self.clock.now_us() + timeout_us, settles=settles)
        lane.bound.append(waiting)
        return cast(Result, await self._served(waiting, lane))

    async def lease(self, client_id: str, batch_size: int, *, timeout_us: int) -> LeaseAnswer:
        """Wait for items. Raises NothingToLease when the time is up."""
        self._check_open()
        if self._nobody_else(batch_size) and (self._is_sure() or await self._look_round(batch_size)):
            answer = await self._lease_alone(batch_size)
            if answer is not None:
                return answer
        self._check_open()
        if client_id in self.leases:
            raise Invalid("duplicate client id; a client cannot make multiple leased requests to the same queue")
        if len(self.leases) >= LEASES_WAITING_COUNT_MAX:
            raise TryAgain("queue is overloaded; try again later")
        waiting = WaitingLease(client_id, batch_size, self.clock.now_us() + timeout_us)
        self.leases[client_id] = waiting
        try:
            self._join_line(waiting)
            return cast(LeaseAnswer, await waiting.future)
        except asyncio.CancelledError:
            # The answer and the disconnection crossed: nobody will ever hear of these leases.
            if waiting.future.done() and not waiting.future.cancelled() and waiting.future.exception() is None:
                answer = cast(LeaseAnswer, waiting.future.result())
                self.release(answer.partition, [item.id for item in answer.items])
            raise
        finally:
            # Answered, timed out or disconnected: from here on it is given nothing, and its name is free.
            if self.leases.get(client_id) is waiting:
                del self.leases[client_id]

    async def _served(self, waiting: Waiting, lane: StorageShare | None = None) -> object:
        self.activity.count += 1
        try:
            self._join_line(waiting, lane)
            return await waiting.future
        except asyncio.CancelledError:
            waiting.future.cancel()  # nothing is done any more for a client that has gone
            raise
        finally:
            self.activity.count -= 1

    def _join_line(self, waiting: Waiting, lane: StorageShare | None = None) -> None:
        self.wake(lane)
        self._alarm.ring_at(waiting.deadline_us)

    def _is_sure(self) -> bool:
        """Whether a request that seems to be alone need not look round: the last ones were alone too."""
        activity = self.activity
        activity.lone_count += 1
        return activity.lone_count > LONE_COUNT_SURE and activity.lone_count % LONE_COUNT_YIELD != 0

    async def _look_round(self, weight: int) -> bool:
        """Let whoever is ready join the same commit; true when there is nobody."""
        self.activity.count += 1
        try:
            await asyncio.sleep(0)
        finally:
            self.activity.count -= 1
        if self._nobody_else(weight):
            return True
        self.activity.lone_count = 0
        return False

    def _check_open(self) -> None:
        if self._closed_with is not None:
            raise self._closed_with

    def _unavailable(self) -> TryAgain:
        return TryAgain(
            f"partition is failing; the storage of queue '{self.record.name}' cannot be used now, try again"
        )

    def lane_of(self, partition: int) -> StorageShare:
        """The lane of a partition; raises Invalid."""
        for lane in self.lanes:
            if partition in lane.partitions:
                return lane
        raise Invalid(f"partition is invalid; '{partition}' is not a valid partition")

    def wake(self, lane: StorageShare | None = None) -> None:
        """There may be something to do."""
        if lane is not None:
            self._wakes[lane].set()
            return
        for wake in self._wakes.values():
            wake.set()

    def release(self, partition: int, ids: Sequence[str]) -> None:
        """Undo leases of which nobody will ever hear."""
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
