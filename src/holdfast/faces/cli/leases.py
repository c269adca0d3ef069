"""`holdfast queue lease|complete|retry|extend`: work on items by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer

from holdfast.core.checks import BATCH_COUNT_MAX
from holdfast.core.item import ExtendedItem, RetryItem
from holdfast.core.requests.queue import CodeReply, ExtendReply
from holdfast.errors import HoldfastError, NothingToLease
from holdfast.faces.cli import command as checks
from holdfast.faces.cli.app import queue as app
from holdfast.faces.cli.command import command, parse_moment
from holdfast.faces.cli.context import CommandContext, CommandFailed, partly_done
from holdfast.faces.cli.output import add_row, filled_table, plural, table
from holdfast.faces.cli.queues import Name
from holdfast.services.queue.queues import Queues

ARRIVE_TIMEOUT_S = 2.0
ARRIVE_POLL_S = 0.02

Ids = Annotated[list[str], typer.Argument(metavar="ID…", help="The ids, as 'queue lease' shows them.")]
Partition = Annotated[int, typer.Option(help="The partition, as 'queue lease' shows it.")]


@command(app, "lease", example="holdfast queue lease orders --batch-size 10 --timeout 5s")
async def lease(
    session: CommandContext,
    name: Name,
    batch_size: Annotated[int, typer.Option(help="At most so many items, 1 to 1000.")] = 1,
    timeout: Annotated[str, typer.Option(help="How long to wait for the first one, 10ms to 15m.")] = "30s",
    client_id: Annotated[
        str | None, typer.Option(help="Who leases; unique among those who wait.", show_default=False)
    ] = None,
) -> None:
    """Wait for items and lease them. They come back to the queue when their lease runs out.

    Settle them with 'queue complete', 'queue retry' or 'queue extend'.
    """
    checks.duration(timeout, option="--timeout")
    async with session.open() as queues:
        try:
            reply = await queues.queue_lease(name, batch_size=batch_size, request_timeout=timeout, client_id=client_id)
        except NothingToLease as error:
            if (await queues.queues_info(name)).paused:
                raise _paused(name) from error
            raise
    session.out.document(reply)
    columns = ("id", "#attempts", "leased until", "kind", "reference", "payload")
    rows = [(i.id, i.attempts, i.lease_deadline, i.kind, i.reference, i.payload) for i in reply.items]
    session.out.show(filled_table(columns, rows, title=f"partition {reply.partition}"))


def _paused(name: str) -> CommandFailed:
    failed = CommandFailed(
        f"request timeout; queue '{name}' is paused and gives nothing out, 'holdfast queue resume {name}' ends that"
    )
    failed.code, failed.code_text = NothingToLease.code, NothingToLease.code_text
    return failed


@command(app, "complete", example="holdfast queue complete orders 0632c2f0b0a4d1-1-0 --partition 0")
async def complete(session: CommandContext, name: Name, ids: Ids, partition: Partition = 0) -> None:
    """Finish leased items: they are done and leave the queue. All of them, or none."""
    async with session.open() as queues:

        async def call(batch: Sequence[str]) -> None:
            await queues.queue_complete(name, batch, partition=partition)

        await in_batches(ids, call, done="completed")
    session.out.document(CodeReply(200))
    session.out.say(f"{plural(len(ids), 'item')} completed")


@command(
    app,
    "retry",
    example="holdfast queue retry orders 0632c2f0b0a4d1-1-0 --retry-at +10m\n"
    "holdfast queue retry orders 0632c2f0b0a4d1-1-0 --dead --reason 'unknown customer'",
)
async def retry(
    session: CommandContext,
    name: Name,
    ids: Ids,
    partition: Partition = 0,
    retry_at: Annotated[
        str, typer.Option(help="When: 2030-01-31T08:00:00Z, or +10m from now. At once if left out.", show_default=False)
    ] = "",
    dead: Annotated[bool, typer.Option("--dead", help="To the dead queue instead.")] = False,
    reason: Annotated[str, typer.Option(help="With --dead: why.", show_default=False)] = "",
) -> None:
    """Give leased items back: to the tail, at a moment, or to the dead queue. All of them, or none."""
    at = parse_moment(retry_at, option="--retry-at") if retry_at else None
    async with session.open() as queues:

        async def call(batch: Sequence[str]) -> None:
            items = [RetryItem(id=item_id, retry_at=at, dead=dead, reason=reason) for item_id in batch]
            await queues.queue_retry(name, items, partition=partition)

        await in_batches(ids, call, done="given back")
        await _let_arrive(queues, name)
    session.out.document(CodeReply(200))
    session.out.say(f"{plural(len(ids), 'item')} given back")


async def _let_arrive(queues: Queues, name: str) -> None:
    """Wait a moment for items on their way to the dead queue; else this process ends, and the next one goes on."""
    deadline_s = time.monotonic() + ARRIVE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        stats = await queues.queue_stats(name)
        if not any(partition.dying for logical in stats.logical_queues for partition in logical.partitions):
            return
        await asyncio.sleep(ARRIVE_POLL_S)


@command(app, "extend", example="holdfast queue extend orders 0632c2f0b0a4d1-1-0 --lease-timeout 10m")
async def extend(
    session: CommandContext,
    name: Name,
    ids: Ids,
    partition: Partition = 0,
    lease_timeout: Annotated[
        str, typer.Option(help="From now on; the queue's own if left out.", show_default=False)
    ] = "",
) -> None:
    """Let leases run longer (or shorter). All of them, or none."""
    checks.duration(lease_timeout, option="--lease-timeout")
    extended: list[ExtendedItem] = []
    async with session.open() as queues:

        async def call(batch: Sequence[str]) -> None:
            reply = await queues.queue_extend(name, batch, partition=partition, lease_timeout=lease_timeout)
            extended.extend(reply.items)

        await in_batches(ids, call, done="extended")
    session.out.document(ExtendReply(extended))
    shown = table("id", "leased until")
    for item in extended:
        add_row(shown, item.id, item.lease_deadline)
    session.out.show(shown)


async def in_batches(ids: Sequence[str], call: Callable[[Sequence[str]], Awaitable[None]], *, done: str) -> None:
    """Call with at most a thousand ids at a time; a failure after the first batch says how many were done."""
    for start in range(0, len(ids), BATCH_COUNT_MAX):
        try:
            await call(ids[start : start + BATCH_COUNT_MAX])
        except HoldfastError as error:
            if not start:
                raise
            text = f"{error.message}; the {plural(start, 'item')} before were {done}"
            raise partly_done(text, error, done_count=start, ids=list(error.ids)) from error
