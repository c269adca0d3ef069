"""Dead-lettering: an item that died goes to its dead queue in three commits, never lost and never there twice. A
redrive is the same move, back to the queue that it died in.

1. The source marks it as dying, with its target partition (this has happened when the mover hears of it).
2. That partition, never another, inserts it under its `source_id`; a repeat is a no-op, also when the copy has been
   completed meanwhile, because the arrival is remembered until (3) is known.
3. The source removes it. Then the target forgets the arrival.

A crash anywhere resumes at the mark. A target that cannot take it is tried again with back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from holdfast.core.moments import NEVER_US, SECOND_US, Backoff
from holdfast.errors import HoldfastError, QueueMissing, ShuttingDown
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import Arrive, DyingItem, Forget, MoveTarget, QueueStore, Remove, Revive
from holdfast.proof import crash_point
from holdfast.services.queue.logical_queue import EarliestTimer, LogicalQueue
from holdfast.telemetry.events import emit

CARRIED_COUNT_MAX = 500
BACKOFF = Backoff(first_s=0.1, delay_s_max=30.0)


class Mover:
    """Carries the dying items of one queue to their dead queue, for as long as there are any."""

    def __init__(self, queue: LogicalQueue, *, clock: Clock, find: Callable[[str], LogicalQueue | None]) -> None:
        self.queue = queue
        self.clock = clock
        self._find = find
        self._task: asyncio.Task[None] | None = None
        self._timer = EarliestTimer(clock, self.wake)  # set while backing off
        self._failures = 0
        self._failing = ""  # the queue that could not take its items
        self._again = False
        self._closed = False

    def wake(self) -> None:
        """There may be dying items."""
        if self._closed or self._timer.at_us < NEVER_US:
            return  # while backing off, the timer wakes it
        if self._task is not None and not self._task.done():
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"mover {self.queue.record.name}")

    async def _run(self) -> None:
        while not self._closed:
            self._again = False
            try:
                moved = [await self._run_once(store, partition) for store, partition in self._with_dying()]
            except ShuttingDown:
                return
            except HoldfastError as error:
                self._back_off(error)
                return
            self._failures = 0
            if not any(moved) and not self._again:
                return

    def _with_dying(self) -> list[tuple[QueueStore, int]]:
        return [
            (share.store, partition)
            for share in self.queue.shares
            if share.healthy
            for partition, state in share.states.items()
            if state.dying
        ]

    async def _run_once(self, store: QueueStore, partition: int) -> int:
        """Carry one batch of a partition; returns how many there were. Raises what the source or a target raises,
        after every other target has been served."""
        dying = await store.dying_items(partition, count_max=CARRIED_COUNT_MAX)
        failed: HoldfastError | None = None
        by_partition = attrgetter("target.generation", "target.partition")
        for target, group in groupby(sorted(dying, key=by_partition), attrgetter("target")):
            try:
                await self._carry(partition, target, list(group))
            except ShuttingDown:
                raise
            except HoldfastError as error:
                failed, self._failing = error, target.queue_name
        if failed is not None:
            raise failed
        return len(dying)

    async def _carry(self, partition: int, target: MoveTarget, dying: Sequence[DyingItem]) -> None:
        ids = [item.source_id for item in dying]
        dead_queue = self._find(target.queue_name)
        if dead_queue is None or dead_queue.record.generation != target.generation:
            # Its dead queue was taken from it and deleted between the mark and now. Today's rules decide anew.
            emit("dead.revived", queue=self.queue.record.name, dead_queue=target.queue_name, count=len(ids))
            await self.queue.operate(Revive(partition, ids))
            return
        crash_point("dead.after_mark")
        try:
            await dead_queue.operate(Arrive(target.partition, dying, dead_queue.record.expire_timeout_us))
        except QueueMissing as error:
            raise HoldfastError(error.message) from error
        crash_point("dead.after_arrive")
        await self.queue.operate(Remove(partition, ids))
        crash_point("dead.after_remove")
        await dead_queue.operate(Forget(target.partition, ids))
        crash_point("dead.after_forget")

    def _back_off(self, error: HoldfastError) -> None:
        if self._closed:
            return
        self._failures += 1
        emit(
            "dead.failed",
            queue=self.queue.record.name,
            dead_queue=self._failing or self.queue.record.dead_queue,
            error=error.message,
        )
        delay_s = BACKOFF.delay_s(self._failures - 1, spread=1.0)
        self._timer.call_at(self.clock.now_us() + int(delay_s * SECOND_US))

    async def finish(self) -> None:
        """Wait until what is marked has been carried, or has to wait for its target."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stop after the commit that runs; what is marked is carried after the next start."""
        self._closed = True
        self._timer.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
