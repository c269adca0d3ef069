"""`holdfast queue lease|complete|retry|extend`: work on items by hand; `holdfast queue items list|delete|export`: what
is stored, looked at, taken out by hand, and written to JSON Lines, byte for byte, page by page."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypeVar

import msgspec
import typer
from msgspec.structs import replace

from holdfast.core.checks import BATCH_COUNT_MAX
from holdfast.core.item import Item, RetryItem, cause_of
from holdfast.core.requests import queue as requests
from holdfast.errors import HoldfastError, Invalid, NothingToLease, QueueMissing
from holdfast.faces.cli.command import CommandOption, command, parse_moment, private
from holdfast.faces.cli.context import CommandContext, CommandFailed, ExitCode, partly_done
from holdfast.faces.cli.output import plural, preview, table
from holdfast.faces.cli.progress import meter
from holdfast.faces.cli.queues import Name
from holdfast.services.queue.queues import REQUEST_TIMEOUT

if TYPE_CHECKING:
    from holdfast.faces.client import RequestClient
    from holdfast.services.queue.queues import Queues

ARRIVE_TIMEOUT_S = 2.0
ARRIVE_POLL_S = 0.02
PAGE_COUNT_FIRST = 50
PAGE_COUNT_MIN = 2
PAGE_COUNT_MAX = BATCH_COUNT_MAX
#: What a page of a listing is aimed at, so that large payloads do not make a large process.
PAGE_BYTES_AIM = 4_000_000
GROWTH_COUNT_MAX = 10_000

PARTITION = CommandOption(help="The partition, as 'queue lease' shows it.")
OnePartition = Annotated[
    int | None, typer.Option(help="Only this partition; all of them if left out.", show_default=False)
]

T = TypeVar("T")
R = TypeVar("R")


@command(
    "queue lease",
    requests.LeaseRequest,
    example="orders --batch-size 10 --timeout 5s",
    batch_size=CommandOption(default=1),
    request_timeout=CommandOption(
        name="timeout", help="How long to wait for the first one, 10ms to 15m.", default="30s"
    ),
    client_id=CommandOption(default=None),
)
async def lease(context: CommandContext, asked: requests.LeaseRequest) -> None:
    """Wait for items and lease them. They come back to the queue when their lease runs out.

    Settle them with 'queue complete', 'queue retry' or 'queue extend'.
    """
    async with context.open() as queues:
        try:
            reply = await queues.queue_lease(
                asked.queue_name,
                batch_size=asked.batch_size,
                request_timeout=asked.request_timeout,
                client_id=asked.client_id or None,
            )
        except NothingToLease as error:
            name = asked.queue_name
            if not (await queues.queues_info(name)).paused:
                raise
            text = f"queue '{name}' is paused and gives nothing out, 'holdfast queue resume {name}' ends that"
            raise CommandFailed(f"request timeout; {text}", cause=error) from error
    context.out.document(reply)
    columns = ("id", "#attempts", "leased until", "kind", "reference", "payload")
    rows = [(i.id, i.attempts, i.lease_deadline, i.kind, i.reference, i.payload) for i in reply.items]
    context.out.show(table(columns, rows, title=f"partition {reply.partition}"))


@command(
    "queue complete",
    requests.CompleteRequest,
    example="orders 0632c2f0b0a4d1-1-0 --partition 0",
    partition=PARTITION,
    but=["request_timeout"],
)
async def complete(context: CommandContext, asked: requests.CompleteRequest) -> None:
    """Finish leased items: they are done and leave the queue. All of them, or none."""
    async with context.connect(requests.CompleteRequest) as client:
        wanted = replace(asked, request_timeout=REQUEST_TIMEOUT)
        await in_batches(asked.ids, lambda ids: client.call(replace(wanted, ids=ids)), done="completed")
    context.out.document(requests.CodeReply(200))
    context.out.say(f"{plural(len(asked.ids), 'item')} completed")


@command(
    "queue retry",
    requests.RetryRequest,
    example="orders 0632c2f0b0a4d1-1-0 --retry-at +10m\norders 0632c2f0b0a4d1-1-0 --dead --reason 'unknown customer'",
    partition=PARTITION,
    but=["items"],
)
async def retry(
    context: CommandContext,
    asked: requests.RetryRequest,
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="The ids, as 'queue lease' shows them.")],
    retry_at: Annotated[
        str, typer.Option(help="When: 2030-01-31T08:00:00Z, or +10m from now. At once if left out.", show_default=False)
    ] = "",
    dead: Annotated[bool, typer.Option("--dead", help="To the dead queue instead.")] = False,
    reason: Annotated[str, typer.Option(help="With --dead: why.", show_default=False)] = "",
) -> None:
    """Give leased items back: to the tail, at a moment, or to the dead queue. All of them, or none."""
    at = parse_moment(retry_at, option="--retry-at")
    items = [RetryItem(id=item_id, retry_at=at, dead=dead, reason=reason) for item_id in ids]
    async with context.connect(requests.RetryRequest) as client:
        await in_batches(items, lambda batch: client.call(replace(asked, items=batch)), done="given back")
        await _let_arrive(client, asked.queue_name)
    context.out.document(requests.CodeReply(200))
    context.out.say(f"{plural(len(ids), 'item')} given back")


async def _let_arrive(client: RequestClient, name: str) -> None:
    """Wait a moment for items on their way to the dead queue; else this process ends, and the next one goes on."""
    deadline_s = time.monotonic() + ARRIVE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        stats = await client.call(requests.StatsRequest(queue_name=name))
        if not any(partition.dying for partition in stats.partitions):
            return
        await asyncio.sleep(ARRIVE_POLL_S)


@command(
    "queue extend",
    requests.ExtendRequest,
    example="orders 0632c2f0b0a4d1-1-0 --lease-timeout 10m",
    partition=PARTITION,
)
async def extend(context: CommandContext, asked: requests.ExtendRequest) -> None:
    """Let leases run longer (or shorter). All of them, or none."""
    async with context.connect(requests.ExtendRequest) as client:
        replies = await in_batches(asked.ids, lambda ids: client.call(replace(asked, ids=ids)), done="extended")
    extended = [item for reply in replies for item in reply.items]
    context.out.document(requests.ExtendReply(extended))
    context.out.show(table(("id", "leased until"), [(item.id, item.lease_deadline) for item in extended]))


async def in_batches(items: list[T], call: Callable[[list[T]], Awaitable[R]], *, done: str) -> list[R]:
    """Call with at most a thousand at a time; a failure after the first batch says how many were done."""
    replies: list[R] = []
    for start in range(0, len(items), BATCH_COUNT_MAX):
        try:
            replies.append(await call(items[start : start + BATCH_COUNT_MAX]))
        except HoldfastError as error:
            if not start:
                raise
            text = f"{error.message}; the {plural(start, 'item')} before were {done}"
            raise partly_done(text, error, done_count=start, ids=list(error.ids)) from error
    return replies


# --- items as they are stored ---------------------------------------------------------------------------------


@command("queue items list", example="orders --limit 20\norders-dead --json")
async def list_items(
    context: CommandContext,
    name: Name,
    partition: OnePartition = None,
    scheduled: Annotated[
        bool, typer.Option("--scheduled", help="The scheduled items instead of the queued ones.")
    ] = False,
    pivot: Annotated[str, typer.Option(help="Begin with this id; needs --partition.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(help="At most so many; 0 is all.", min=0)] = 100,
) -> None:
    """List queued and leased items, or scheduled ones, in their order. Nothing is taken."""
    moment = "enqueue at" if scheduled else "leased until"
    columns = ("id", "#partition", "#attempts", moment, "expires", "died of", "kind", "reference", "payload")
    rows: list[tuple[object, ...]] = []
    count = 0
    async with context.open() as queues:
        listing = pages(queues, name, partition=partition, scheduled=scheduled, pivot=pivot, limit=limit)
        async for number, page in listing:
            context.out.documents(page)
            count += len(page)
            rows += [] if context.as_json else [_row(number, item, scheduled=scheduled) for item in page]
    if rows:
        context.out.show(table(columns, rows))
    if not count:
        context.out.say(f"queue '{name}' has no {'scheduled ' if scheduled else ''}items")
    elif count == limit:
        context.out.note(f"the first {limit}; --limit 0 shows all, 'queue items export' writes them to a file")


def _row(partition: int, item: Item, *, scheduled: bool) -> tuple[object, ...]:
    at = item.enqueue_at if scheduled else item.lease_deadline if item.is_leased else None
    died = f"{cause_of(item)} in {item.source_queue}" if item.source_queue else ""
    return (
        item.id, partition, item.attempts, at, item.expire_deadline, died, item.kind, item.reference,
        preview(item.payload),
    )  # fmt: skip


@command("queue items delete", requests.DeleteItemsRequest, example="orders 0632c2f0b0a4d1-1-0")
async def delete_items(context: CommandContext, asked: requests.DeleteItemsRequest) -> None:
    """Delete items by id, leased ones too. Ids that are not there are skipped."""
    wanted = list(dict.fromkeys(asked.ids))
    async with context.connect(requests.DeleteItemsRequest) as client:
        there = [item_id for item_id in wanted if await _is_there(client, asked, item_id)]
        await in_batches(wanted, lambda ids: client.call(replace(asked, ids=ids)), done="deleted")
    context.out.document(requests.CodeReply(200))
    absent = len(wanted) - len(there)
    told = f"; {plural(absent, 'id')} {'was' if absent == 1 else 'were'} not there" if absent else ""
    context.out.say(f"{plural(len(there), 'item')} deleted{told}")


async def _is_there(client: RequestClient, asked: requests.DeleteItemsRequest, item_id: str) -> bool:
    """Whether a listing that begins with the id begins with that item. Deleting tells nobody how many there were."""
    for listing in (requests.ListItemsRequest, requests.ListScheduledRequest):
        try:
            page = await client.call(
                listing(queue_name=asked.queue_name, partition=asked.partition, pivot=item_id, limit=1)
            )
        except QueueMissing:
            raise
        except Invalid:  # not even the form of an id
            return False
        if page.items and page.items[0].id == item_id:
            return True
    return False


async def pages(
    queues: Queues,
    name: str,
    *,
    partition: int | None = None,
    scheduled: bool = False,
    pivot: str = "",
    limit: int = 0,
) -> AsyncIterator[tuple[int, list[Item]]]:
    """Items page by page with their partition; at most `limit`, and one page in memory at a time."""
    numbers = (
        [partition] if partition is not None else [p.partition for p in (await queues.queues_info(name)).partitions]
    )
    # A queue that grows while it is listed must not keep us for ever: at most what was there, with room for items
    # that come back under a new id.
    left = limit or 2 * await count_items(queues, name, scheduled=scheduled) + GROWTH_COUNT_MAX
    for number in numbers:
        async for page in _partition_pages(queues, name, number, scheduled=scheduled, pivot=pivot):
            yield number, page[:left]
            left -= len(page)
            if left > 0:
                continue
            if limit:
                return
            raise CommandFailed(
                f"listing stopped; '{name}' grows faster than it can be listed, pause it first with 'queue pause'",
                exit_code=ExitCode.PARTLY_DONE,
            )


async def count_items(queues: Queues, name: str, *, scheduled: bool) -> int:
    """How many items a listing of the whole queue would show now."""
    stats = await queues.queue_stats(name)
    return sum(partition.scheduled if scheduled else partition.total for partition in stats.partitions)


async def _partition_pages(
    queues: Queues, name: str, partition: int, *, scheduled: bool, pivot: str
) -> AsyncIterator[list[Item]]:
    list_page = queues.storage_scheduled_list if scheduled else queues.storage_items_list
    last = ""
    count_max = PAGE_COUNT_FIRST
    while True:  # ends: every page but the last goes on by at least one id
        page = await list_page(name, partition=partition, pivot=pivot, limit=count_max)
        is_last = len(page) < count_max
        # The pivot is included, so that a page begins with the last item of the page before, if it is still there.
        if page and page[0].id == last:
            page = page[1:]
        if page:
            yield page
            last = pivot = page[-1].id
        if is_last:
            return
        count_max = _page_count(page)


def _page_count(page: Sequence[Item]) -> int:
    """How many items to ask for next: as many as make a page of the aimed size, by what the last page showed."""
    average_bytes = sum(len(item.payload) + 300 for item in page) / max(1, len(page))
    return max(PAGE_COUNT_MIN, min(PAGE_COUNT_MAX, int(PAGE_BYTES_AIM / max(1.0, average_bytes))))


@command("queue items export", example="orders --output orders.jsonl\norders --scheduled | gzip > orders.jsonl.gz")
async def export(
    context: CommandContext,
    name: Name,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file instead of stdout.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    scheduled: Annotated[bool, typer.Option("--scheduled", help="The scheduled items too.")] = False,
    partition: OnePartition = None,
) -> None:
    """Write the items of a queue as JSON Lines; payloads are base64. Nothing is taken from the queue.

    In a queue that is at work an item may move meanwhile and appear twice; pause the queue for an exact copy.
    """
    encoder = msgspec.json.Encoder()
    kinds = (False, True) if scheduled else (False,)
    async with context.open() as queues:
        total = sum([await count_items(queues, name, scheduled=kind) for kind in kinds])
        what = f"exporting '{name}'"
        with (
            _sink(output, overwrite=overwrite) as sink,
            meter(what, total=total, quiet=context.as_json) as bar,
        ):
            for kind in kinds:
                async for _, page in pages(queues, name, partition=partition, scheduled=kind):
                    sink.write(encoder.encode_lines(page))
                    bar.add(len(page))
                    bar.advance(len(page))
    if output is not None:
        context.out.document({"exported_count": bar.count, "file": str(output)})
    context.out.note(f"{plural(bar.count, 'item')} exported from '{name}'")


@contextmanager
def _sink(path: Path | None, *, overwrite: bool) -> Iterator[BinaryIO]:
    """stdout, or a file for its owner alone, which gets its name only when everything is in it: half an export never
    looks like a whole."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.exists() and not overwrite:
        raise CommandFailed(f"file is there already; '{path}', choose another name or give --overwrite")
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # one that is left may be for everybody
        with open(partial, "xb", opener=private) as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except OSError as error:
        raise CommandFailed(f"file cannot be written; '{error.filename or partial}': {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
