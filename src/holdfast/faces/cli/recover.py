"""`holdfast recover`: every letter out of a dead-letter queue, published first and acked second."""

from __future__ import annotations

import errno
import logging
import os
import re
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from holdfast.core.death import RedriveStamp
from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.core.recovery import RunLimits, Summary
from holdfast.core.routes import FILE_BYTES_MAX, Mode, RouteTable, parse_place, parse_routes
from holdfast.core.selection import LetterFilter
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.cli import recover_options as options
from holdfast.faces.cli.app import app
from holdfast.faces.cli.command import CONFIG_PARAMETER, JSON_PARAMETER, command
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode
from holdfast.faces.cli.progress import bar
from holdfast.faces.cli.recover_ending import finish
from holdfast.faces.cli.recover_place import find_place
from holdfast.faces.cli.recover_report import open_report
from holdfast.faces.cli.recover_signals import Begin, let_go_at_once, signals
from holdfast.ports.recovery import DeadLetters
from holdfast.services.recover.report import Notices
from holdfast.services.recover.run import Recovery
from holdfast.services.recover.service import RecoveryOrder, RunRecord, new_run, recorded, recover
from holdfast.services.recover.source import BackupRun, publish_backup

if TYPE_CHECKING:
    from holdfast.wiring import JournalPaths, OpenJournal

TIMEOUTS = ("total", "idle", "empty", "stall", "hold", "stop")
BROKERS = frozenset(("amqp", "amqps"))
RATE_PER_S_MAX = 1e9
EXAMPLE = """holdfast recover imageviewer.dlq --routes routes.toml --dry-run
holdfast recover amqp://localhost q.orders.dlq --to-source
holdfast recover sqlite:///work orders-dead"""


@command(app, "recover", example=EXAMPLE, shared=(CONFIG_PARAMETER, JSON_PARAMETER))
async def recover_command(
    session: CommandContext,
    url: options.Url = "",
    dead_queue: options.DeadQueue = "",
    routes: options.Routes = None,
    to_source: options.ToSource = False,
    to_exchange: options.ToExchange = False,
    through_wait: options.ThroughWait = False,
    to: options.To = None,
    where: options.Where = None,
    limit: options.Limit = None,
    window: options.Window = 4_000,
    window_bytes: options.WindowBytes = 64 * 2**20,
    one_at_a_time: options.OneAtATime = False,
    rate: options.Rate = None,
    dry_run: options.DryRun = False,
    keep_unroutable: options.KeepUnroutable = False,
    strict: options.Strict = False,
    total_timeout: options.TotalTimeout = "30m",
    idle_timeout: options.IdleTimeout = "10s",
    empty_timeout: options.EmptyTimeout = "5s",
    stall_timeout: options.StallTimeout = "30s",
    hold_timeout: options.HoldTimeout = "20m",
    stop_timeout: options.StopTimeout = "10s",
    journal: options.Journal = None,
    no_journal: options.NoJournal = False,
    backup: options.Backup = None,
    from_backup: options.FromBackup = None,
    report: options.ReportOption = None,
    by: options.By = None,
    management: options.Management = None,
) -> ExitCode:
    """Send every letter of a dead-letter queue back to where it belongs. None is lost, whatever fails.

    A letter is acked only after the broker has confirmed its copy and has not returned it. What cannot go is kept:
    held, and given back at the end. Ctrl-C stops cleanly. Exit codes: 0 all recovered (of a dry run: all would be),
    3 some kept or remaining, 1 failed, 2 bad usage, 130 interrupted before it began.
    """
    # Everything worth a warning is said by the run itself, in sentences.
    logging.getLogger("holdfast").handlers = [logging.NullHandler()]
    limits = RunLimits(
        limit=limit,
        window_count_max=1 if one_at_a_time else window,
        window_bytes_max=window_bytes,
        rate_per_s=_rate(rate),
        **_timeouts(total_timeout, idle_timeout, empty_timeout, stall_timeout, hold_timeout, stop_timeout),
    )
    url, dead_queue = find_place(session, url, dead_queue, needs_queue=from_backup is None)
    _check(where or [], from_backup, backup, journal, strict, no_journal=no_journal)
    if urlsplit(url).scheme not in BROKERS:
        from holdfast.faces.cli.recover_embedded import recover_embedded, refuse

        about_routes = (routes, to, to_exchange, through_wait, keep_unroutable, strict)
        refuse((*about_routes, journal, no_journal, backup, from_backup, management), where or ())
        return await recover_embedded(
            session, url, dead_queue, limits=limits, where=where or (), dry_run=dry_run, report=report, by=by
        )
    table = _table(routes, to_source=to_source, to_exchange=to_exchange, through_wait=through_wait, to=to)
    places = None if dry_run or from_backup else _journals(session, url, dead_queue, journal, keeps=not no_journal)
    order = RecoveryOrder(
        dead_queue=dead_queue,
        table=table,
        limits=limits,
        where=tuple(where or ()),
        dry_run=dry_run,
        keep_unroutable=keep_unroutable,
        strict=strict,
        run=new_run(),
        journal_file=str((places and places.own) or ""),
        backup_file=str(from_backup or ""),
    )
    run = _Run(session, url, order, by=by, management=management)
    with open_report(report) as written, run.journal(places) as kept:
        with bar(session.as_json, limits.limit) as ways:
            summary = await run.recorded(Notices(*ways), kept=kept, backup=backup, from_backup=from_backup)
        return finish(session, summary, written)


class _Run:
    """One run against a broker."""

    def __init__(
        self, session: CommandContext, url: str, order: RecoveryOrder, *, by: str | None, management: str | None
    ) -> None:
        from holdfast.wiring import somebody

        self._session = session
        self._url = url
        self._order = order
        self._by = by or somebody()
        self._redrive = RedriveStamp(run=order.run, by=self._by, dead_queue=order.dead_queue)
        known = session.settings.management
        self._management = management or (known.reveal() if known else None)

    def journal(self, places: JournalPaths | None) -> AbstractContextManager[OpenJournal]:
        """It ends last: until the summary is said, it has what only this run knows. Raises CannotStart."""
        from holdfast.wiring import kept_journal

        return kept_journal(places, self._url, self._order)

    async def recorded(
        self, notices: Notices, *, kept: OpenJournal, backup: Path | None, from_backup: Path | None
    ) -> Summary:
        """From the queue or from a backup, with a row in the ledger."""
        from holdfast.wiring import SystemClock, ledger_of, source_of

        name = self._order.dead_queue
        entry = RunRecord(run=self._order.run, by=self._by, dead_queue=name, source=source_of(self._url, name))

        async def run() -> Summary:
            with signals(notices) as begin:
                if from_backup is not None:
                    return await self.publish(from_backup, notices, begin)
                return await self.recover(notices, begin, kept=kept, backup=backup)

        return await recorded(entry, run, ledger=ledger_of(self._session.settings), clock=SystemClock())

    async def recover(self, notices: Notices, begin: Begin, *, kept: OpenJournal, backup: Path | None) -> Summary:
        """From the queue."""
        from holdfast.wiring import SystemClock, open_backup

        def on_begin(run: Recovery) -> None:
            begin(run, lambda: run.flying_count)

        clock = SystemClock()
        order = self._order
        async with AsyncExitStack() as stack:
            letters = await stack.enter_async_context(self._open())
            await stack.enter_async_context(let_go_at_once(letters))
            written = stack.enter_context(open_backup(backup)) if backup is not None else None
            summary = await recover(
                letters, order, clock=clock, journal=kept.journal, backup=written, notices=notices, on_begin=on_begin
            )
            return kept.ended(summary, letters)

    async def publish(self, backup: Path, notices: Notices, begin: Begin) -> Summary:
        """From a backup."""
        from holdfast.wiring import SystemClock, backup_letters

        def on_begin(run: BackupRun) -> None:
            notices.has_begun = True
            notices.nobody_may_listen()
            begin(run, lambda: run.flying_count)

        async with self._open() as letters, let_go_at_once(letters):
            return await publish_backup(
                letters,
                backup_letters(backup),
                self._order,
                clock=SystemClock(),
                notices=notices,
                on_begin=on_begin,
            )

    def _open(self) -> AbstractAsyncContextManager[DeadLetters]:
        from holdfast.wiring import open_dead_letters

        return open_dead_letters(
            self._url,
            self._redrive,
            self._order.table,
            management=self._management,
            window_bytes_max=self._order.limits.window_bytes_max,
        )


def _table(
    routes: Path | None, *, to_source: bool, to_exchange: bool, through_wait: bool, to: str | None
) -> RouteTable:
    ways = [to_source, to_exchange, through_wait, to is not None]
    if sum(ways) > 1:
        raise BadUsage("only one of --to-source, --to-exchange, --through-wait and --to can be given")
    try:
        table = parse_routes(_bytes(routes), source=str(routes)) if routes is not None else RouteTable()
        if to is not None:
            return replace(table, mode=Mode.PLACE, place=parse_place(to))
    except Invalid as error:
        raise BadUsage(error.message) from error
    mode = Mode.SOURCE if to_source else Mode.EXCHANGE if to_exchange else Mode.WAIT if through_wait else Mode.ROUTES
    return replace(table, mode=mode)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes() if path.stat().st_size <= FILE_BYTES_MAX else None
    except OSError as error:
        raise BadUsage(f"routes file cannot be read; '{path}': {error.strerror or error}") from error
    if data is None:
        raise BadUsage(f"routes file is invalid; '{path}' has more than {FILE_BYTES_MAX} bytes")
    return data


def _check(
    texts: list[str],
    from_backup: Path | None,
    backup: Path | None,
    journal: Path | None,
    strict: bool,
    *,
    no_journal: bool,
) -> None:
    if journal is not None and no_journal:
        raise BadUsage("only one of --journal and --no-journal can be given")
    if from_backup is not None:
        if backup or journal or strict:
            raise BadUsage("--backup, --journal and --strict are for a queue; --from-backup reads none")
        if why := _unreadable(from_backup):
            raise BadUsage(f"backup cannot be read; '{from_backup}': {why}")
    try:
        LetterFilter(texts)
    except HoldfastError as error:
        raise BadUsage(error.message) from error


def _unreadable(path: Path) -> str:
    """Why a file cannot be read, if so. It is not opened: a pipe could be read only once."""
    code = 0 if os.access(path, os.R_OK) else errno.EACCES if path.exists() else errno.ENOENT
    return os.strerror(errno.EISDIR if path.is_dir() else code) if code or path.is_dir() else ""


def _timeouts(*given: str) -> dict[str, Any]:
    pairs = zip(TIMEOUTS, given, strict=True)
    return {f"{name}_timeout_s": _seconds(text, f"--{name}-timeout") for name, text in pairs}


def _seconds(text: str, option: str) -> float:
    try:
        duration_us = parse_duration(text, what=option)
    except Invalid as error:
        raise BadUsage(error.message) from error
    return duration_us / SECOND_US


def _rate(text: str | None) -> float:
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text.strip())
    if found is None or not 0 < float(found[1]) <= RATE_PER_S_MAX:
        raise BadUsage(f"--rate is invalid; '{text[:80]}' is not a number of letters a second such as 200/s")
    return float(found[1])


def _journals(session: CommandContext, url: str, dead_queue: str, file: Path | None, *, keeps: bool) -> JournalPaths:
    from holdfast.wiring import journals

    return journals(session.settings, url, dead_queue, file=file, keeps=keeps)
