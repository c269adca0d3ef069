"""`holdfast queue watch`: a live table of queues, refreshed every second."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.core.moments import format_duration, parse_duration
from holdfast.core.requests.queue import PartitionStats, StatsReply
from holdfast.errors import HoldfastError, QueueMissing
from holdfast.faces.cli.app import queue as app
from holdfast.faces.cli.command import command
from holdfast.faces.cli.context import CommandContext
from holdfast.faces.cli.output import filled_table, one_line, readable, shown
from holdfast.faces.cli.queues import all_queues, counts
from holdfast.services.queue.queues import Queues

ROWS_COUNT_MAX = 500
INTERVAL_S = 1.0


@command(app, "watch", example="holdfast queue watch\nholdfast queue watch orders orders-dead --once")
async def watch(
    session: CommandContext,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE…", help="Which queues; all if left out.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between frames.", min=0.1, max=3600)
    ] = INTERVAL_S,
) -> None:
    """Watch queues live, until Ctrl-C. With --json: one line per queue and frame."""
    async with session.open() as queues:
        frames = _Frames(queues, names or [])
        first = await frames.read()  # a name that does not exist, or a server that is not there, is said at once
        if once or session.as_json or not sys.stdout.isatty():
            await _print_frames(session, frames, first, once=once, interval_s=interval_s)
            return
        with Live(frames.table(first), console=session.out.people, screen=True, auto_refresh=False) as live:
            while True:  # ends by Ctrl-C
                live.update(frames.table(await frames.read_again()), refresh=True)
                await asyncio.sleep(interval_s)


async def _print_frames(
    session: CommandContext, frames: _Frames, first: list[StatsReply], *, once: bool, interval_s: float
) -> None:
    stats = first
    while True:  # ends by Ctrl-C, or at once
        session.out.documents(stats)
        session.out.show(frames.table(stats))
        if once:
            return
        await asyncio.sleep(interval_s)
        stats = await frames.read()


class _Frames:
    """Reads the counts of queues, and remembers the last ones to tell how they change."""

    def __init__(self, queues: Queues, names: list[str]) -> None:
        self._queues = queues
        self._names = names
        self._trouble = ""
        self._last: dict[str, tuple[float, int]] = {}
        self._stats: list[StatsReply] = []

    async def read(self) -> list[StatsReply]:
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

    async def read_again(self) -> list[StatsReply]:
        """Like `read`, but trouble that may pass is shown below the last known counts."""
        try:
            return await self.read()
        except HoldfastError as error:
            self._trouble = error.message
            return self._stats

    def table(self, stats: list[StatsReply]) -> Table:
        """One frame. What is wrong (dying, overdue, failures) has a column only when there is any."""
        columns = (
            "queue",
            "#queued",
            "#±/s",
            "#leased",
            "#scheduled",
            "#dying",
            "#overdue",
            "#failures",
            "#waiting",
            "#age",
        )
        now_s = time.monotonic()
        rows: list[list[object]] = []
        for reply in stats:
            partitions = [p for logical in reply.logical_queues for p in logical.partitions]
            queued, leased, scheduled, *wrong = counts(partitions)
            change = self._change(reply.queue_name, now_s, queued)
            waiting = sum(logical.lease_waiting for logical in reply.logical_queues)
            rows.append([
                reply.queue_name, queued, change, leased, scheduled, *(count or None for count in wrong), waiting,
                _average_age(partitions),
            ])  # fmt: skip
        made = filled_table(columns, rows)
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


def _average_age(partitions: list[PartitionStats]) -> str:
    """Over all partitions, by their number of items."""
    total = sum(p.total for p in partitions)
    if not total:
        return ""
    age_us = sum(parse_duration(p.average_age, what="age") * p.total for p in partitions) // total
    return readable(format_duration(age_us))
