"""Signals during a recovery: the first stops it cleanly, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A run."""

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for the end."""

    def stop(self) -> None:
        """Nothing new; what is under way is finished."""

    def abandon(self) -> None:
        """End now, still without loss."""


@contextmanager
def signals() -> Iterator[Callable[[Stoppable], None]]:
    """Call what it gives with the run when that begins."""
    loop = asyncio.get_running_loop()
    running: list[Stoppable] = []

    def on_signal() -> None:
        for run in running:
            run.abandon() if run.is_stopping else run.stop()

    for number in NUMBERS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield running.append
    finally:
        for number in NUMBERS:
            loop.remove_signal_handler(number)
