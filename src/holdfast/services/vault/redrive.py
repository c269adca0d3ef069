"""Redrive out of the vault: tasks that survive their process and go on in another, and what operators say to them."""

from __future__ import annotations

import asyncio

from holdfast.core.ledger import Act
from holdfast.core.redrive_task import Redrive, RedriveState
from holdfast.errors import BrokerError, Conflict, NotFound, TryAgain
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.redriving import LEASE_S, WAIT_S_FIRST, WAIT_S_MAX, Redriving
from holdfast.telemetry.events import emit

LIST_COUNT_MAX = 1_000


class Redrives:
    """Runs tasks, each in a task of its own, and hears what operators say to them."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self._running: dict[int, asyncio.Task[None]] = {}
        self._closing = False

    async def resume_all(self) -> None:
        """Go on with every task that was running when its process ended."""
        before = 2**62
        while tasks := await self._custody.vault.redrives.page(before=before, count_max=LIST_COUNT_MAX):
            for redrive in tasks:
                if redrive.state is RedriveState.RUNNING:
                    self.begin(redrive)
            before = tasks[-1].id

    def begin(self, redrive: Redrive) -> None:
        """Work on a task, unless that happens already."""
        if redrive.id not in self._running and redrive.state is RedriveState.RUNNING:
            task = asyncio.create_task(self._keep_on(redrive.id), name=f"redrive {redrive.id}")
            self._running[redrive.id] = task
            task.add_done_callback(lambda _: self._running.pop(redrive.id, None))

    async def find(self, number: int) -> Redrive:
        """Raises NotFound."""
        found = await self._custody.vault.redrives.find(number)
        if found is None:
            raise NotFound(f"redrive does not exist; there is no redrive {number}")
        return found

    async def change(self, number: int, word: str, act: Act) -> Redrive:
        """`pause`, `resume` or `cancel`. Raises Conflict when that cannot be done to it now."""
        state, sources = {
            "pause": (RedriveState.PAUSED, [RedriveState.RUNNING]),
            "resume": (RedriveState.RUNNING, [RedriveState.PAUSED, RedriveState.STOPPED]),
            "cancel": (RedriveState.CANCELLED, [RedriveState.RUNNING, RedriveState.PAUSED, RedriveState.STOPPED]),
        }[word]
        redrive = await self.find(number)
        if not await self._custody.vault.redrives.set_state(number, state, sources=sources, act=act):
            raise Conflict(f"redrive cannot {word}; redrive {number} is {redrive.state.value}")
        if number in self._running and state is not RedriveState.RUNNING:
            await asyncio.wait([self._running[number]], timeout=LEASE_S)
        changed = await self.find(number)
        self.begin(changed)
        return changed

    async def close(self) -> None:
        """End after the batch that is in flight; tasks go on when the server is back."""
        self._closing = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=LEASE_S)

    async def _keep_on(self, number: int) -> None:
        """Run a task, whatever the vault or the broker do meanwhile. A bug stops it, and says so."""
        wait_s = WAIT_S_FIRST
        while not self._closing:
            try:
                await self.run(number)
                return
            except (BrokerError, TryAgain) as error:
                emit("redrive.waits", redrive=number, error=error)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, WAIT_S_MAX)
            except Exception as bug:  # noqa: BLE001 - it is told, and the task stops
                emit("server.bug", method=f"redrive {number}", error=repr(bug), traceback=bug)
                await self._stop(number, "it met a bug, the server's log has the details")
                return

    async def run(self, number: int) -> None:
        """Until it is done, paused, cancelled, or this server stops."""
        redrive = await self.find(number)
        why = await Redriving(self._custody, redrive, is_closing=lambda: self._closing).run()
        if why:
            await self._stop(number, why)

    async def _stop(self, number: int, why: str) -> None:
        act = Act(actor=self._custody.actor, action="redrives.stopped", detail=why)
        await self._custody.vault.redrives.set_state(
            number, RedriveState.STOPPED, sources=[RedriveState.RUNNING], act=act
        )
