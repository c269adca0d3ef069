"""The arguments and options of `holdfast recover`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The broker (amqp://…), or a storage (sqlite:///…); left out or -: the broker in HOLDFAST_BROKER_URL.",
        show_default=False,
    ),
]
DeadQueue = Annotated[
    str,
    typer.Argument(metavar="DLQ", help="The dead-letter queue, or the embedded dead queue.", show_default=False),
]
Routes = Annotated[Path | None, typer.Option(metavar="FILE", help="Which type goes where (TOML).")]
ToSource = Annotated[bool, typer.Option("--to-source", help="Each to the queue it died in.")]
ToExchange = Annotated[bool, typer.Option("--to-exchange", help="Each to its original exchange and key.")]
ThroughWait = Annotated[bool, typer.Option("--through-wait", help="Each to the wait queue of its queue.")]
To = Annotated[str | None, typer.Option(metavar="ADDRESS", help="All to a queue, or exchange=NAME,key=KEY.")]
Where = Annotated[
    list[str] | None,
    typer.Option(help="Only letters that fit: type=…, reason=…, queue=…, age>1h, header.NAME=…, body~…."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many letters that fit; default: those there now.")]
Window = Annotated[int, typer.Option(min=1, max=60_000, help="Letters under way at once.")]
WindowBytes = Annotated[int, typer.Option(min=1, help="Bytes under way at once.")]
OneAtATime = Annotated[bool, typer.Option("--one-at-a-time", help="A window of one letter.")]
Rate = Annotated[str | None, typer.Option(metavar="N/s", help="At most so many letters a second.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Take nothing away; say what would happen.")]
KeepUnroutable = Annotated[
    bool, typer.Option("--keep-unroutable", help="Go on though a route leads nowhere; its letters are kept.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a queue with a delivery limit.")]
TotalTimeout = Annotated[str, typer.Option(help="The run ends after this long.")]
IdleTimeout = Annotated[str, typer.Option(help="… when no letter came for this long.")]
EmptyTimeout = Annotated[str, typer.Option(help="… when the queue was empty for this long.")]
StallTimeout = Annotated[str, typer.Option(help="… when no letter could be settled for this long.")]
HoldTimeout = Annotated[str, typer.Option(help="… when a letter was held for this long.")]
StopTimeout = Annotated[str, typer.Option(help="How long a stop waits for confirms.")]
Journal = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the journal is kept; default: in the user's state folder.")
]
NoJournal = Annotated[bool, typer.Option("--no-journal", help="Keep none.")]
Backup = Annotated[Path | None, typer.Option(metavar="FILE", help="Write each letter there first.")]
FromBackup = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Publish the letters of a backup; no queue is touched.")
]
ReportOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the summary there as JSON.")]
By = Annotated[str | None, typer.Option(help="Who redrives, for the letters; default: USER@HOST.")]
Management = Annotated[
    str | None,
    typer.Option(help="The management API, http://user:password@host:15672. Also HOLDFAST_MANAGEMENT_URL."),
]
