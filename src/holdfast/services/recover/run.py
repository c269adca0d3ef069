"""One recovery run: take, find the route, publish, wait for the confirm, ack. Nothing is acked before that.

Letters that cannot go (no route, refused, returned, left out by a filter) are held unacked and given back once, at the
end: given back at once, the broker would deliver them again in a loop. A lost connection gives everything back by
itself; what comes again is recognised by its bytes, so that nothing is counted or published twice that need not be.

Letters that cannot go: counted with their reason, held unacked, and given back at the end of the run.

What became of letters that were published: those that are stored are written down and acked, the others are kept.

Letters on their way out: at the pace that was asked for, into the backup first, and to exchanges that take them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from holdfast.core.message import Address, Outcome, OutcomeKind
from holdfast.core.recovery import RunLimits, StoppedBy, Summary, add_planned, may_return
from holdfast.core.routes import Mode, RouteTable
from holdfast.core.selection import LetterFilter
from holdfast.errors import BrokerError, BrokerLost, BrokerRefused
from holdfast.ports.clock import Clock
from holdfast.ports.recovery import Backup, DeadLetters, Journal, Preflight, RunLetter, address_text
from holdfast.proof import crash_point
from holdfast.services.recover.ending import Ending
from holdfast.services.recover.letter_table import LetterTable
from holdfast.services.recover.limits import Quota, RunClock, Window, unless, wait
from holdfast.services.recover.report import Notices, sample

#: How much longer a publish may take than the run: the run's own clocks decide when it is over.
PUBLISH_SPARE_S = 60.0
#: Why a letter is kept that a filter left out.
LEFT_OUT = "left out by --where"


class Keeper:
    """Holds letters. One that could not bear another return goes back by a publish, at once."""

    def __init__(
        self,
        letters: DeadLetters,
        books: LetterTable,
        summary: Summary,
        limits: RunLimits,
        watch: RunClock,
        notices: Notices,
    ) -> None:
        self.delivery_limit: int | None = None
        self._letters = letters
        self._books = books
        self._summary = summary
        self._limits = limits
        self._watch = watch
        self._notices = notices

    def failed(self, letter: RunLetter, why: str) -> None:
        """Its publish did not succeed, or would not."""
        self._summary.failed_at(address_text(letter.address))
        self.keep(letter, why, failed=True)

    def keep(self, letter: RunLetter, why: str, *, failed: bool = False, warn: bool = True) -> None:
        """It stays in the queue, for this reason."""
        reason = self._summary.reason(why)
        reason.count += 1
        if reason.sample is None:
            reason.sample = sample(self._letters.read(letter), letter.route.type)
        if warn:
            self._notices.kept(self._summary, why, letter.route.type, count=reason.count, failed=failed)
        self.hold(letter)

    def hold(self, letter: RunLetter, *, is_put_back: bool = False) -> None:
        """Unacked, without its body. One that was put back already is not put back again before the end: where a queue
        bears fewer returns than are spared, it would go round and round."""
        letter.kept = True
        if not letter.in_hand:
            return
        self._books.hold(letter)
        if may_return(letter.returns or 0, self.delivery_limit):
            self._letters.forget(letter)
            return
        if is_put_back:
            return
        # Now, not at the end: until then a lost connection or a kill would return it once more.
        self._books.fly([letter])
        timeout_s = self._watch.left_s() + self._limits.stop_timeout_s + PUBLISH_SPARE_S
        self._letters.put_back([letter], self._on_put_back, timeout_s=timeout_s)

    def _on_put_back(self, letters: Sequence[RunLetter], outcome: Outcome) -> None:
        """They are in the queue a second time, with a count that begins anew: the first ones go."""
        landed = self._books.land(letters)
        if outcome.kind is not OutcomeKind.CONFIRMED:
            return  # they stay held; the end tries again
        for letter in landed:
            self._watch.progressed()
            self._books.release(letter)
            self._books.was_put_back(letter)
            self._summary.put_back += 1
            if not letter.in_hand or self._letters.ack([letter]):
                # Its delivery was lost before the ack: both are in the queue now, and nobody can tell them apart.
                self._summary.possible_duplicates += 1


def why_not(outcome: Outcome) -> str:
    """Why a publish did not succeed, in words."""
    if outcome.kind is OutcomeKind.NACKED:
        return "nacked: the target does not take it (it is full, or has no leader)"
    kind = outcome.kind.value
    return f"{kind}: {outcome.code} {outcome.text}" if outcome.code else f"{kind}: {outcome.text}"


#: Refusals that concern the exchange, not the letter: the next one would be refused as well.
EXCHANGE_REFUSALS = frozenset((403, 404))
REFUSED_COUNT_MAX = 1_000
TOPIC = "access to topic"


class Settler:
    """`on_outcome` for every publish. `room` is set whenever letters have left the window."""

    def __init__(
        self,
        letters: DeadLetters,
        books: LetterTable,
        summary: Summary,
        keeper: Keeper,
        watch: RunClock,
        notices: Notices,
        journal: Journal | None,
        room: asyncio.Event,
    ) -> None:
        self.stored: list[RunLetter] = []  #: confirmed, and not written down yet
        self.doubtful: set[RunLetter] = set()  #: published by an earlier run, perhaps
        self.refused: dict[str | Address, str] = {}  #: exchanges, or keys of one, that take nothing, and why
        self._letters = letters
        self._books = books
        self._summary = summary
        self._keeper = keeper
        self._watch = watch
        self._notices = notices
        self._journal = journal
        self._room = room
        self._settle_due = False
        self._sent_again_count = 0

    def on_outcome(self, letters: Sequence[RunLetter], outcome: Outcome) -> None:
        """Letters that share this outcome."""
        landed = self._books.land(letters)
        if outcome.kind is OutcomeKind.CONFIRMED:
            for letter in landed:
                letter.stored = True
            if self.doubtful:
                self._summary.possible_duplicates += len(self.doubtful.intersection(landed))
                self.doubtful.difference_update(landed)
            self.stored += landed
            self._settle_soon()
            return
        for letter in landed:
            self._not_stored(letter, outcome)

    def _not_stored(self, letter: RunLetter, outcome: Outcome) -> None:
        address = letter.address or Address()
        if (
            outcome.kind is OutcomeKind.REFUSED
            and outcome.code in EXCHANGE_REFUSALS
            and len(self.refused) < REFUSED_COUNT_MAX
        ):
            # Rights by topic are rights to keys: the other keys of the exchange may be allowed.
            self.refused[address if TOPIC in outcome.text else address.exchange] = why_not(outcome)
        self._summary.unknown += outcome.kind is OutcomeKind.UNKNOWN
        # Of several queues that a letter goes to, one may have taken it though another did not.
        some_may_have_it = outcome.kind is OutcomeKind.NACKED and len(self._letters.receivers(address)) != 1
        self._summary.possible_duplicates += outcome.kind is OutcomeKind.UNKNOWN or some_may_have_it
        self._keeper.failed(letter, why_not(outcome))
        self._watch.progressed()
        self._room.set()

    def why_refused(self, address: Address) -> str:
        """What the broker said to the last letter that went there; the empty text when it took it."""
        return self.refused.get(address.exchange) or self.refused.get(address, "")

    def sending(self, letters: Sequence[RunLetter]) -> None:
        """Before they are published: what is sent for the second time, perhaps, is told by the next run if this one is
        killed."""
        if self.doubtful and self._journal is not None:
            self._journal.doubt(len(self.doubtful.intersection(letters)))

    def _settle_soon(self) -> None:
        if not self._settle_due:
            self._settle_due = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        """Write down that these are published, then ack them."""
        self._settle_due = False
        stored, self.stored = self.stored, []
        if not stored:
            return
        crash_point("recover.after_confirm")
        here = [letter for letter in stored if letter.in_hand]
        if self._journal is not None:
            crash_point("recover.before_journal")
            self._journal.doubt(self._letters.sent_again_count - self._sent_again_count)
            self._sent_again_count = self._letters.sent_again_count
            self._journal.confirmed([letter.digest for letter in stored])
            crash_point("recover.after_journal")
        self.ack_noted(here)
        crash_point("recover.after_ack")
        self._watch.progressed()
        self._room.set()

    def ack_noted(self, letters: Sequence[RunLetter]) -> None:
        """Noted before it is sent: a note that came later could be missing for an ack that was sent."""
        if self._journal is not None:
            self._journal.acking([letter.digest for letter in letters])
        self.ack(letters)

    def ack(self, letters: Sequence[RunLetter]) -> None:
        """They are done; those whose delivery was lost will come again."""
        missed = set(self._letters.ack(letters))
        for letter in missed:
            if letter.in_hand:
                self._books.miss(letter)
        done = [letter for letter in letters if letter not in missed] if missed else letters
        self._books.acked(done)
        summary = self._summary
        for route, same in groupby(done, key=attrgetter("route")):
            summary.went(address_text(route.address), len(list(same)))
        before = summary.recovered
        summary.recovered += len(done)
        self._notices.progressed(summary, before)


#: Exchanges that letters name are asked for until there are so many.
EXCHANGES_COUNT_MAX = 1_000


class Sender:
    """`add` letters that may go, then `send` whenever the run comes by: nothing here waits for a pace."""

    def __init__(
        self,
        letters: DeadLetters,
        books: LetterTable,
        summary: Summary,
        keeper: Keeper,
        settler: Settler,
        watch: RunClock,
        limits: RunLimits,
        backup: Backup | None,
    ) -> None:
        self.waiting: deque[RunLetter] = deque()  #: in hand, not sent yet
        self._letters = letters
        self._books = books
        self._summary = summary
        self._keeper = keeper
        self._settler = settler
        self._watch = watch
        self._limits = limits
        self._backup = backup
        self._exchanges: set[str] = set()

    async def add(self, letters: Sequence[RunLetter]) -> None:
        """They go next. Raises BrokerError, with all of them waiting.

        An exchange is asked for before the first publish to it: one that is refused ends the channel, and with it what
        is known of all others.
        """
        self.waiting += letters
        names = {letter.route.address.exchange for letter in letters if letter.route.address is not None}
        for name in names - self._exchanges:
            if len(self._exchanges) >= EXCHANGES_COUNT_MAX:
                return
            why = await self._letters.refusal(name)
            self._exchanges.add(name)
            if why:
                self._settler.refused[name] = why
                self._keep_those_for(name, why)

    async def send(self) -> bool:
        """What may go now; False when there is no backup of it: then nothing more may be published."""
        while count := self._watch.due_count(len(self.waiting)):
            letters = [self.waiting[place] for place in range(count)] if count < len(self.waiting) else [*self.waiting]
            if self._backup is not None and not await self._save(self._backup, letters):
                return False
            self._settler.sending(letters)
            crash_point("recover.before_publish")
            for _ in letters:
                self.waiting.popleft()
            self._books.fly(letters)
            # Longer than the run itself: its own clocks decide when it is over.
            timeout_s = self._watch.left_s() + self._limits.stop_timeout_s + PUBLISH_SPARE_S
            self._letters.send(letters, self._settler.on_outcome, timeout_s=timeout_s)
            crash_point("recover.after_publish")
        return True

    def lose(self) -> None:
        """The connection is gone: they will be delivered again."""
        for letter in self.waiting:
            self._books.miss(letter)
        self.waiting.clear()

    async def _save(self, backup: Backup, letters: Sequence[RunLetter]) -> bool:
        try:
            await backup.write([self._letters.export(letter) for letter in letters])
        except OSError as error:
            why = error.strerror or str(error)
            self._summary.failure = f"the backup cannot be written, so nothing more was published; {why}"
            return False
        return True

    def _keep_those_for(self, exchange: str, why: str) -> None:
        still, self.waiting = self.waiting, deque()
        for letter in still:
            if letter.address is not None and letter.address.exchange == exchange:
                self._keeper.failed(letter, why)
            else:
                self.waiting.append(letter)


TICK_S = 0.25
ALARM_STEP_S = 1.0
ADDRESSES_COUNT_MAX = 1_000
BATCH_COUNT_MAX = 1_000
RECONNECT_S_FIRST, RECONNECT_S_MAX = 0.2, 10.0


class Recovery:
    """`await Recovery(letters, …).run()`; `stop()` ends it cleanly, `abandon()` at once, still without loss."""

    def __init__(
        self,
        letters: DeadLetters,
        *,
        dead_queue: str,
        run: str,
        table: RouteTable,
        clock: Clock,
        limits: RunLimits | None = None,
        journal: Journal | None = None,
        backup: Backup | None = None,
        where: LetterFilter | None = None,
        dry_run: bool = False,
        notices: Notices | None = None,
    ) -> None:
        self.summary = Summary(dead_queue=dead_queue, run=run, dry_run=dry_run)
        self._letters = letters
        self._table = table
        self._clock = clock
        self._limits = limits or RunLimits()
        self._journal = journal
        self._where = where or LetterFilter()
        self._notices = notices or Notices()
        self._books = LetterTable()
        self._losses_count = 0  # of connections since the last letter came; each may have returned what we know of
        self._room = asyncio.Event()
        self._stop: StoppedBy | None = None
        self._stopping = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._quota = Quota(self._limits.limit, filters=bool(self._where))
        self._window = Window(self._limits)
        self._addresses: dict[Address, None] = {}  # that nobody named beforehand
        self._warned_count = 0
        self._is_counted = False  # the queue counts returns: it is a quorum queue
        # Nothing is asked of a letter but its route.
        self._is_plain = not self._where and not dry_run and table.mode is not Mode.EXCHANGE
        self._findings: Preflight | None = None
        self._watch = RunClock(self._limits, asyncio.get_running_loop().time)
        self._keeper = Keeper(letters, self._books, self.summary, self._limits, self._watch, self._notices)
        self._settler = Settler(
            letters, self._books, self.summary, self._keeper, self._watch, self._notices, journal, self._room
        )
        self._sender = Sender(
            letters, self._books, self.summary, self._keeper, self._settler, self._watch, self._limits, backup
        )

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._stop is not None

    @property
    def flying_count(self) -> int:
        """Letters whose confirms are still to come."""
        return len(self._books.flying)

    def stop(self) -> None:
        """Take nothing new, wait for the confirms, give the rest back."""
        self._stop_by(StoppedBy.SIGNAL)

    def _stop_by(self, reason: StoppedBy) -> None:
        self._stop = self._stop or reason
        self._stopping.set()
        self._room.set()

    def abandon(self) -> None:
        """End now: whatever is unsettled goes back by itself."""
        self.stop()
        self._abandoned.set()

    async def run(self, findings: Preflight) -> Summary:
        """Raises RecoveryLocked or another BrokerError when it cannot begin; after that, the summary says all."""
        self._findings = findings
        self._keeper.delivery_limit = findings.delivery_limit
        summary = self.summary
        summary.found = findings.depth.ready
        self._quota.starts_with(summary.found)
        if self._journal is not None and (doubted := self._journal.doubted_count):
            summary.possible_duplicates += doubted
            summary.notes.append(f"{doubted} of the possible duplicates are of an earlier run, which was killed")
        self._watch.start()
        if findings.alarm or self._letters.trouble:
            await self._wait_for_the_alarm()
        if self._stop is None:
            await self._want()
            tag = await self._letters.open(capacity_count=self._window.fits_count)
            self._notices.started(summary, tag)
            self._warn()
        try:
            # Whoever says it a second time does not wait for an answer that a silent broker owes us.
            if self._stop is not None or not await unless(self._abandoned, self._take_all()):
                summary.stopped_by = self._stop or StoppedBy.SIGNAL
        finally:
            # Also after an error: what is in hand goes back, and what is published is waited for.
            await self._end()
        return summary

    async def _wait_for_the_alarm(self) -> None:
        """Nothing is taken that could not be published: to give it back would count as a return, run after run."""
        while self._stop is None and (alarm := await self._letters.alarm()):
            self._notices.waits(self.summary, alarm)
            if self._watch.left_s() <= 0:
                self._stop_by(StoppedBy.TOTAL)
            await wait(self._stopping, min(ALARM_STEP_S, self._watch.left_s()))
        self._watch.suspended()

    def _warn(self) -> None:
        """Say what was not said yet."""
        for warning in self._letters.warnings[self._warned_count :]:
            self._warned_count += 1
            self.summary.notes.append(warning)
            self._notices.say(f"Warning: {warning}")

    # Taking.

    async def _take_all(self) -> None:
        stopped: StoppedBy | None = None
        while stopped is None:
            try:
                stopped = await self._step()
            except BrokerError as error:  # also a no to a question: a queue whose node is down does not exist
                if not await self._come_back(error):
                    stopped = self._stop or StoppedBy.STALL
        self.summary.stopped_by = stopped

    async def _step(self) -> StoppedBy | None:
        """One batch, or one tick of waiting; the reason when the run is over."""
        room = self._room_count()
        tick_s = min(TICK_S, self._watch.pace_s()) if self._sender.waiting else TICK_S
        if room <= 0:
            self._room.clear()
            if self._room_count() <= 0 and not self._stop:
                await wait(self._room, tick_s)
        else:
            batch = await self._letters.take(count_max=room, timeout_s=tick_s)
            if batch:
                self._watch.arrived()
                await self._admit(batch)
        if self._sender.waiting and self._stop is None and not await self._sender.send():
            self._stop_by(StoppedBy.STALL)
        await self._widen()
        await self._want()
        if self._stop is not None:
            return self._stop
        return await self._is_over()

    def _room_count(self) -> int:
        """How many letters may be taken now."""
        limits, books = self._limits, self._books
        if self._stop is not None or books.flying_bytes >= limits.window_bytes_max:
            return 0
        room = min(limits.window_count_max - len(books.flying) - len(self._sender.waiting), BATCH_COUNT_MAX)
        # Letters that come again do not count, so that the limit may be reached while some are still to come.
        left = self._quota.left()
        return room if left is None or books.lost_count else min(room, left)

    async def _is_over(self) -> StoppedBy | None:
        books, watch, waiting = self._books, self._watch, self._sender.waiting
        if trouble := self._letters.trouble:
            watch.suspended()
            self._notices.waits(self.summary, trouble)
        is_idle = not books.flying and not waiting
        if self._quota.left() == 0 and is_idle and not books.lost_count:
            return StoppedBy.ALL_TAKEN
        oldest = [next(iter(letters)).at_s for letters in (books.held, waiting) if letters]
        if len(books.held) >= self._limits.held_count_max or any(map(watch.is_held_too_long, oldest)):
            return StoppedBy.HOLD
        if stopped := watch.is_over(flying=len(books.flying), waiting=len(waiting)):
            return stopped
        if is_idle and watch.is_quiet():
            depth = await self._letters.depth()
            if watch.is_empty(depth.ready):
                return StoppedBy.EMPTY
        return None

    async def _admit(self, batch: Sequence[RunLetter]) -> None:
        crash_point("recover.after_take")
        now_s, books, take = self._watch.now_s(), self._books, self._quota.take
        self._losses_count = 0
        if books.lost_count:
            self._settler.settle()  # those of them that are confirmed only wait for their ack, once they come again
        going: list[RunLetter] = []
        done: list[RunLetter] = []
        self._window.came(batch)
        self._is_counted = self._is_counted or any(letter.returns is not None for letter in batch)
        for letter in batch:
            letter.at_s = now_s
            if letter.redelivered and (known := books.find(letter)) is not None:
                if self._came_again(known, now_s):
                    going.append(known)
                continue
            if books.has_put_back and books.is_put_back(letter):
                self._keeper.hold(letter, is_put_back=True)  # counted when it was taken first
                continue
            if is_doubtful := self._is_forgotten(letter):
                self.summary.recovered -= 1
                self.summary.went(address_text(letter.address), -1)
            else:
                if not take():
                    self._keeper.hold(letter)  # not one of those that were wanted: it only goes back
                    continue
                if letter.redelivered and self._journal is not None and not self.summary.dry_run:
                    if self._journal.recognise(letter.digest):
                        self.summary.recognised += 1
                        letter.stored = True  # should its ack be lost, it is not published either
                        done.append(letter)
                        continue
                    is_doubtful = self._journal.follows_killed_run
            if self._may_go(letter):
                going.append(letter)
                if is_doubtful:
                    self._settler.doubtful.add(letter)
        if done:
            self._settler.ack(done)
        if going:
            await self._sender.add(going)
        if not self._quota.is_bounded:
            there = self._letters.untaken_count + (await self._letters.depth()).ready
            self._quota.starts_with(self._quota.seen_count + there)

    def _is_forgotten(self, letter: RunLetter) -> bool:
        """Whether it is one that we were done with, as far as anybody can tell: a broker that was lost forgets acks. It
        is published again, and is not recovered until then; of those that are to be taken it is none."""
        may_be = letter.redelivered and self.summary.interruptions and self.summary.recovered
        return bool(may_be and self._books.was_acked(letter))

    def _came_again(self, letter: RunLetter, now_s: float) -> bool:
        """A letter that a lost connection took from us is back, and goes on where it was; True: it was not sent yet."""
        letter.at_s = now_s
        if letter.stored:
            # Its copy is confirmed and written down: only the ack is missing.
            self.summary.recognised += 1
            self._settler.ack_noted([letter])
        elif letter not in self._books.flying:
            if not letter.kept:
                return True
            self._keeper.hold(letter)
        return False

    def _may_go(self, letter: RunLetter) -> bool:
        summary, route = self.summary, letter.route
        if self._is_plain and route.address is not None and not route.blocked and not self._settler.refused:
            return True
        if self._where and not self._where.fits(self._letters.read(letter), route.type, self._clock.now_us()):
            summary.filtered += 1
            self._quota.left_out_count += 1
            self._keeper.keep(letter, LEFT_OUT, warn=False)
            return False
        address = letter.address
        if address is None:
            summary.skipped += 1
            self._keeper.keep(letter, route.why)
            return False
        if why := route.blocked or self._settler.why_refused(address):
            self._keeper.failed(letter, why)
            return False
        if self._table.mode is Mode.EXCHANGE and len(self._addresses) < ADDRESSES_COUNT_MAX:
            self._addresses[address] = None
        if summary.dry_run:
            add_planned(summary, route)
            self._keeper.hold(letter)
            return False
        return True

    async def _widen(self) -> None:
        """As many letters in hand as the window allows by their size so far, beside those that are held."""
        fits = self._window.fits_count
        wanted = fits + len(self._books.held)
        if (wanted - self._letters.capacity_count) * 4 >= fits:
            await self._want()
            await self._letters.widen(wanted)

    async def _want(self) -> None:
        """No more letters are delivered than are to be taken: each that was too many would be given back."""
        left = self._quota.left()
        # What a lost connection took from us comes again, and does not count again.
        await self._letters.want(None if left is None else left + self._books.lost_count)

    # Losing the connection, and the end.

    async def _come_back(self, error: BrokerError) -> bool:
        """Connect again; False when the run ends instead."""
        summary, books = self.summary, self._books
        summary.interruptions += 1
        self._notices.interrupted(summary, error)
        self._losses_count += 1
        self._sender.lose()
        books.lose(self._settler.stored)
        worst = max((letter.returns or 0 for letter in books.lost()), default=0)
        limit = self._findings.delivery_limit if self._findings else None
        await self._want()
        delay_s = RECONNECT_S_FIRST
        refused_until_s = self._watch.now_s() + self._limits.stall_timeout_s
        while self._stop is None:
            if not may_return(count := worst + self._losses_count, limit):
                summary.notes.append(
                    f"ended instead of reconnecting: a letter came back {count} times, the delivery limit is {limit}"
                )
                return False
            left_s = self._watch.left_s()
            await wait(self._stopping, min(left_s, delay_s * (0.5 + random.random() / 2)))  # noqa: S311
            delay_s = min(delay_s * 2, RECONNECT_S_MAX)
            if self._watch.left_s() <= 0:
                self._stop_by(StoppedBy.TOTAL)
                return False
            try:
                async with asyncio.timeout(self._watch.left_s()):
                    if not await unless(self._stopping, self._letters.reopen(capacity_count=self._window.fits_count)):
                        return False
            except TimeoutError:
                continue
            except BrokerRefused as refused:
                # A queue whose node is down is said not to exist, for as long as that lasts.
                if self._watch.now_s() > refused_until_s:
                    summary.failure = f"the broker does not let us go on; {refused.message}"
                    return False
                self._notices.waits(summary, str(refused))
                continue
            except BrokerError as again:
                self._losses_count += isinstance(again, BrokerLost)  # letters may have been on their way to us
                self._notices.waits(summary, str(again))
                continue
            self._watch.suspended()
            self._notices.resumed(summary)
            return True
        return False

    async def _end(self) -> None:
        ending = Ending(
            self._letters, self._books, self.summary, self._limits, self._abandoned, unsent=self._sender.waiting
        )
        await ending.run(
            self._findings.delivery_limit if self._findings else None, settle=self._settler.settle, room=self._room
        )
        self._warn()
        found, summary = self._findings, self.summary
        if found is not None and found.gives_back_at_tail and summary.returned and self._is_counted:
            summary.notes.append("letters that were given back are behind newer ones in this quorum queue")
        for address in self._addresses:
            queues = list(self._letters.receivers(address))
            if len(queues) > 1:
                summary.copies[str(address)] = queues
        self._quota.seen_count -= ending.unsent_count()
        summary.unseen = self._quota.unseen(summary)
        self.summary.possible_duplicates += self._letters.sent_again_count
        self._watch.end(self.summary)
        self._notices.ended(self.summary)
