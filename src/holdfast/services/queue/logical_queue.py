"""One queue: its waiting requests, and a loop per storage that turns all of them into one commit at a time.

The loop drains *everything* that waits, places it on partitions, hands the store one batch, and answers after the
commit. A commit that fails answers 454 to its own requests and sets that storage aside; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from holdfast.core.item import NewItem, PlacedItem, QueueRecord
from holdfast.errors import HoldfastError, InternalError, NothingToLease, QueueMissing, ShuttingDown, TryAgain
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import (
    DeathRules,
    Ended,
    Import,
    LeasedItems,
    LeaseItems,
    MoveTarget,
    Operation,
    Produce,
    Produced,
    Result,
    Revive,
    SendBack,
    SentBack,
)
from holdfast.proof import crash_point
from holdfast.services.queue.batch import assign_leases, place_produce, refuse_all, share, take
from holdfast.services.queue.storage_share import StorageShare
from holdfast.services.queue.waiting import (
    INLINE_ITEMS_COUNT_MAX,
    CommitBatch,
    InFlight,
    LeaseAnswer,
    WaitingLease,
    WaitingRequests,
    placed,
)
from holdfast.telemetry.events import emit


class Hooks:
    """What a queue tells its manager. Replaced by the manager; alone, a queue tells nobody."""

    def mortality(self, queue: LogicalQueue) -> DeathRules:
        """By which rules its items die now."""
        return DeathRules(max_attempts=queue.record.max_attempts)

    def ended(self, queue: LogicalQueue, ended: Ended) -> None:
        """Items were marked as dying, moved or deleted."""

    def redriven(self, queue: LogicalQueue, target: MoveTarget, redriven: SentBack) -> None:
        """Items go back to the queue that they died in."""

    def loaded(self, queue: LogicalQueue) -> None:
        """A storage was read anew: items may be dying of which nobody was told."""

    def failed(self, queue: LogicalQueue) -> None:
        """A commit failed, as far as is known: on a shared storage it may have moved items to other queues."""

    def missing(self, queue: LogicalQueue) -> None:
        """The store says that the queue is gone or was made anew."""


#: So many requests are a crowd, of which more may be on their way,
GATHER_COUNT_MIN = 2
#: and for so many turns of the event loop they are waited for.
GATHER_TURNS_MAX = 4


class LogicalQueue(WaitingRequests):
    """A queue that is open for requests."""

    def __init__(
        self, record: QueueRecord, lanes: Sequence[StorageShare], *, clock: Clock, hooks: Hooks, activity: InFlight
    ) -> None:
        super().__init__(record, lanes, clock=clock, activity=activity)
        self.hooks = hooks
        self.in_flight = 0
        self.frozen = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._thawed = asyncio.Event()

    # --- the loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loops."""
        for lane in self.lanes:
            self._start(lane)

    def _start(self, lane: StorageShare) -> None:
        task = asyncio.get_running_loop().create_task(self._run(lane), name=f"queue {self.record.name}")
        task.add_done_callback(self._on_end)
        self._tasks.append(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A loop ends when its queue is closed. Any other end is a bug, and then nobody may wait in vain."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            emit("queue.bug", queue=self.record.name, error=repr(bug), traceback=bug)
            self.close_requests(InternalError("internal error; the server's log has the details"))

    async def _run(self, lane: StorageShare) -> None:
        wake = self._wakes[lane]
        while self._closed_with is None:
            await wake.wait()
            wake.clear()
            if not lane.healthy:
                await self._try_to_load(lane)
            while self._may_commit(lane):
                await self._gather(lane)
                if not self._may_commit(lane):
                    break
                batch = take(self, lane)
                if not batch.operations:
                    break
                await self._commit(lane, batch)
                if not (self.produces or self.leases or lane.bound or lane.due_more):
                    break
                # A crowd that has come meanwhile is committed in a thread while those who are answered now read their
                # answers. On this thread the answers go first.
                waiting_count = len(self.produces) + len(lane.bound)
                if 2 * waiting_count < len(batch.requests()) or self._goes_inline(lane):
                    await asyncio.sleep(0)
            self._alarm.ring_at(self._next_us())

    async def _gather(self, lane: StorageShare) -> None:
        """A commit on this thread holds everybody up: let those who are ready join it, as long as each turn of the loop
        brings more of them."""
        for _ in range(GATHER_TURNS_MAX):
            count = len(self.produces) + len(lane.bound)
            if count < GATHER_COUNT_MIN or self.activity.count > count or not self._goes_inline(lane):
                return  # also where somebody is served elsewhere: then a thread makes the commit
            await asyncio.sleep(0)
            if len(self.produces) + len(lane.bound) <= count:
                return

    def _goes_inline(self, lane: StorageShare) -> bool:
        """Whether what waits now would be committed on this thread, if nobody else were being served."""
        if len(self.produces) + len(lane.bound) > INLINE_ITEMS_COUNT_MAX or not lane.commits_inline():
            return False
        weight = sum([one.weight for one in self.produces]) + sum([one.weight for one in lane.bound])
        return weight <= INLINE_ITEMS_COUNT_MAX

    def _may_commit(self, lane: StorageShare) -> bool:
        return lane.healthy and self._closed_with is None and not self.frozen

    async def _try_to_load(self, lane: StorageShare) -> None:
        if lane.failures and self.clock.now_us() < lane.retry_at_us:
            return
        lane.busy = True
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
        finally:
            lane.busy = False
            self._thawed.set()

    async def _commit(self, lane: StorageShare, batch: CommitBatch) -> None:
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
            crash_point("queue.before_reply")
            self._answer(lane, batch, committed.results)
            if lane.abilities.shared and any(shape.dying for shape in committed.shapes.values()):
                self.hooks.loaded(self)  # a server that died may have left them
        except Exception as error:  # noqa: BLE001 - see _failure
            self._fail(batch, self._failure(lane, error))
        finally:
            lane.busy = False
            self.in_flight -= len(requests)
            self._thawed.set()
            if self._closed_with is not None:
                self.close_requests(self._closed_with)  # a lease that this commit gave nothing hears it now

    def _failure(self, lane: StorageShare, error: Exception) -> HoldfastError:
        """A commit failed: what its requests hear. The lane is not used again before it has been loaded."""
        if lane.abilities.shared:
            self.hooks.failed(self)
        if isinstance(error, QueueMissing):
            self.hooks.missing(self)
            return error
        if isinstance(error, HoldfastError):
            emit("queue.storage_failed", queue=self.record.name, storage=lane.storage, error=error.message)
            return lane.set_aside(error)
        # A bug: say so loudly, lose nothing, and read the truth from the store again.
        emit("queue.bug", queue=self.record.name, storage=lane.storage, error=repr(error), traceback=error)
        return lane.set_aside(TryAgain(f"storage failed; {error!r}"))

    def _fail(self, batch: CommitBatch, error: HoldfastError) -> None:
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

    def _answer(self, lane: StorageShare, batch: CommitBatch, results: Sequence[Result]) -> None:
        for index, result in enumerate(results):
            if index in batch.produces:
                batch.answer_produces(index, cast(Produced, result))
            elif (leases := batch.leases.get(index)) is not None:
                self._answer_leases(lane, leases, batch.operations[index].partition, cast(LeasedItems, result))
            elif (single := batch.singles.get(index)) is not None:
                single.answer(result)
            self._learn(lane, batch.operations[index], result)

    def _learn(self, lane: StorageShare, operation: Operation, result: Result) -> None:
        """What a result means for everybody but the one who is answered with it."""
        if isinstance(operation, Import | Revive):
            # They came with attempts of their own: what is used up dies now, nobody could lease it.
            lane.due_more.add(operation.partition)
        if isinstance(operation, SendBack) and isinstance(result, SentBack) and result.ids:
            self.hooks.redriven(self, operation.target, result)
        if isinstance(result, Ended):
            if result.more:
                lane.due_more.add(operation.partition)
            if result.dying or result.moved or result.deleted:
                self.hooks.ended(self, result)

    def _answer_leases(
        self, lane: StorageShare, leases: list[WaitingLease], partition: int, leased: LeasedItems
    ) -> None:
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
            self.release(partition, [item.id for item in leased.items if item.id not in kept])
        elif lane.abilities.shared and given:
            lane.hinted.add(partition)  # there may be more

    # --- a lone request ---------------------------------------------------------------------------------------

    def _nobody_else(self, weight: int) -> bool:
        lane = self.lanes[0]
        if self.activity.count or len(self.lanes) > 1 or weight > INLINE_ITEMS_COUNT_MAX or lane.busy:
            return False
        if self.produces or self.leases or lane.bound or not self._may_commit(lane) or not lane.commits_inline():
            return False
        return not lane.due_partitions(self.hooks.mortality(self))

    async def _produce_alone(self, items: Sequence[NewItem]) -> list[PlacedItem]:
        partition = place_produce(self.lanes[0].un_leased())
        produced = await self._operate_alone(Produce(partition, items, self.record.expire_timeout_us))
        return placed(cast(Produced, produced).ids, items, partition)

    async def _lease_alone(self, batch_size: int) -> LeaseAnswer | None:
        lane = self.lanes[0]
        available = lane.available(lane.un_leased())
        if not available or self.record.paused:
            return None
        (partition,) = assign_leases([batch_size], available)
        lease = LeaseItems(partition, batch_size, self.record.lease_timeout_us, self.hooks.mortality(self))
        try:
            leased = cast(LeasedItems, await self._operate_alone(lease))
        except TryAgain:
            return None  # it waits on, until the storage is back or its time is up
        if not leased.items:
            lane.dry[partition] = lane.shapes[partition].queued
            return None
        return LeaseAnswer(partition, list(leased.items))

    async def _operate_alone(self, operation: Operation) -> Result:
        """One commit for the only client: no task, no event, no thread between it and its commit, and nothing that
        would suspend it: a client can be cancelled while it is suspended, a commit cannot."""
        lane = self.lanes[0]
        lane.busy = True
        self.in_flight += 1
        try:
            committed = await lane.commit((operation,), alone=True)
            crash_point("queue.before_reply")
            result = committed.results[0]
            self._learn(lane, operation, result)
        except Exception as error:
            failure = self._failure(lane, error)
            self.wake(lane)
            raise failure from error
        finally:
            lane.busy = False
            self.in_flight -= 1
        if lane.due_more:
            self.wake(lane)
        self._alarm.ring_at(lane.next_due_us(self.hooks.mortality(self)))
        return result

    # --- time -----------------------------------------------------------------------------------------------

    def _next_us(self) -> int:
        moments = [waiting.deadline_us for waiting in self._untaken()]
        mortality = self.hooks.mortality(self)
        for lane in self.lanes:
            if lane.busy or self.frozen:
                continue  # it looks again when it is done; an alarm for what is being done would ring without end
            if lane.failures:
                moments.append(lane.retry_at_us)
            elif due_us := lane.next_due_us(mortality):
                moments.append(due_us)
        return min(moments, default=0)

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
            lane.hinted.update(lane.partitions)
            lane.due_more.update(lane.partitions)
        self.wake()

    def hint(self) -> None:
        """Somebody else may have added items: the next lease asks the store, whatever was counted here."""
        for lane in self.lanes:
            lane.hinted.update(lane.partitions)

    async def change(self, record: QueueRecord, lanes: Sequence[StorageShare]) -> None:
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

    async def _replace(self, old: StorageShare, new: StorageShare) -> None:
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
