"""All queues of an installation: opens, creates, changes and deletes them, and links each to its dead queue.

The catalog of the first storage is the truth about which queues exist. On a shared storage other servers change it
too: their hints, and behind them a poll that needs no hint, bring their changes here within a second.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from holdfast.core.item import QueueRecord
from holdfast.core.moments import format_duration
from holdfast.errors import CannotStart, HoldfastError, QueueMissing, ShuttingDown, StorageFailed
from holdfast.ports.clock import Clock, Timer
from holdfast.ports.queue_store import Catalog, DeathRules, Ended, Forget, MoveTarget, Storage
from holdfast.services.queue.logical_queue import InFlight, ItemsSentBack, LogicalQueue, QueueChange, QueueEvent
from holdfast.services.queue.mover import Mover
from holdfast.services.queue.storage_share import StorageShare
from holdfast.telemetry.events import emit

POLL_S = 0.5
OPEN_AT_ONCE_COUNT_MAX = 16
ARRIVALS_COUNT_MAX = 10_000
FINISH_TIMEOUT_S = 2.0
_DELETED_EVENTS = {
    "max_attempts": "item.deleted",
    "expired": "item.expired",
    "retention": "item.retention",
}


class QueueManager:
    """The queues that are open, by name."""

    def __init__(self, storages: Mapping[str, Storage], *, clock: Clock) -> None:
        self.storages = dict(storages)
        self.clock = clock
        self.catalog: Catalog = next(iter(self.storages.values())).catalog()
        self.closing = False
        self._queues: dict[str, LogicalQueue] = {}
        #: An open queue by its name, if there is one.
        self.find: Callable[[str], LogicalQueue | None] = self._queues.get
        self._lock = asyncio.Lock()
        self._activity = InFlight()
        self._movers: dict[str, Mover] = {}
        self._names: list[str] = []
        self._source_queues: dict[str, list[str]] = {}
        self._rules: dict[str, DeathRules] = {}
        self._spares = False  #: what would be deleted stays, until the clock is believed
        self._sparing: Timer | None = None
        self._counting: asyncio.Task[None] | None = None
        self._stale = asyncio.Event()  # the catalog is to be read before the next poll

    # --- finding ----------------------------------------------------------------------------------------------

    def get(self, name: str) -> LogicalQueue:
        """An open queue; raises QueueMissing or ShuttingDown."""
        queue = self._queues.get(name)
        if queue is None:
            if self.closing:
                raise ShuttingDown
            raise QueueMissing(name)
        return queue

    def records(self) -> list[QueueRecord]:
        """All queues, by name in code point order."""
        return [self._queues[name].record for name in self._names]

    def names(self, *, pivot: str = "") -> list[str]:
        """The names of queues in that order, from the pivot on."""
        return self._names[bisect_left(self._names, pivot) :]

    def sources(self, name: str) -> list[str]:
        """The queues whose dead queue this one is."""
        return self._source_queues.get(name, [])

    # --- start and stop ---------------------------------------------------------------------------------------

    async def open(self, *, doubts_clock: bool = False) -> None:
        """Open the storages and every queue, arm every deadline, resume every interrupted death. Who doubts the clock
        deletes nothing by time for a while when nothing was written for long."""
        spared_us = max(storage.spared_us() for storage in self.storages.values()) if doubts_clock else 0
        self._spares = spared_us > 0
        for storage in self.storages.values():
            await storage.open()
        records = await self.catalog.queues()
        for record in records:
            self._check_configured(record)
        gate = asyncio.Semaphore(OPEN_AT_ONCE_COUNT_MAX)

        async def add(record: QueueRecord) -> None:
            async with gate:
                await self._add(record)

        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(add(record))
        self._index()
        for queue in self._queues.values():
            queue.start()
            queue.wake()
        await self._forget_old_arrivals()
        for mover in self._movers.values():
            mover.wake()
        if self._spares:
            self._sparing = self.clock.call_later(spared_us, self._believe_clock)
            self._counting = asyncio.create_task(self._count_spared(format_duration(spared_us)), name="what is spared")

    async def _count_spared(self, delay: str) -> None:
        """Say how many items would be deleted."""
        for queue in list(self._queues.values()):
            with suppress(HoldfastError):
                if count := await self._past_time_count(queue):
                    emit("queue.deletions_wait", queue=queue.record.name, count=count, delay=delay)

    def _believe_clock(self) -> None:
        self._spares = False
        self._rules.clear()
        for queue in self._queues.values():
            queue.look_again()

    async def _past_time_count(self, queue: LogicalQueue) -> int:
        record, now_us = queue.record, self.clock.now_us()
        if self._source_queues.get(record.name):
            return sum(
                state.queued
                for share in queue.shares
                for state in share.states.values()
                if record.dead_retention_us and 0 < state.oldest_death_us <= now_us - record.dead_retention_us
            )
        if record.dead_queue:
            return 0
        rules = self._rules_of(queue)
        tallies = [await share.store.tally(p, rules=rules) for share in queue.shares for p in share.states]
        return sum(tally.overdue for tally in tallies)

    def stop(self) -> None:
        """Take no more requests; those that wait are answered with 453 at once."""
        self.closing = True
        for queue in self._queues.values():
            queue.close_requests(ShuttingDown())

    async def close(self) -> None:
        """Answer waiting requests with 453, let running commits finish, close the storages."""
        if not self.closing:
            # Nobody is in a hurry: let what is dying arrive, so that the next start need not resume it.
            carried = asyncio.gather(*(mover.finish() for mover in self._movers.values()))
            with suppress(TimeoutError):
                await asyncio.wait_for(carried, FINISH_TIMEOUT_S)
        for begun in (self._sparing, self._counting):
            if begun is not None:
                begun.cancel()
        self.stop()
        for mover in self._movers.values():
            await mover.close()
        queues = list(self._queues.values())
        self._queues.clear()
        for queue in queues:
            await queue.close()
        for storage in self.storages.values():
            await storage.close()

    async def _add(self, record: QueueRecord) -> LogicalQueue:
        queue = LogicalQueue(
            record,
            self._shares(record),
            clock=self.clock,
            activity=self._activity,
            rules=self._rules_of,
            on_event=self._on_event,
        )
        for share in queue.shares:
            try:
                await share.load()
            except HoldfastError as error:
                share.set_aside(error)
                emit("queue.storage_failed", queue=record.name, storage=share.storage, error=error.message)
        self._queues[record.name] = queue
        self._movers[record.name] = Mover(queue, clock=self.clock, find=self.find)
        return queue

    def _check_configured(self, record: QueueRecord) -> None:
        for one in record.partitions:
            if one.storage not in self.storages:
                raise CannotStart(
                    f"storage is not configured; queue '{record.name}' has partition {one.partition} in storage "
                    f"'{one.storage}', name it in the settings"
                )

    def _shares(self, record: QueueRecord) -> list[StorageShare]:
        self._check_configured(record)
        by_storage: dict[str, list[int]] = {}
        for one in record.partitions:
            by_storage.setdefault(one.storage, []).append(one.partition)
        return [
            StorageShare(
                storage=name,
                partitions=partitions,
                store=self.storages[name].queue_store(record, partitions),
                abilities=self.storages[name].abilities,
                clock=self.clock,
            )
            for name, partitions in by_storage.items()
        ]

    def _index(self) -> None:
        self._rules.clear()
        self._names = sorted(self._queues)
        self._source_queues = {}
        for name in self._names:
            if dead_queue := self._queues[name].record.dead_queue:
                self._source_queues.setdefault(dead_queue, []).append(name)

    async def _forget_old_arrivals(self) -> None:
        """Arrivals are remembered until their source has removed the item; a crash may leave some that are done."""
        pairs = [(dead, source) for dead, sources in self._source_queues.items() for source in sources]
        for target_name, source in (*pairs, *((source, dead) for dead, source in pairs)):  # deaths, and redrives
            target, queue = self._queues.get(target_name), self._queues.get(source)
            if target is None or queue is None:
                continue
            idle = all(share.healthy and not any(s.dying for s in share.states.values()) for share in queue.shares)
            for share in [share for share in target.shares if idle and share.healthy]:
                # What cannot be forgotten now is forgotten at the next start; the others do not wait for it.
                with suppress(HoldfastError):
                    source_ids = await share.store.arrivals(source_queue=source, count_max=ARRIVALS_COUNT_MAX)
                    if source_ids:
                        await target.operate(Forget(share.partitions[0], source_ids))

    # --- changes ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Catalog]:
        """The catalog, for one change at a time. A change that was reported as failed may have happened all the same:
        then the catalog is read anew, so that what is known here is what it says."""
        try:
            async with self._lock:
                yield self.catalog
        except StorageFailed:
            with suppress(HoldfastError):
                await self.refresh()
            raise

    async def put(self, record: QueueRecord) -> None:
        """A queue was created or changed, here or elsewhere."""
        queue = self._queues.get(record.name)
        if queue is not None and queue.record.generation != record.generation:
            await self.drop(queue)
            queue = None
        if queue is None:
            queue = await self._add(record)
            self._index()
            queue.start()
            self._movers[record.name].wake()
        else:
            old_dead_queue = queue.record.dead_queue
            await queue.change(record, self._shares(record))
            self._index()
            self._look_again(old_dead_queue)
        self._look_again(record.name)
        self._look_again(record.dead_queue)

    def _look_again(self, name: str) -> None:
        """By which rules its items die may have changed (a queue became a dead queue, or is one no more), or it may
        have items that nobody here was told of."""
        if (queue := self._queues.get(name)) is not None:
            queue.look_again()

    async def drop(self, queue: LogicalQueue) -> None:
        """A queue was deleted, here or elsewhere."""
        name = queue.record.name
        if self._queues.get(name) is queue:
            del self._queues[name]
            mover = self._movers.pop(name)
            self._index()
            queue.close_requests(QueueMissing(name))
            await mover.close()
            await queue.close(QueueMissing(name))
            self._look_again(queue.record.dead_queue)

    # --- rules of death ---------------------------------------------------------------------------------------

    def _rules_of(self, queue: LogicalQueue) -> DeathRules:
        """In a dead queue nothing dies by itself; elsewhere the dead go to the emptiest healthy partition."""
        record = queue.record
        known = self._rules.get(record.name)
        if known is not None:
            return known
        if self._source_queues.get(record.name):
            retention_us = 0 if self._spares else record.dead_retention_us
            rules = DeathRules(max_attempts=record.max_attempts, immortal=True, retention_us=retention_us)
        elif self._spares and not record.dead_queue:
            rules = DeathRules(immortal=True)
        else:
            rules = DeathRules(max_attempts=record.max_attempts, target=self.target(record.dead_queue))
        if rules.target is None:
            if record.dead_queue and not rules.immortal:
                # Its dead queue is not open here yet: until it is, nothing may die, least of all into nowhere.
                return DeathRules(immortal=True)
            # Where the dead go depends on how full the dead queue's partitions are; the rest only on settings.
            self._rules[record.name] = rules
        return rules

    def target(self, name: str) -> MoveTarget | None:
        """Where in a queue what moves there is put; none when it is not open."""
        queue = self._queues.get(name) if name else None
        if queue is None:
            return None
        shares = [share for share in queue.shares if share.healthy] or list(queue.shares)
        _, partition, storage = min(
            (count, partition, share.storage) for share in shares for partition, count in share.un_leased().items()
        )
        return MoveTarget(
            queue_name=name,
            generation=queue.record.generation,
            partition=partition,
            storage=storage,
            expire_timeout_us=queue.record.expire_timeout_us,
        )

    # --- what queues tell -------------------------------------------------------------------------------------

    def _on_event(self, queue: LogicalQueue, event: QueueEvent) -> None:
        record = queue.record
        match event:
            case Ended():
                self._on_ended(record, event)
            case ItemsSentBack(target=target, sent_back=sent_back):
                emit("item.redriven", queue=record.name, source_queue=target.queue_name, count=len(sent_back.ids))
                if sent_back.moved:
                    self._look_again(target.queue_name)
                else:
                    self._movers[record.name].wake()
            case QueueChange.DYING:
                # A commit whose answer was lost may have marked items as dying: carry them.
                if (mover := self._movers.get(record.name)) is not None:
                    mover.wake()
            case QueueChange.FAILED:
                # A death, or a redrive, whose answer was lost may have happened: who waits where it leads to looks.
                for name in (record.dead_queue, *self._source_queues.get(record.name, ())):
                    self._look_again(name)
            case QueueChange.LOST:
                # Another server deleted the queue or made it anew: read the catalog.
                queue.close_requests(QueueMissing(record.name))
                self._stale.set()

    def _on_ended(self, record: QueueRecord, ended: Ended) -> None:
        """Carry what is dying, wake who waits at the dead queue, and say what was deleted."""
        if ended.dying or ended.moved:
            emit("item.dead", queue=record.name, dead_queue=record.dead_queue, count=ended.dying + ended.moved)
        if ended.dying:
            self._movers[record.name].wake()
        if ended.moved:
            self._look_again(record.dead_queue)
        for item, reason in ended.deleted:
            emit(_DELETED_EVENTS.get(reason, "item.rejected"), queue=record.name, item=item)

    # --- other servers on a shared storage --------------------------------------------------------------------

    @asynccontextmanager
    async def keep_up(self) -> AsyncIterator[None]:
        """While this is open, changes made by other servers arrive here within a second."""
        tasks = [
            asyncio.create_task(self._follow(storage), name="storage hints")
            for storage in self.storages.values()
            if storage.abilities.shared
        ]
        if tasks:
            tasks.append(asyncio.create_task(self._follow_catalog(), name="catalog poll"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, storage: Storage) -> None:
        while True:
            try:
                await storage.watch(self._on_hint)
            except HoldfastError as error:
                emit("catalog.failed", error=error.message)
            await asyncio.sleep(POLL_S)

    def _on_hint(self, name: str) -> None:
        """Another server may have changed a queue."""
        if name in self._queues:
            self._look_again(name)
        else:
            self._stale.set()

    async def _follow_catalog(self) -> None:
        seen = -1
        while True:
            try:
                version = await self.catalog.version()
                if version != seen or self._stale.is_set():
                    self._stale.clear()
                    await self.refresh()
                    seen = version
            except HoldfastError as error:
                emit("catalog.failed", error=error.message)
            self._poll()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stale.wait(), POLL_S)

    def _poll(self) -> None:
        """Queues somebody waits at look again, whatever hints were lost; at the others the next lease does, so that a
        client which waits for less than the time between two polls is served too."""
        for queue in self._queues.values():
            if queue.waiting.leases:
                queue.look_again()
            else:
                queue.hint()

    async def refresh(self) -> None:
        """Bring the catalog's present state here."""
        async with self._lock:
            records = {record.name: record for record in await self.catalog.queues()}
            for queue in list(self._queues.values()):
                record = records.get(queue.record.name)
                if record is None or record.generation != queue.record.generation:
                    await self.drop(queue)
            known = {queue.record.name: queue.record for queue in self._queues.values()}
            for name, record in records.items():
                if known.get(name) != record:
                    await self.put(record)
