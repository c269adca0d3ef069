"""Redrive out of the vault: tasks that survive their process and go on in another, and what operators say to them."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from contextlib import suppress
from datetime import timedelta

from holdfast.core.ledger import LedgerAct
from holdfast.core.moments import moment
from holdfast.core.redrive_task import RedriveState, RedriveTask
from holdfast.errors import BrokerError, Conflict, HoldfastError, NotFound, TryAgain
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.redriving import LEASE_S, WAIT_S_FIRST, WAIT_S_MAX, Redriving
from holdfast.telemetry.events import emit

LIST_COUNT_MAX = 1_000
#: Who runs a task says so again and again; who was silent for so long is taken for dead.
HOLD_S = 15.0
BEAT_S = 3.0
WAIT_FOR_HOLD_S = 1.0
RELEASE_COUNT_MAX = 2_000


class RedriveRunner:
    """Runs tasks, each in a task of its own, and hears what operators say to them."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self._running: dict[int, asyncio.Task[None]] = {}
        self._closing = False
        self._name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._lost: set[int] = set()  #: another runs them by now

    async def resume_all(self) -> None:
        """Go on with every task that was running when its process ended."""
        before = 2**62
        while tasks := await self._custody.vault.redrives.page(before=before, count_max=LIST_COUNT_MAX):
            for redrive in tasks:
                if redrive.state is RedriveState.RUNNING:
                    self.begin(redrive)
            before = tasks[-1].id

    def begin(self, redrive: RedriveTask) -> None:
        """Work on a task, unless that happens already."""
        if redrive.id not in self._running and redrive.state is RedriveState.RUNNING:
            task = asyncio.create_task(self._keep_on(redrive.id), name=f"redrive {redrive.id}")
            self._running[redrive.id] = task
            task.add_done_callback(lambda _: self._running.pop(redrive.id, None))

    async def find(self, number: int) -> RedriveTask:
        """Raises NotFound."""
        found = await self._custody.vault.redrives.find(number)
        if found is None:
            raise NotFound(f"redrive does not exist; there is no redrive {number}")
        return found

    async def change(self, number: int, word: str, act: LedgerAct) -> RedriveTask:
        """`pause`, `resume` or `cancel`. Raises Conflict when that cannot be done to it now."""
        state, sources = {
            "pause": (RedriveState.PAUSED, [RedriveState.RUNNING]),
            "resume": (RedriveState.RUNNING, [RedriveState.PAUSED, RedriveState.STOPPED]),
            "cancel": (RedriveState.CANCELLED, [RedriveState.RUNNING, RedriveState.PAUSED, RedriveState.STOPPED]),
        }[word]
        redrive = await self.find(number)
        if word == "cancel" and redrive.state is RedriveState.CANCELLED:
            await self.release()  # leases may have run out since
            return await self.find(number)
        if word == "resume" and redrive.state is RedriveState.RUNNING:
            self._check_takeover(redrive)
            sources = [*sources, RedriveState.RUNNING]
        if not await self._custody.vault.redrives.set_state(number, state, sources=sources, act=act):
            raise Conflict(f"redrive cannot {word}; redrive {number} is {redrive.state.value}")
        if number in self._running and state is not RedriveState.RUNNING:
            await asyncio.wait([self._running[number]], timeout=LEASE_S)
        if state is RedriveState.CANCELLED:
            await self.release()
        changed = await self.find(number)
        self.begin(changed)
        return changed

    async def release(self) -> None:
        """Letters of cancelled tasks that nobody has in hand any more are an operator's again, with a note."""
        act = LedgerAct(actor=self._custody.actor, action="redrives.release")
        while await self._custody.vault.redrives.release(count_max=RELEASE_COUNT_MAX, act=act) == RELEASE_COUNT_MAX:
            pass

    def _check_takeover(self, redrive: RedriveTask) -> None:
        """A running task is taken over only from nobody. Raises Conflict."""
        if redrive.id in self._running:
            raise Conflict(f"redrive cannot resume; redrive {redrive.id} is running")
        if redrive.held_until is not None:
            left_s = (redrive.held_until - moment(self._custody.clock.now_us())).total_seconds()
            raise Conflict(
                f"redrive cannot resume; redrive {redrive.id} is running in the process {redrive.held_by}; if that one "
                f"is gone, try again in {max(1, round(left_s + 0.5))} s"
            )

    async def close(self) -> None:
        """End after the batch that is in flight; tasks go on when the server is back."""
        self._closing = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=LEASE_S)

    async def _keep_on(self, number: int) -> None:
        """Run a task as the only one who does: its letters are leased one by one, its rate and canary are not."""
        self._lost.discard(number)
        if not await self._held(number):
            return
        beating = asyncio.create_task(self._beat(number), name=f"hold on redrive {number}")
        try:
            await self._persist(number)
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            with suppress(HoldfastError):  # it runs out by itself
                await self._custody.vault.redrives.let_go(number, self._name)

    async def _held(self, number: int) -> bool:
        """Wait until nobody else runs it; false when there is nothing to run any more."""
        while not self._closing:
            with suppress(BrokerError, TryAgain):
                if await self._hold(number):
                    return True
                if (await self.find(number)).state is not RedriveState.RUNNING:
                    return False
            await asyncio.sleep(WAIT_FOR_HOLD_S)
        return False

    async def _beat(self, number: int) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with suppress(HoldfastError):
                if not await self._hold(number):
                    self._lost.add(number)
                    return

    async def _hold(self, number: int) -> bool:
        until = moment(self._custody.clock.now_us()) + timedelta(seconds=HOLD_S)
        return await self._custody.vault.redrives.hold(number, self._name, until=until)

    async def _persist(self, number: int) -> None:
        """Run a task, whatever the vault or the broker do meanwhile. A bug stops it, and says so."""
        wait_s = WAIT_S_FIRST
        while not self._is_over(number):
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
        why = await Redriving(self._custody, redrive, is_closing=lambda: self._is_over(number)).run()
        if why:
            await self._stop(number, why)

    def _is_over(self, number: int) -> bool:
        return self._closing or number in self._lost

    async def _stop(self, number: int, why: str) -> None:
        act = LedgerAct(actor=self._custody.actor, action="redrives.stopped", detail=why)
        await self._custody.vault.redrives.set_state(
            number, RedriveState.STOPPED, sources=[RedriveState.RUNNING], act=act
        )
