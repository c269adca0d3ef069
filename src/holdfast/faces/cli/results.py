"""`holdfast results start|list|show|gaps|ask|cat|abandon`: collected results, in process or of a server."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from holdfast.core.requests import results as requests
from holdfast.core.states import TransactionState
from holdfast.faces.cli.command import SHARED, CommandOption, asks, command, read_file, shared_option
from holdfast.faces.cli.context import BadUsage, CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.output import Output, console, plural, shown, table

if TYPE_CHECKING:
    from holdfast.faces.client import RequestClient


LOOK_S = 0.25
REQUEST_BYTES_MAX = 64 * 1024 * 1024

COLLECTING = (
    shared_option(
        "blobs",
        "Where results are kept, without a server: a folder, s3://, az:// or gs://. Also HOLDFAST_BLOBS.",
        panel=None,
    ),
    shared_option(
        "broker",
        "amqp://… when results arrive over RabbitMQ, without a server. Also HOLDFAST_COLLECT_BROKER.",
        panel=None,
    ),
    *SHARED,
)
ID = CommandOption(name="transaction", metavar="TRANSACTION")
#: Nothing more comes after these.
ENDS = frozenset(state.value for state in TransactionState if state.is_end)


@command(
    "results start",
    requests.StartResultRequest,
    example="--producer reports --notify done --series orders --series lines 'May 2026' --wait",
    shared=COLLECTING,
    but=["request"],
    utf8=CommandOption(name="request", metavar="TEXT", help="The request's body.", default=""),
    producer=CommandOption(default=""),
    series=CommandOption(kind=list[str]),
    transaction_id=CommandOption(name="id"),
)
async def start(
    context: CommandContext,
    asked: requests.StartResultRequest,
    file: Annotated[Path | None, typer.Option(help="The request's body from a file.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, with a bar for each series.")] = False,
) -> ExitCode | None:
    """Ask a producer for a large result and collect it.

    Without --wait the request is kept and forwarded by whichever collector runs: a server, or the next --wait.
    """
    if not asked.producer:
        raise BadUsage("--producer is missing; say where the request goes")
    body = read_file(file, bytes_max=REQUEST_BYTES_MAX) if file is not None else asked.utf8.encode()
    async with context.connect(requests.ReadResult) as results:
        begun = await results.call(replace(asked, request=body, utf8=""))
        if wait:
            begun = await watched(context, results, begun.id)
    context.out.document(begun)
    context.out.say(f"{begun.id} is {begun.state}" + (f"; {begun.reason}" if begun.reason else ""))
    return ExitCode.FAILED if begun.state in {"failed", "abandoned"} else None


async def watched(context: CommandContext, results: RequestClient, transaction: str) -> requests.ResultView:
    """Wait for the end; one bar per series on stderr, when somebody sits in front of it."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[stored]:>11} of {task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=context.as_json or not sys.stderr.isatty(),
    )
    bars: dict[str, TaskID] = {}
    with progress:
        while True:
            view = await results.call(requests.ReadResult(id=transaction))
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


@asks("results list", requests.ListResults, lines="items", shared=COLLECTING)
def list_results(out: Output, asked: requests.ListResults, reply: requests.ResultsReply) -> None:
    """List transactions by id, finished ones too."""
    rows = [(one.id, one.state, one.producer, one.created_at, one.updated_at, one.reason) for one in reply.items]
    out.show(table(("id", "state", "producer", "created", "updated", "reason"), rows))


@command("results show", requests.ReadResult, example="t-1", shared=COLLECTING, id=ID)
async def show(
    context: CommandContext,
    asked: requests.ReadResult,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, with a bar for each series.")] = False,
) -> None:
    """Show where a transaction stands, series by series."""
    async with context.connect(requests.ReadResult) as results:
        view = await (watched(context, results, asked.id) if wait else results.call(asked))
    context.out.document(view)
    context.out.say(f"{view.id} is {view.state}" + (f"; {view.reason}" if view.reason else ""))
    rows = [(one.series, one.stored_count, one.count, one.stored_bytes) for one in view.series]
    context.out.show(table(("series", "#stored", "#count", "#bytes"), rows, with_empty=True))


@asks("results gaps", requests.ReadGaps, example="t-1", lines="items", shared=COLLECTING, id=ID)
def gaps(out: Output, asked: requests.ReadGaps, reply: requests.GapsReply) -> None:
    """Show which ordinals are missing, as ranges."""
    rows = [(gap.series, gap.stored_count, gap.count, missing_text(gap)) for gap in reply.items]
    out.show(table(("series", "#stored", "#count", "missing"), rows, with_empty=True))


def missing_text(gap: requests.GapView) -> str:
    """`3, 7-9, 20-`: the last is open while nobody has said how many there are."""
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in gap.missing]
    return ", ".join([*texts, *(["and whatever follows"] if gap.is_open else [])])


@command(
    "results cat",
    requests.ReadSeries,
    example="t-1 orders > orders.bin",
    shared=COLLECTING,
    id=ID,
)
async def cat(context: CommandContext, asked: requests.ReadSeries) -> None:
    """Write a series to stdout, in order and verified, up to the first gap."""
    transaction, series = asked.id, asked.series
    async with context.connect(requests.ReadResult) as results:
        known = [each.series for each in (await results.call(requests.ReadResult(id=transaction))).series]
        if series not in known:
            have = f"it has {', '.join(known)}" if known else "it has none yet"
            raise CommandFailed(f"series does not exist; '{transaction}' has no series '{series}', {have}")
        async with aclosing(await results.call(asked)) as chunks:
            async for chunk in chunks:
                sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        missing = [gap for gap in (await results.call(requests.ReadGaps(id=transaction))).items if gap.series == series]
    if missing and (missing[0].missing or missing[0].is_open):
        context.out.note(f"note: the series is not complete; missing {missing_text(missing[0])}")


@asks("results ask", requests.RequestMissing, example="t-1", shared=COLLECTING, id=ID)
def ask(out: Output, asked: requests.RequestMissing, reply: requests.MissingReply) -> None:
    """Ask the producer once more for what is missing."""
    out.say(f"the producer of {asked.id} was asked for {plural(reply.ranges, 'range')}, and for what is not known yet")


@asks("results abandon", requests.AbandonResult, example="t-1 --reason 'asked by mistake'", shared=COLLECTING, id=ID)
def abandon(out: Output, asked: requests.AbandonResult, view: requests.ResultView) -> None:
    """Give a transaction up: its queues and index rows go, and its blobs."""
    out.say(f"{view.id} is {view.state}; {view.reason}")
