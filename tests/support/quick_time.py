"""An event loop in which nobody waits: when nothing is left to do, its clock jumps to the next timer.

For code that knows time by its loop alone (`loop.time`, `asyncio.sleep`, `asyncio.timeout`) and talks to nobody
outside: minutes of back-off and of limits pass in milliseconds, in order. A wait that nothing can end is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: What one round of the loop takes, so that the limit of a loop that never sleeps is reached as well.
ROUND_S = 0.0001


class _Skipping(selectors.DefaultSelector):
    """A selector that never blocks: it says how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("the loop waits for something that never comes: no timer, and nothing to run")
        self.now_s += ROUND_S if ready else max(timeout or 0.0, ROUND_S)
        return ready


class QuickLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0 and is the sum of all that was waited for. No threads, no sockets, no processes."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


def run_quickly(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, without the waiting."""
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        return runner.run(main)
