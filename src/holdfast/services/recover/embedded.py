"""A recovery of an embedded dead queue: each item goes back to the queue it died in, by the move of three commits.

Nothing is leased: an item is either marked in one commit, or left as it was. So a run that is killed anywhere leaves
each item in exactly one place, and what was marked arrives by itself when the queues are opened again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from holdfast.core.death import NO_SOURCE, QueueNames
from holdfast.core.item import Item, cause_of
from holdfast.core.message import Address, Message
from holdfast.core.moments import Backoff
from holdfast.core.recovery import RecoveryOrder, StoppedBy, Summary, add_planned
from holdfast.core.requests.queue import PartitionStats
from holdfast.core.routes import NOT_FOR_THIS_RUN
from holdfast.errors import QueueMissing, ShuttingDown, TryAgain, Unreachable
from holdfast.ports.clock import Clock
from holdfast.services.queue.queues import Queues
from holdfast.services.recover.limits import LimitedRun, wait
from holdfast.services.recover.report import Notices

PAGE_COUNT_FIRST = 16
PAGE_COUNT_MAX = 1_000
BACKOFF = Backoff(first_s=0.1, delay_s_max=5.0)
ARRIVAL_STEP_S = 0.05
LEASED = "leased by somebody, left alone"
GONE = "leased or taken by somebody meanwhile, left alone"
LOST_ANSWER = "a storage error left open whether it was moved"
TROUBLE = (TryAgain, ShuttingDown, Unreachable)

R = TypeVar("R")


class EmbeddedRecovery(LimitedRun):
    """One run over the queues of this process or of a server."""

    def __init__(self, queues: Queues, order: RecoveryOrder, *, clock: Clock, notices: Notices | None = None) -> None:
        # An item tells itself where it died: whatever its queue is called, that is no guess.
        table = replace(order.table, names=QueueNames(wait_queues=(), dead_queues=()))
        super().__init__(replace(order, table=table), clock=clock, notices=notices)
        self._queues = queues
        self._table = order.table
        self._page_count = min(PAGE_COUNT_FIRST, self._limits.window_count_max)

    async def run(self) -> Summary:
        """Raises QueueMissing when there is no such dead queue; after that, the summary says all."""
        summary = self.summary
        self._notices.beginning()
        self._watch.start()
        partitions = await self._partitions()
        for one in partitions:
            if one.failures:
                summary.notes.append(f"partition {one.partition} cannot be read at present, its items stay")
        summary.found = sum(one.total for one in partitions)  # leased ones too
        self._notices.found(summary)
        self._quota.starts_with(summary.found)
        there = sum([await self._partition(one.partition, one.total) for one in partitions])
        is_short = self._quota.left() != 0 and there < summary.found
        summary.stopped_by = self._stop or (StoppedBy.EMPTY if is_short else StoppedBy.ALL_TAKEN)
        await self._arrived()
        if summary.stopped_by is not StoppedBy.EMPTY:
            summary.unseen = max(0, min(summary.found - self._quota.seen_count, summary.remaining or 0))
        self._watch.end(summary)
        self._notices.ended(summary)
        return summary

    async def _partitions(self) -> list[PartitionStats]:
        """Raises QueueMissing."""
        stats = await self._queues.queue_stats(self.summary.dead_queue)
        return [one for logical in stats.logical_queues for one in logical.partitions]

    # Taking.

    async def _partition(self, partition: int, count: int) -> int:
        """Look at so many items from the first one on, which are those that were there at the start; returns how many
        there were. Ids rise: one that comes back during the run is behind them."""
        seen, last = 0, ""
        while seen < count and (left := self._quota.left()) != 0 and not self._is_over():
            page = await self._page(partition, last, min(self._page_count, count - seen, left or count))
            if not page:
                break
            seen, last = seen + len(page), page[-1].id
            await self._page_of(partition, page)
        return seen

    async def _page(self, partition: int, last: str, count: int) -> list[Item]:
        name = self.summary.dead_queue

        async def read() -> list[Item]:
            # The one that the last page ended with may still be there: it comes first again.
            return await self._queues.storage_items_list(name, partition=partition, pivot=last, limit=count + 1)

        items = await self._patiently(read) or []
        page = [item for item in items if item.id != last][:count]
        if page:
            size = max(1, sum(len(item.payload) for item in page) // len(page))
            fits = max(1, self._limits.window_bytes_max // size)
            most = min(PAGE_COUNT_MAX, self._limits.window_count_max, fits)
            self._page_count = max(1, min(most, self._page_count * 2))
        return page

    async def _page_of(self, partition: int, page: Sequence[Item]) -> None:
        groups: dict[str, list[Item]] = {}
        for item in page:
            if self._quota.left() == 0:
                break  # untouched, and counted as remaining
            self._quota.seen_count += 1
            if self._where and self._leave_out(_message(item), item.kind):
                continue
            if not item.source_queue:
                self._keep(item, NO_SOURCE)
            elif item.is_leased:
                self._keep(item, LEASED)
            else:
                groups.setdefault(item.source_queue, []).append(item)
        for source_queue, items in groups.items():
            if reason := await self._refusal(source_queue):
                for item in items:
                    self._keep(item, reason, failed=True)
            elif self.summary.dry_run:
                for item in items:
                    add_planned(self.summary, item.kind, Address(routing_key=source_queue))
            else:
                await self._redrive(partition, source_queue, items)

    async def _refusal(self, source_queue: str) -> str:
        """Why nothing can go back to a queue; empty when it can."""
        if source_queue == self.summary.dead_queue:
            return f"its source queue is '{source_queue}' itself"
        if not self._table.may_send(Address(routing_key=source_queue)):
            return NOT_FOR_THIS_RUN
        try:
            await self._patiently(lambda: self._queues.queues_info(source_queue))
        except QueueMissing as error:
            return error.message
        return ""

    async def _redrive(self, partition: int, source_queue: str, items: Sequence[Item]) -> None:
        """At the pace that was asked for. What is left at the end is untouched, and counted as remaining."""
        while items and not self._is_over():
            if count := self._watch.due_count(len(items)):
                await self._redrive_part(partition, source_queue, items[:count])
                items = items[count:]
            else:
                await wait(self._stopping, self._watch.pace_s())

    async def _redrive_part(self, partition: int, source_queue: str, items: Sequence[Item]) -> None:
        summary, tries = self.summary, 0

        async def redrive() -> list[str]:
            nonlocal tries
            tries += 1
            return await self._queues.queue_redrive(
                summary.dead_queue, [item.id for item in items], source_queue=source_queue, partition=partition
            )

        try:
            ids = await self._patiently(redrive)
        except QueueMissing as error:
            await self._queues.queues_info(summary.dead_queue)  # if it is this one that is gone, so is the run
            for item in items:
                self._keep(item, error.message, failed=True)
            return
        lost = ids is None or tries > 1
        gone = {item.id for item in items}.difference(ids or ())
        before = summary.recovered
        summary.recovered += len(items) - len(gone)
        summary.went(source_queue, len(items) - len(gone))
        self._notices.progressed(summary, before)
        for item in items:
            if item.id in gone and lost:
                summary.unknown += 1
                self._keep(item, LOST_ANSWER, failed=True)
            elif item.id in gone:
                self._keep(item, GONE)

    def _keep(self, item: Item, why: str, *, failed: bool = False) -> None:
        if failed:
            self.summary.failed_at(item.source_queue)
        else:
            self.summary.skipped += 1
        self._kept(why, item.kind, lambda: _message(item), failed=failed)

    # Time.

    def _is_over(self) -> bool:
        if self._watch.left_s() <= 0:
            self._stop_by(StoppedBy.TOTAL)
        return self._stop is not None

    async def _patiently(self, call: Callable[[], Awaitable[R]]) -> R | None:
        """Try again while the storage or the server has trouble, up to the stall limit; None when the run is over."""
        began_s, failures = self._watch.now_s(), 0
        while True:
            try:
                return await call()
            except TROUBLE as error:
                self._notices.waits(self.summary, error.message)
                if self._watch.now_s() - began_s >= self._limits.stall_timeout_s:
                    self.summary.notes.append(f"the storage cannot be used; {error.message}")
                    self._stop_by(StoppedBy.STALL)
            await wait(self._stopping, BACKOFF.delay_s(failures, spread=1.0))
            if self._is_over():
                return None
            failures += 1

    async def _arrived(self) -> None:
        """Wait until what is marked has arrived, for as long as that goes on; then count what is left."""
        summary, moved_s, before = self.summary, self._watch.now_s(), -1
        while True:
            try:
                partitions = await self._partitions()
            except (*TROUBLE, QueueMissing) as error:
                summary.notes.append(f"what is left could not be counted; {error.message}")
                summary.remaining = max(1, summary.found - summary.recovered)
                return
            dying = sum(one.dying for one in partitions)
            summary.remaining = sum(one.total + one.scheduled for one in partitions) + dying
            if dying != before:
                before, moved_s = dying, self._watch.now_s()
            if not dying or self._abandoned.is_set() or self._watch.now_s() - moved_s >= self._limits.stop_timeout_s:
                break
            await asyncio.sleep(ARRIVAL_STEP_S)
        if dying:
            summary.recovered -= min(dying, summary.recovered)
            summary.notes.append(f"{dying} are marked and on their way; they arrive as soon as their queue takes them")


def _message(item: Item) -> Message:
    """An item as the filter knows letters."""
    death = {
        "queue": item.source_queue,
        "reason": cause_of(item),
        "count": item.death_attempts,
        "time": item.died_at,
    }
    headers = {"x-death": [death]} if item.source_queue else {}
    return Message(body=item.payload, id=item.id, type=item.kind, reference=item.reference, headers=headers)
