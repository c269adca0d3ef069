"""A recovery from its first look at the broker to its summary and its row in the ledger; what is refused is refused
before anything is taken.

Also those that run by themselves inside a server: once at its start, or every so often, one queue one run at a time. A
run that fails is logged and tried again at its next turn; it never ends the server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from msgspec import Struct, json
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.moments import moment
from holdfast.core.recovery import RecoveryOrder, RunEnd, Summary
from holdfast.errors import HoldfastError
from holdfast.ports.broker import RecoveryBroker
from holdfast.ports.clock import Clock
from holdfast.services.recover.report import Notices, check, preflight_lines
from holdfast.services.recover.run import RecoveryRun
from holdfast.services.recover.source import BackupSource, DeadQueueSource, LetterSource
from holdfast.stores.files import FileBackup, read_backup
from holdfast.stores.journal import FileJournal, JournalPaths
from holdfast.stores.ledger import Ledger
from holdfast.telemetry.events import emit

ACTION = "recovery"
#: Beyond its own stop_timeout: what a run may take to give letters back and to write its row.
STOP_TIMEOUT_S = 30.0
NEVER = "neither on_start nor every is set, so it never runs by itself"
OpenLedger = Callable[[], AbstractAsyncContextManager[Ledger]]


class RunRecord(Struct, frozen=True, kw_only=True):
    """What is known of a run before it begins. `source` is the broker or the storage, without any login."""

    run: str
    by: str
    dead_queue: str
    source: str


class _Detail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    run: str
    began_at: datetime
    ended_at: datetime
    dry_run: bool = False
    found: int = 0
    recovered: int = 0
    failed: int = 0
    skipped: int = 0
    filtered: int = 0
    possible_duplicates: int = 0
    remaining: int | None = 0


async def recorded(
    entry: RunRecord, run: Callable[[], Awaitable[Summary]], *, ledger: OpenLedger, clock: Clock
) -> Summary:
    """Run it and record it, also when it raises. A row that cannot be written does not undo what was recovered: it is
    logged, and the summary says so."""
    began_us = clock.now_us()
    summary: Summary | None = None
    reason, outcome = "ended by an error of its own", "failed"
    try:
        summary = await run()
        reason, outcome = summary.stopped_by.value, "done" if summary.is_complete else "partly_done"
        return summary
    except HoldfastError as error:
        reason = error.message
        raise
    finally:
        try:
            async with ledger() as opened:
                await record_run(
                    opened, entry, summary, reason=reason, outcome=outcome, began_us=began_us, ended_us=clock.now_us()
                )
        except HoldfastError as error:
            emit("recovery.unrecorded", queue=entry.dead_queue, error=error.message)
            if summary is not None:
                summary.notes.append(f"this run is not in the ledger; {error.message}")


async def record_run(
    ledger: Ledger,
    entry: RunRecord,
    summary: Summary | None,
    *,
    reason: str,
    outcome: str,
    began_us: int,
    ended_us: int,
) -> None:
    """Append the row of a run. Raises what the ledger raises; then there is no row."""
    told = summary or Summary()
    detail = _Detail(
        run=entry.run,
        began_at=moment(began_us),
        ended_at=moment(ended_us),
        dry_run=told.dry_run,
        found=told.found,
        recovered=told.recovered,
        failed=told.failed,
        skipped=told.skipped,
        filtered=told.filtered,
        possible_duplicates=told.possible_duplicates,
        remaining=told.remaining,
    )
    act = LedgerAct(
        actor=entry.by, action=ACTION, origin=entry.source, reason=reason, detail=json.encode(detail).decode()
    )
    await ledger.append(act, outcome=outcome, queue=entry.dead_queue, count=told.recovered)


class StoppableRun(Protocol):
    """A run that can be asked to end."""

    def stop(self) -> None:
        """Nothing new; what is under way is finished."""

    def abandon(self) -> None:
        """End now, still without loss."""


OnBegin = Callable[[StoppableRun], None]


class ScheduledRecovery(Struct, frozen=True, kw_only=True):
    """One dead-letter queue and when it is recovered. `run` tells `on_begin` of each run that begins."""

    dead_queue: str
    run: Callable[[OnBegin], Awaitable[Summary]]
    on_start: bool = False
    every_s: float = 0.0  #: from the end of a run to the next; 0: never again


class RecoverySchedule:
    """Keeps duties until it is stopped."""

    def __init__(self, duties: Sequence[ScheduledRecovery]) -> None:
        self._duties = [duty for duty in duties if duty.on_start or duty.every_s]
        self._idle = [duty for duty in duties if duty not in self._duties]
        self._stopped = asyncio.Event()
        self._running: set[StoppableRun] = set()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep them while the block runs; at its end runs are stopped cleanly, and at once if that takes too long."""
        for duty in self._idle:  # whoever wrote it down may think that it runs
            emit("recovery.waits", queue=duty.dead_queue, error=NEVER)
        tasks = [asyncio.create_task(self._keep(duty), name=f"recovery of {duty.dead_queue}") for duty in self._duties]
        try:
            yield
        finally:
            await self._end(tasks)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._stopped.set()
        for recovery in self._running:
            recovery.stop()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        if late:
            for recovery in self._running:
                recovery.abandon()
            _, late = await asyncio.wait(late, timeout=STOP_TIMEOUT_S)
        for task in late:  # a run that does not begin, or hangs: its letters go back with its connection
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _keep(self, duty: ScheduledRecovery) -> None:
        if duty.on_start:
            await self.run_once(duty)
        while duty.every_s and not await self._stops_within(duty.every_s):
            await self.run_once(duty)

    async def run_once(self, duty: ScheduledRecovery) -> Summary | None:
        """One run; none when it failed, which is logged."""
        begun: list[StoppableRun] = []

        def on_begin(recovery: StoppableRun) -> None:
            begun.append(recovery)
            self._running.add(recovery)
            if self._stopped.is_set():
                recovery.stop()

        try:
            return await duty.run(on_begin)
        except HoldfastError as error:
            emit("recovery.failed", queue=duty.dead_queue, error=error.message)
        except Exception as bug:  # noqa: BLE001 - a bug here must not take the server along
            emit("recovery.failed", queue=duty.dead_queue, error=repr(bug), traceback=bug)
        finally:
            self._running.difference_update(begun)
        return None

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


class OpenJournal:
    """The journals of one run while it runs; it says with `ended` how it leaves its queue."""

    def __init__(self, journal: FileJournal | None) -> None:
        self.journal = journal
        self.end = RunEnd.BROKEN

    def ended(self, summary: Summary, broker: RecoveryBroker) -> Summary:
        """It came to its end."""
        self.end = how_it_ended(summary, has_broker=not broker.has_trouble, is_lost=broker.drain.is_lost)
        return summary


@contextmanager
def kept_journal(places: JournalPaths | None, order: RecoveryOrder) -> Iterator[OpenJournal]:
    """None: a run that takes nothing away. Raises CannotStart."""
    if places is None:
        yield OpenJournal(None)
        return
    journal = places.open(run=order.run)
    keeping = OpenJournal(journal)
    try:
        yield keeping
    finally:
        journal.close(keeping.end)


def how_it_ended(summary: Summary, *, has_broker: bool, is_lost: bool) -> RunEnd:
    """What a killed run left ends when nothing of it can be in the queue any more; in any doubt it may be."""
    if is_lost:
        return RunEnd.LOST
    is_all_seen = summary.recovered + summary.kept >= summary.found and not summary.unseen
    if not is_all_seen or summary.failure or not has_broker or (summary.remaining or 0) > summary.kept:
        # What is left may be letters whose acks were lost with a connection, also when the run went on with another.
        return RunEnd.LOST if summary.interruptions else RunEnd.PARTLY
    return RunEnd.KEPT if summary.remaining or summary.kept else RunEnd.WHOLE


def new_run() -> str:
    """The name of a run."""
    return uuid.uuid4().hex[:16]


async def recover(
    broker: RecoveryBroker,
    order: RecoveryOrder,
    *,
    clock: Clock,
    journal: FileJournal | None = None,
    backup: FileBackup | None = None,
    notices: Notices | None = None,
    on_begin: Callable[[RecoveryRun], None] = lambda run: None,
) -> Summary:
    """From the queue, or from the backup that was named. Raises RecoveryRefused, RecoveryLocked or another BrokerError
    when it cannot begin, CannotStart when there is no such file."""
    told = notices or Notices()
    told.beginning()
    preflight = await broker.questions.preflight(order.table)
    for line in preflight_lines(order, preflight):
        told.say(line)
    if backup is not None and backup.held_bytes and not order.dry_run:
        told.say(
            f"Note: backup '{backup.path}' has letters already ({backup.held_bytes} bytes); those of this run are "
            "added behind them, and --from-backup will publish all"
        )
    check(order, preflight)
    source: LetterSource = DeadQueueSource(broker, preflight)
    if order.backup_file:
        source = BackupSource(broker, read_backup(Path(order.backup_file)), order.limits)
    order = replace(order, run=order.run or new_run())
    run = RecoveryRun(source, order, preflight, clock=clock, journal=journal, backup=backup, notices=told)
    on_begin(run)
    return await run.run()
