"""Publish the letters of a backup to where they belong. There is nothing to settle: the file stays as it is, and so
does the queue that they came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from holdfast.core.message import Outcome, OutcomeKind
from holdfast.core.recovery import StoppedBy, Summary, add_planned
from holdfast.core.selection import LetterFilter
from holdfast.errors import Invalid
from holdfast.ports.clock import Clock
from holdfast.ports.recovery import DeadLetters, Exported, RunLetter, address_text
from holdfast.services.recover.limits import Quota, RunClock, wait
from holdfast.services.recover.report import Notices, sample
from holdfast.services.recover.run import LEFT_OUT, why_not
from holdfast.services.recover.service import RecoveryOrder, check, new_run, preflight_lines

BATCH_COUNT_MAX = 500


async def publish_backup(
    letters: DeadLetters,
    backup: Iterator[Exported],
    order: RecoveryOrder,
    *,
    clock: Clock,
    notices: Notices,
    on_begin: Callable[[BackupRun], None] = lambda run: None,
) -> Summary:
    """Raises RecoveryRefused or another BrokerError when it cannot begin, CannotStart when there is no such file."""
    notices.beginning()
    findings = await letters.inspect(order.table, targets_only=True)
    for line in preflight_lines(order, findings):
        notices.say(line)
    check(order, findings)
    run = BackupRun(letters, backup, order, clock=clock, notices=notices)
    on_begin(run)
    return await run.run()


class BackupRun:
    """Batch by batch; each letter has its own outcome. A copy carries the id that its redrive from the queue had."""

    def __init__(
        self, letters: DeadLetters, backup: Iterator[Exported], order: RecoveryOrder, *, clock: Clock, notices: Notices
    ) -> None:
        run = order.run or new_run()
        self.summary = Summary(dead_queue=order.dead_queue, run=run, dry_run=order.dry_run)
        self.summary.from_backup, self.summary.remaining = True, None
        self._letters = letters
        self._backup = backup
        self._limits = order.limits
        self._clock = clock
        self._notices = notices
        self._where = LetterFilter(order.where)
        self._quota = Quota(order.limits.limit, filters=bool(self._where))
        self._watch = RunClock(order.limits, asyncio.get_running_loop().time)
        self._flying: set[RunLetter] = set()
        self._landed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._abandoned = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._stopped.is_set()

    @property
    def flying_count(self) -> int:
        """Letters whose confirms are still to come."""
        return len(self._flying)

    def stop(self) -> None:
        """Publish nothing more; wait for the confirms."""
        self._stopped.set()
        self._landed.set()

    def abandon(self) -> None:
        """End now."""
        self.stop()
        self._abandoned.set()

    async def run(self) -> Summary:
        """The summary says all, also of a file that is damaged."""
        summary = self.summary
        self._watch.start()
        while (stopped := self._is_over()) is None:
            batch = self._read()
            if not batch:
                break
            await self._send([letter for letter in map(self._letters.restored, batch) if self._may_go(letter)])
        summary.stopped_by = stopped or summary.stopped_by
        summary.unseen += self._count_rest()
        summary.found += summary.unseen
        summary.possible_duplicates += self._letters.sent_again_count
        self._watch.end(summary)
        self._notices.ended(summary)
        return summary

    def _is_over(self) -> StoppedBy | None:
        if self._stopped.is_set():
            return StoppedBy.SIGNAL
        return StoppedBy.TOTAL if self._watch.left_s() <= 0 else None

    def _read(self) -> list[Exported]:
        """As many as fit the window. What was read before a damaged line is published."""
        left = self._quota.left()
        most = min(BATCH_COUNT_MAX, self._limits.window_count_max, BATCH_COUNT_MAX if left is None else left)
        batch: list[Exported] = []
        size = 0
        try:
            while len(batch) < most and size < self._limits.window_bytes_max:
                if (one := next(self._backup, None)) is None:
                    break
                batch.append(one)
                size += len(one.properties) * 2 + len(one.body)
        except Invalid as error:
            self.summary.failure = error.message
        self.summary.found += len(batch)
        return batch

    def _count_rest(self) -> int:
        try:
            return 0 if self.summary.failure else sum(1 for _ in self._backup)
        except Invalid as error:
            self.summary.failure = error.message
            return 0

    def _may_go(self, letter: RunLetter) -> bool:
        summary, quota, route = self.summary, self._quota, letter.route
        if quota.left() == 0:
            summary.found -= 1
            summary.unseen += 1
            return False
        quota.seen_count += 1
        if self._where and not self._where.fits(self._letters.read(letter), route.type, self._clock.now_us()):
            summary.filtered += 1
            quota.left_out_count += 1
            self._keep(letter, LEFT_OUT, warn=False)
        elif letter.address is None:
            summary.skipped += 1
            self._keep(letter, route.why)
        elif route.blocked:
            self._fail(letter, route.blocked)
        elif summary.dry_run:
            add_planned(summary, route)
        else:
            return True
        return False

    async def _send(self, letters: Sequence[RunLetter]) -> None:
        while letters and self._is_over() is None:
            count = self._watch.due_count(len(letters))
            if not count:
                await wait(self._stopped, min(self._watch.pace_s(), self._watch.left_s()))
                continue
            part, letters = letters[:count], letters[count:]
            before = self.summary.recovered
            self._flying.update(part)
            self._letters.send(part, self._on_outcome, timeout_s=self._limits.stall_timeout_s)
            await self._land()
            self._notices.progressed(self.summary, before)
        self._unsee(letters)

    def _unsee(self, letters: Sequence[RunLetter]) -> None:
        """The run ended before these."""
        self.summary.found -= len(letters)
        self.summary.unseen += len(letters)

    async def _land(self) -> None:
        """Every publish has an outcome in the end; after a stop it is waited for no longer than the limit."""
        while self._flying and not self._stopped.is_set():
            self._landed.clear()
            await self._landed.wait()
        deadline_s = self._watch.now_s() + self._limits.stop_timeout_s
        while self._flying and not self._abandoned.is_set() and self._watch.now_s() < deadline_s:
            self._landed.clear()
            await wait(self._landed, min(0.1, deadline_s - self._watch.now_s()))
        self._on_outcome(list(self._flying), Outcome(OutcomeKind.UNKNOWN, 0, "no answer before the end"))

    def _on_outcome(self, letters: Sequence[RunLetter], outcome: Outcome) -> None:
        summary = self.summary
        for letter in letters:
            if letter not in self._flying:
                continue  # its answer came after the end
            self._flying.discard(letter)
            if outcome.kind is OutcomeKind.CONFIRMED:
                summary.recovered += 1
                summary.went(address_text(letter.address))
            else:
                summary.unknown += outcome.kind is OutcomeKind.UNKNOWN
                summary.possible_duplicates += outcome.kind is OutcomeKind.UNKNOWN
                self._fail(letter, why_not(outcome))
        if not self._flying:
            self._landed.set()

    def _fail(self, letter: RunLetter, why: str) -> None:
        self.summary.failed_at(address_text(letter.address))
        self._keep(letter, why, failed=True)

    def _keep(self, letter: RunLetter, why: str, *, failed: bool = False, warn: bool = True) -> None:
        reason = self.summary.reason(why)
        reason.count += 1
        if reason.sample is None:
            reason.sample = sample(self._letters.read(letter), letter.route.type)
        if warn:
            self._notices.kept(self.summary, why, letter.route.type, count=reason.count, failed=failed)
