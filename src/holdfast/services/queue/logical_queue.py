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
from holdfast.services.queue.batch import assign_leases, place_produce, refuse_all, share_out, take
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

    def rules(self, queue: LogicalQueue) -> DeathRules:
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
        self, record: QueueRecord, shares: Sequence[StorageShare], *, clock: Clock, hooks: Hooks, activity: InFlight
    ) -> None:
        super().__init__(record, shares, clock=clock, activity=activity)
        self.hooks = hooks
        self.in_flight = 0
        self.frozen = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._thawed = asyncio.Event()

    # --- the loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loops."""
        for share in self.shares:
            self._start(share)

    def _start(self, share: StorageShare) -> None:
        task = asyncio.get_running_loop().create_task(self._run(share), name=f"queue {self.record.name}")
        task.add_done_callback(self._on_end)
        self._tasks.append(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A loop ends when its queue is closed. Any other end is a bug, and then nobody may wait in vain."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            emit("queue.bug", queue=self.record.name, error=repr(bug), traceback=bug)
            self.close_requests(InternalError("internal error; the server's log has the details"))

    async def _run(self, share: StorageShare) -> None:
        wake = self._wakes[share]
        while self._closed_with is None:
            await wake.wait()
            wake.clear()
            if not share.healthy:
                await self._try_to_load(share)
            while self._may_commit(share):
                await self._gather(share)
                if not self._may_commit(share):
                    break
                batch = take(self, share)
                if not batch.operations:
                    break
                await self._commit(share, batch)
                if not (self.produces or self.leases or share.bound or share.due_more):
                    break
                # A crowd that has come meanwhile is committed in a thread while those who are answered now read their
                # answers. On this thread the answers go first.
                waiting_count = len(self.produces) + len(share.bound)
                if 2 * waiting_count < len(batch.requests()) or self._goes_inline(share):
                    await asyncio.sleep(0)
            self._alarm.ring_at(self._next_us())

    async def _gather(self, share: StorageShare) -> None:
        """A commit on this thread holds everybody up: let those who are ready join it, as long as each turn of the loop
        brings more of them."""
        for _ in range(GATHER_TURNS_MAX):
            count = len(self.produces) + len(share.bound)
            if count < GATHER_COUNT_MIN or self.activity.count > count or not self._goes_inline(share):
                return  # also where somebody is served elsewhere: then a thread makes the commit
            await asyncio.sleep(0)
            if len(self.produces) + len(share.bound) <= count:
                return

    def _goes_inline(self, share: StorageShare) -> bool:
        """Whether what waits now would be committed on this thread, if nobody else were being served."""
        if len(self.produces) + len(share.bound) > INLINE_ITEMS_COUNT_MAX or not share.commits_inline():
            return False
        weight = sum([one.weight for one in self.produces]) + sum([one.weight for one in share.bound])
        return weight <= INLINE_ITEMS_COUNT_MAX

    def _may_commit(self, share: StorageShare) -> bool:
        return share.healthy and self._closed_with is None and not self.frozen

    async def _try_to_load(self, share: StorageShare) -> None:
        if share.failures and self.clock.now_us() < share.retry_at_us:
            return
        share.busy = True
        try:
            await share.load()
        except QueueMissing:
            self.hooks.missing(self)
        except HoldfastError as error:
            share.set_aside(error)
            emit("queue.storage_failed", queue=self.record.name, storage=share.storage, error=error.message)
        else:
            emit("queue.loaded", queue=self.record.name, storage=share.storage)
            self.hooks.loaded(self)
        finally:
            share.busy = False
            self._thawed.set()

    async def _commit(self, share: StorageShare, batch: CommitBatch) -> None:
        requests = batch.requests()
        for waiting in requests:
            waiting.taken = True
        counted = len(batch.singles) + sum(map(len, batch.produces.values()))
        # Nobody else is being served: a thread would only add its own switches to the wait for the disk.
        alone = self.activity.count <= counted and batch.weight <= INLINE_ITEMS_COUNT_MAX
        share.busy = True
        self.in_flight += len(requests)
        try:
            committed = await share.commit(batch.operations, alone=alone)
            crash_point("queue.before_reply")
            self._answer(share, batch, committed.results)
            if share.abilities.shared and any(state.dying for state in committed.states.values()):
                self.hooks.loaded(self)  # a server that died may have left them
        except Exception as error:  # noqa: BLE001 - see _failure
            self._fail(batch, self._failure(share, error))
        finally:
            share.busy = False
            self.in_flight -= len(requests)
            self._thawed.set()
            if self._closed_with is not None:
                self.close_requests(self._closed_with)  # a lease that this commit gave nothing hears it now

    def _failure(self, share: StorageShare, error: Exception) -> HoldfastError:
        """A commit failed: what its requests hear. The share is not used again before it has been loaded."""
        if share.abilities.shared:
            self.hooks.failed(self)
        if isinstance(error, QueueMissing):
            self.hooks.missing(self)
            return error
        if isinstance(error, HoldfastError):
            emit("queue.storage_failed", queue=self.record.name, storage=share.storage, error=error.message)
            return share.set_aside(error)
        # A bug: say so loudly, lose nothing, and read the truth from the store again.
        emit("queue.bug", queue=self.record.name, storage=share.storage, error=repr(error), traceback=error)
        return share.set_aside(TryAgain(f"storage failed; {error!r}"))

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
        for share in self.shares:
            if not share.healthy:
                for waiting in share.bound:
                    waiting.fail(self._unavailable())
                share.bound.clear()
        if not any(share.healthy for share in self.shares):
            refuse_all(self, self._unavailable())

    def _answer(self, share: StorageShare, batch: CommitBatch, results: Sequence[Result]) -> None:
        for index, result in enumerate(results):
            if index in batch.produces:
                batch.answer_produces(index, cast(Produced, result))
            elif (leases := batch.leases.get(index)) is not None:
                self._answer_leases(share, leases, batch.operations[index].partition, cast(LeasedItems, result))
            elif (single := batch.singles.get(index)) is not None:
                single.answer(result)
            self._learn(share, batch.operations[index], result)

    def _learn(self, share: StorageShare, operation: Operation, result: Result) -> None:
        """What a result means for everybody but the one who is answered with it."""
        if isinstance(operation, Import | Revive):
            # They came with attempts of their own: what is used up dies now, nobody could lease it.
            share.due_more.add(operation.partition)
        if isinstance(operation, SendBack) and isinstance(result, SentBack) and result.ids:
            self.hooks.redriven(self, operation.target, result)
        if isinstance(result, Ended):
            if result.more:
                share.due_more.add(operation.partition)
            if result.dying or result.moved or result.deleted:
                self.hooks.ended(self, result)

    def _answer_leases(
        self, share: StorageShare, leases: list[WaitingLease], partition: int, leased: LeasedItems
    ) -> None:
        if not leased.items:
            share.dry[partition] = share.states[partition].queued
        waiting = [lease for lease in leases if not lease.future.done()]
        shares = share_out(leased.items, [lease.batch_size for lease in waiting])
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
        elif share.abilities.shared and given:
            share.hinted.add(partition)  # there may be more

    # --- a lone request ---------------------------------------------------------------------------------------

    def _nobody_else(self, weight: int) -> bool:
        share = self.shares[0]
        if self.activity.count or len(self.shares) > 1 or weight > INLINE_ITEMS_COUNT_MAX or share.busy:
            return False
        if self.produces or self.leases or share.bound or not self._may_commit(share) or not share.commits_inline():
            return False
        return not share.due_partitions(self.hooks.rules(self))

    async def _produce_alone(self, items: Sequence[NewItem]) -> list[PlacedItem]:
        partition = place_produce(self.shares[0].un_leased())
        produced = await self._operate_alone(Produce(partition, items, self.record.expire_timeout_us))
        return placed(cast(Produced, produced).ids, items, partition)

    async def _lease_alone(self, batch_size: int) -> LeaseAnswer | None:
        share = self.shares[0]
        available = share.available(share.un_leased())
        if not available or self.record.paused:
            return None
        (partition,) = assign_leases([batch_size], available)
        lease = LeaseItems(partition, batch_size, self.record.lease_timeout_us, self.hooks.rules(self))
        try:
            leased = cast(LeasedItems, await self._operate_alone(lease))
        except TryAgain:
            return None  # it waits on, until the storage is back or its time is up
        if not leased.items:
            share.dry[partition] = share.states[partition].queued
            return None
        return LeaseAnswer(partition, list(leased.items))

    async def _operate_alone(self, operation: Operation) -> Result:
        """One commit for the only client: no task, no event, no thread between it and its commit, and nothing that
        would suspend it: a client can be cancelled while it is suspended, a commit cannot."""
        share = self.shares[0]
        share.busy = True
        self.in_flight += 1
        try:
            committed = await share.commit((operation,), alone=True)
            crash_point("queue.before_reply")
            result = committed.results[0]
            self._learn(share, operation, result)
        except Exception as error:
            failure = self._failure(share, error)
            self.wake(share)
            raise failure from error
        finally:
            share.busy = False
            self.in_flight -= 1
        if share.due_more:
            self.wake(share)
        self._alarm.ring_at(share.next_due_us(self.hooks.rules(self)))
        return result

    # --- time -----------------------------------------------------------------------------------------------

    def _next_us(self) -> int:
        moments = [waiting.deadline_us for waiting in self._untaken()]
        rules = self.hooks.rules(self)
        for share in self.shares:
            if share.busy or self.frozen:
                continue  # it looks again when it is done; an alarm for what is being done would ring without end
            if share.failures:
                moments.append(share.retry_at_us)
            elif due_us := share.next_due_us(rules):
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
        for share in self.shares:
            share.hinted.update(share.partitions)
            share.due_more.update(share.partitions)
        self.wake()

    def hint(self) -> None:
        """Somebody else may have added items: the next lease asks the store, whatever was counted here."""
        for share in self.shares:
            share.hinted.update(share.partitions)

    async def change(self, record: QueueRecord, shares: Sequence[StorageShare]) -> None:
        """Take over new settings at once, and shares that have more partitions than before."""
        self.record = record
        known = {share.storage: share for share in self.shares}
        for share in shares:
            old = known.get(share.storage)
            if old is not None and old.partitions == share.partitions:
                continue
            if old is not None:
                await self._replace(old, share)
            else:
                await self._try_to_load(share)
                self.shares = (*self.shares, share)
                self._wakes[share] = asyncio.Event()
                self._start(share)
                self.wake(share)

    async def _replace(self, old: StorageShare, new: StorageShare) -> None:
        """The same storage with more partitions: the share keeps its waiting requests."""
        async with self.freeze():
            await old.store.close()
            old.partitions, old.store = new.partitions, new.store
            await self._try_to_load(old)

    @asynccontextmanager
    async def freeze(self) -> AsyncIterator[None]:
        """No commit runs and none begins until this ends; requests wait."""
        self.frozen += 1
        try:
            while any(share.busy for share in self.shares):
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
        for share in self.shares:
            for operation in share.bound:
                operation.fail(error or ShuttingDown())
            await share.store.close()
