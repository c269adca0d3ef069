"""A queue's file: one writing connection, one transaction per batch, and a reading connection beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import apsw

from holdfast.core.item import Item, QueueRecord, listed_item
from holdfast.core.moments import NEVER_US, format_duration
from holdfast.core.requests.queue import PartitionStats
from holdfast.engines.sqlite.connection import (
    BESIDE_PAGES_COUNT,
    SQL,
    Checkpoints,
    fetch_all,
    fetch_one,
    open_reader,
    open_writer,
    size_of,
    transaction,
    translated,
    translation,
)
from holdfast.engines.sqlite.operations import Operations
from holdfast.engines.sqlite.partition import Moments, SqlitePartition, read_partitions
from holdfast.errors import StorageFailed
from holdfast.ports.queue_store import Committed, DeathRules, DyingItem, LedgerEntry, Operation
from holdfast.proof import crash_point

if TYPE_CHECKING:
    from holdfast.engines.sqlite.storage import SqliteStorage


T = TypeVar("T")


class SqliteQueueStore:
    """The partitions of one queue in one file."""

    def __init__(self, storage: SqliteStorage, record: QueueRecord, partitions: Sequence[int], path: Path) -> None:
        self._storage = storage
        self._name = record.name
        self._generation = record.generation
        self._numbers = tuple(partitions)
        self.path = path
        self.last_use = 0
        self._writer: apsw.Connection | None = None
        self._operations: Operations | None = None
        self._checkpoints: Checkpoints | None = None
        self._reader: apsw.Connection | None = None
        self._partitions: dict[int, SqlitePartition] = {}
        self._moments: Moments
        self._write_lock = asyncio.Lock()
        self._read_lock = asyncio.Lock()

    # --- writing ----------------------------------------------------------------------------------------------

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        if inline and self.can_commit_inline():
            return self._commit(operations, alone=True)
        async with self._write_lock:
            await self._storage.make_room(self)
            return await self._in_thread(lambda: self._commit(operations))

    def can_commit_inline(self) -> bool:
        return self._writer is not None and not self._write_lock.locked()

    async def load(self) -> Committed:
        async with self._write_lock:
            await self._storage.make_room(self)
            return await self._in_thread(self._load)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._storage.threads, work)

    def _commit(self, operations: Sequence[Operation], *, alone: bool = False) -> Committed:
        if self._writer is None:
            self._open()
        writer, work, checkpoints = self._writer, self._operations, self._checkpoints
        assert writer and work and checkpoints  # noqa: S101, PT018 - _open has set all of them
        now_us = self._storage.clock.now_us()
        self.last_use = next(self._storage.uses)
        try:
            # Written out instead of `transaction`: this is the hot path, and a context manager costs as much as a row.
            writer.execute("BEGIN IMMEDIATE")
            results = work.carry_out(operations, now_us)
            touched = [self._partitions[number] for number in {o.partition for o in operations}]
            for partition in touched:
                if (row := partition.reserve()) is not None:
                    writer.execute(SQL["update_partition"], row)
            crash_point("sqlite.before_commit")
            writer.execute("COMMIT")
        except BaseException as error:
            # The counts in memory may be ahead of the file: read them anew before the next commit. Letting go of the
            # connection rolls back what it had begun.
            self._let_go_of_writer()
            if isinstance(error, apsw.Error | OSError):
                raise translation(error, self.path) from error
            raise
        crash_point("sqlite.after_commit")
        if checkpoints.pages_count >= BESIDE_PAGES_COUNT:
            checkpoints.after_commit(alone=alone)
        states = {p.number: self._moments.state(p) for p in touched}
        return Committed(results, states, now_us, self._storage.clock.now_us() - now_us)

    def _load(self) -> Committed:
        self.last_use = next(self._storage.uses)
        self._let_go_of_writer()
        self._open()
        states = {number: self._moments.state(self._partitions[number]) for number in self._numbers}
        return Committed([], states, self._storage.clock.now_us())

    def _open(self) -> None:
        size = size_of(self.path)  # 0 also while somebody copies a backup to its place
        if not size and self._storage.catalog().was_made(self._generation):
            what = "missing" if size is None else "empty"
            raise StorageFailed(
                f"storage failed; the file {self.path.name} of queue '{self._name}' is {what}, restore it from a "
                "backup or delete the queue"
            )
        writer = open_writer(self.path, kind="queue", create=size is None)
        with translated(self.path):
            self._partitions = read_partitions(writer, self._generation)
            missing = [(number,) for number in self._numbers if number not in self._partitions]
            if missing:
                with transaction(writer):
                    writer.executemany(SQL["insert_partition"], missing)
                self._partitions = read_partitions(writer, self._generation)
            self._moments = Moments(writer)
        self._storage.catalog().note_made(self._generation)
        self._writer = writer
        self._checkpoints = Checkpoints(self.path, writer, self._storage.checkpointer)
        self._operations = Operations(writer, self._partitions, self._moments)

    def _let_go_of_writer(self) -> None:
        writer, self._writer, self._operations = self._writer, None, None
        if writer is not None:
            with translated(self.path):
                if self._checkpoints is not None:
                    self._checkpoints.close()
                writer.close()

    # --- reading ----------------------------------------------------------------------------------------------

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        def run() -> T:
            if size_of(self.path) is None:
                raise StorageFailed(f"storage failed; the file {self.path.name} is missing")
            with translated(self.path):
                if self._reader is None:
                    self._reader = open_reader(self.path)
                try:
                    return work(self._reader)
                except apsw.Error:
                    self._let_go_of_reader()
                    raise

        async with self._read_lock:
            return await self._in_thread(run)

    def _let_go_of_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _place(self, partition: int) -> SqlitePartition:
        """A partition that has been loaded; raises StorageFailed: a file that never opened has shown none."""
        place = self._partitions.get(partition)
        if place is None:
            raise StorageFailed(f"storage failed; {self.path.name}: partition {partition} is not loaded, try again")
        return place

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        place = self._place(partition)
        rows = await self._read(lambda db: fetch_all(db, "select_dying", (place.first, place.last, count_max)))
        return [DyingItem.from_row(place.id_of(row[0]), self._name, row[1:]) for row in rows]

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        rows = await self._read(lambda db: fetch_all(db, "select_arrivals", (source_queue, count_max)))
        return [row[0] for row in rows]

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        place = self._place(partition)
        first = place.first_from(pivot)
        statement = "list_scheduled" if scheduled else "list_items"
        rows = await self._read(lambda db: fetch_all(db, statement, (first, place.last, count_max)))
        return [listed_item(place.id_of(row[0]), row[1:]) for row in rows]

    async def tally(self, partition: int, *, rules: DeathRules) -> PartitionStats:
        place, now_us = self._place(partition), self._storage.clock.now_us()
        span = (place.first, place.last)
        ceiling = rules.max_attempts or NEVER_US

        def read(db: apsw.Connection) -> PartitionStats:
            db.execute("BEGIN")
            try:
                queued, queued_age_us, overdue = fetch_one(db, "tally_ready", (*span, now_us, ceiling))
                leased, leased_age_us, lease_age_us = fetch_one(db, "tally_leases", (*span, now_us))
                waiting, dying = fetch_one(db, "tally_others", span)
            finally:
                db.execute("COMMIT")
            total = queued + leased
            return PartitionStats(
                partition=partition,
                total=total,
                total_leased=leased,
                scheduled=waiting,
                dying=dying,
                overdue=overdue if rules.immortal else 0,
                average_age=format_duration(max(0, (queued_age_us + leased_age_us) // max(total, 1))),
                average_leased_age=format_duration(max(0, lease_age_us // max(leased, 1))),
            )

        return await self._read(read)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        rows = await self._read(lambda db: fetch_all(db, "select_ledger", (after, count_max)))
        return [LedgerEntry(at_us, action, self._name, *story) for at_us, action, *story in rows]

    # --- letting go -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Open, and nobody uses it at this moment."""
        return self._writer is not None and not self._write_lock.locked() and not self._read_lock.locked()

    async def close(self) -> None:
        async with self._write_lock, self._read_lock:
            self._storage.closed(self)
            await self._in_thread(self._close_both)

    def _close_both(self) -> None:
        # The reader first: the last connection of a file folds the write-ahead log into it.
        self._let_go_of_reader()
        self._write_counts()
        self._let_go_of_writer()

    def _write_counts(self) -> None:
        """The next opening need not count. Where it cannot be written, it will count."""
        stale = [partition for partition in self._partitions.values() if not partition.exact]
        if self._writer is None or not stale:
            return
        for partition in stale:
            partition.exact = True
        with suppress(StorageFailed), translated(self.path), transaction(self._writer):
            self._writer.executemany(SQL["update_partition"], [partition.row() for partition in stale])
