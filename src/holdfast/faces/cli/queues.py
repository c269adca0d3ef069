"""`holdfast queue create|update|info|list|delete|stats|clear|pause|resume`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer
from msgspec import UNSET, UnsetType
from rich.table import Table

from holdfast.core.checks import LIST_COUNT_DEFAULT
from holdfast.core.item import QueueInfo
from holdfast.core.requests.queue import CodeReply, PartitionStats, StatsReply
from holdfast.faces.cli import command as checks
from holdfast.faces.cli.app import queue as app
from holdfast.faces.cli.command import command
from holdfast.faces.cli.context import BadUsage, CommandContext
from holdfast.faces.cli.output import add_row, filled_table, plural, readable, table
from holdfast.services.queue.queues import Queues

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]

#: What `counts` begins with, in words.
_PLACES = ("queued", "leased", "scheduled")
_LEASE = "How long a lease lasts, such as 30s or 5m."
_EXPIRE = "How long an item may wait before it dies, such as 24h."
_ATTEMPTS = "How often an item may be leased before it dies; 0 is without limit."
_DEAD = "The queue that dead items go to; it must exist."
_REFERENCE = "A text of your own to find the queue by."
_PARTITIONS = "How many partitions it has; an update may only raise it."
_RETENTION = "In a dead queue: how long an item is kept before it is deleted; for ever if left out."


@command(app, "create", example="holdfast queue create orders --max-attempts 5 --dead-queue orders-dead")
async def create(
    session: CommandContext,
    name: Name,
    lease_timeout: Annotated[str, typer.Option(help=_LEASE)] = "1m",
    expire_timeout: Annotated[str, typer.Option(help=_EXPIRE)] = "24h",
    max_attempts: Annotated[int, typer.Option(help=_ATTEMPTS)] = 0,
    dead_queue: Annotated[str, typer.Option(help=_DEAD, show_default=False)] = "",
    reference: Annotated[str, typer.Option(help=_REFERENCE, show_default=False)] = "",
    partitions: Annotated[int, typer.Option(help=_PARTITIONS)] = 1,
    dead_retention: Annotated[str, typer.Option(help=_RETENTION, show_default=False)] = "",
) -> None:
    """Make a queue."""
    _check_durations(lease_timeout=lease_timeout, expire_timeout=expire_timeout, dead_retention=dead_retention)
    async with session.open() as queues:
        await queues.queues_create(
            name,
            lease_timeout=lease_timeout,
            expire_timeout=expire_timeout,
            max_attempts=max_attempts,
            dead_queue=dead_queue,
            reference=reference,
            requested_partitions=partitions,
            dead_retention=dead_retention,
        )
    session.out.document(CodeReply(200))
    session.out.say(f"queue '{name}' was created")
    if not dead_queue:
        _remark_deletion(session, expire_timeout, max_attempts)


@command(
    app, "update", example="holdfast queue update orders --max-attempts 3\nholdfast queue update orders --dead-queue ''"
)
async def update(
    session: CommandContext,
    name: Name,
    lease_timeout: Annotated[str | None, typer.Option(help=_LEASE)] = None,
    expire_timeout: Annotated[str | None, typer.Option(help=_EXPIRE)] = None,
    max_attempts: Annotated[int | None, typer.Option(help=_ATTEMPTS)] = None,
    dead_queue: Annotated[str | None, typer.Option(help=f"{_DEAD} '' takes it away.")] = None,
    reference: Annotated[str | None, typer.Option(help=f"{_REFERENCE} '' takes it away.")] = None,
    partitions: Annotated[int | None, typer.Option(help=_PARTITIONS)] = None,
    dead_retention: Annotated[str | None, typer.Option(help=f"{_RETENTION} '' takes it away.")] = None,
) -> None:
    """Change a queue's settings. What is not given stays as it is; '' and 0 are said explicitly."""
    _check_durations(lease_timeout=lease_timeout, expire_timeout=expire_timeout, dead_retention=dead_retention)
    async with session.open() as queues:
        await queues.queues_update(
            name,
            lease_timeout=_given(lease_timeout),
            expire_timeout=_given(expire_timeout),
            max_attempts=UNSET if max_attempts is None else max_attempts,
            dead_queue=_given(dead_queue),
            reference=_given(reference),
            requested_partitions=UNSET if partitions is None else partitions,
            dead_retention=_given(dead_retention),
        )
    session.out.document(CodeReply(200))
    session.out.say(f"queue '{name}' was updated")


@command(app, "info", example="holdfast queue info orders")
async def info(session: CommandContext, name: Name) -> None:
    """Show a queue's settings."""
    async with session.open() as queues:
        found = await queues.queues_info(name)
    session.out.document(found)
    session.out.show(_info_table(found))


@command(app, "list", example="holdfast queue list\nholdfast queue list --json | jq -r .queue_name")
async def list_queues(
    session: CommandContext,
    pivot: Annotated[str, typer.Option(help="Begin with this name.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(help="At most so many; 0 is all.", min=0)] = 0,
) -> None:
    """List the queues by name."""
    columns = ("queue", "#lease", "#expire", "#attempts", "#partitions", "state", "dead queue", "reference")
    rows: list[tuple[object, ...]] = []
    async with session.open() as queues:
        async for found in all_queues(queues, pivot=pivot, limit=limit):
            session.out.document(found)
            if session.as_json:
                continue
            rows.append((
                found.queue_name, found.lease_timeout, found.expire_timeout, found.max_attempts or "no limit",
                len(found.partitions), "paused" if found.paused else "open", found.dead_queue, found.reference,
            ))  # fmt: skip
    if rows:
        session.out.show(filled_table(columns, rows))
    else:
        session.out.say("there are no queues here; make one with 'holdfast queue create NAME'")


@command(app, "delete", example="holdfast queue delete orders --force")
async def delete(
    session: CommandContext,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Delete it with the items that are in it.")] = False,
) -> None:
    """Delete a queue; with items in it only by force."""
    async with session.open() as queues:
        await queues.queues_delete(name, force=force)
    session.out.document(CodeReply(200))
    session.out.say(f"queue '{name}' was deleted")


@command(app, "stats", example="holdfast queue stats orders")
async def stats(session: CommandContext, name: Name) -> None:
    """Count what waits, is leased, scheduled, dying and overdue, by partition."""
    async with session.open() as queues:
        reply = await queues.queue_stats(name)
    session.out.document(reply)
    session.out.show(_stats_table(reply))
    waiting = [(q.produce_waiting, q.lease_waiting, q.complete_waiting, q.in_flight) for q in reply.logical_queues]
    produces, leases, completes, in_flight = (sum(column) for column in zip(*waiting, strict=True))
    session.out.say(
        f"requests waiting: {produces} produce, {leases} lease, {completes} complete; {in_flight} in flight"
    )


@command(app, "clear", example="holdfast queue clear orders --queue --scheduled")
async def clear(
    session: CommandContext,
    name: Name,
    queue: Annotated[bool, typer.Option("--queue", help="Delete the queued items.")] = False,
    scheduled: Annotated[bool, typer.Option("--scheduled", help="Delete the scheduled items.")] = False,
    destructive: Annotated[bool, typer.Option("--destructive", help="With --queue: leased items too.")] = False,
) -> None:
    """Delete items and keep the queue. Say which: --queue, --scheduled, or both."""
    if not queue and not scheduled:
        raise BadUsage("say what to delete; --queue, --scheduled, or both")
    async with session.open() as queues:
        before = counts(await _partitions(queues, name))
        await queues.queue_clear(name, queue=queue, scheduled=scheduled, destructive=destructive)
        after = counts(await _partitions(queues, name))
    session.out.document(CodeReply(200))
    gone = [max(0, were - are) for were, are in zip(before, after, strict=True)][:3]
    parts = [f"{plural(count, 'item')} {what}" for count, what in zip(gone, _PLACES, strict=True) if count]
    session.out.say(f"queue '{name}' was cleared; {', '.join(parts) or 'no items'} went")
    if after[1] and queue:
        session.out.note(f"{plural(after[1], 'item')} leased stayed; --destructive deletes those too")


@command(app, "pause", example="holdfast queue pause orders")
async def pause(session: CommandContext, name: Name) -> None:
    """Take items in and give none out, until resumed; a restart does not change that."""
    async with session.open() as queues:
        await queues.queue_pause(name)
    session.out.document(CodeReply(200))
    session.out.say(f"queue '{name}' is paused")


@command(app, "resume", example="holdfast queue resume orders")
async def resume(session: CommandContext, name: Name) -> None:
    """Give items out again."""
    async with session.open() as queues:
        await queues.queue_resume(name)
    session.out.document(CodeReply(200))
    session.out.say(f"queue '{name}' is resumed")


async def all_queues(queues: Queues, *, pivot: str = "", limit: int = 0) -> AsyncIterator[QueueInfo]:
    """Queues by name from the pivot on, page by page. The pivot is included, so each page repeats the last name."""
    last: str | None = None
    count = 0
    while True:
        page = await queues.queues_list(pivot=pivot, limit=LIST_COUNT_DEFAULT)
        for found in page:
            if found.queue_name == last:
                continue
            yield found
            count += 1
            if count == limit:
                return
        if len(page) < LIST_COUNT_DEFAULT:
            return
        last = pivot = page[-1].queue_name


async def _partitions(queues: Queues, name: str) -> list[PartitionStats]:
    reply = await queues.queue_stats(name)
    return [partition for logical in reply.logical_queues for partition in logical.partitions]


def _check_durations(**given: str | None) -> None:
    for name, text in given.items():
        checks.duration(text or "", option=f"--{name.replace('_', '-')}")


def _remark_deletion(session: CommandContext, expire_timeout: str, max_attempts: int) -> None:
    """Without a dead queue a policy deletes: whoever sets it should know."""
    attempts = f", or leased {max_attempts} times without success" if max_attempts else ""
    session.out.note(
        f"note: it has no dead queue; an item that waits longer than {expire_timeout}{attempts} is deleted. "
        "'queue update --dead-queue' changes that"
    )


def _given(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value


def _info_table(found: QueueInfo) -> Table:
    places: dict[str, int] = {}
    for partition in found.partitions:
        places[partition.storage] = places.get(partition.storage, 0) + 1
    shown = table("queue", found.queue_name)
    for what, value in (
        ("lease timeout", found.lease_timeout),
        ("expire timeout", found.expire_timeout),
        ("max attempts", found.max_attempts or "no limit"),
        ("dead queue", found.dead_queue),
        ("dead retention", found.dead_retention),
        ("reference", found.reference),
        ("state", "paused" if found.paused else "open"),
        ("partitions", ", ".join(f"{count} in {storage}" for storage, count in places.items())),
        ("created", found.created_at),
        ("updated", found.updated_at),
    ):
        add_row(shown, what, value)
    return shown


def _stats_table(reply: StatsReply) -> Table:
    partitions = [partition for logical in reply.logical_queues for partition in logical.partitions]
    failing = ["#failures"] if any(p.failures for p in partitions) else []
    shown = table(
        "#partition", "#queued", "#leased", "#scheduled", "#dying", "#overdue", *failing, "#age", "#leased for",
        title=reply.queue_name,
    )  # fmt: skip
    number_count = 6 if failing else 5
    for p in partitions:
        ages = readable(p.average_age), readable(p.average_leased_age)
        add_row(shown, p.partition, *counts([p])[:number_count], *ages, style="red" if p.failures else "")
    if len(partitions) > 1:
        shown.add_section()
        add_row(shown, "all", *counts(partitions)[:number_count], "", "")
    return shown


def counts(partitions: Sequence[PartitionStats]) -> list[int]:
    """Queued, leased, scheduled, dying, overdue items, and failures, of these partitions together."""
    return [
        sum(p.total - p.total_leased for p in partitions),
        sum(p.total_leased for p in partitions),
        sum(p.scheduled for p in partitions),
        sum(p.dying for p in partitions),
        sum(p.overdue for p in partitions),
        sum(p.failures for p in partitions),
    ]
