"""One queue: its requests, and a loop per storage that turns all that wait into one commit at a time.

The loop drains *everything* that waits, places it on partitions, hands the store one batch, and answers after the
commit. A commit that fails answers 454 to its own requests and sets that storage aside; the others go on. A request
that is alone makes its own commit, without the loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from holdfast.core.item import LeasedItem, NewItem, PlacedItem, QueueRecord, partition_of
from holdfast.core.moments import NEVER_US
from holdfast.core.requests.queue import LeaseReply
from holdfast.errors import HoldfastError, InternalError, Invalid, NothingToLease, QueueMissing, ShuttingDown, TryAgain
from holdfast.ports.clock import Clock, Timer
from holdfast.ports.queue_store import (
    DeathRules,
    Ended,
    Import,
    LeaseItems,
    MoveTarget,
    Operation,
    PartitionOperation,
    Produce,
    Release,
    Result,
    Revive,
    SendBack,
    SentBack,
)
from holdfast.proof import crash_point
from holdfast.services.queue.storage_share import StorageShare
from holdfast.services.queue.waiting import (
    PRODUCES_WAITING_BYTES_MAX,
    CommitBatch,
    Waiting,
    WaitingLease,
    WaitingRequests,
    assign_leases,
    place_produce,
    share_out,
    take,
)
from holdfast.telemetry.events import emit

R = TypeVar("R")

OPERATION_TIMEOUT_US = 60_000_000
#: A batch of more items is not committed on the event loop's thread: it would hold up whoever comes next.
INLINE_ITEMS_COUNT_MAX = 200
#: After so many requests in a row that were alone, the next one no longer looks round first for company,
LONE_COUNT_SURE = 16
#: but every so many it does, so that whatever else runs in the process gets its turn.
LONE_COUNT_YIELD = 8
#: So many requests are a crowd, of which more may be on their way,
GATHER_COUNT_MIN = 2
#: and for so many turns of the event loop they are waited for.
GATHER_TURNS_MAX = 4


class InFlight(Struct):
    """How many requests are being served in the whole process: alone, one is served without a thread."""

    count: int = 0
    lone_count: int = 0  #: requests in a row that had no company


class ItemsSentBack(Struct, frozen=True):
    """Items go back to the queue that they died in."""

    target: MoveTarget
    sent_back: SentBack


class QueueChange(enum.Enum):
    """What happened to a queue that its own requests do not tell."""

    DYING = "dying"  #: items are, or may be, of which nobody was told: a storage was read anew, or a server died
    FAILED = "failed"  #: a commit, as far as is known: on a shared storage it may have moved items to other queues
    LOST = "lost"  #: the store says that the queue is gone or was made anew


#: What a queue tells its manager. Items that ended were marked as dying, moved or deleted.
QueueEvent: TypeAlias = Ended | ItemsSentBack | QueueChange


class EarliestTimer:
    """Calls once at the earliest moment that was asked for; a call too early is harmless."""

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self.at_us = NEVER_US  # when it calls
        self._clock = clock
        self._callback = callback
        self._timer: Timer | None = None

    def call_at(self, at_us: int) -> None:
        """Call at that moment, unless it calls before; 0 asks for nothing."""
        if not at_us or self.at_us <= at_us:
            return
        self.cancel()
        self.at_us = at_us
        self._timer = self._clock.call_later(at_us - self._clock.now_us(), self._call)

    def cancel(self) -> None:
        """Do not call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.at_us = None, NEVER_US

    def _call(self) -> None:
        self._timer, self.at_us = None, NEVER_US
        self._callback()


class LogicalQueue:
    """A queue that is open for requests.

    `rules` says by which rules items of a queue die now; `on_event` is told what others have to know.
    """

    def __init__(
        self,
        record: QueueRecord,
        shares: Sequence[StorageShare],
        *,
        clock: Clock,
        activity: InFlight,
        rules: Callable[[LogicalQueue], DeathRules],
        on_event: Callable[[LogicalQueue, QueueEvent], None],
    ) -> None:
        self.record = record
        self.shares = tuple(shares)
        self.waiting = WaitingRequests()
        self.in_flight = 0
        self._clock = clock
        self._activity = activity
        #: By which rules its items die now.
        self.rules: Callable[[], DeathRules] = partial(rules, self)
        self._on_event = on_event
        self._closed_with: HoldfastError | None = None
        self._frozen = 0
        self._commit_ended = asyncio.Event()
        self._wakes = {share: asyncio.Event() for share in self.shares}
        self._tasks: list[asyncio.Task[None]] = []
        self._timer = EarliestTimer(clock, self._on_time)

    # --- requests ---------------------------------------------------------------------------------------------

    async def produce(self, items: Sequence[NewItem], *, byte_count: int, timeout_us: int) -> list[PlacedItem]:
        """Store items; returns after their commit. Raises TryAgain, and then none is acknowledged."""
        self._check_open()
        if not any([share.healthy for share in self.shares]):  # noqa: C419 - a list is quicker
            raise self._unavailable()
        if self._nobody_else(len(items)) and byte_count <= PRODUCES_WAITING_BYTES_MAX:
            if self._is_sure() or await self._look_round(len(items)):
                return await self._produce_alone(items)
            self._check_open()
        waiting = self.waiting.add_produce(items, byte_count, self._clock.now_us() + timeout_us)
        ids, partition = cast(tuple[Sequence[str], int], await self._served(waiting))
        return _placed(ids, items, partition)

    async def lease(self, client_id: str, batch_size: int, *, timeout_us: int) -> LeaseReply:
        """Wait for items. Raises NothingToLease when the time is up."""
        self._check_open()
        if self._nobody_else(batch_size) and (self._is_sure() or await self._look_round(batch_size)):
            answer = await self._lease_alone(batch_size)
            if answer is not None:
                return answer
        self._check_open()
        waiting = self.waiting.add_lease(client_id, batch_size, self._clock.now_us() + timeout_us)
        try:
            self._wait_for_turn(waiting)
            return cast(LeaseReply, await waiting.future)
        except asyncio.CancelledError:
            # The answer and the disconnection crossed: nobody will ever hear of these leases.
            if waiting.future.done() and not waiting.future.cancelled() and waiting.future.exception() is None:
                answer = cast(LeaseReply, waiting.future.result())
                self.release(answer.partition, [item.id for item in answer.items])
            raise
        finally:
            self.waiting.remove_lease(waiting)  # answered, timed out or disconnected

    async def operate(
        self, operation: PartitionOperation[R], *, settles: bool = False, timeout_us: int = OPERATION_TIMEOUT_US
    ) -> R:
        """Carry out an operation on its partition. Raises TryAgain, and then nothing is acknowledged."""
        self._check_open()
        share = self.share_of(operation.partition)
        if not share.healthy:
            raise self._unavailable()
        weight = _weight(operation)
        if self._nobody_else(weight) and (self._is_sure() or await self._look_round(weight)):
            return await self._operate_alone(operation)
        self._check_open()
        deadline_us = self._clock.now_us() + timeout_us
        waiting = self.waiting.add_operation(share, operation, weight, deadline_us, settles=settles)
        return cast(R, await self._served(waiting, share))

    def release(self, partition: int, ids: Sequence[str]) -> None:
        """Undo leases of which nobody will ever hear."""
        if self._closed_with is None:
            share, deadline_us = self.share_of(partition), self._clock.now_us() + OPERATION_TIMEOUT_US
            self.waiting.add_operation(share, Release(partition, ids), len(ids), deadline_us)
            self.wake(share)

    async def _served(self, waiting: Waiting, share: StorageShare | None = None) -> object:
        self._activity.count += 1
        try:
            self._wait_for_turn(waiting, share)
            return await waiting.future
        except asyncio.CancelledError:
            waiting.future.cancel()  # nothing is done any more for a client that has gone
            raise
        finally:
            self._activity.count -= 1

    def _wait_for_turn(self, waiting: Waiting, share: StorageShare | None = None) -> None:
        self.wake(share)
        self._timer.call_at(waiting.deadline_us)

    def _check_open(self) -> None:
        if self._closed_with is not None:
            raise self._closed_with

    def _unavailable(self) -> TryAgain:
        return TryAgain(
            f"partition is failing; the storage of queue '{self.record.name}' cannot be used now, try again"
        )

    def share_of(self, partition: int) -> StorageShare:
        """The share that a partition is in; raises Invalid."""
        for share in self.shares:
            if partition in share.partitions:
                return share
        raise Invalid(f"partition is invalid; '{partition}' is not a valid partition")

    # --- a lone request ---------------------------------------------------------------------------------------

    def _nobody_else(self, weight: int) -> bool:
        """Whether a request of that weight is all there is to do, and can be carried out without being suspended."""
        share = self.shares[0]
        if self._activity.count or len(self.shares) > 1 or weight > INLINE_ITEMS_COUNT_MAX or share.busy:
            return False
        waiting = self.waiting
        if waiting.produces or waiting.leases or waiting.operations[share]:
            return False
        return self._may_commit(share) and share.serves_inline(self.rules)

    def _is_sure(self) -> bool:
        """Whether a request that seems to be alone need not look round: the last ones were alone too."""
        activity = self._activity
        activity.lone_count += 1
        return activity.lone_count > LONE_COUNT_SURE and activity.lone_count % LONE_COUNT_YIELD != 0

    async def _look_round(self, weight: int) -> bool:
        """Let whoever is ready join the same commit; true when there is nobody."""
        self._activity.count += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._activity.count -= 1
        if self._nobody_else(weight):
            return True
        self._activity.lone_count = 0
        return False

    async def _produce_alone(self, items: Sequence[NewItem]) -> list[PlacedItem]:
        """Store items at once."""
        (share,) = self.shares
        partition = share.partitions[0] if len(share.partitions) == 1 else place_produce(share.un_leased())
        produced = await self._operate_alone(Produce(partition, items, self.record.expire_timeout_us))
        return _placed(produced, items, partition)

    async def _lease_alone(self, batch_size: int) -> LeaseReply | None:
        """Lease items at once; none when it has to wait."""
        (share,) = self.shares
        available = share.available(share.un_leased())
        if not available or self.record.paused:
            return None
        partition = next(iter(available)) if len(available) == 1 else assign_leases([batch_size], available)[0]
        lease = LeaseItems(partition, batch_size, self.record.lease_timeout_us, self.rules())
        try:
            leased = await self._operate_alone(lease)
        except TryAgain:
            return None  # it waits on, until the storage is back or its time is up
        if not leased:
            share.gave_nothing(partition)
            return None
        return LeaseReply(self.record.name, partition, leased)

    async def _operate_alone(self, operation: PartitionOperation[R]) -> R:
        """One commit for the only client: no task, no event, no thread between it and its commit, and nothing that
        would suspend it: a client can be cancelled while it is suspended, a commit cannot."""
        (share,) = self.shares
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
            self.in_flight -= 1
        if share.due_again:
            self.wake(share)
        if share.soonest_us < self._timer.at_us:
            self._timer.call_at(share.next_due_us(self.rules()))
        return cast(R, result)

    # --- the loop ---------------------------------------------------------------------------------------------

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

    def wake(self, share: StorageShare | None = None) -> None:
        """There may be something to do."""
        if share is not None:
            self._wakes[share].set()
            return
        for wake in self._wakes.values():
            wake.set()

    async def _run(self, share: StorageShare) -> None:
        wake, waiting = self._wakes[share], self.waiting
        while self._closed_with is None:
            await wake.wait()
            wake.clear()
            if not share.healthy:
                await self._try_to_load(share)
            while self._may_commit(share):
                await self._gather(share)
                if not self._may_commit(share):
                    break
                batch = take(waiting, share, shares=self.shares, record=self.record, rules=self.rules)
                for partition in batch.better:
                    self.wake(self.share_of(partition))
                if not batch.operations:
                    break
                await self._commit(share, batch)
                if not (waiting.is_any(share) or share.due_again):
                    break
                # A crowd that has come meanwhile is committed in a thread while those who are answered now read their
                # answers. On this thread the answers go first.
                if 2 * waiting.count(share) < len(batch.requests()) or self._goes_inline(share):
                    await asyncio.sleep(0)
            self._timer.call_at(self._next_us())

    async def _gather(self, share: StorageShare) -> None:
        """A commit on this thread holds everybody up: let those who are ready join it, as long as each turn of the loop
        brings more of them."""
        for _ in range(GATHER_TURNS_MAX):
            count = self.waiting.count(share)
            if count < GATHER_COUNT_MIN or self._activity.count > count or not self._goes_inline(share):
                return  # also where somebody is served elsewhere: then a thread makes the commit
            await asyncio.sleep(0)
            if self.waiting.count(share) <= count:
                return

    def _goes_inline(self, share: StorageShare) -> bool:
        """Whether what waits now would be committed on this thread, if nobody else were being served."""
        if self.waiting.count(share) > INLINE_ITEMS_COUNT_MAX or not share.commits_inline():
            return False
        return self.waiting.weight(share) <= INLINE_ITEMS_COUNT_MAX

    def _may_commit(self, share: StorageShare) -> bool:
        return share.healthy and self._closed_with is None and not self._frozen

    async def _try_to_load(self, share: StorageShare) -> None:
        if share.failures and self._clock.now_us() < share.retry_at_us:
            return
        try:
            await share.load()
        except QueueMissing:
            self._on_event(self, QueueChange.LOST)
        except HoldfastError as error:
            share.set_aside(error)
            emit("queue.storage_failed", queue=self.record.name, storage=share.storage, error=error.message)
        else:
            emit("queue.loaded", queue=self.record.name, storage=share.storage)
            self._on_event(self, QueueChange.DYING)
        finally:
            self._commit_ended.set()

    async def _commit(self, share: StorageShare, batch: CommitBatch) -> None:
        requests = batch.requests()
        for waiting in requests:
            waiting.taken = True
        counted = len(batch.singles) + sum(map(len, batch.produces.values()))
        # Nobody else is being served: a thread would only add its own switches to the wait for the disk.
        alone = self._activity.count <= counted and batch.weight <= INLINE_ITEMS_COUNT_MAX
        self.in_flight += len(requests)
        try:
            committed = await share.commit(batch.operations, alone=alone)
            crash_point("queue.before_reply")
            self._answer(share, batch, committed.results)
            if share.abilities.shared and any(state.dying for state in committed.states.values()):
                self._on_event(self, QueueChange.DYING)  # a server that died may have left them
        except Exception as error:  # noqa: BLE001 - see _failure
            self._fail(batch, self._failure(share, error))
        finally:
            self.in_flight -= len(requests)
            self._commit_ended.set()
            if self._closed_with is not None:
                self.close_requests(self._closed_with)  # a lease that this commit gave nothing hears it now

    def _failure(self, share: StorageShare, error: Exception) -> HoldfastError:
        """A commit failed: what its requests hear. The share is not used again before it has been loaded."""
        if share.abilities.shared:
            self._on_event(self, QueueChange.FAILED)
        if isinstance(error, QueueMissing):
            self._on_event(self, QueueChange.LOST)
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
                self.waiting.fail_operations(share, self._unavailable())
        if not any(share.healthy for share in self.shares):
            self.waiting.fail_produces(self._unavailable())

    def _answer(self, share: StorageShare, batch: CommitBatch, results: Sequence[Result]) -> None:
        for index, result in enumerate(results):
            if index in batch.produces:
                batch.answer_produces(index, cast(list[str], result))
            elif (leases := batch.leases.get(index)) is not None:
                self._answer_leases(share, leases, batch.operations[index].partition, cast(list[LeasedItem], result))
            elif (single := batch.singles.get(index)) is not None:
                single.answer(result)
            self._learn(share, batch.operations[index], result)

    def _learn(self, share: StorageShare, operation: Operation, result: Result) -> None:
        """What a result means for everybody but the one who is answered with it."""
        if isinstance(operation, Import | Revive):
            # They came with attempts of their own: what is used up dies now, nobody could lease it.
            share.due_again.add(operation.partition)
        if isinstance(operation, SendBack) and isinstance(result, SentBack) and result.ids:
            self._on_event(self, ItemsSentBack(operation.target, result))
        if isinstance(result, Ended):
            if result.more:
                share.due_again.add(operation.partition)
            if result.dying or result.moved or result.deleted:
                self._on_event(self, result)

    def _answer_leases(
        self, share: StorageShare, leases: list[WaitingLease], partition: int, leased: list[LeasedItem]
    ) -> None:
        if not leased:
            share.gave_nothing(partition)
        waiting = [lease for lease in leases if not lease.future.done()]
        shares = share_out(leased, [lease.batch_size for lease in waiting])
        given = 0
        for lease, items in zip(waiting, shares, strict=True):
            lease.taken = False
            if items:
                given += len(items)
                self.waiting.remove_lease(lease)
                lease.answer(LeaseReply(self.record.name, partition, items))
        if given < len(leased):
            # Somebody went away while the commit ran. Nobody knows of these leases: undo them.
            kept = {item.id for items in shares for item in items}
            self.release(partition, [item.id for item in leased if item.id not in kept])
        elif share.abilities.shared and given:
            share.hint((partition,))  # there may be more

    # --- time -------------------------------------------------------------------------------------------------

    def _next_us(self) -> int:
        """The next moment at which there is something to do, unless the timer calls before it; 0 if there is none."""
        moments = [waiting.deadline_us for waiting in self.waiting.untaken()]
        for share in self.shares:
            if share.busy or self._frozen:
                continue  # it looks again when it is done; a timer for what is being done would call without end
            if share.failures:
                moments.append(share.retry_at_us)
            elif share.soonest_us < self._timer.at_us and (due_us := share.next_due_us(self.rules())):
                moments.append(due_us)
        return min(moments, default=0)

    def _on_time(self) -> None:
        now_us = self._clock.now_us()
        for waiting in self.waiting.untaken():
            if waiting.deadline_us <= now_us:
                late = isinstance(waiting, WaitingLease)
                waiting.fail(NothingToLease() if late else TryAgain("request timeout; the storage is busy, try again"))
        self.wake()
        if self._closed_with is None:
            self._timer.call_at(self._next_us())

    # --- changes ----------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Settings changed, or somebody else added items: look at deadlines and items anew."""
        for share in self.shares:
            share.look_again()
        self.wake()

    def hint(self) -> None:
        """Somebody else may have added items: the next lease asks the store, whatever was counted here."""
        for share in self.shares:
            share.hint(share.partitions)

    async def change(self, record: QueueRecord, shares: Sequence[StorageShare]) -> None:
        """Take over new settings at once, and shares that have more partitions than before."""
        self.record = record
        known = {share.storage: share for share in self.shares}
        for share in shares:
            old = known.get(share.storage)
            if old is not None and old.partitions == share.partitions:
                continue
            if old is not None:
                # The same storage with more partitions: the share keeps its waiting requests.
                async with self.freeze():
                    await old.store.close()
                    old.partitions, old.store = share.partitions, share.store
                    await self._try_to_load(old)
            else:
                await self._try_to_load(share)
                self.shares = (*self.shares, share)
                self._wakes[share] = asyncio.Event()
                self._start(share)
                self.wake(share)

    async def reload(self) -> None:
        """Read the state from the store again. Raises StorageFailed or QueueMissing."""
        async with self.freeze():
            for share in self.shares:
                try:
                    await share.load()
                finally:
                    self._commit_ended.set()
        self.look_again()

    @asynccontextmanager
    async def freeze(self) -> AsyncIterator[None]:
        """No commit runs and none begins until this ends; requests wait."""
        self._frozen += 1
        try:
            while any(share.busy for share in self.shares):
                self._commit_ended.clear()
                await self._commit_ended.wait()
            yield
        finally:
            self._frozen -= 1
            self.wake()

    # --- the end ----------------------------------------------------------------------------------------------

    def close_requests(self, error: HoldfastError) -> None:
        """Take no more requests; those that wait are answered with the error, running commits finish."""
        self._closed_with = error
        for waiting in self.waiting.untaken():
            waiting.fail(error)
        self._timer.cancel()
        self.wake()

    async def close(self, error: HoldfastError | None = None) -> None:
        """Answer everybody, let running commits finish, let go of the store."""
        self.close_requests(error or ShuttingDown())
        for task in self._tasks:
            await asyncio.wait([task])
            if not task.cancelled() and (bug := task.exception()) is not None:
                raise bug
        self.waiting.fail_all(error or ShuttingDown())
        for share in self.shares:
            await share.store.close()


def _weight(operation: Operation) -> int:
    """About how many items an operation touches."""
    things = getattr(operation, "ids", None) or getattr(operation, "items", None) or ()
    return len(things) or getattr(operation, "count_max", 0)


def _placed(ids: Sequence[str], items: Sequence[NewItem], partition: int) -> list[PlacedItem]:
    """Where produced items are. A dedupe key that is there already may be in another partition: the id says where."""
    return [
        PlacedItem(item_id, partition_of(item_id) if item.dedupe_key else partition)
        for item_id, item in zip(ids, items, strict=True)
    ]
