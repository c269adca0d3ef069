"""Recoveries that run by themselves inside a server: once at its start, or every so often, one queue one run at a time.

A run that fails is logged and tried again at its next turn; it never ends the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct

from holdfast.core.recovery import Summary
from holdfast.errors import HoldfastError
from holdfast.telemetry.events import emit

#: Beyond its own stop_timeout: what a run may take to give letters back and to write its row.
STOP_TIMEOUT_S = 30.0
NEVER = "neither on_start nor every is set, so it never runs by itself"


class StoppableRun(Protocol):
    """A run that can be asked to end."""

    def stop(self) -> None:
        """Nothing new; what is under way is finished."""

    def abandon(self) -> None:
        """End now, still without loss."""


OnBegin = Callable[[StoppableRun], None]


class ScheduledRecovery(Struct, frozen=True, kw_only=True):
    """One dead-letter queue and when it is recovered. `run` tells `on_begin` of each run that begins."""

    dead_queue: str
    run: Callable[[OnBegin], Awaitable[Summary]]
    on_start: bool = False
    every_s: float = 0.0  #: from the end of a run to the next; 0: never again


class RecoverySchedule:
    """Keeps duties until it is stopped."""

    def __init__(self, duties: Sequence[ScheduledRecovery]) -> None:
        self._duties = [duty for duty in duties if duty.on_start or duty.every_s]
        self._idle = [duty for duty in duties if duty not in self._duties]
        self._stopped = asyncio.Event()
        self._running: set[StoppableRun] = set()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep them while the block runs; at its end runs are stopped cleanly, and at once if that takes too long."""
        for duty in self._idle:  # whoever wrote it down may think that it runs
            emit("recovery.waits", queue=duty.dead_queue, error=NEVER)
        tasks = [asyncio.create_task(self._keep(duty), name=f"recovery of {duty.dead_queue}") for duty in self._duties]
        try:
            yield
        finally:
            await self._end(tasks)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._stopped.set()
        for recovery in self._running:
            recovery.stop()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        if late:
            for recovery in self._running:
                recovery.abandon()
            _, late = await asyncio.wait(late, timeout=STOP_TIMEOUT_S)
        for task in late:  # a run that does not begin, or hangs: its letters go back with its connection
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _keep(self, duty: ScheduledRecovery) -> None:
        if duty.on_start:
            await self.run_once(duty)
        while duty.every_s and not await self._stops_within(duty.every_s):
            await self.run_once(duty)

    async def run_once(self, duty: ScheduledRecovery) -> Summary | None:
        """One run; none when it failed, which is logged."""
        begun: list[StoppableRun] = []

        def on_begin(recovery: StoppableRun) -> None:
            begun.append(recovery)
            self._running.add(recovery)
            if self._stopped.is_set():
                recovery.stop()

        try:
            return await duty.run(on_begin)
        except HoldfastError as error:
            emit("recovery.failed", queue=duty.dead_queue, error=error.message)
        except Exception as bug:  # noqa: BLE001 - a bug here must not take the server along
            emit("recovery.failed", queue=duty.dead_queue, error=repr(bug), traceback=bug)
        finally:
            self._running.difference_update(begun)
        return None

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True
