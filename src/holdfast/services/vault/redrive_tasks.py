"""Redrive out of the vault: tasks that survive their process and go on in another, and what operators say to them.

A task at work leases, publishes with confirm, and settles; while a batch is on its way, the one before is settled and
the next one is leased and read. What is confirmed is settled, what is known not to be stored goes back to *captured*,
and what is unknown stays and is repeated under the same id. An outcome is kept until the vault has it: a vault that is
away for a moment makes no copy.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import Struct

from holdfast.core.death import RedriveStamp
from holdfast.core.ledger import LedgerAct
from holdfast.core.message import Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import Backoff, moment, parse_duration
from holdfast.core.plan import RedriveState, RedriveTask
from holdfast.errors import BlobMissing, BrokerError, Conflict, HoldfastError, MessageRefused, NotFound, TryAgain
from holdfast.ports.broker import Broker
from holdfast.proof import crash_point
from holdfast.services.vault.capture import in_batches
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.planner import NO_BROKER
from holdfast.stores.redrives import LeasedLetter, Settled, unpack
from holdfast.telemetry.events import emit

BATCH_COUNT_MAX = 1_000
#: A limited rate goes out in so many portions a second, not all at once.
PORTIONS_PER_S = 10
CANARY_STEP_S = 0.5
AUTO_S = 90.0
#: What is read into memory and published together.
CHUNK_COUNT_MAX = 500
CHUNK_BYTES_MAX = 8 * 1024 * 1024
CHUNKS_AT_ONCE = 2
LEASE_S = 120.0
WAITS = Backoff(first_s=0.2, delay_s_max=10.0)
FRUITLESS_ROUNDS_MAX = 100
#: How often a broker that is away is looked after.
AWAY_S = 0.5
LIST_COUNT_MAX = 1_000
#: Who runs a task says so again and again; who was silent for so long is taken for dead.
HOLD_S = 15.0
BEAT_S = 3.0
WAIT_FOR_HOLD_S = 1.0
RELEASE_COUNT_MAX = 2_000
#: Who does what a vault does by itself.
ACTOR = "holdfast"


class Pace:
    """How many letters may go next."""

    def __init__(self, redrive: RedriveTask) -> None:
        self._rate = redrive.wish.max_per_s
        self._canary = redrive.wish.canary
        self.sent = redrive.redriven + redrive.failed
        #: After a restart it goes on as wide as it was.
        self._allowed = self._canary.allows(self.sent) if self._canary else 0

    @property
    def is_used_up(self) -> bool:
        """Whether the canary has to be asked first."""
        return self._canary is not None and self.sent >= self._allowed

    @property
    def runs_ahead(self) -> bool:
        """Whether the next batch can be leased while this one is on its way."""
        return self._canary is None and not self._rate

    @property
    def next_count(self) -> int:
        """The size of the next batch."""
        count = min(BATCH_COUNT_MAX, max(1, self._rate // PORTIONS_PER_S)) if self._rate else BATCH_COUNT_MAX
        return min(count, self._allowed - self.sent) if self._canary else count

    def pause_s(self, count: int, took_s: float) -> float:
        """How long to rest after a batch that took so long."""
        return max(0.0, count / self._rate - took_s) if self._rate else 0.0

    def widen(self) -> None:
        """More may go."""
        if self._canary:
            self._allowed = self._canary.wider(self._allowed)


class _Batch(Struct, frozen=True):
    """Letters that are ours until a moment."""

    leased: Sequence[LeasedLetter]
    until: datetime


class Redriving:
    """`await Redriving(custody, redrive, ...).run()`."""

    def __init__(self, custody: Custody, redrive: RedriveTask, *, is_closing: Callable[[], bool]) -> None:
        self._custody = custody
        self._redrive = redrive
        self._is_closing = is_closing
        self._act = LedgerAct(
            actor=redrive.started_by, action="redrive", reason=redrive.reason, detail=f"redrive {redrive.id}"
        )
        self._pace = Pace(redrive)
        self._ahead: _Batch | None = None
        self._waits = False
        #: What became of batches, and until when they were ours; not settled yet.
        self._outcomes: list[tuple[Sequence[Settled], datetime]] = []
        self._stamps: dict[str, RedriveStamp] = {}

    async def run(self) -> str:
        """Until it is done, paused, cancelled, or this server stops; returns why it has to be stopped, if it has."""
        fruitless = 0
        while self._ahead or not self._is_closing():
            if not self._ahead and await self._is_away():
                await asyncio.sleep(AWAY_S)
                continue
            try:
                went_well = await self._step()
                if went_well is None:
                    return ""
            except _Stopped as stopped:
                return str(stopped)
            except (BrokerError, TryAgain) as error:
                emit("redrive.waits", redrive=self._redrive.id, error=error)
                went_well = False
            if went_well:
                fruitless = 0
                continue
            fruitless += 1
            if fruitless > FRUITLESS_ROUNDS_MAX:
                return "the outcome of some letters stays unknown, resume it later"
            await asyncio.sleep(WAITS.delay_s(fruitless - 1, spread=1.0))
        await self._settle()
        return ""

    async def _is_away(self) -> bool:
        """Whether the broker of the next letter takes nothing now. Then none is leased, which might look as if it had
        been sent."""
        trouble = ""
        if any(broker.publisher.trouble for broker in self._custody.brokers):
            origin = await self._custody.vault.redrives.next_origin(self._redrive.id)
            broker = self._custody.broker_of(origin) if origin else None
            trouble = broker.publisher.trouble if broker else ""
        if trouble and not self._waits:
            emit("redrive.waits", redrive=self._redrive.id, error=trouble)
        self._waits = bool(trouble)
        return self._waits

    async def _step(self) -> bool | None:
        """One batch; None when the task is over, false when the outcome of some is unknown or none could be had."""
        if self._pace.is_used_up:
            await self._settle()
            if not await self._watched():
                return None
            self._pace.widen()
        if self._ahead is None:
            await self._settle()
        batch, self._ahead = self._ahead or await self._lease(), None
        if batch is None:
            return None if await self._is_over() else False
        began_s = asyncio.get_running_loop().time()
        flight = asyncio.create_task(self._published(batch.leased))
        try:
            await self._settle()
            if self._pace.runs_ahead:
                self._ahead = await self._lease()
        finally:
            settled = await flight
            crash_point("redrive.after_confirm")
            self._outcomes.append((settled, batch.until))
            self._pace.sent += sum(one.kind != "unknown" for one in settled)
        if pause_s := self._pace.pause_s(len(settled), asyncio.get_running_loop().time() - began_s):
            await self._settle()
            await asyncio.sleep(pause_s)
        return all(one.kind != "unknown" for one in settled)

    async def _watched(self) -> bool:
        """Watch what was sent so far for as long as the canary says; false when the task is to end. Raises _Stopped."""
        canary = self._redrive.wish.canary
        if canary is None:
            return True
        is_old = canary.wait == "auto"  # a task that was begun before `auto` was put into seconds by its plan
        wait_s = AUTO_S if is_old else parse_duration(canary.wait, what="canary wait") / 1_000_000
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        until = moment(self._custody.clock.now_us()) + timedelta(seconds=wait_s)
        await self._custody.vault.redrives.watch(self._redrive.id, until=until)
        while True:
            now = await self._custody.vault.redrives.find(self._redrive.id)
            if now is None or now.state is not RedriveState.RUNNING or self._is_closing():
                return False
            if now.redriven and now.came_back / now.redriven > canary.stop_above:
                raise _Stopped(
                    f"{now.came_back} of {now.redriven} letters came back, the canary allows {canary.stop_above:.0%}"
                )
            if loop.time() >= deadline:
                return True
            await asyncio.sleep(min(CANARY_STEP_S, max(0.01, deadline - loop.time())))

    async def _lease(self) -> _Batch | None:
        until = moment(self._custody.clock.now_us()) + timedelta(seconds=LEASE_S)
        leased = await self._custody.vault.redrives.lease(
            self._redrive.id, count_max=self._pace.next_count, until=until, act=self._act
        )
        return _Batch(leased, until) if leased else None

    async def _settle(self) -> None:
        while self._outcomes:
            settled, until = self._outcomes[0]
            await self._custody.vault.redrives.settle(self._redrive.id, settled, self._act, until=until)
            self._outcomes.pop(0)

    async def _published(self, leased: Sequence[LeasedLetter]) -> list[Settled]:
        """All of them; a few chunks are read and published at a time, so that large bodies do not fill the memory."""
        slots = asyncio.Semaphore(CHUNKS_AT_ONCE)

        async def publish(chunk: Sequence[LeasedLetter]) -> list[Settled]:
            async with slots:
                try:
                    return await self._chunk(chunk)
                except (BrokerError, TryAgain) as error:
                    # Not one of them is settled by this, whatever became of it.
                    emit("redrive.waits", redrive=self._redrive.id, error=error)
                    return [Settled(one.letter, "unknown", error.message) for one in chunk]

        chunks = in_batches(leased, lambda one: one.body_bytes, bytes_max=CHUNK_BYTES_MAX, count_max=CHUNK_COUNT_MAX)
        done = await asyncio.gather(*(publish(chunk) for chunk in chunks))
        return [one for chunk in done for one in chunk]

    async def _chunk(self, leased: Sequence[LeasedLetter]) -> list[Settled]:
        settled: list[Settled] = []
        by_broker: dict[Broker, list[tuple[int, Outgoing]]] = {}
        contents = await self._custody.contents(leased)
        for one, content in zip(leased, contents, strict=True):
            if isinstance(content, BlobMissing):
                settled.append(Settled(one.letter, "failed", f"its body is gone; {content}"))
                continue
            broker = self._custody.broker_of(one.origin)
            if broker is None:
                settled.append(Settled(one.letter, "failed", NO_BROKER))
                continue
            try:
                outgoing = broker.rewrite(content, unpack(one.address), self._stamp(one.queue), one.redrive_id)
            except MessageRefused as error:
                settled.append(Settled(one.letter, "failed", error.message))
                continue
            by_broker.setdefault(broker, []).append((one.letter, outgoing))
        for broker, going in by_broker.items():
            crash_point("redrive.before_publish")
            outcomes = await broker.publisher.publish([outgoing for _, outgoing in going])
            settled += [_settled(letter, outcome) for (letter, _), outcome in zip(going, outcomes, strict=True)]
        return settled

    def _stamp(self, queue: str) -> RedriveStamp:
        """What all letters of one queue have in common."""
        stamp = self._stamps.get(queue)
        if stamp is None:
            run, by = f"task-{self._redrive.id}", self._redrive.started_by
            stamp = RedriveStamp(run=run, by=by, dead_queue=queue, names=self._custody.names)
            self._stamps[queue] = stamp
        return stamp

    async def _is_over(self) -> bool:
        redrive = await self._custody.vault.redrives.find(self._redrive.id)
        if redrive is None or redrive.state is not RedriveState.RUNNING:
            return True
        if redrive.settled < redrive.total:
            return False
        act = LedgerAct(actor=redrive.started_by, action="redrives.done")
        done, running = RedriveState.DONE, RedriveState.RUNNING
        await self._custody.vault.redrives.set_state(redrive.id, done, sources=[running], act=act)
        emit("redrive.ended", redrive=redrive.id, state="done", redriven=redrive.redriven, failed=redrive.failed)
        return True


class _Stopped(Exception):
    """The canary says no, and why."""


def _settled(letter: int, outcome: Outcome) -> Settled:
    if outcome.stored:
        return Settled(letter, "redriven")
    # A nack may come from one queue of several: another may have it.
    is_known = outcome.kind in (OutcomeKind.RETURNED, OutcomeKind.REFUSED)
    why = f"{outcome.kind.value}: {outcome.text or outcome.code}"
    return Settled(letter, "failed" if is_known else "unknown", why)


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
            now = await self.find(number)  # somebody may have been faster
            is_told = now.changed_by and now.state not in (RedriveState.DONE, RedriveState.STOPPED)
            by = f", by {now.changed_by}" if is_told else ""
            raise Conflict(f"redrive cannot {word}; redrive {number} is {now.state.value}{by}")
        if number in self._running and state is not RedriveState.RUNNING:
            await asyncio.wait([self._running[number]], timeout=LEASE_S)
        if state is RedriveState.CANCELLED:
            await self.release()
        changed = await self.find(number)
        self.begin(changed)
        return changed

    async def release(self) -> None:
        """Letters of cancelled tasks that nobody has in hand any more are an operator's again, with a note."""
        act = LedgerAct(actor=ACTOR, action="redrives.release")
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
        failures = 0
        while not self._is_over(number):
            try:
                await self.run(number)
                return
            except (BrokerError, TryAgain) as error:
                emit("redrive.waits", redrive=number, error=error)
                await asyncio.sleep(WAITS.delay_s(failures, spread=1.0))
                failures += 1
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
        act = LedgerAct(actor=ACTOR, action="redrives.stopped", detail=why)
        await self._custody.vault.redrives.set_state(
            number, RedriveState.STOPPED, sources=[RedriveState.RUNNING], act=act
        )
