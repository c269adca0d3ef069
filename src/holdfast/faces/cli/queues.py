"""`holdfast queue create|update|info|list|delete|stats|clear|pause|resume|watch`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Meta
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.core.item import QueueInfo
from holdfast.core.moments import format_duration, written_duration
from holdfast.core.requests import queue as requests
from holdfast.errors import HoldfastError, QueueMissing
from holdfast.faces.cli.command import CommandOption, asks, command
from holdfast.faces.cli.context import BadUsage, CommandContext
from holdfast.faces.cli.output import Output, add_row, one_line, plural, readable, short, shown, table
from holdfast.services.queue.queues import all_queues

if TYPE_CHECKING:
    from holdfast.services.queue.queues import Queues

ROWS_COUNT_MAX = 500
INTERVAL_S = 1.0
#: What `counts` begins with, in words.
_PLACES = ("queued", "leased", "scheduled")

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]
LIMIT = CommandOption(help="At most so many; 0 is all.", limits=(0, None))


def _or_none(about: Meta) -> CommandOption:
    return CommandOption(help=f"{about.description} '' takes it away.")


@asks(
    "queue create",
    requests.CreateQueueRequest,
    example="orders --max-attempts 5 --dead-queue orders-dead",
    lease_timeout=CommandOption(default="1m"),
    expire_timeout=CommandOption(default="24h"),
    requested_partitions=CommandOption(name="partitions", default=1),
)
def create(out: Output, asked: requests.CreateQueueRequest, reply: requests.CodeReply) -> None:
    """Make a queue."""
    out.say(f"queue '{asked.queue_name}' was created")
    if asked.dead_queue:
        return
    # Without a dead queue a policy deletes: whoever sets it should know.
    attempts = f", or leased {asked.max_attempts} times without success" if asked.max_attempts else ""
    out.note(
        f"note: it has no dead queue; an item that waits longer than {asked.expire_timeout}{attempts} is deleted. "
        "'queue update --dead-queue' changes that"
    )


@asks(
    "queue update",
    requests.UpdateQueueRequest,
    example="orders --max-attempts 3\norders --dead-queue ''",
    dead_queue=_or_none(requests.DEAD),
    reference=_or_none(requests.REFERENCE),
    requested_partitions=CommandOption(name="partitions"),
    dead_retention=_or_none(requests.RETENTION),
)
def update(out: Output, asked: requests.UpdateQueueRequest, reply: requests.CodeReply) -> None:
    """Change a queue's settings. What is not given stays as it is; '' and 0 are said explicitly."""
    out.say(f"queue '{asked.queue_name}' was updated")


@asks("queue info", requests.InfoRequest, example="orders")
def info(out: Output, asked: requests.InfoRequest, found: QueueInfo) -> None:
    """Show a queue's settings."""
    places = Counter(partition.storage for partition in found.partitions)
    rows = (
        ("lease timeout", short(found.lease_timeout)),
        ("expire timeout", short(found.expire_timeout)),
        ("max attempts", found.max_attempts or "no limit"),
        ("dead queue", found.dead_queue),
        ("dead retention", short(found.dead_retention)),
        ("reference", found.reference),
        ("state", "paused" if found.paused else "open"),
        ("partitions", ", ".join(f"{count} in {storage}" for storage, count in places.items())),
        ("created", found.created_at),
        ("updated", found.updated_at),
    )
    out.show(table(("queue", found.queue_name), rows))


@command(
    "queue list",
    requests.ListRequest,
    example="\n--json | jq -r .queue_name",
    pivot=CommandOption(help="Begin with this name."),
    limit=LIMIT,
)
async def list_queues(context: CommandContext, asked: requests.ListRequest) -> None:
    """List the queues by name."""
    columns = ("queue", "#lease", "#expire", "#attempts", "#partitions", "state", "dead queue", "reference")
    rows: list[tuple[object, ...]] = []
    async with context.open() as queues:
        async for found in all_queues(queues, pivot=asked.pivot, limit=asked.limit):
            context.out.document(found)
            if context.as_json:
                continue
            timeouts = short(found.lease_timeout), short(found.expire_timeout)
            rows.append((
                found.queue_name, *timeouts, found.max_attempts or "no limit", len(found.partitions),
                "paused" if found.paused else "open", found.dead_queue, found.reference,
            ))  # fmt: skip
    if rows:
        context.out.show(table(columns, rows))
    else:
        context.out.say("there are no queues here; make one with 'holdfast queue create NAME'")


@asks("queue delete", requests.DeleteQueueRequest, example="orders --force")
def delete(out: Output, asked: requests.DeleteQueueRequest, reply: requests.CodeReply) -> None:
    """Delete a queue; with items in it only by force."""
    out.say(f"queue '{asked.queue_name}' was deleted")


@asks("queue stats", requests.StatsRequest, example="orders")
def stats(out: Output, asked: requests.StatsRequest, reply: requests.StatsReply) -> None:
    """Count what waits, is leased, scheduled, dying and overdue, by partition."""
    partitions = reply.partitions
    failing = ["#failures"] if any(p.failures for p in partitions) else []
    counted = ("#partition", "#queued", "#leased", "#scheduled", "#dying", "#overdue", *failing)
    made = table((*counted, "#age", "#leased for"), (), title=reply.queue_name)
    number_count = 6 if failing else 5
    for p in partitions:
        ages = readable(p.average_age), readable(p.average_leased_age)
        add_row(made, p.partition, *counts([p])[:number_count], *ages, style="red" if p.failures else "")
    if len(partitions) > 1:
        made.add_section()
        add_row(made, "all", *counts(partitions)[:number_count], "", "")
    out.show(made)
    waiting = [(q.produce_waiting, q.lease_waiting, q.complete_waiting, q.in_flight) for q in reply.logical_queues]
    produces, leases, completes, in_flight = (sum(column) for column in zip(*waiting, strict=True))
    out.say(f"requests waiting: {produces} produce, {leases} lease, {completes} complete; {in_flight} in flight")


@command("queue clear", requests.ClearRequest, example="orders --queue --scheduled")
async def clear(context: CommandContext, asked: requests.ClearRequest) -> None:
    """Delete items and keep the queue. Say which: --queue, --scheduled, or both."""
    if not asked.queue and not asked.scheduled:
        raise BadUsage("say what to delete; --queue, --scheduled, or both")
    async with context.connect(requests.ClearRequest) as client:
        before = counts((await client.call(requests.StatsRequest(queue_name=asked.queue_name))).partitions)
        context.out.document(await client.call(asked))
        after = counts((await client.call(requests.StatsRequest(queue_name=asked.queue_name))).partitions)
    gone = [max(0, were - are) for were, are in zip(before, after, strict=True)][:3]
    parts = [f"{plural(count, 'item')} {what}" for count, what in zip(gone, _PLACES, strict=True) if count]
    context.out.say(f"queue '{asked.queue_name}' was cleared; {', '.join(parts) or 'no items'} went")
    if after[1] and asked.queue:
        context.out.note(f"{plural(after[1], 'item')} leased stayed; --destructive deletes those too")


@asks("queue pause", requests.PauseRequest, example="orders")
def pause(out: Output, asked: requests.PauseRequest, reply: requests.CodeReply) -> None:
    """Take items in and give none out, until resumed; a restart does not change that."""
    out.say(f"queue '{asked.queue_name}' is paused")


@asks("queue resume", requests.ResumeRequest, example="orders")
def resume(out: Output, asked: requests.ResumeRequest, reply: requests.CodeReply) -> None:
    """Give items out again."""
    out.say(f"queue '{asked.queue_name}' is resumed")


def counts(partitions: Sequence[requests.PartitionStats]) -> list[int]:
    """Queued, leased, scheduled, dying, overdue items, and failures, of these partitions together."""
    return [
        sum(p.total - p.total_leased for p in partitions),
        sum(p.total_leased for p in partitions),
        sum(p.scheduled for p in partitions),
        sum(p.dying for p in partitions),
        sum(p.overdue for p in partitions),
        sum(p.failures for p in partitions),
    ]


# --- queue watch: a live table, refreshed every second --------------------------------------------------------


@command("queue watch", example="\norders orders-dead --once")
async def watch(
    context: CommandContext,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE…", help="Which queues; all if left out.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between frames.", min=0.1, max=3600)
    ] = INTERVAL_S,
) -> None:
    """Watch queues live, until Ctrl-C. With --json: one line per queue and frame."""
    async with context.open() as queues:
        frames = _Frames(queues, names or [])
        stats = await frames.read()  # a name that does not exist, or a server that is not there, is said at once
        if once or context.as_json or not sys.stdout.isatty():
            while True:  # ends by Ctrl-C, or at once
                context.out.documents(stats)
                context.out.show(frames.table(stats))
                if once:
                    return
                await asyncio.sleep(interval_s)
                stats = await frames.read()
        with Live(frames.table(stats), console=context.out.people, screen=True, auto_refresh=False) as live:
            while True:  # ends by Ctrl-C
                live.update(frames.table(await frames.read_again()), refresh=True)
                await asyncio.sleep(interval_s)


class _Frames:
    """Reads the counts of queues, and remembers the last ones to tell how they change."""

    def __init__(self, queues: Queues, names: list[str]) -> None:
        self._queues = queues
        self._names = names
        self._trouble = ""
        self._last: dict[str, tuple[float, int]] = {}
        self._stats: list[requests.StatsReply] = []

    async def read(self) -> list[requests.StatsReply]:
        """The counts now. A queue that was found by listing and is deleted meanwhile is left out."""
        listed = [found.queue_name async for found in all_queues(self._queues, limit=ROWS_COUNT_MAX)]
        stats = []
        for name in self._names or listed:
            try:
                stats.append(await self._queues.queue_stats(name))
            except QueueMissing:
                if self._names and not self._stats:
                    raise
        self._stats = stats
        self._trouble = ""
        return stats

    async def read_again(self) -> list[requests.StatsReply]:
        """Like `read`, but trouble that may pass is shown below the last known counts."""
        try:
            return await self.read()
        except HoldfastError as error:
            self._trouble = error.message
            return self._stats

    def table(self, stats: list[requests.StatsReply]) -> Table:
        """One frame. What is wrong (dying, overdue, failures) has a column only when there is any."""
        columns = (
            "queue", "#queued", "#±/s", "#leased", "#scheduled", "#dying", "#overdue", "#failures", "#waiting", "#age",
        )  # fmt: skip
        now_s = time.monotonic()
        rows: list[list[object]] = []
        for reply in stats:
            queued, leased, scheduled, *wrong = counts(reply.partitions)
            change = self._change(reply.queue_name, now_s, queued)
            waiting = sum(logical.lease_waiting for logical in reply.logical_queues)
            rows.append([
                reply.queue_name, queued, change, leased, scheduled, *(count or None for count in wrong), waiting,
                _average_age(reply.partitions),
            ])  # fmt: skip
        made = table(columns, rows)
        made.caption = Text(one_line(self._trouble), style="red") if self._trouble else time.strftime("%H:%M:%S")
        made.caption_justify = "left"
        return made

    def _change(self, name: str, now_s: float, queued: int) -> str:
        last = self._last.get(name)
        self._last[name] = (now_s, queued)
        if last is None or now_s <= last[0]:
            return ""
        change = round((queued - last[1]) / (now_s - last[0]))
        return f"+{shown(change)}" if change > 0 else shown(change)


def _average_age(partitions: list[requests.PartitionStats]) -> str:
    """Over all partitions, by their number of items."""
    total = sum(p.total for p in partitions)
    if not total:
        return ""
    age_us = sum(written_duration(p.average_age) * p.total for p in partitions) // total
    return readable(format_duration(age_us))
