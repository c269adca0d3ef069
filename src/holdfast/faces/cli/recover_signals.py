"""Signals during a recovery: before it has begun they end it; later the first stops it cleanly, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.faces.cli.context import CommandFailed, ExitCode
from holdfast.ports.recovery import DeadLetters
from holdfast.services.recover.report import Notices

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: For each goodbye to a broker that may be silent. After that its connection ends without one.
GOODBYE_S = 0.5
STREAMS = (1, 2)


class Stoppable(Protocol):
    """A run."""

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for the end."""

    def stop(self) -> None:
        """Nothing new; what is under way is finished."""

    def abandon(self) -> None:
        """End now, still without loss."""


class Begin(Protocol):
    """Called with the run when that begins."""

    def __call__(self, run: Stoppable, waiting: Callable[[], int] | None = None) -> None:
        """`waiting`: for how many confirms a stop would wait; without it, it waits for no confirms."""


class Interrupted(CommandFailed):
    """A signal came before anything was taken."""

    def __init__(self) -> None:
        super().__init__("recovery was stopped before it began; nothing was taken", exit_code=ExitCode.INTERRUPTED)


@contextmanager
def signals(notices: Notices) -> Iterator[Begin]:
    """Around everything from the first connection on. Raises Interrupted at a signal before the run has begun."""
    loop = asyncio.get_running_loop()
    ears = SignalListener(notices, loop)
    # Under nohup the run outlives its terminal.
    numbers = [one for one in NUMBERS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, ears.hear, number)
    try:
        yield ears.begin
    except (asyncio.CancelledError, HoldfastError) as error:
        if not ears.has_interrupted:
            raise
        raise Interrupted from error
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        ears.close()


@asynccontextmanager
async def let_go_at_once(letters: DeadLetters) -> AsyncIterator[None]:
    """Whoever is interrupted ends one connection here and the other when `letters` is closed, each within a limit."""
    try:
        yield
    except asyncio.CancelledError:
        await letters.let_go()
        raise


class SignalListener:
    """Cancels the task that made it until `close`, or stops the run."""

    def __init__(self, notices: Notices, loop: asyncio.AbstractEventLoop) -> None:
        self.has_interrupted = False
        self._notices = notices
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._terminals = [stream for stream in STREAMS if os.isatty(stream)]
        self._run: Stoppable | None = None
        self._waiting: Callable[[], int] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._has_hung_up = False

    def begin(self, run: Stoppable, waiting: Callable[[], int] | None = None) -> None:
        if self.has_interrupted:  # somebody has swallowed the cancellation
            raise Interrupted
        self._run, self._waiting = run, waiting

    def hear(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            self._has_hung_up = True
            self._leave_terminals()
            self._notices.nobody_may_listen()
        run = self._run
        if run is None or not self._notices.has_begun:
            self._interrupt()
        elif not run.is_stopping:
            run.stop()
            self._notices.stopping(self._waiting() if self._waiting is not None else None)
        elif number != signal.SIGHUP:  # which comes more than once: from the kernel, and passed on by the shell
            run.abandon()

    def close(self) -> None:
        """What was asked of the task is over: whoever goes on in it is not cancelled."""
        if self._again is not None:
            self._again.cancel()
        if self._has_hung_up:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._leave_terminals()
        while self.has_interrupted and self._task is not None and self._task.cancelling():
            self._task.uncancel()

    def _interrupt(self) -> None:
        """Again and again: each goodbye that is waited for in vain ends by it."""
        assert self._task is not None  # noqa: S101  a coroutine of the command line runs in a task
        self.has_interrupted = True
        self._task.cancel()
        if self._again is not None:
            self._again.cancel()
        self._again = self._loop.call_later(GOODBYE_S, self._interrupt)

    def _leave_terminals(self) -> None:
        """Whatever is said to a terminal that is gone would be an error in the middle of the run."""
        for stream in self._terminals:
            if not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
