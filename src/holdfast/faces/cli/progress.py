"""A bar on stderr with count and rate, when somebody sits in front of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.faces.cli.output import console, shown


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
