"""How many letters may go next: by the rate, and by what the canary has seen come back so far.

A canary watches the dead-letter queues where its letters would come back. `auto` is as long as a letter that fails
every attempt takes until it is there, and a little more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.core.message import Address
from holdfast.core.moments import SECOND_US, format_duration, parse_duration
from holdfast.core.redrive_task import PlanOptions, RedriveState, RedriveTask
from holdfast.errors import Conflict
from holdfast.ports.custody import Post, Reach
from holdfast.services.vault.custody import Custody

BATCH_COUNT_MAX = 1_000
#: A limited rate goes out in so many portions a second, not all at once.
PORTIONS_PER_S = 10
CANARY_STEP_S = 0.5
AUTO_S = 90.0
#: What `auto` adds to the retry ladder of the target.
MARGIN_S = 30.0


class CanarySent(Protocol):
    """A letter that would be sent."""

    @property
    def queue(self) -> str: ...
    @property
    def source_queue(self) -> str: ...
    @property
    def address(self) -> Address: ...
    @property
    def post(self) -> Post: ...


async def canary_wait(
    custody: Custody, wish: PlanOptions, going: Sequence[CanarySent], reached: Mapping[Address, Reach]
) -> str:
    """How long the canary of a plan watches; "" without one. Raises Conflict when it would see nothing."""
    if wish.canary is None or not going:
        return ""
    ways = {(one.queue, one.source_queue, one.address) for one in going}
    dead: dict[str, list[str]] = {}
    for post in {one.post for one in going}:
        for found in await post.queues():
            dead.setdefault(found.source_queue, []).append(found.queue)
    for queue, source, address in sorted(ways, key=str):
        # Sent into the wait queue or by an exchange, it is tried in the queue that it died in, as far as we know.
        targets = (address.routing_key,) if not address.exchange else reached.get(address, Reach()).queues or (source,)
        returns = {one for target in targets for one in ([queue] if target == source else dead.get(target, []))}
        _check_watched(custody, returns or {queue}, known=bool(returns) or bool(address.exchange), target=str(address))
    if wish.canary.wait != "auto":
        return wish.canary.wait
    longest = MARGIN_S
    for post in {one.post for one in going}:
        ladder_s = await post.ladder_s(list({one.address: None for one in going if one.post is post}))
        if ladder_s is None:
            raise Conflict(
                "canary cannot tell how long to watch; nothing says after which delays consumers of the target try "
                'again, give the duration ("wait": "90s"), or set retry_delay and retry_attempts'
            )
        longest = max(longest, ladder_s + MARGIN_S)
    return format_duration(round(longest) * SECOND_US)


def _check_watched(custody: Custody, queues: set[str], *, known: bool, target: str) -> None:
    if not known:
        raise Conflict(f"canary is blind; nothing says where letters that die in '{target}' come back")
    for queue in sorted(queues):
        if not custody.is_capturing(queue):
            raise Conflict(
                f"canary is blind; nothing captures '{queue}', where letters would come back, start its capture"
            )


def canary_note(wish: PlanOptions, wait: str) -> list[str]:
    """What the canary of a plan will do, for people."""
    canary = wish.canary
    if canary is None or not wait:
        return []
    part = f"{canary.stop_above:.0%}"
    return [f"a canary sends {canary.first} first, watches for {wait}, and stops when more than {part} come back"]


class Canaries:
    """Watches what was sent so far."""

    def __init__(self, custody: Custody, redrive: RedriveTask, *, is_closing: Callable[[], bool]) -> None:
        self._custody = custody
        self._redrive = redrive
        self._is_closing = is_closing

    async def watched(self) -> str | None:
        """Watch for as long as the canary says. "" when more may go, else why not; None when the task is to end."""
        canary = self._redrive.wish.canary
        if canary is None:
            return ""
        is_old = canary.wait == "auto"  # a task that was begun before `auto` was put into seconds by its plan
        wait_s = AUTO_S if is_old else parse_duration(canary.wait, what="canary wait") / 1_000_000
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            now = await self._custody.vault.redrives.find(self._redrive.id)
            if now is None or now.state is not RedriveState.RUNNING or self._is_closing():
                return None
            if now.redriven and now.came_back / now.redriven > canary.stop_above:
                return f"{now.came_back} of {now.redriven} letters came back, the canary allows {canary.stop_above:.0%}"
            if loop.time() >= deadline:
                return ""
            await asyncio.sleep(min(CANARY_STEP_S, max(0.01, deadline - loop.time())))


class Pace:
    """How many letters may go next."""

    def __init__(self, redrive: RedriveTask) -> None:
        self._rate = redrive.wish.max_per_s
        self._canary = redrive.wish.canary
        self._allowed = self._canary.first if self._canary else 0
        self.sent = redrive.redriven + redrive.failed
        while self._canary and self.sent > self._allowed:  # it goes on after a restart: as wide as it was
            self.widen()

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
            self._allowed = max(self._allowed + 1, round(self._allowed * self._canary.widen))
