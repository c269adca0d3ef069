"""What every run has, whatever it takes its letters from: what it counts, how it is asked to end, and where it ends.

Its clocks (total, idle, empty, stall and hold) with the pace that was asked for, and how many letters it takes: at most
those that were there at the start, and of those that fit, as many as asked. Every loop ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from holdfast.core.message import Message
from holdfast.core.recovery import RecoveryOrder, RunLimits, StoppedBy, Summary
from holdfast.core.selection import LetterFilter
from holdfast.ports.clock import Clock
from holdfast.services.recover.report import Notices, sample

DEPTH_STEP_S = 1.0
PACE_STEP_S = 0.1
#: With a filter nobody knows which letters fit: so many are looked at together even when fewer are still wanted.
AHEAD_COUNT = 100


class LimitedRun:
    """A run over a dead-letter queue, a backup or an embedded dead queue, as far as these are the same."""

    def __init__(self, order: RecoveryOrder, *, clock: Clock, notices: Notices | None = None) -> None:
        self.summary = Summary(dead_queue=order.dead_queue, run=order.run, dry_run=order.dry_run)
        self.summary.from_backup = bool(order.from_backup)
        self._limits = order.limits
        self._clock = clock
        self._notices = notices or Notices()
        self._names = order.table.names
        self._where = LetterFilter(order.where, self._names)
        self._quota = Quota(order.limits.limit, filters=bool(self._where))
        self._watch = RunClock(order.limits, asyncio.get_running_loop().time)
        self._stop: StoppedBy | None = None
        self._stopping = asyncio.Event()
        self._abandoned = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._stop is not None

    @property
    def sent_count(self) -> int | None:
        """Letters whose confirms are still to come, and would be waited for; None where there are no confirms."""
        return None

    def stop(self) -> None:
        """Take nothing new; what is under way is finished, and the rest stays where it was."""
        self._stop_by(StoppedBy.SIGNAL)

    def abandon(self) -> None:
        """End now, still without loss: whatever is under way ends by itself."""
        self.stop()
        self._abandoned.set()

    async def run(self) -> Summary:
        """Once. Raises HoldfastError when it cannot begin; after that, the summary says all."""
        raise NotImplementedError

    def _stop_by(self, reason: StoppedBy) -> None:
        self._stop = self._stop or reason
        self._stopping.set()

    def _leave_out(self, message: Message, kind: str) -> bool:
        """Whether a letter does not fit the filter; then it is counted as kept."""
        if self._where.fits(message, kind, self._clock.now_us()):
            return False
        self.summary.filtered += 1
        self._quota.left_out_count += 1
        self._kept("left out by --where", kind, lambda: message, warn=False)
        return True

    def _kept(
        self, why: str, kind: str, read: Callable[[], Message], *, failed: bool = False, warn: bool = True
    ) -> None:
        """A letter stays for this reason: count it and say it. The first one is read, for a sample."""
        reason = self.summary.reason(why)
        reason.count += 1
        if reason.sample is None:
            reason.sample = sample(read(), kind, self._names)
        if warn:
            self._notices.kept(self.summary, why, kind, count=reason.count, failed=failed)


class RunClock:
    """Knows when it is over. Time in which nothing could be published does not count as idle or stalled."""

    def __init__(self, limits: RunLimits, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self._limits = limits
        self._began_s = self._moved_s = self._asked_s = now_s()
        self._next_s = 0.0

    def start(self) -> None:
        """The first letter may come from now on."""
        self._began_s = self._moved_s = self.now_s()

    def moved(self) -> None:
        """Letters came, or were settled, or could not be: idle and stall time begin anew."""
        self._moved_s = self.now_s()

    def left_s(self) -> float:
        """Until the total limit."""
        return max(0.0, self._limits.total_timeout_s - (self.now_s() - self._began_s))

    def is_held_too_long(self, since_s: float) -> bool:
        """The broker would end a consumer that holds a letter for longer."""
        return self.now_s() - since_s > self._limits.hold_timeout_s

    def why_over(self, *, sent: int, waiting: int) -> StoppedBy | None:
        """Which limit of time is reached, if any; letters that wait for their pace are no reason."""
        if self.left_s() <= 0:
            return StoppedBy.TOTAL
        if waiting and not sent:
            return None
        still_s = self.now_s() - self._moved_s
        if sent:
            return StoppedBy.STALL if still_s > self._limits.stall_timeout_s else None
        return StoppedBy.IDLE if still_s > self._limits.idle_timeout_s else None

    def is_quiet(self) -> bool:
        """Whether it is worth asking the broker how many letters are left; at most once a second."""
        now_s = self.now_s()
        step_s = min(DEPTH_STEP_S, self._limits.empty_timeout_s)
        if now_s - self._moved_s < self._limits.empty_timeout_s or now_s - self._asked_s < step_s:
            return False
        self._asked_s = now_s
        return True

    def is_empty(self, depth: int) -> bool:
        """A depth of 0 alone means nothing (the queue may have no leader): nothing must have come for a while, too."""
        return depth == 0 and self.now_s() - self._moved_s >= self._limits.empty_timeout_s

    def due_count(self, count: int) -> int:
        """How many of so many letters may go now; they are counted as gone."""
        rate = self._limits.rate_per_s
        if not rate or not count:
            return count
        now_s = self.now_s()
        if now_s < self._next_s:
            return 0
        count = min(count, max(1, int(rate * PACE_STEP_S)))
        # Whoever comes a little late may catch up, so that the pace is kept.
        self._next_s = max(self._next_s, now_s - PACE_STEP_S) + count / rate
        return count

    def pace_s(self) -> float:
        """Until the next may go."""
        return max(0.0, self._next_s - self.now_s())

    def end(self, summary: Summary) -> None:
        """Write how long it took."""
        summary.duration_s = round(self.now_s() - self._began_s, 3)
        summary.rate_per_s = round(summary.recovered / summary.duration_s, 1) if summary.duration_s else 0.0


class Quota:
    """Counts letters, not deliveries. What `--where` leaves out does not count toward the limit."""

    def __init__(self, limit: int | None, *, filters: bool) -> None:
        self.seen_max = None if filters else limit  #: letters looked at; None: not known yet
        self.is_bounded = False  #: by how many there were
        self.seen_count = 0
        self.left_out_count = 0
        self._fits_max = limit if filters else None

    def starts_with(self, found: int) -> None:
        """So many are there: no more are taken, or letters that die again would be chased. 0 means nothing yet."""
        if found and not self.is_bounded:
            self.is_bounded = True
            self.seen_max = found if self.seen_max is None else min(self.seen_max, found)

    def take(self) -> bool:
        """Count one more letter that is looked at; False, and not counted, when it is none of those wanted."""
        if self.seen_max is not None and self.seen_count >= self.seen_max:
            return False
        if self._fits_max is not None and self.seen_count - self.left_out_count >= self._fits_max:
            return False
        self.seen_count += 1
        return True

    def left(self) -> int | None:
        """How many more may be taken at once; None: whatever there is."""
        left = None if self.seen_max is None else max(0, self.seen_max - self.seen_count)
        if self._fits_max is None:
            return left
        wanted = self._fits_max - (self.seen_count - self.left_out_count)
        ahead = max(wanted, AHEAD_COUNT) if wanted > 0 else 0
        return ahead if left is None else min(left, ahead)

    def unseen(self, summary: Summary) -> int:
        """Of those that were found, how many were not looked at; what somebody else has taken is none of them.

        A broker that lost a node may count letters to a connection that is gone, and say that the queue is empty.
        """
        unseen = max(0, summary.found - self.seen_count)
        if summary.interruptions or summary.remaining is None:
            return unseen
        return 0 if summary.stopped_by is StoppedBy.EMPTY else min(unseen, summary.remaining)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """For an event, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do it, unless the event comes first: then it is given up, and the answer is False."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        waiting.cancel()
        if task.cancel():
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # looked at, or asyncio would print it
