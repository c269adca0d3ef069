"""`holdfast recover` on an embedded dead queue: each item goes back to the queue it died in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.core.recovery import RunLimits, Summary
from holdfast.errors import CannotStart, HoldfastError, Unauthorized, Unreachable
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.progress import bar
from holdfast.faces.cli.recover_ending import finish
from holdfast.faces.cli.recover_report import open_report
from holdfast.faces.cli.recover_signals import signals
from holdfast.services.recover.embedded import EmbeddedRecovery
from holdfast.services.recover.report import Notices
from holdfast.services.recover.service import RunRecord, new_run, recorded

BROKER_OPTIONS = (
    "--routes", "--to", "--to-exchange", "--through-wait", "--keep-unroutable", "--strict",
    "--journal", "--no-journal", "--backup", "--from-backup", "--management",
)  # fmt: skip
SCHEMES = frozenset(("sqlite", "postgresql", "postgres", "memory", "http", "https"))


async def recover_embedded(
    session: CommandContext,
    url: str,
    dead_queue: str,
    *,
    limits: RunLimits,
    dry_run: bool,
    report: Path | None,
    where: Sequence[str] = (),
    by: str | None = None,
) -> ExitCode:
    """Over the queues of a storage, opened in this process, or of a server."""
    if urlsplit(url).scheme not in SCHEMES:
        raise BadUsage("URL is invalid; use amqp://…, sqlite:///FOLDER, postgresql://…, memory:// or http://…")
    from holdfast.wiring import SystemClock, ledger_of, somebody, source_of

    entry = RunRecord(run=new_run(), by=by or somebody(), dead_queue=dead_queue, source=source_of(url, dead_queue))
    clock = SystemClock()
    with open_report(report) as written:
        with bar(session.as_json, limits.limit) as ways:
            notices = Notices(*ways)

            async def run() -> Summary:
                with signals(notices) as begin:
                    async with replace(session, url=url).open() as queues:
                        recovery = EmbeddedRecovery(
                            queues,
                            dead_queue=dead_queue,
                            run=entry.run,
                            clock=clock,
                            limits=limits,
                            where=where,
                            dry_run=dry_run,
                            notices=notices,
                        )
                        begin(recovery)
                        return await recovery.run()

            try:
                summary = await recorded(entry, run, ledger=ledger_of(session.settings), clock=clock)
            except HoldfastError as error:
                raise _advised(error, session.server) from error
        return finish(session, summary, written)


def refuse(given: Sequence[object], where: Sequence[str]) -> None:
    """What would be left out in silence is refused. `given` are the values of BROKER_OPTIONS."""
    if refused := [name for name, value in zip(BROKER_OPTIONS, given, strict=True) if value]:
        *others, last = refused
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise BadUsage(
            f"{names} for a broker (amqp://…); an embedded dead queue gives each item back to the queue it died in, "
            "with --limit, --rate, --where, --dry-run, --report and the limits of time"
        )
    for text in where:
        if text.strip().startswith("header."):
            raise BadUsage(
                f"--where is invalid; '{text}': an item has no headers, use type, reason, queue, age or body"
            )


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
    failed = CommandFailed(error.message + advice)
    failed.code, failed.code_text = error.code, error.code_text
    return failed
