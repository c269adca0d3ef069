"""A recovery from its first look at the broker to its summary; what is refused is refused before anything is taken.

Every recovery leaves a row in the ledger: who, which queue, where, how many, from when to when, and why it ended.

Recoveries that run by themselves inside a server: once at its start, or every so often, one queue one run at a time.

A run that fails is logged and tried again at its next turn; it never ends the server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from msgspec import Struct, json

from holdfast.core.ledger import LedgerAct
from holdfast.core.moments import moment
from holdfast.core.recovery import RunLimits, Summary
from holdfast.core.routes import Mode, RouteTable
from holdfast.core.selection import LetterFilter
from holdfast.errors import HoldfastError, RecoveryRefused
from holdfast.ports.clock import Clock
from holdfast.ports.recovery import Backup, DeadLetters, Journal, Preflight
from holdfast.services.recover.report import Notices
from holdfast.services.recover.run import Recovery
from holdfast.stores.ledger import Ledger
from holdfast.telemetry.events import emit

ACTION = "recovery"
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


#: Beyond its own stop_timeout: what a run may take to give letters back and to write its row.
STOP_TIMEOUT_S = 30.0
NEVER = "neither on_start nor every is set, so it never runs by itself"


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


ASSUMED = " (assumed from the version)"
LINE_END = "\n"


class RecoveryOrder(Struct, frozen=True, kw_only=True):
    """What somebody asks for."""

    dead_queue: str
    table: RouteTable
    limits: RunLimits = RunLimits()
    where: tuple[str, ...] = ()
    dry_run: bool = False
    keep_unroutable: bool = False
    strict: bool = False
    run: str = ""
    journal_file: str = ""  #: where the journal is kept, for people
    backup_file: str = ""  #: the letters of this backup are published; the queue is not touched


class BackupFile(Backup, Protocol):
    """A backup that may have letters of an earlier run."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def held_bytes(self) -> int:
        """How much was in it at the start."""


def new_run() -> str:
    """The name of a run."""
    return uuid.uuid4().hex[:16]


def check(order: RecoveryOrder, findings: Preflight) -> None:
    """Raises RecoveryRefused: nothing was taken."""
    if refused := [str(right) for right in findings.rights if right.given is False and right.verb == "read"]:
        raise RecoveryRefused(f"permission is missing; {'; '.join(refused)}; nothing was taken")
    if findings.cycles:
        raise RecoveryRefused(f"route is cyclic; {'; '.join(findings.cycles)}; nothing was taken")
    if findings.missing and not order.keep_unroutable:
        raise RecoveryRefused(
            f"route leads nowhere; {'; '.join(findings.missing)}; nothing was taken, make it or use --keep-unroutable"
        )
    if order.strict and findings.delivery_limit is not None:
        assumed = f"{ASSUMED}; --management sees whether it has one" if findings.limit_is_assumed else ""
        raise RecoveryRefused(
            f"queue has a delivery limit; '{order.dead_queue}' deletes a letter that comes back "
            f"{findings.delivery_limit} times{assumed}; the cure is {' '.join(findings.cure.split(LINE_END))}"
        )


def preflight_lines(order: RecoveryOrder, findings: Preflight) -> list[str]:
    """What was found, for people."""
    limit = "none" if findings.delivery_limit is None else str(findings.delivery_limit)
    assumed = ASSUMED if findings.limit_is_assumed else ""
    kind = findings.queue_type or "unknown without the management API"
    alarm = findings.alarm or ("none" if findings.has_management else "not asked")
    depth = f"{findings.depth.ready} messages, {findings.depth.consumers} other consumers"
    lines = [f"Broker: {findings.broker}; alarms: {alarm}"]
    if order.backup_file:
        lines.append(f"Backup '{order.backup_file}': its letters are published, no queue is read")
    else:
        lines.append(f"Queue '{order.dead_queue}': {depth}, type {kind}, delivery limit {limit}{assumed}")
    if order.journal_file:
        lines.append(f"Journal: {order.journal_file}")
    if findings.rights:
        lines.append(f"Permissions: {'; '.join(map(str, findings.rights))}")
    if findings.depth.consumers:
        lines.append("Warning: other consumers take letters from this queue as well.")
    if findings.delivery_limit is not None:
        cure, _, command = findings.cure.partition(LINE_END)
        lines.append(f"Warning: letters that come back too often are deleted by the broker; the cure is {cure}")
        lines += [command] if command else []  # to be copied
    barred = [right.what for right in findings.rights if right.given is False and right.verb == "write"]
    lines += [f"Warning: {what} may not be written to; what would go there is kept." for what in barred]
    lines += [f"Warning: {text}" for text in (*findings.missing, *findings.warnings)]
    if order.table.mode is Mode.EXCHANGE or order.table.mode is Mode.ROUTES:
        for address, queues in findings.copies.items():
            if len(queues) > 1:
                lines.append(f"Note: {address} copies to {len(queues)} queues: {', '.join(queues)}")
    return lines


async def recover(
    letters: DeadLetters,
    order: RecoveryOrder,
    *,
    clock: Clock,
    journal: Journal | None = None,
    backup: BackupFile | None = None,
    notices: Notices | None = None,
    on_begin: Callable[[Recovery], None] = lambda recovery: None,
) -> Summary:
    """Raises RecoveryRefused, RecoveryLocked or another BrokerError when it cannot begin."""
    told = notices or Notices()
    told.beginning()
    findings = await letters.inspect(order.table)
    for line in preflight_lines(order, findings):
        told.say(line)
    if backup is not None and backup.held_bytes and not order.dry_run:
        told.say(
            f"Note: backup '{backup.path}' has letters already ({backup.held_bytes} bytes); those of this run are "
            "added behind them, and --from-backup will publish all"
        )
    check(order, findings)
    recovery = Recovery(
        letters,
        dead_queue=order.dead_queue,
        run=order.run or new_run(),
        table=order.table,
        clock=clock,
        limits=order.limits,
        journal=journal,
        backup=backup,
        where=LetterFilter(order.where),
        dry_run=order.dry_run,
        notices=told,
    )
    on_begin(recovery)
    return await recovery.run(findings)
