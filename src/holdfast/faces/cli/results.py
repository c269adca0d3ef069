"""`holdfast results start|list|show|gaps|cat|abandon`: collected results, in process or of a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from holdfast.core.requests.results import GapView, ResultView, StartResultRequest
from holdfast.faces.cli.app import results as app
from holdfast.faces.cli.command import command, read_file
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.output import add_row, console, filled_table, shown, table
from holdfast.services.collect.service import ENDS, PAGE_COUNT_MAX, LocalResults, Results

LOOK_S = 0.25
REQUEST_BYTES_MAX = 64 * 1024 * 1024

Id = Annotated[str, typer.Argument(metavar="TRANSACTION", help="The transaction's id.", show_default=False)]
Blobs = Annotated[
    str | None,
    typer.Option(
        help="Where results are kept, without a server: a folder, s3://, az:// or gs://. Also HOLDFAST_BLOBS.",
        show_default=False,
    ),
]
Broker = Annotated[
    str | None,
    typer.Option(
        help="amqp://… when results arrive over RabbitMQ, without a server. Also HOLDFAST_COLLECT_BROKER.",
        show_default=False,
    ),
]


@asynccontextmanager
async def opened(session: CommandContext, blobs: str | None, broker: str | None) -> AsyncIterator[Results]:
    """The results that --url names. Without a server the collector runs in this process, and resumes what was left."""
    url = session.settings.storages[0].url
    if url.startswith(("http://", "https://")):
        if blobs or broker:
            raise BadUsage("--blobs and --broker are for a collector in this process; a server has its own")
        from holdfast.faces.results_client import ResultsClient

        async with ResultsClient(url, session.token(url), tls=session.tls()) as client:
            yield client
        return
    from holdfast.wiring import open_collector

    settings = session.settings
    known = settings.collect_broker.reveal() if settings.collect_broker else None
    async with open_collector(url, blobs=blobs or settings.blobs, broker=broker or known) as service:
        yield LocalResults(service)


@command(
    app,
    "start",
    example="holdfast results start --producer reports --notify done --series orders --series lines 'May 2026' --wait",
)
async def start(
    session: CommandContext,
    request: Annotated[str, typer.Argument(metavar="TEXT", help="The request's body.", show_default=False)] = "",
    producer: Annotated[str, typer.Option(help="Where the request goes: a queue, or EXCHANGE/KEY.")] = "",
    notify: Annotated[str, typer.Option(help="Where the completion notice goes.", show_default=False)] = "",
    series: Annotated[
        list[str] | None,
        typer.Option(help="A series of the result, several times for several; else headers say how many there are."),
    ] = None,
    transaction_id: Annotated[
        str, typer.Option("--id", help="Its id; the same again is the same result. Made when left out.")
    ] = "",
    file: Annotated[Path | None, typer.Option(help="The request's body from a file.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, with a bar for each series.")] = False,
    blobs: Blobs = None,
    broker: Broker = None,
) -> ExitCode | None:
    """Ask a producer for a large result and collect it.

    Without --wait the request is kept and forwarded by whichever collector runs: a server, or the next --wait.
    """
    if not producer:
        raise BadUsage("--producer is missing; say where the request goes")
    body = read_file(file, bytes_max=REQUEST_BYTES_MAX) if file is not None else request.encode()
    wanted = StartResultRequest(
        producer=producer, notify=notify, transaction_id=transaction_id, series=series, request=body
    )
    async with opened(session, blobs, broker) as results:
        begun = await results.start(wanted)
        if wait:
            begun = await watched(session, results, begun.id)
    session.out.document(begun)
    session.out.say(f"{begun.id} is {begun.state}" + (f"; {begun.reason}" if begun.reason else ""))
    return ExitCode.FAILED if begun.state in {"failed", "abandoned"} else None


async def watched(session: CommandContext, results: Results, transaction: str) -> ResultView:
    """Wait for the end; one bar per series on stderr, when somebody sits in front of it."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[stored]:>11} of {task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=session.as_json or not sys.stderr.isatty(),
    )
    bars: dict[str, TaskID] = {}
    with progress:
        while True:
            view = await results.show(transaction)
            for series in view.series:
                if series.series not in bars:
                    bars[series.series] = progress.add_task(series.series, total=None, stored="0", count="?")
                progress.update(
                    bars[series.series],
                    completed=series.stored_count,
                    total=series.count,
                    stored=shown(series.stored_count),
                    count="?" if series.count is None else shown(series.count),
                )
            if view.state in ENDS:
                return view
            await asyncio.sleep(LOOK_S)


@command(app, "list", example="holdfast results list")
async def list_results(
    session: CommandContext,
    after: Annotated[str, typer.Option(help="Begin after this id.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, max=PAGE_COUNT_MAX, help="How many.")] = PAGE_COUNT_MAX,
    blobs: Blobs = None,
    broker: Broker = None,
) -> None:
    """List transactions by id, finished ones too."""
    async with opened(session, blobs, broker) as results:
        found = (await results.page(after=after, limit=limit)).items
    session.out.documents(found)
    rows = [(each.id, each.state, each.producer, each.created_at, each.updated_at, each.reason) for each in found]
    session.out.show(filled_table(("id", "state", "producer", "created", "updated", "reason"), rows))


@command(app, "show", example="holdfast results show t-1")
async def show(
    session: CommandContext,
    transaction: Id,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, with a bar for each series.")] = False,
    blobs: Blobs = None,
    broker: Broker = None,
) -> None:
    """Show where a transaction stands, series by series."""
    async with opened(session, blobs, broker) as results:
        view = await (watched(session, results, transaction) if wait else results.show(transaction))
    session.out.document(view)
    session.out.say(f"{view.id} is {view.state}" + (f"; {view.reason}" if view.reason else ""))
    made = table("series", "#stored", "#count", "#bytes")
    for series in view.series:
        add_row(made, series.series, series.stored_count, series.count, series.stored_bytes)
    session.out.show(made)


@command(app, "gaps", example="holdfast results gaps t-1")
async def gaps(session: CommandContext, transaction: Id, blobs: Blobs = None, broker: Broker = None) -> None:
    """Show which ordinals are missing, as ranges."""
    async with opened(session, blobs, broker) as results:
        found = (await results.gaps(transaction)).items
    session.out.documents(found)
    made = table("series", "#stored", "#count", "missing")
    for gap in found:
        add_row(made, gap.series, gap.stored_count, gap.count, missing_text(gap))
    session.out.show(made)


def missing_text(gap: GapView) -> str:
    """`3, 7-9, 20-`: the last is open while nobody has said how many there are."""
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in gap.missing]
    return ", ".join([*texts, *(["and whatever follows"] if gap.is_open else [])])


@command(app, "cat", example="holdfast results cat t-1 orders > orders.bin")
async def cat(
    session: CommandContext,
    transaction: Id,
    series: Annotated[str, typer.Argument(metavar="SERIES", help="The series.", show_default=False)],
    blobs: Blobs = None,
    broker: Broker = None,
) -> None:
    """Write a series to stdout, in order and verified, up to the first gap."""
    async with opened(session, blobs, broker) as results, aclosing(results.stream(transaction, series)) as chunks:
        known = [each.series for each in (await results.show(transaction)).series]
        if series not in known:
            have = f"it has {', '.join(known)}" if known else "it has none yet"
            raise CommandFailed(f"series does not exist; '{transaction}' has no series '{series}', {have}")
        async for chunk in chunks:
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        missing = [gap for gap in (await results.gaps(transaction)).items if gap.series == series]
    if missing and (missing[0].missing or missing[0].is_open):
        session.out.note(f"note: the series is not complete; missing {missing_text(missing[0])}")


@command(app, "abandon", example="holdfast results abandon t-1 --reason 'asked by mistake'")
async def abandon(
    session: CommandContext,
    transaction: Id,
    reason: Annotated[str, typer.Option(help="Why, for the ledger.")] = "by hand",
    blobs: Blobs = None,
    broker: Broker = None,
) -> None:
    """Give a transaction up: its queues and index rows go, and its blobs."""
    async with opened(session, blobs, broker) as results:
        view = await results.abandon(transaction, reason=reason)
    session.out.document(view)
    session.out.say(f"{view.id} is {view.state}; {view.reason}")
