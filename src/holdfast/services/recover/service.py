"""A recovery from its first look at the broker to its summary; what is refused is refused before anything is taken."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from holdfast.core.letter_filter import LetterFilter
from holdfast.core.recovery import RunLimits, Summary
from holdfast.core.routes import Mode, RouteTable
from holdfast.errors import RecoveryRefused
from holdfast.ports.clock import Clock
from holdfast.ports.recovery import Backup, DeadLetters, Journal, Preflight
from holdfast.services.recover.notices import Notices
from holdfast.services.recover.run import Recovery

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
