"""One queue: its waiting requests, and a loop per storage that turns all of them into one commit at a time.

The loop drains *everything* that waits, places it on partitions, hands the store one batch, and answers after the
commit. A commit that fails answers 454 to its own requests and sets that storage aside; the others go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from holdfast.core.item import NewItem, PlacedItem
from holdfast.core.queue import QueueRecord
from holdfast.errors import HoldfastError, Invalid, NothingToLease, QueueMissing, ShuttingDown, TryAgain
from holdfast.ports.clock import Clock
from holdfast.ports.queues import Ended, Import, Leased, Operation, Produced, Release, Result, Revive
from holdfast.proof import crash_point
from holdfast.services.queue.alarm import Alarm
from holdfast.services.queue.assign import refuse_all, take
from holdfast.services.queue.distribution import share
from holdfast.services.queue.hooks import Activity, Hooks
from holdfast.services.queue.lane import Lane
from holdfast.services.queue.waiting import (
    Batch,
    LeaseAnswer,
    Waiting,
    WaitingLease,
    WaitingOperation,
    WaitingProduce,
)
from holdfast.telemetry.events import emit

LEASES_WAITING_COUNT_MAX = 1_000
PRODUCES_WAITING_COUNT_MAX = 10_000
PRODUCES_WAITING_BYTES_MAX = 256 * 2**20
OPERATION_TIMEOUT_US = 60_000_000
#: A batch of more items is not committed on the event loop's thread: it would hold up whoever comes next.
INLINE_ITEMS_COUNT_MAX = 200


class LogicalQueue:
    """A queue that is open for requests."""

    def __init__(
        self, record: QueueRecord, lanes: Sequence[Lane], *, clock: Clock, hooks: Hooks, activity: Activity
    ) -> None:
        self.record = record
        self.lanes = tuple(lanes)
        self.clock = clock
        self.hooks = hooks
        self.activity = activity
        self.produces: deque[WaitingProduce] = deque()
        self.leases: dict[str, WaitingLease] = {}
        self.in_flight = 0
        self.frozen = 0
        self._produce_bytes = 0
        self._closed_with: HoldfastError | None = None
        self._wakes = {lane: asyncio.Event() for lane in self.lanes}
        self._tasks: list[asyncio.Task[None]] = []
        self._alarm = Alarm(clock, self._on_alarm)
        self._thawed = asyncio.Event()

    # --- requests -------------------------------------------------------------------------------------------

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
            self.wake()
            self._alarm.ring_at(waiting.deadline_us)
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
        self.wake(lane)
        self._alarm.ring_at(waiting.deadline_us)
        try:
            return await waiting.future
        finally:
            self.activity.count -= 1

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

    # --- the loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loops."""
        for lane in self.lanes:
            self._start(lane)

    def _start(self, lane: Lane) -> None:
        task = asyncio.get_running_loop().create_task(self._run(lane), name=f"queue {self.record.name}")
        self._tasks.append(task)

    def wake(self, lane: Lane | None = None) -> None:
        """There may be something to do."""
        if lane is not None:
            self._wakes[lane].set()
            return
        for wake in self._wakes.values():
            wake.set()

    async def _run(self, lane: Lane) -> None:
        wake = self._wakes[lane]
        while self._closed_with is None:
            await wake.wait()
            wake.clear()
            if not lane.healthy:
                await self._try_to_load(lane)
            while self._may_commit(lane):
                batch = take(self, lane)
                if not batch.operations:
                    break
                await self._commit(lane, batch)
                await asyncio.sleep(0)
            self._alarm.ring_at(self._next_us())

    def _may_commit(self, lane: Lane) -> bool:
        return lane.healthy and self._closed_with is None and not self.frozen

    async def _try_to_load(self, lane: Lane) -> None:
        if lane.failures and self.clock.now_us() < lane.retry_at_us:
            return
        try:
            await lane.load()
        except QueueMissing:
            self.hooks.missing(self)
        except HoldfastError as error:
            lane.set_aside(error)
            emit("queue.storage_failed", queue=self.record.name, storage=lane.storage, error=error.message)
        else:
            emit("queue.loaded", queue=self.record.name, storage=lane.storage)
            self.hooks.loaded(self)

    async def _commit(self, lane: Lane, batch: Batch) -> None:
        requests = batch.requests()
        for waiting in requests:
            waiting.taken = True
        counted = len(batch.singles) + sum(map(len, batch.produces.values()))
        # Nobody else is being served: a thread would only add its own switches to the wait for the disk.
        alone = self.activity.count <= counted and batch.weight <= INLINE_ITEMS_COUNT_MAX
        lane.busy = True
        self.in_flight += len(requests)
        try:
            committed = await lane.commit(batch.operations, alone=alone)
        except QueueMissing as error:
            self._fail(batch, error)
            self.hooks.missing(self)
        except HoldfastError as error:
            emit("queue.storage_failed", queue=self.record.name, storage=lane.storage, error=error.message)
            self._fail(batch, lane.set_aside(error))
        except Exception as error:  # noqa: BLE001 - a bug: say so loudly, lose nothing, and read the truth from the store again
            emit("queue.bug", queue=self.record.name, storage=lane.storage, error=repr(error), traceback=error)
            self._fail(batch, lane.set_aside(TryAgain(f"storage failed; {error!r}")))
        else:
            crash_point("queue.before_reply")
            self._answer(lane, batch, committed.results)
        finally:
            lane.busy = False
            self.in_flight -= len(requests)
            self._thawed.set()

    def _fail(self, batch: Batch, error: HoldfastError) -> None:
        for waiting in batch.requests():
            waiting.taken = False
            # A lease waits on: another partition may serve it, or this one once it is back.
            if isinstance(waiting, WaitingLease) and not isinstance(error, QueueMissing):
                continue
            waiting.fail(error)
        if not isinstance(error, QueueMissing):
            self._refuse_what_waits()
        self.wake()

    def _refuse_what_waits(self) -> None:
        """Requests that need a storage which was set aside are answered now, not when their time is up."""
        for lane in self.lanes:
            if not lane.healthy:
                for waiting in lane.bound:
                    waiting.fail(self._unavailable())
                lane.bound.clear()
        if not any(lane.healthy for lane in self.lanes):
            refuse_all(self, self._unavailable())

    def _answer(self, lane: Lane, batch: Batch, results: Sequence[Result]) -> None:
        for index, result in enumerate(results):
            if index in batch.produces:
                batch.answer_produces(index, cast(Produced, result))
            elif (leases := batch.leases.get(index)) is not None:
                self._answer_leases(lane, leases, batch.operations[index].partition, cast(Leased, result))
            elif (single := batch.singles.get(index)) is not None:
                single.answer(result)
                if isinstance(single.operation, Import | Revive):
                    # They came with attempts of their own: what is used up dies now, nobody could lease it.
                    lane.due_more.add(single.operation.partition)
            if isinstance(result, Ended):
                if result.more:
                    lane.due_more.add(batch.operations[index].partition)
                if result.dying or result.moved or result.deleted:
                    self.hooks.ended(self, result)

    def _answer_leases(self, lane: Lane, leases: list[WaitingLease], partition: int, leased: Leased) -> None:
        if not leased.items:
            lane.dry[partition] = lane.shapes[partition].queued
        waiting = [lease for lease in leases if not lease.future.done()]
        shares = share(leased.items, [lease.batch_size for lease in waiting])
        given = 0
        for lease, items in zip(waiting, shares, strict=True):
            lease.taken = False
            if items:
                given += len(items)
                del self.leases[lease.client_id]
                lease.answer(LeaseAnswer(partition, items))
        if given < len(leased.items):
            # Somebody went away while the commit ran. Nobody knows of these leases: undo them.
            kept = {item.id for items in shares for item in items}
            self._release(partition, [item.id for item in leased.items if item.id not in kept])
        elif lane.abilities.shared and given:
            lane.hinted = True  # there may be more

    def _release(self, partition: int, ids: Sequence[str]) -> None:
        if self._closed_with is None:
            lane = self.lane_of(partition)
            deadline_us = self.clock.now_us() + OPERATION_TIMEOUT_US
            lane.bound.append(WaitingOperation(Release(partition, ids), deadline_us, settles=False))
            self.wake(lane)

    # --- time -----------------------------------------------------------------------------------------------

    def _next_us(self) -> int:
        moments = [waiting.deadline_us for waiting in self._untaken()]
        mortality = self.hooks.mortality(self)
        for lane in self.lanes:
            if lane.failures:
                moments.append(lane.retry_at_us)
            elif due_us := lane.next_due_us(mortality):
                moments.append(due_us)
        return min(moments, default=0)

    def _untaken(self) -> list[Waiting]:
        waiting: list[Waiting] = [*self.produces, *self.leases.values()]
        for lane in self.lanes:
            waiting.extend(lane.bound)
        return [one for one in waiting if not one.taken and not one.future.done()]

    def _on_alarm(self) -> None:
        now_us = self.clock.now_us()
        for waiting in self._untaken():
            if waiting.deadline_us <= now_us:
                late = isinstance(waiting, WaitingLease)
                waiting.fail(NothingToLease() if late else TryAgain("request timeout; the storage is busy, try again"))
        self.wake()
        if self._closed_with is None:
            self._alarm.ring_at(self._next_us())

    # --- changes --------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Settings changed, or somebody else added items: look at deadlines and items anew."""
        for lane in self.lanes:
            lane.hinted = True
            lane.due_more.update(lane.partitions)
        self.wake()

    async def change(self, record: QueueRecord, lanes: Sequence[Lane]) -> None:
        """Take over new settings at once, and lanes that have more partitions than before."""
        self.record = record
        known = {lane.storage: lane for lane in self.lanes}
        for lane in lanes:
            old = known.get(lane.storage)
            if old is not None and old.partitions == lane.partitions:
                continue
            if old is not None:
                await self._replace(old, lane)
            else:
                await self._try_to_load(lane)
                self.lanes = (*self.lanes, lane)
                self._wakes[lane] = asyncio.Event()
                self._start(lane)
                self.wake(lane)

    async def _replace(self, old: Lane, new: Lane) -> None:
        """The same storage with more partitions: the lane keeps its waiting requests."""
        async with self.freeze():
            await old.shelves.close()
            old.partitions, old.shelves = new.partitions, new.shelves
            await self._try_to_load(old)

    @asynccontextmanager
    async def freeze(self) -> AsyncIterator[None]:
        """No commit runs and none begins until this ends; requests wait."""
        self.frozen += 1
        try:
            while any(lane.busy for lane in self.lanes):
                self._thawed.clear()
                await self._thawed.wait()
            yield
        finally:
            self.frozen -= 1
            self.wake()

    # --- the end --------------------------------------------------------------------------------------------

    def forget_produce(self, waiting: WaitingProduce) -> None:
        """A produce request has left the line."""
        self._produce_bytes -= waiting.byte_count

    def close_requests(self, error: HoldfastError) -> None:
        """Take no more requests; those that wait are answered with the error, running commits finish."""
        self._closed_with = error
        for waiting in self._untaken():
            waiting.fail(error)
        self._alarm.off()
        self.wake()

    async def close(self, error: HoldfastError | None = None) -> None:
        """Answer everybody, let running commits finish, let go of the store."""
        self.close_requests(error or ShuttingDown())
        for task in self._tasks:
            await asyncio.wait([task])
            if not task.cancelled() and (bug := task.exception()) is not None:
                raise bug
        for waiting in [*self.produces, *self.leases.values()]:
            waiting.fail(error or ShuttingDown())
        for lane in self.lanes:
            for operation in lane.bound:
                operation.fail(error or ShuttingDown())
            await lane.shelves.close()
