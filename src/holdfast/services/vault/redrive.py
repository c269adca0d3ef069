"""Redrive out of the vault: lease, publish with confirm, settle. A task survives its process and goes on in another.

A letter is *redriving* from its lease on, so that nobody edits or discards it meanwhile. What is confirmed is settled,
what is known not to be stored goes back to *captured*, and what is unknown stays and is repeated under the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from holdfast.core.ledger import Act
from holdfast.core.letter import Content, Letter
from holdfast.core.moments import moment, parse_duration
from holdfast.core.redrive_task import Canary, Leased, Redrive, RedriveState, Settled
from holdfast.errors import BrokerError, Conflict, NotFound, TryAgain
from holdfast.ports.custody import Parcel, Post, Posted
from holdfast.proof import crash_point
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.plans import unpack
from holdfast.telemetry.events import emit

BATCH_COUNT_MAX = 1_000
#: What is read into memory and published together.
CHUNK_COUNT_MAX = 250
CHUNK_BYTES_MAX = 8 * 1024 * 1024
CHUNKS_AT_ONCE = 2
LEASE_S = 120.0
WAIT_S_FIRST = 0.2
WAIT_S_MAX = 10.0
FRUITLESS_ROUNDS_MAX = 100
#: What `auto` adds to the retry ladder of the target; the ladder itself is the consumer's, and 60 s where not known.
CANARY_AUTO_S = 90.0
CANARY_STEP_S = 0.5
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

    # --- the loop ---------------------------------------------------------------------------------------------

    async def run(self, number: int) -> None:
        """Until it is done, paused, cancelled, or this server stops."""
        wait_s = WAIT_S_FIRST
        fruitless = 0
        redrive = await self.find(number)
        pace = _Pace(redrive)
        while not self._closing:
            try:
                if pace.is_used_up:
                    if redrive.wish.canary is None or not await self._may_widen(redrive, redrive.wish.canary):
                        return
                    pace.widen()
                published, unknown = await self._round(redrive, pace.next_count)
                if not published and await self._is_over(number):
                    return
            except (BrokerError, TryAgain) as error:
                emit("redrive.waits", redrive=number, error=error)
                published, unknown = 0, 1
            pace.sent += published
            if published and not unknown:
                wait_s, fruitless = WAIT_S_FIRST, 0
                continue
            fruitless += 1
            if fruitless > FRUITLESS_ROUNDS_MAX:
                await self._stop(number, "the outcome of some letters stays unknown, resume it later")
                return
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, WAIT_S_MAX)

    async def _round(self, redrive: Redrive, count: int) -> tuple[int, int]:
        """One batch; returns how many were published, and of how many the outcome is unknown."""
        began = asyncio.get_running_loop().time()
        act = Act(actor=redrive.started_by, action="redrive", reason=redrive.reason, detail=f"redrive {redrive.id}")
        until = moment(self._custody.clock.now_us()) + timedelta(seconds=LEASE_S)
        leased = await self._custody.vault.redrives.lease(redrive.id, count_max=count, until=until, act=act)
        if not leased:
            return 0, 0
        settled = await self._published(redrive, leased)
        crash_point("redrive.after_confirm")
        await self._custody.vault.redrives.settle(redrive.id, settled, act)
        if redrive.wish.max_per_s:
            took = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, len(leased) / redrive.wish.max_per_s - took))
        return len(leased), sum(one.kind == "unknown" for one in settled)

    async def _published(self, redrive: Redrive, leased: Sequence[Leased]) -> list[Settled]:
        """All of them; a few chunks are read and published at a time, so that large bodies do not fill the memory."""
        slots = asyncio.Semaphore(CHUNKS_AT_ONCE)

        async def publish(chunk: Sequence[Leased]) -> list[Settled]:
            async with slots:
                return await self._chunk(redrive, chunk)

        done = await asyncio.gather(*(publish(chunk) for chunk in _chunks(leased)))
        return [one for chunk in done for one in chunk]

    async def _chunk(self, redrive: Redrive, leased: Sequence[Leased]) -> list[Settled]:
        settled: list[Settled] = []
        by_post: dict[Post, list[Parcel]] = {}
        found = {letter.id: (letter, content) for letter, content in await self._loaded(leased)}
        for one in leased:
            letter, content = found[one.letter]
            post = next((post for post in self._custody.posts if post.origin == letter.origin), None)
            if post is None:
                settled.append(Settled(one.letter, "failed", "its broker is not configured here"))
                continue
            parcel = Parcel(
                letter=letter,
                content=content,
                address=unpack(one.address),
                redrive_id=one.redrive_id,
                run=f"task-{redrive.id}",
                by=redrive.started_by,
            )
            by_post.setdefault(post, []).append(parcel)
        for post, parcels in by_post.items():
            crash_point("redrive.before_publish")
            outcomes = await post.publish(parcels)
            settled += [_settled(one.letter, outcome) for one, outcome in zip(parcels, outcomes, strict=True)]
        return settled

    async def _loaded(self, leased: Sequence[Leased]) -> list[tuple[Letter, Content]]:
        return await self._custody.load([one.letter for one in leased])

    async def _is_over(self, number: int) -> bool:
        redrive = await self.find(number)
        if redrive.state is not RedriveState.RUNNING:
            return True
        if redrive.redriven + redrive.failed + redrive.skipped < redrive.total:
            return False
        act = Act(actor=redrive.started_by, action="redrives.done")
        await self._custody.vault.redrives.set_state(number, RedriveState.DONE, sources=[RedriveState.RUNNING], act=act)
        emit("redrive.ended", redrive=number, state="done", redriven=redrive.redriven, failed=redrive.failed)
        return True

    async def _stop(self, number: int, why: str) -> None:
        act = Act(actor=self._custody.actor, action="redrives.stopped", detail=why)
        await self._custody.vault.redrives.set_state(
            number, RedriveState.STOPPED, sources=[RedriveState.RUNNING], act=act
        )

    async def _may_widen(self, redrive: Redrive, canary: Canary) -> bool:
        """Watch for as long as the canary says; stop the task when too many have come back."""
        wait_s = CANARY_AUTO_S if canary.wait == "auto" else parse_duration(canary.wait, what="canary wait") / 1_000_000
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            now = await self.find(redrive.id)
            if now.state is not RedriveState.RUNNING or self._closing:
                return False
            if now.redriven and now.came_back / now.redriven > canary.stop_above:
                why = f"{now.came_back} of {now.redriven} letters came back, the canary allows {canary.stop_above:.0%}"
                await self._stop(redrive.id, why)
                return False
            if asyncio.get_running_loop().time() >= deadline:
                return True
            await asyncio.sleep(min(CANARY_STEP_S, max(0.01, deadline - asyncio.get_running_loop().time())))


class _Pace:
    """How many letters may go next: by the rate, and by what the canary has allowed so far."""

    def __init__(self, redrive: Redrive) -> None:
        self._rate = redrive.wish.max_per_s or BATCH_COUNT_MAX
        self._canary = redrive.wish.canary
        self._allowed = self._canary.first if self._canary else 0
        self.sent = redrive.redriven
        while self._canary and self.sent > self._allowed:  # it goes on after a restart: as wide as it was
            self.widen()

    @property
    def is_used_up(self) -> bool:
        """Whether the canary has to be asked first."""
        return self._canary is not None and self.sent >= self._allowed

    @property
    def next_count(self) -> int:
        """The size of the next batch."""
        count = min(BATCH_COUNT_MAX, self._rate)
        return min(count, self._allowed - self.sent) if self._canary else count

    def widen(self) -> None:
        """More may go."""
        if self._canary:
            self._allowed = max(self._allowed + 1, round(self._allowed * self._canary.widen))


def _chunks(leased: Sequence[Leased]) -> list[list[Leased]]:
    chunks: list[list[Leased]] = [[]]
    size = 0
    for one in leased:
        if chunks[-1] and (len(chunks[-1]) >= CHUNK_COUNT_MAX or size + one.body_bytes > CHUNK_BYTES_MAX):
            chunks.append([])
            size = 0
        chunks[-1].append(one)
        size += one.body_bytes
    return chunks


def _settled(letter: Letter, outcome: Posted) -> Settled:
    if outcome.kind == "stored":
        return Settled(letter.id, "redriven")
    return Settled(letter.id, "failed" if outcome.kind == "failed" else "unknown", outcome.why)
