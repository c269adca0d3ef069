"""`holdfast recover`: every letter out of a dead-letter queue, published first and acked second; or every item of an
embedded dead queue back to the queue it died in.

Signals: before a run has begun they end it; later the first stops it cleanly, the second at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace as replaced
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.checks import unclear_url
from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.core.recovery import RecoveryOrder, RunLimits, Summary, summary_lines
from holdfast.core.requests.recover import TIMEOUTS
from holdfast.core.routes import NAME_BYTES_MAX, Mode, RouteTable, parse_to
from holdfast.core.selection import LetterFilter
from holdfast.errors import CannotStart, HoldfastError, Invalid, Unauthorized, Unreachable
from holdfast.faces.cli.command import CONFIG, JSON, command
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode, collect_seldom
from holdfast.faces.cli.progress import bar
from holdfast.services.recover.limits import LimitedRun
from holdfast.services.recover.report import Notices
from holdfast.services.recover.service import OnBegin, new_run, read_routes
from holdfast.settings import Secret

BROKERS = frozenset(("amqp", "amqps"))
SCHEMES = frozenset(("sqlite", "postgresql", "postgres", "memory", "http", "https"))
BROKER_OPTIONS = (
    "--routes", "--to", "--to-exchange", "--through-wait", "--source", "--allow-copies", "--keep-unroutable",
    "--strict", "--journal", "--no-journal", "--backup", "--from-backup", "--management",
)  # fmt: skip
RATE_PER_S_MAX = 1e9
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: For each goodbye to a broker that may be silent. After that its connection ends without one.
GOODBYE_S = 0.5
STREAMS = (1, 2)
EXAMPLE = """imageviewer.dlq --routes routes.toml --dry-run
amqp://localhost q.orders.dlq --to-source
sqlite:///work orders-dead"""


class RecoverOptions(Struct, frozen=True, kw_only=True):
    """What was typed. URL and DLQ are arguments, the others options."""

    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The broker (amqp://…), or a storage (sqlite:///…); left out or -: the broker in HOLDFAST_BROKER_URL.",
            show_default=False,
        ),
    ] = ""
    dead_queue: Annotated[
        str,
        typer.Argument(metavar="DLQ", help="The dead-letter queue, or the embedded dead queue.", show_default=False),
    ] = ""
    routes: Annotated[Path | None, typer.Option(metavar="FILE", help="Which type goes where (TOML).")] = None
    to_source: Annotated[bool, typer.Option("--to-source", help="Each to the queue it died in.")] = False
    to_exchange: Annotated[bool, typer.Option("--to-exchange", help="Each to its original exchange and key.")] = False
    through_wait: Annotated[bool, typer.Option("--through-wait", help="Each to the wait queue of its queue.")] = False
    to: Annotated[str | None, typer.Option(metavar="ADDRESS", help="All to a queue, or exchange=NAME,key=KEY.")] = None
    source: Annotated[
        str, typer.Option(metavar="QUEUE", help="The queue that letters died in that do not tell.", show_default=False)
    ] = ""
    allow_copies: Annotated[
        bool, typer.Option("--allow-copies", help="Also where the headers of a letter lead to several queues.")
    ] = False
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only letters that fit: type=…, reason=…, queue=…, age>1h, header.NAME=…, body~…."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many letters that fit; default: those there now.")
    ] = None
    window: Annotated[int, typer.Option(min=1, max=60_000, help="Letters under way at once.")] = 4_000
    window_bytes: Annotated[int, typer.Option(min=1, help="Bytes under way at once.")] = 64 * 2**20
    one_at_a_time: Annotated[bool, typer.Option("--one-at-a-time", help="A window of one letter.")] = False
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="At most so many letters a second.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Take nothing away; say what would happen.")] = False
    keep_unroutable: Annotated[
        bool, typer.Option("--keep-unroutable", help="Go on though a route leads nowhere; its letters are kept.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a queue with a delivery limit.")] = False
    total_timeout: Annotated[str, typer.Option(help="The run ends after this long.")] = "30m"
    idle_timeout: Annotated[str, typer.Option(help="… when no letter came for this long.")] = "10s"
    empty_timeout: Annotated[str, typer.Option(help="… when the queue was empty for this long.")] = "5s"
    stall_timeout: Annotated[str, typer.Option(help="… when no letter could be settled for this long.")] = "30s"
    hold_timeout: Annotated[str, typer.Option(help="… when a letter was held for this long.")] = "20m"
    stop_timeout: Annotated[str, typer.Option(help="How long a stop waits for confirms.")] = "10s"
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the journal is kept; default: in the user's state folder."),
    ] = None
    no_journal: Annotated[bool, typer.Option("--no-journal", help="Keep none.")] = False
    backup: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each letter there first.")] = None
    from_backup: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Publish the letters of a backup; no queue is touched.")
    ] = None
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the summary there as JSON.")] = None
    by: Annotated[str | None, typer.Option(help="Who redrives, for the letters; default: USER@HOST.")] = None
    management: Annotated[
        str | None,
        typer.Option(help="The management API, http://user:password@host:15672. Also HOLDFAST_MANAGEMENT_URL."),
    ] = None

    def limits(self) -> RunLimits:
        """Raises BadUsage."""
        limits = RunLimits(
            limit=self.limit,
            window_count_max=1 if self.one_at_a_time else self.window,
            window_bytes_max=self.window_bytes,
            rate_per_s=_rate(self.rate),
        )
        timeouts_us = {name: parse_duration(getattr(self, name), what=name) for name in TIMEOUTS}
        return replace(limits, **{f"{name}_s": timeout_us / SECOND_US for name, timeout_us in timeouts_us.items()})

    def order(self) -> RecoveryOrder:
        """What is asked for, as a new run. Raises BadUsage."""
        return RecoveryOrder(
            dead_queue=self.dead_queue,
            table=self.table(),
            limits=self.limits(),
            where=tuple(self.where or ()),
            dry_run=self.dry_run,
            keep_unroutable=self.keep_unroutable,
            strict=self.strict,
            run=new_run(),
            backup_file=str(self.backup or ""),
            from_backup=str(self.from_backup or ""),
        )

    def table(self) -> RouteTable:
        """Where letters go. Raises BadUsage."""
        if sum((self.to_source, self.to_exchange, self.through_wait, self.to is not None)) > 1:
            raise BadUsage("only one of --to-source, --to-exchange, --through-wait and --to can be given")
        try:
            table = read_routes(self.routes) if self.routes else RouteTable()
            if self.to is not None:
                return replace(table, mode=Mode.ADDRESS, address=parse_to(self.to))
        except (CannotStart, Invalid) as error:
            raise BadUsage(error.message) from error
        table = replace(table, source=self.source, allow_copies=self.allow_copies)
        chosen = {Mode.SOURCE: self.to_source, Mode.EXCHANGE: self.to_exchange, Mode.WAIT: self.through_wait}
        return replace(table, mode=next((mode for mode, is_chosen in chosen.items() if is_chosen), Mode.ROUTES))

    def check(self) -> None:
        """Raises BadUsage for what cannot go together."""
        if self.journal is not None and self.no_journal:
            raise BadUsage("only one of --journal and --no-journal can be given")
        if self.from_backup is not None:
            if self.backup or self.journal or self.strict:
                raise BadUsage("--backup, --journal and --strict are for a queue; --from-backup reads none")
            if why := _unreadable(self.from_backup):
                raise BadUsage(f"backup cannot be read; '{self.from_backup}': {why}")
        try:
            LetterFilter(self.where or ())
        except HoldfastError as error:
            raise BadUsage(error.message) from error

    def check_embedded(self) -> None:
        """What would be left out in silence is refused."""
        given = [getattr(self, name.removeprefix("--").replace("-", "_")) for name in BROKER_OPTIONS]
        if refused := [name for name, value in zip(BROKER_OPTIONS, given, strict=True) if value]:
            *others, last = refused
            names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            raise BadUsage(
                f"{names} for a broker (amqp://…); an embedded dead queue gives each item back to the queue it died "
                "in, with --limit, --rate, --where, --dry-run, --report and the limits of time"
            )
        for text in self.where or ():
            if text.strip().startswith("header."):
                raise BadUsage(
                    f"--where is invalid; '{text}': an item has no headers, use type, reason, queue, age or body"
                )
        if urlsplit(self.url).scheme not in SCHEMES:
            raise BadUsage("URL is invalid; use amqp://…, sqlite:///FOLDER, postgresql://…, memory:// or http://…")


@command("recover", RecoverOptions, example=EXAMPLE, shared=(CONFIG, JSON))
async def recover_command(context: CommandContext, given: RecoverOptions) -> ExitCode:
    """Send every letter of a dead-letter queue back to where it belongs. None is lost, whatever fails.

    A letter is acked only after the broker has confirmed its copy and has not returned it. What cannot go is kept:
    held, and given back at the end. Ctrl-C stops cleanly. Exit codes: 0 all recovered (of a dry run: all would be),
    3 some kept or remaining, 1 failed, 2 bad usage, 130 interrupted before it began.
    """
    # Everything worth a warning is said by the run itself, in sentences.
    logging.getLogger("holdfast").handlers = [logging.NullHandler()]
    options = _with_queue(context, given)
    is_broker = urlsplit(options.url).scheme in BROKERS
    options.check()
    if not is_broker:
        options.check_embedded()
    from holdfast.wiring import journals, origin_of, run_recovery, somebody, vault_of

    collect_seldom()
    settings, url, name = context.settings, options.url, options.dead_queue
    if options.management:
        settings = replace(settings, management=Secret(options.management))
    order = replace(options.order(), by=options.by or somebody(), origin=origin_of(url, name))
    paths = None
    if is_broker and not order.dry_run and not order.from_backup:
        paths = journals(settings, url, name, file=options.journal, keeps=not options.no_journal)
        order = replace(order, journal_file=str(paths.own or ""))
    with ExitStack() as stack:
        report = stack.enter_context(closing(ReportFile(options.report))) if options.report else None
        # The journal ends last: until the summary is said, it has what only this run knows.
        journal = stack.enter_context(paths.kept(order.run)) if paths else None
        with bar(context.as_json, order.limits.limit) as notices:
            try:
                summary = await run_recovery(
                    settings,
                    url,
                    order,
                    vault=vault_of(settings),
                    hearing=signals(notices),
                    journal=nullcontext(journal),
                    queues=None if is_broker else replaced(context, url=url).open(),
                    notices=notices,
                )
            except HoldfastError as error:
                raise error if is_broker else _advised(error, context.server) from error
        return _finish(context, summary, report)


def _with_queue(context: CommandContext, options: RecoverOptions) -> RecoverOptions:
    """With URL and queue. A URL on the command line is seen by everybody on the machine (`ps`), a variable is not."""
    url, dead_queue = options.url, options.dead_queue
    if not dead_queue and url != "-" and "://" not in url:
        url, dead_queue = "", url  # the queue alone was given
    if options.from_backup is None and not dead_queue:
        raise BadUsage("Missing argument 'DLQ'. See 'holdfast recover --help'")
    if len(dead_queue.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
        raise BadUsage(f"DLQ is invalid; no queue has a name of more than {NAME_BYTES_MAX} bytes")
    if url in ("", "-"):
        broker = context.settings.broker
        if broker is None:
            raise BadUsage(
                "URL is missing; set HOLDFAST_BROKER_URL, or give amqp://… or sqlite:///FOLDER before the DLQ"
            )
        url = broker.reveal()
    if why := unclear_url(url):
        raise BadUsage(f"URL is invalid; {why}")
    return replace(options, url=url, dead_queue=dead_queue)


def _advised(error: HoldfastError, server: str) -> HoldfastError:
    """With what to do next, where that is not what other commands would say: there is no --url, and no --token-file."""
    match error:
        case Unauthorized():
            advice = ", give it in HOLDFAST_TOKEN"
        case Unreachable() if "cannot be reached" in error.message:
            advice = "; start it with 'holdfast serve', or give another URL"
        case CannotStart() if error.message.startswith("data folder is in use"):
            address = server or "http://HOST:PORT"
            advice = f"; if that process is a Holdfast server, give its address instead: holdfast recover {address} DLQ"
        case _:
            return error
    return CommandFailed(error.message + advice, cause=error)


def _finish(context: CommandContext, summary: Summary, report: ReportFile | None) -> ExitCode:
    """Write and say the summary; returns what it means for a program. A report that fails does not silence it."""
    failed: CommandFailed | None = None
    if report is not None:
        try:
            report.write(summary)
        except CommandFailed as error:
            failed = error
    for line in summary_lines(summary):
        context.out.say(line)
    context.out.document(summary)
    if failed is not None:
        raise failed
    if summary.failure:
        return ExitCode.FAILED
    return ExitCode.DONE if summary.is_complete else ExitCode.PARTLY_DONE


def _unreadable(path: Path) -> str:
    """Why a file cannot be read, if so. It is not opened: a pipe could be read only once."""
    code = 0 if os.access(path, os.R_OK) else errno.EACCES if path.exists() else errno.ENOENT
    return os.strerror(errno.EISDIR if path.is_dir() else code) if code or path.is_dir() else ""


def _rate(text: str | None) -> float:
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text.strip())
    if found is None or not 0 < float(found[1]) <= RATE_PER_S_MAX:
        raise BadUsage(f"--rate is invalid; '{text[:80]}' is not a number of letters a second such as 200/s")
    return float(found[1])


class ReportFile:
    """`--report`: opened before anything is taken, so that a path that cannot be written is noticed in time.

    For its owner alone: the summary has samples of letters. What is there stays until the summary replaces it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error, "nothing was taken") from error

    def write(self, summary: Summary) -> None:
        """Raises CommandFailed."""
        data = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
        self._is_new = False
        try:
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, 0)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._failed(error, "the run itself is done, and its summary is the one that was printed") from error

    def close(self) -> None:
        """A run that never came to its summary leaves no empty file behind."""
        os.close(self._file)
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def _failed(self, error: OSError, now: str) -> CommandFailed:
        return CommandFailed(f"report cannot be written; '{self._path}': {error.strerror or error}; {now}")


class Interrupted(CommandFailed):
    """A signal came before anything was taken."""

    def __init__(self) -> None:
        super().__init__("recovery was stopped before it began; nothing was taken", exit_code=ExitCode.INTERRUPTED)


@contextmanager
def signals(notices: Notices) -> Iterator[OnBegin]:
    """Around everything from the first connection on. Raises Interrupted at a signal before the run has begun."""
    loop = asyncio.get_running_loop()
    listener = SignalListener(notices, loop)
    # Under nohup the run outlives its terminal.
    numbers = [one for one in NUMBERS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, listener.hear, number)
    try:
        yield listener.begin
    except (asyncio.CancelledError, HoldfastError) as error:
        if not listener.has_interrupted:
            raise
        raise Interrupted from error
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        listener.close()


class SignalListener:
    """Cancels the task that made it until `close`, or stops the run."""

    def __init__(self, notices: Notices, loop: asyncio.AbstractEventLoop) -> None:
        self.has_interrupted = False
        self._notices = notices
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._terminals = [stream for stream in STREAMS if os.isatty(stream)]
        self._run: LimitedRun | None = None
        self._again: asyncio.TimerHandle | None = None
        self._has_hung_up = False

    def begin(self, run: LimitedRun) -> None:
        """Called with the run when that begins."""
        if self.has_interrupted:  # somebody has swallowed the cancellation
            raise Interrupted
        self._run = run

    def hear(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            self._has_hung_up = True
            self._leave_terminals()
            self._notices.nobody_may_listen()
        run = self._run
        if run is None or not self._notices.has_begun:
            self._interrupt()
        elif not run.is_stopping:
            run.stop()
            self._notices.stopping(run.sent_count)
        elif number != signal.SIGHUP:  # which comes more than once: from the kernel, and passed on by the shell
            run.abandon()

    def close(self) -> None:
        """What was asked of the task is over: whoever goes on in it is not cancelled."""
        if self._again is not None:
            self._again.cancel()
        if self._has_hung_up:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._leave_terminals()
        while self.has_interrupted and self._task is not None and self._task.cancelling():
            self._task.uncancel()

    def _interrupt(self) -> None:
        """Again and again: each goodbye that is waited for in vain ends by it."""
        assert self._task is not None  # noqa: S101  a coroutine of the command line runs in a task
        self.has_interrupted = True
        self._task.cancel()
        if self._again is not None:
            self._again.cancel()
        self._again = self._loop.call_later(GOODBYE_S, self._interrupt)

    def _leave_terminals(self) -> None:
        """Whatever is said to a terminal that is gone would be an error in the middle of the run."""
        for stream in self._terminals:
            if not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
