"""`holdfast recover` on an embedded dead queue: each item goes back to the queue it died in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.core.recovery import Limits, Summary
from holdfast.faces.cli.failures import BadUsage, ExitCode
from holdfast.faces.cli.recover_ending import finish
from holdfast.faces.cli.recover_progress import bar
from holdfast.faces.cli.recover_report import open_report
from holdfast.faces.cli.recover_signals import signals
from holdfast.faces.cli.session import Session
from holdfast.services.recover.embedded import EmbeddedRecovery
from holdfast.services.recover.notices import Notices
from holdfast.services.recover.record import Entry, recorded
from holdfast.services.recover.service import new_run

SCHEMES = frozenset(("sqlite", "postgresql", "postgres", "memory", "http", "https"))


async def recover_embedded(
    session: Session,
    url: str,
    dead_queue: str,
    *,
    limits: Limits,
    dry_run: bool,
    report: Path | None,
    where: Sequence[str] = (),
    by: str | None = None,
) -> ExitCode:
    """Over the queues of a storage, opened in this process, or of a server."""
    if urlsplit(url).scheme not in SCHEMES:
        raise BadUsage("URL is invalid; use amqp://…, sqlite:///FOLDER, postgresql://…, memory:// or http://…")
    from holdfast.wiring import SystemClock
    from holdfast.wiring_recover import ledger_of, somebody, source_of

    entry = Entry(run=new_run(), by=by or somebody(), dead_queue=dead_queue, source=source_of(url, dead_queue))
    clock = SystemClock()
    with open_report(report) as written:
        with bar(session.as_json) as (say, on_progress):

            async def run() -> Summary:
                async with replace(session, url=url).open() as queues:
                    recovery = EmbeddedRecovery(
                        queues,
                        dead_queue=dead_queue,
                        run=entry.run,
                        clock=clock,
                        limits=limits,
                        where=where,
                        dry_run=dry_run,
                        notices=Notices(say, on_progress),
                    )
                    with signals() as on_begin:
                        on_begin(recovery)
                        return await recovery.run()

            summary = await recorded(entry, run, ledger=ledger_of(session.settings), clock=clock)
        return finish(session, summary, written)


def refuse(*broker_options: object) -> None:
    """What would be left out in silence is refused."""
    if any(broker_options):
        raise BadUsage(
            "option is for a broker (amqp://…); an embedded dead queue gives each item back to the queue it died in, "
            "with --limit, --rate, --where, --dry-run, --report and the limits of time"
        )
