"""How far a command is: bars on stderr when somebody sits in front of it, for many items and for a recovery."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from holdfast.core.recovery import Summary, progress_of
from holdfast.faces.cli.output import console, one_line, shown
from holdfast.services.recover.report import Notices

PROGRESS_STEP_S = 1.0


class Meter:
    """Counts, and shows nothing."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        """So many more items are done."""
        self.count += count

    def advance(self, steps: int) -> None:
        """The bar moves on by so many of its total."""


class _Bar(Meter):
    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        super().__init__()
        self._progress = progress
        self._began_s = time.monotonic()
        self._task = progress.add_task(what, total=total, count="0", rate="")

    def add(self, count: int) -> None:
        super().add(count)
        elapsed_s = max(0.001, time.monotonic() - self._began_s)
        rate = f"{shown(round(self.count / elapsed_s))}/s"
        self._progress.update(self._task, count=shown(self.count), rate=rate)

    def advance(self, steps: int) -> None:
        self._progress.advance(self._task, steps)


@contextmanager
def meter(what: str, *, total: int | None, quiet: bool) -> Iterator[Meter]:
    """A bar of `total` steps (None: nobody knows how many), or just a count when quiet or stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield Meter()
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]:>11} items", markup=False),
        TextColumn("{task.fields[rate]:>11}", markup=False),
        TimeElapsedColumn(),
        console=console(stderr=True),
    )
    with progress:
        yield _Bar(progress, what, total)


@contextmanager
def bar(as_json: bool, limit: int | None = None) -> Iterator[Notices]:
    """What a recovery shows while it runs: the sentences, and on a terminal a bar with rate and time left.

    Sentences go to stdout, as JSON lines to stderr; progress to a bar, or to stderr as JSON lines.
    """
    if sys.stderr.isatty() and not as_json:
        with _terminal(limit) as notices:
            yield notices
        return
    yield Notices(_say_json if as_json else lambda sentence: typer.echo(one_line(sentence)), _lines(), _say_json)


def _say_json(sentence: str) -> None:
    typer.echo(msgspec.json.encode({"message": sentence}), err=True)


def _lines() -> Callable[[Summary], None]:
    said_s = time.monotonic()

    def on_progress(summary: Summary) -> None:
        nonlocal said_s
        if time.monotonic() - said_s < PROGRESS_STEP_S:
            return
        said_s = time.monotonic()
        line = {
            "event": "recovery.progress",
            "queue": summary.dead_queue,
            "found": summary.found,
            "recovered": summary.recovered,
            "failed": summary.failed,
            "skipped": summary.skipped,
        }
        typer.echo(msgspec.json.encode(line), err=True)

    return on_progress


@contextmanager
def _terminal(limit: int | None) -> Iterator[Notices]:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
        console=console(stderr=True),
    )
    began_s = time.monotonic()
    drawn_s = 0.0
    task = progress.add_task("Recovering", total=None, rate="")

    def on_progress(summary: Summary) -> None:
        nonlocal drawn_s
        now_s = time.monotonic()
        done, total = progress_of(summary, limit)
        if now_s - drawn_s < 0.1 and (total is None or done < total):
            return
        drawn_s = now_s
        rate = f"{shown(round(summary.recovered / max(0.001, now_s - began_s)))}/s"
        progress.update(task, completed=done, total=total, rate=rate)

    def say(sentence: str) -> None:
        progress.console.print(one_line(sentence), markup=False, soft_wrap=True)  # commands in it can be copied

    with progress:
        yield Notices(say, on_progress, say)
