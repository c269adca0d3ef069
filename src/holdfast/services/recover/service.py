"""A recovery from its first look at the broker to its summary and its row in the ledger, asked for or by a schedule;
what is refused is refused before anything is taken.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct, json
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import clip
from holdfast.core.moments import moment
from holdfast.core.recovery import RecoveryOrder, RunEnd, Summary, as_utf8, progress_of
from holdfast.core.requests.declare import view
from holdfast.core.requests.recover import RecoveryOptions, RecoveryRow, RecoveryState, RecoverySummary, RecoveryView
from holdfast.core.routes import FILE_BYTES_MAX, RouteTable, parse_routes
from holdfast.errors import CannotStart, HoldfastError
from holdfast.ports.broker import RecoveryBroker
from holdfast.ports.clock import Clock
from holdfast.services.recover.limits import LimitedRun, wait
from holdfast.services.recover.report import Notices, check, preflight_lines
from holdfast.services.recover.run import RecoveryRun
from holdfast.stores.files import BackupDrain, FileBackup
from holdfast.stores.journal import FileJournal
from holdfast.stores.vault import OpenVault
from holdfast.telemetry.events import emit

ACTION = "recovery"
#: What the ledger keeps of a summary, as far as it is not 0.
RECORDED = (
    "dry_run", "found", "recovered", "failed", "skipped", "filtered", "possible_duplicates", "remaining"
)  # fmt: skip
#: Beyond its own stop_timeout: what a run may take to give letters back and to write its row.
STOP_TIMEOUT_S = 30.0
WHY_CHARACTERS_MAX = 1_000
NEVER = "neither on_start nor every is set, so it never runs by itself"
OnBegin = Callable[[LimitedRun], None]


async def recover(
    broker: RecoveryBroker,
    order: RecoveryOrder,
    *,
    clock: Clock,
    journal: FileJournal | None = None,
    backup: FileBackup | None = None,
    notices: Notices | None = None,
    on_begin: OnBegin = lambda run: None,
) -> Summary:
    """From the queue, or from the backup that was named; the journal is told how it ended. Raises RecoveryRefused,
    RecoveryLocked or another BrokerError when it cannot begin, CannotStart when there is no such file."""
    notices = notices or Notices()
    notices.beginning()
    preflight = await broker.inspector.preflight(order.table)
    for line in preflight_lines(order, preflight):
        notices.say(line)
    if backup is not None and backup.found_bytes and not order.dry_run:
        notices.say(
            f"Note: backup '{backup.path}' has letters already ({backup.found_bytes} bytes); those of this run are "
            "added behind them, and --from-backup will publish all"
        )
    check(order, preflight)
    file: BackupDrain | None = None
    if order.from_backup:
        file = BackupDrain(Path(order.from_backup), bytes_max=order.limits.window_bytes_max)
        broker = replace(broker, drain=file)
    run = RecoveryRun(broker, order, preflight, clock=clock, journal=journal, backup=backup, notices=notices)
    on_begin(run)
    summary = await run.run()
    if file is not None:
        summary.failure = summary.failure or file.failure
    if journal is not None:
        journal.end = how_it_ended(summary, has_broker=not broker.publisher.trouble, is_lost=broker.drain.is_lost)
    return summary


def read_routes(path: Path) -> RouteTable:
    """A routes file. Raises CannotStart when it cannot be read, Invalid when it says what cannot be."""
    try:
        data = path.read_bytes() if path.stat().st_size <= FILE_BYTES_MAX else None
    except OSError as error:
        raise CannotStart(f"routes file cannot be read; '{path}': {error.strerror or error}") from error
    if data is None:
        raise CannotStart(f"routes file is invalid; '{path}' has more than {FILE_BYTES_MAX} bytes")
    return parse_routes(data, source=str(path))


def new_run() -> str:
    """The name of a run."""
    return uuid.uuid4().hex[:16]


def how_it_ended(summary: Summary, *, has_broker: bool, is_lost: bool) -> RunEnd:
    """What a killed run left ends when nothing of it can be in the queue any more; in any doubt it may be."""
    if is_lost:
        return RunEnd.LOST
    is_all_seen = summary.recovered + summary.kept >= summary.found and not summary.unseen
    if not is_all_seen or summary.failure or not has_broker or (summary.remaining or 0) > summary.kept:
        # What is left may be letters whose acks were lost with a connection, also when the run went on with another.
        return RunEnd.LOST if summary.interruptions else RunEnd.PARTLY
    return RunEnd.KEPT if summary.remaining or summary.kept else RunEnd.WHOLE


async def recorded(
    order: RecoveryOrder, run: Callable[[], Awaitable[Summary]], *, vault: OpenVault, clock: Clock
) -> Summary:
    """Run it and record it, also when it raises. A row that cannot be written does not undo what was recovered: it is
    logged, and the summary says so."""
    began_us = clock.now_us()
    summary: Summary | None = None
    reason, outcome = "ended by an error of its own", RecoveryState.FAILED
    try:
        summary = await run()
        reason, outcome = (
            summary.stopped_by.value,
            RecoveryState.DONE if summary.is_complete else RecoveryState.PARTLY_DONE,
        )
        return summary
    except HoldfastError as error:
        reason = error.message
        raise
    finally:
        try:
            counts = summary or Summary()
            row = replace(row_of(order, counts, began_us=began_us), state=outcome, ended_at=moment(clock.now_us()))
            if summary is None:
                row = replace(row, stopped_by="", why=clip(reason, WHY_CHARACTERS_MAX))
            detail = {"run": order.run, "began_at": row.began_at, "ended_at": row.ended_at}
            detail |= {name: count for name in RECORDED if (count := getattr(counts, name)) != 0}
            text = json.encode(detail).decode()
            act = LedgerAct(actor=order.by, action=ACTION, origin=order.origin, reason=reason, detail=text)
            async with vault() as opened:
                await opened.recoveries.keep(view_of(order, row, counts), act)
        except HoldfastError as error:
            emit("recovery.unrecorded", queue=order.dead_queue, error=error.message)
            if summary is not None:
                summary.notes.append(f"this run is not in the ledger; {error.message}")


def row_of(order: RecoveryOrder, summary: Summary, *, began_us: int) -> RecoveryRow:
    """A run in a line, as long as it runs."""
    done, expected = progress_of(summary, order.limits.limit)
    return view(
        RecoveryRow,
        summary,
        queue=as_utf8(order.dead_queue),
        run=order.run,
        by=as_utf8(order.by),
        dry_run=order.dry_run,
        state=RecoveryState.RUNNING,
        began_at=moment(began_us),
        ended_at=None,
        stopped_by=summary.stopped_by.value,
        why=clip(summary.failure, WHY_CHARACTERS_MAX),
        done=done,
        expected=expected,
    )


def view_of(order: RecoveryOrder, row: RecoveryRow, summary: Summary, said: Sequence[str] = ()) -> RecoveryView:
    """All that is told of a run."""
    return RecoveryView(
        recovery=row, options=RecoveryOptions.of(order), summary=RecoverySummary.of(summary), said=list(said)
    )


class ScheduledRecovery(Struct, frozen=True, kw_only=True):
    """One dead-letter queue and when it is recovered. `run` tells `on_begin` of each run that begins."""

    dead_queue: str
    run: Callable[[OnBegin], Awaitable[Summary]]
    on_start: bool = False
    every_s: float = 0.0  #: from the end of a run to the next; 0: never again


async def end_runs(tasks: Collection[asyncio.Task[None]], running: Collection[LimitedRun]) -> None:
    """Stop runs, and wait for the tasks that they are in: what is published is settled, and the rest given back. What
    takes too long ends at once."""
    for run in running:
        run.stop()
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
    if late:
        for run in running:
            run.abandon()
        _, late = await asyncio.wait(late, timeout=STOP_TIMEOUT_S)
    for task in late:  # a run that does not begin, or hangs: its letters go back with its connection
        task.cancel()
    if late:
        await asyncio.wait(late)


class RecoverySchedule:
    """Recoveries that run by themselves inside a server, until it is stopped: once at its start, or every so often, one
    queue one run at a time. A run that fails is logged and tried again at its next turn; it never ends the server."""

    def __init__(self, recoveries: Sequence[ScheduledRecovery]) -> None:
        self._kept = [scheduled for scheduled in recoveries if scheduled.on_start or scheduled.every_s]
        self._idle = [scheduled for scheduled in recoveries if scheduled not in self._kept]
        self._stopped = asyncio.Event()
        self._running: set[LimitedRun] = set()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep them while the block runs; at its end runs are stopped cleanly, and at once if that takes too long."""
        for scheduled in self._idle:  # whoever wrote it down may think that it runs
            emit("recovery.waits", queue=scheduled.dead_queue, error=NEVER)
        tasks = [
            asyncio.create_task(self._keep(scheduled), name=f"recovery of {scheduled.dead_queue}")
            for scheduled in self._kept
        ]
        try:
            yield
        finally:
            await self._end(tasks)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._stopped.set()
        await end_runs(tasks, self._running)

    async def _keep(self, scheduled: ScheduledRecovery) -> None:
        if scheduled.on_start:
            await self.run_once(scheduled)
        while scheduled.every_s:
            await wait(self._stopped, scheduled.every_s)
            if self._stopped.is_set():
                return
            await self.run_once(scheduled)

    async def run_once(self, scheduled: ScheduledRecovery) -> Summary | None:
        """One run; none when it failed, which is logged."""
        begun: list[LimitedRun] = []

        def on_begin(run: LimitedRun) -> None:
            begun.append(run)
            self._running.add(run)
            if self._stopped.is_set():
                run.stop()

        try:
            return await scheduled.run(on_begin)
        except HoldfastError as error:
            emit("recovery.failed", queue=scheduled.dead_queue, error=error.message)
        except Exception as bug:  # noqa: BLE001 - a bug here must not take the server along
            emit("recovery.failed", queue=scheduled.dead_queue, error=repr(bug), traceback=bug)
        finally:
            self._running.difference_update(begun)
        return None
