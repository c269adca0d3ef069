"""One recovery run: take, find the route, publish, wait for the confirm, note it in the journal, ack. Nothing is acked
whose copy was not confirmed, to this run or to a killed one that had noted it.

Letters that cannot go (no route, refused, returned, left out by a filter) are held unacked and given back once, at the
end: given back at once, the broker would deliver them again in a loop. A lost connection gives everything back by
itself; what comes again is recognised by its bytes, so that nothing is counted or published twice that need not be.

Two things go on beside each other and share the `LetterTable`: letters are taken and sent, and outcomes are settled as
they come in, also while a backup is being synced. At the end, consuming is cancelled first, because letters given back
before would be delivered again; those that cannot bear another return go back by a publish; the rest goes back in
as few frames as keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from holdfast.core.message import Address, Delivery, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import Backoff
from holdfast.core.recovery import (
    Preflight,
    RecoveryOrder,
    RunLetter,
    StoppedBy,
    Summary,
    add_planned,
    address_text,
    as_utf8,
    may_return,
)
from holdfast.core.states import RunState
from holdfast.errors import BrokerError, BrokerLost, BrokerRefused
from holdfast.ports.broker import OnOutcome, RecoveryBroker
from holdfast.ports.clock import Clock
from holdfast.proof import crash_point
from holdfast.services.recover.letter_table import LetterTable
from holdfast.services.recover.limits import LimitedRun, unless, wait
from holdfast.services.recover.report import Notices
from holdfast.stores.files import Exported, FileBackup
from holdfast.stores.journal import FileJournal

TICK_S = 0.25
ALARM_STEP_S = 1.0
BATCH_COUNT_MAX = 1_000
RECONNECT = Backoff(first_s=0.2, delay_s_max=10.0)
#: How much longer a publish may take than the run: the run's own clocks decide when it is over.
PUBLISH_SPARE_S = 60.0
#: Refusals that concern the exchange, not the letter: the next one would be refused as well.
EXCHANGE_REFUSALS = frozenset((403, 404))
REFUSED_COUNT_MAX = 1_000
TOPIC = "access to topic"
#: Exchanges that letters name are asked for until there are so many, and their addresses are remembered.
EXCHANGES_COUNT_MAX = 1_000
ADDRESSES_COUNT_MAX = 1_000
ANSWER_STEP_S = 0.1
STEADY_COUNT = 3
STEADY_STEP_S = 0.1
STEADY_TIMEOUT_S = 30.0
HASTY_TIMEOUT_S = 5.0


class RecoveryRun(LimitedRun):
    """`await RecoveryRun(broker, order, preflight, …).run()`; `stop()` ends it cleanly, `abandon()` at once, still
    without loss."""

    def __init__(
        self,
        broker: RecoveryBroker,
        order: RecoveryOrder,
        preflight: Preflight,
        *,
        clock: Clock,
        journal: FileJournal | None = None,
        backup: FileBackup | None = None,
        notices: Notices | None = None,
    ) -> None:
        super().__init__(order, clock=clock, notices=notices)
        self._drain, self._publisher = broker.drain, broker.publisher
        self._redriver, self._inspector = broker.redriver, broker.inspector
        self._preflight = preflight
        self._journal = journal
        self._backup = backup
        # Letters of a queue are in hand until they are settled or given back; those of a file never are.
        self._holds = not order.from_backup
        self._letters = LetterTable(holds=self._holds)
        self._room = asyncio.Event()  # letters have left the window
        self._losses_count = 0  # of connections since the last letter came; each may have returned what we know of
        self._refused: dict[str | Address, str] = {}  # exchanges, or keys of one, that take nothing, and why
        self._exchanges: set[str] = set()  # that were asked for
        self._addresses: dict[Address, None] = {}  # that letters went to, or would
        self._warned_count = self._sent_again_count = 0
        self._settle_due = False
        self._has_ended = False  # nothing more comes, ever
        self._error: Exception | None = None  # a bug that showed itself where nobody hears it
        self._is_counted = False  # the queue counts returns: it is a quorum queue
        # Nothing is asked of a letter but its route.
        self._is_plain = not self._where and not order.dry_run

    @property
    def sent_count(self) -> int:
        return len(self._letters.sent)

    def _stop_by(self, reason: StoppedBy) -> None:
        super()._stop_by(reason)
        self._room.set()

    async def run(self) -> Summary:
        """Raises RecoveryLocked or another BrokerError when it cannot begin; after that, the summary says all."""
        summary = self.summary
        summary.found = self._preflight.depth.ready
        self._quota.starts_with(summary.found)
        if self._journal is not None and (doubted := self._journal.doubted_count):
            summary.possible_duplicates += doubted
            summary.notes.append(f"{doubted} of the possible duplicates are of an earlier run, which was killed")
        self._watch.start()
        if self._preflight.alarm or self._publisher.trouble:
            await self._wait_for_the_alarm()
        if self._stop is None:
            await self._allow()
            self._notices.started(summary, await self._drain.open())
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
        while self._stop is None and (alarm := await self._inspector.alarm()):
            self._notices.waits(self.summary, alarm)
            if self._watch.left_s() <= 0:
                self._stop_by(StoppedBy.TOTAL)
            await wait(self._stopping, min(ALARM_STEP_S, self._watch.left_s()))
        self._watch.moved()

    def _warn(self) -> None:
        """Say what was not said yet."""
        for warning in self._drain.warnings[self._warned_count :]:
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
                if not await self._reconnect(error):
                    stopped = self._stop or StoppedBy.STALL
        self.summary.stopped_by = stopped

    async def _step(self) -> StoppedBy | None:
        """One batch, or one tick of waiting; the reason when the run is over."""
        if self._error is not None:
            raise self._error
        room = self._room_count()
        tick_s = min(TICK_S, self._watch.pace_s()) if self._letters.waiting else TICK_S
        if room <= 0:
            self._room.clear()
            if self._room_count() <= 0 and not self._stop:
                await wait(self._room, tick_s)
        else:
            deliveries = await self._drain.take(count_max=room, timeout_s=tick_s)
            self._has_ended = deliveries is None
            if deliveries:
                self._watch.moved()
                self._redriver.tick()
                await self._admit(list(map(self._redriver.letter, deliveries)))
        if self._letters.waiting and self._stop is None and not await self._send():
            self._stop_by(StoppedBy.STALL)
        await self._allow()
        if self._stop is not None:
            return self._stop
        return await self._why_over()

    def _room_count(self) -> int:
        """How many letters may be taken now."""
        limits, letters = self._limits, self._letters
        if self._stop is not None or self._has_ended or letters.sent_bytes >= limits.window_bytes_max:
            return 0
        room = min(limits.window_count_max - len(letters.sent) - len(letters.waiting), BATCH_COUNT_MAX)
        # Letters that come again do not count, so that the limit may be reached while some are still to come.
        left = self._quota.left()
        return room if left is None or letters.away_count else min(room, left)

    async def _why_over(self) -> StoppedBy | None:
        letters, watch = self._letters, self._watch
        if trouble := self._publisher.trouble:
            watch.moved()
            self._notices.waits(self.summary, trouble)
        is_idle = not letters.sent and not letters.waiting
        if is_idle and not letters.away_count and (self._has_ended or self._quota.left() == 0):
            return StoppedBy.ALL_TAKEN
        oldest = [next(iter(group)).at_s for group in (letters.held, letters.waiting) if group]
        if len(letters.held) >= self._limits.held_count_max or any(map(watch.is_held_too_long, oldest)):
            return StoppedBy.HOLD
        if stopped := watch.why_over(sent=len(letters.sent), waiting=len(letters.waiting)):
            return stopped
        if is_idle and watch.is_quiet():
            depth = await self._drain.depth()
            if watch.is_empty(depth.ready):
                return StoppedBy.EMPTY
        return None

    async def _allow(self) -> None:
        """No more letters are delivered than are to be taken: each that was too many would be given back."""
        left = self._quota.left()
        # What a lost connection took from us comes again, and does not count again.
        wanted = None if left is None else left + self._letters.away_count
        await self._drain.allow(wanted, held_count=len(self._letters.held))

    # Which of them go.

    async def _admit(self, batch: Sequence[RunLetter]) -> None:
        crash_point("recover.after_take")
        now_s, letters = self._watch.now_s(), self._letters
        self._losses_count = 0
        if letters.away_count:
            self._settle()  # those of them that are confirmed only wait for their ack, once they come again
        if self._preflight.gives_back_at_tail:
            self._is_counted = self._is_counted or any(letter.returns is not None for letter in batch)
        going: list[RunLetter] = []
        noted: list[RunLetter] = []
        for letter in batch:  # each branch uses up what it finds: their order matters
            letter.at_s = now_s
            if letter.redelivered and (known := letters.take_again(letter)) is not None:
                if self._came_again(known, now_s):
                    going.append(known)
            elif letters.has_put_back and letters.take_put_back(letter):
                self._hold(letter, is_put_back=True)  # counted when it was taken first
            elif letter.redelivered and self._is_forgotten(letter):
                self.summary.recovered -= 1
                self.summary.went(address_text(letter.address), -1)
                letters.doubtful.add(letter)
                if self._sift(letter):
                    going.append(letter)
            elif not self._quota.take():
                self._hold(letter)  # not one of those that were wanted: it only goes back
            elif letter.redelivered and self._use_note(letter):
                noted.append(letter)
            elif self._sift(letter):
                going.append(letter)
        if noted:
            self.summary.recognised += len(noted)
            letters.recognise(noted)
            self._ack_and_count(noted)  # without a note: the journal has written it as it recognised them
        if going:
            await self._add(going)
        if not self._quota.is_bounded and self._holds:
            depth = await self._drain.depth()
            self._quota.starts_with(self._quota.seen_count + depth.untaken + depth.ready)

    def _is_forgotten(self, letter: RunLetter) -> bool:
        """Whether it is one that we were done with, as far as anybody can tell: a broker that was lost forgets acks. It
        is published again, and is not recovered until then; of those that are to be taken it is none."""
        return bool(self.summary.interruptions and self.summary.recovered) and self._letters.was_acked(letter)

    def _use_note(self, letter: RunLetter) -> bool:
        """Whether a killed run has noted that it is published; each note is used once. Without one it is doubtful."""
        journal = self._journal
        if journal is None or self.summary.dry_run:
            return False
        if journal.recognise(letter.digest):
            return True
        if journal.follows_killed_run:
            self._letters.doubtful.add(letter)
        return False

    def _came_again(self, letter: RunLetter, now_s: float) -> bool:
        """A letter that a lost connection took from us is back, and goes on where it was; True: it was not sent yet."""
        letter.at_s = now_s
        match letter.state:
            case RunState.WAITING:
                return True
            case RunState.CONFIRMED:
                # Its copy is confirmed and written down: only the ack is missing.
                self.summary.recognised += 1
                self._note_and_ack([letter])
            case RunState.HELD | RunState.PUT_BACK:
                self._hold(letter)
            case _:
                # Its outcome is still to come; what is done then is done to this delivery.
                pass
        return False

    def _sift(self, letter: RunLetter) -> bool:
        """Whether it is to be sent. If not, it is counted with the reason and held."""
        summary, route = self.summary, letter.route
        if self._is_plain and route.address is not None and not route.blocked and not self._refused:
            return True
        if self._where and self._leave_out(self._redriver.read(letter.delivery), route.type):
            self._hold(letter)
            return False
        address = route.address
        if address is None:
            summary.skipped += 1
            self._keep(letter, route.why)
            return False
        if why := route.blocked or self._refused.get(address.exchange) or self._refused.get(address, ""):
            self._fail(letter, why)
            return False
        if summary.dry_run:
            add_planned(summary, route.type or self._redriver.read(letter.delivery).type, address)
            self._goes_to(address)
            self._hold(letter)
            return False
        return True

    # Keeping: counted with the reason, held unacked, and given back at the end of the run.

    def _fail(self, letter: RunLetter, why: str) -> None:
        """Its publish did not succeed, or would not."""
        self.summary.failed_at(address_text(letter.address))
        self._keep(letter, why, failed=True)

    def _keep(self, letter: RunLetter, why: str, *, failed: bool = False) -> None:
        """It stays in the queue, for this reason."""
        self._kept(why, letter.route.type, lambda: self._redriver.read(letter.delivery), failed=failed)
        self._hold(letter)

    def _hold(self, letter: RunLetter, *, is_put_back: bool = False) -> None:
        """Unacked, without its body. One that could not bear another return goes back by a publish, at once; but one
        that was put back already is not put back again before the end: where a queue bears fewer returns than are
        spared, it would go round and round."""
        if not self._letters.hold(letter):
            return
        if may_return(letter.returns or 0, self._preflight.delivery_limit):
            letter.properties = b""
            self._drain.forget_body(letter.delivery)
        elif not is_put_back:
            # Now, not at the end: until then a lost connection or a kill would return it once more.
            self._letters.put_back([letter])
            copies = [self._redriver.put_back(letter)]
            self._publish(copies, self._on_put_back)

    def _on_put_back(self, copies: Sequence[Outgoing], outcome: Outcome) -> None:
        known = self._letters.answered([copy.made_from for copy in copies])
        if outcome.stored:
            self._was_put_back(known)
        else:
            self._letters.not_put_back(known)

    def _was_put_back(self, letters: Sequence[RunLetter]) -> None:
        """They are in the queue a second time, with a count that begins anew: the first ones go."""
        if not letters:
            return
        self._letters.was_put_back(letters)
        self._watch.moved()
        here = [letter for letter in letters if letter.here]
        done_count = len(here) - len(self._ack(here))
        self.summary.put_back += len(letters)
        # Of the others the delivery was lost before the ack: both are in the queue now, nobody can tell them apart.
        self.summary.possible_duplicates += len(letters) - done_count

    # Sending: at the pace that was asked for, into the backup first, and to exchanges that take them.

    async def _add(self, letters: Sequence[RunLetter]) -> None:
        """They go next. Raises BrokerError, with all of them waiting.

        An exchange is asked for before the first publish to it: one that is refused ends the channel, and with it what
        is known of all others.
        """
        self._letters.wait(letters)
        names = {letter.route.address.exchange for letter in letters if letter.route.address is not None}
        for name in names - self._exchanges:
            if len(self._exchanges) >= EXCHANGES_COUNT_MAX:
                return
            why = await self._refusal(name)
            self._exchanges.add(name)
            if why:
                self._refused[name] = why
                for letter in self._letters.refuse(name):
                    self._fail(letter, why)

    async def _refusal(self, exchange: str) -> str:
        try:
            return await self._inspector.refusal(exchange)
        except BrokerError as error:
            if self._drain.is_connected:
                return ""  # nobody can say
            raise BrokerLost(f"exchange '{exchange}' could not be asked for; {error}") from error

    async def _send(self) -> bool:
        """What may go now; False when there is no backup of it: then nothing more may be published."""
        table = self._letters
        while count := self._watch.due_count(len(table.waiting)):
            letters = table.first(count)
            if self._backup is not None and not await self._save(self._backup, letters):
                return False
            if table.doubtful and self._journal is not None:
                # What is sent for the second time, perhaps, is told by the next run if this one is killed.
                self._journal.doubt(len(table.doubtful.intersection(letters)))
            crash_point("recover.before_publish")
            table.send(letters)
            self._publish(list(map(_copy, letters)), self._on_outcome)
            crash_point("recover.after_publish")
        return True

    async def _save(self, backup: FileBackup, letters: Sequence[RunLetter]) -> bool:
        try:
            await backup.write([self._exported(letter) for letter in letters])
        except OSError as error:
            why = error.strerror or str(error)
            self.summary.failure = f"the backup cannot be written, so nothing more was published; {why}"
            return False
        return True

    def _exported(self, letter: RunLetter) -> Exported:
        message = self._redriver.read(letter.delivery)
        return Exported(
            exchange=as_utf8(message.exchange),
            routing_key=as_utf8(message.routing_key),
            properties=letter.delivery.properties,
            body=message.body,
            message_id=as_utf8(message.id),
        )

    def _publish(self, copies: Sequence[Outgoing], on_outcome: OnOutcome) -> None:
        """For longer than the run itself: its own clocks decide when it is over."""
        timeout_s = self._watch.left_s() + self._limits.stop_timeout_s + PUBLISH_SPARE_S
        self._publisher.send(copies, partial(self._heard, on_outcome), timeout_s=timeout_s)

    def _heard(self, work: Callable[..., None], *what: object) -> None:
        """Nobody hears what a callback raises: it is kept, and ends the run at its next step, so that everything that
        is in hand is given back."""
        try:
            work(*what)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again
            self._error = self._error or error
            self._room.set()

    # What became of those that were published: what is stored is written down and acked, the others are kept.

    def _on_outcome(self, copies: Sequence[Outgoing], outcome: Outcome) -> None:
        """Of letters that share this outcome."""
        table = self._letters
        known = table.answered([copy.made_from for copy in copies])
        if not outcome.stored:
            for letter in known:
                self._not_stored(letter, outcome)
            return
        if table.doubtful:
            self.summary.possible_duplicates += len(table.doubtful.intersection(known))
            table.doubtful.difference_update(known)
        table.confirm(known)
        if not self._settle_due:
            self._settle_due = True
            asyncio.get_running_loop().call_soon(self._heard, self._settle)

    def _not_stored(self, letter: RunLetter, outcome: Outcome) -> None:
        address, kind, why = letter.address or Address(), outcome.kind, why_not(outcome)
        concerns_exchange = kind is OutcomeKind.REFUSED and outcome.code in EXCHANGE_REFUSALS
        if concerns_exchange and len(self._refused) < REFUSED_COUNT_MAX:
            # Rights by topic are rights to keys: the other keys of the exchange may be allowed.
            self._refused[address if TOPIC in outcome.text else address.exchange] = why
        self.summary.unknown += kind is OutcomeKind.UNKNOWN
        self.summary.possible_duplicates += kind is OutcomeKind.UNKNOWN
        if kind is OutcomeKind.NACKED:
            # Of several queues that a letter goes to, one may have taken it though another did not.
            queues = self._preflight.receivers(address)
            self.summary.possible_duplicates += len(queues) > 1
            self.summary.perhaps_elsewhere += not queues
        self._fail(letter, why)
        self._watch.moved()
        self._room.set()

    def _settle(self) -> None:
        """Write down that these are published, then ack them."""
        self._settle_due = False
        confirmed = self._letters.take_confirmed()
        if not confirmed:
            return
        crash_point("recover.after_confirm")
        here = [letter for letter in confirmed if letter.here]
        if self._journal is not None:
            crash_point("recover.before_journal")
            sent_again_count = self._publisher.sent_again
            self._journal.doubt(sent_again_count - self._sent_again_count)
            self._sent_again_count = sent_again_count
            self._journal.confirmed([letter.digest for letter in confirmed])
            crash_point("recover.after_journal")
        self._note_and_ack(here)
        crash_point("recover.after_ack")
        self._watch.moved()
        self._room.set()

    def _note_and_ack(self, letters: Sequence[RunLetter]) -> None:
        """Noted before it is sent: a note that came later could be missing for an ack that was sent."""
        if self._journal is not None:
            self._journal.acking([letter.digest for letter in letters])
        self._ack_and_count(letters)

    def _ack_and_count(self, letters: Sequence[RunLetter]) -> None:
        """Ack them, and they are done; those whose delivery was lost will come again."""
        done = self._letters.settle(letters, self._ack(letters))
        summary = self.summary
        for route, same in groupby(done, key=attrgetter("route")):
            summary.went(address_text(route.address), len(list(same)))
            self._goes_to(route.address)
        before = summary.recovered
        summary.recovered += len(done)
        self._notices.progressed(summary, before)

    def _goes_to(self, address: Address | None) -> None:
        """Which queues get copies is told at the end."""
        if address is not None and address.exchange and len(self._addresses) < ADDRESSES_COUNT_MAX:
            self._addresses[address] = None

    def _ack(self, letters: Sequence[RunLetter]) -> Sequence[Delivery]:
        """The only way out of the queue, through the gate of the table. Answers those that are not in our hands."""
        return self._drain.ack(self._letters.ackable(letters))

    # Losing the connection.

    async def _reconnect(self, error: BrokerError) -> bool:
        """Connect again; False when the run ends instead."""
        summary, watch = self.summary, self._watch
        summary.interruptions += 1
        self._notices.interrupted(summary, error)
        self._losses_count += 1
        self._letters.lose()
        worst = max((letter.returns or 0 for letter in self._letters.away()), default=0)
        limit = self._preflight.delivery_limit
        await self._allow()
        failures = 0
        refused_until_s = watch.now_s() + self._limits.stall_timeout_s
        while self._stop is None:
            if not may_return(count := worst + self._losses_count, limit):
                summary.notes.append(
                    f"ended instead of reconnecting: a letter came back {count} times, the delivery limit is {limit}"
                )
                return False
            await wait(self._stopping, min(watch.left_s(), RECONNECT.delay_s(failures)))
            failures += 1
            if watch.left_s() <= 0:
                self._stop_by(StoppedBy.TOTAL)
                return False
            try:
                async with asyncio.timeout(watch.left_s()):
                    if not await unless(self._stopping, self._drain.open()):
                        return False
            except TimeoutError:
                continue
            except BrokerRefused as refused:
                # A queue whose node is down is said not to exist, for as long as that lasts.
                if watch.now_s() > refused_until_s:
                    summary.failure = f"the broker does not let us go on; {refused.message}"
                    return False
                self._notices.waits(summary, str(refused))
                continue
            except BrokerError as again:
                self._losses_count += isinstance(again, BrokerLost)  # letters may have been on their way to us
                self._notices.waits(summary, str(again))
                continue
            watch.moved()
            self._notices.resumed(summary)
            return True
        return False

    # The end. Never raises BrokerError: without a broker, it gives everything back by itself.

    async def _end(self) -> None:
        summary, letters, preflight = self.summary, self._letters, self._preflight
        is_given_back = False
        try:
            is_given_back = not self._abandoned.is_set() and await self._give_back()
        except BrokerError as error:
            summary.notes.append(f"the broker gave the rest back by itself; {error}")
        if not is_given_back:
            self._give_up()
            await self._drain.abandon()
        unsent_count = letters.unsent_count()
        confirmed = letters.end()
        for letter in confirmed:
            # Published, and never acked: its other copy is still in the queue, and nobody will recognise it.
            summary.recovered += 1
            summary.went(address_text(letter.address))
            summary.possible_duplicates += 1
        if missing := letters.away_count - len(confirmed):
            summary.notes.append(
                f"{missing} letters that a lost connection took have not come again; the broker may still count them "
                "to that connection, look at the queue's unacknowledged messages"
            )
        await self._count()
        self._warn()
        if preflight.gives_back_at_tail and summary.returned and self._is_counted:
            summary.notes.append("letters that were given back are behind newer ones in this quorum queue")
        for address in self._addresses:
            queues = list(preflight.receivers(address))
            if len(queues) > 1:
                summary.copies[str(address)] = queues
        if summary.from_backup:  # how many there are is known when the file is read to its end
            summary.found, summary.remaining = summary.remaining or 0, None
        self._quota.seen_count -= unsent_count
        summary.unseen = self._quota.unseen(summary)
        summary.possible_duplicates += self._publisher.sent_again
        self._watch.end(summary)
        self._notices.ended(summary)

    async def _give_back(self) -> bool:
        """Everything that is unsettled, in order; False when somebody has no more time for that."""
        leftovers: list[RunLetter] = []

        async def stop() -> None:
            leftovers.extend(map(self._redriver.letter, await self._drain.stop(self._is_near_limit)))

        async def give_back_all() -> None:
            self.summary.returned += await self._drain.give_back_all(others_count=self._preflight.depth.consumers)

        await unless(self._abandoned, stop())
        await self._await_answers()
        self._give_up()
        if self._abandoned.is_set():
            return False
        if (limit := self._preflight.delivery_limit) is not None:
            await self._put_back(self._letters.near_limit(leftovers, limit))
        return await unless(self._abandoned, give_back_all())

    def _is_near_limit(self, delivery: Delivery) -> bool:
        """Whether it could not bear another return."""
        limit = self._preflight.delivery_limit
        if limit is None:
            return False
        returns = self._redriver.letter(delivery).returns if delivery.redelivered else None
        return not may_return(returns or 0, limit)

    async def _await_answers(self) -> None:
        """Wait for the confirms that are still to come."""
        deadline_s = self._watch.now_s() + self._limits.stop_timeout_s
        while self._letters.sent and not self._abandoned.is_set() and (left_s := deadline_s - self._watch.now_s()) > 0:
            self._room.clear()
            # In steps: a letter that was put back makes no room.
            await unless(self._abandoned, wait(self._room, min(ANSWER_STEP_S, left_s)))

    def _give_up(self) -> None:
        """Nobody knows whether the broker has those that are not answered: they are not acked."""
        summary = self.summary
        self._settle()
        sent, putting_back = self._letters.give_up()
        summary.possible_duplicates += len(putting_back)  # they were being put back, and are counted as kept
        for letter in sent:
            summary.unknown += 1
            summary.possible_duplicates += 1
            summary.failed_at(address_text(letter.address))
            summary.reason("unknown: no answer before the end").count += 1

    async def _put_back(self, letters: Sequence[RunLetter]) -> None:
        """These bear no other return. Nobody waits for the answer to an earlier publish of them any more."""
        if not letters:
            return
        self._letters.put_back(letters, at_end=True)
        copies = list(map(self._redriver.put_back, letters))
        outcomes = await self._publisher.publish(copies, timeout_s=self._limits.stop_timeout_s)
        told = list(zip(letters, outcomes, strict=True))
        self._letters.not_put_back([letter for letter, outcome in told if not outcome.stored])
        self.summary.possible_duplicates += sum(outcome.kind is OutcomeKind.UNKNOWN for outcome in outcomes)
        self._was_put_back([letter for letter, outcome in told if outcome.stored])

    async def _count(self) -> None:
        """Not for long, once somebody has no more time."""
        if self._abandoned.is_set() or not await unless(self._abandoned, self._read_depth(STEADY_TIMEOUT_S)):
            await self._read_depth(HASTY_TIMEOUT_S)

    async def _read_depth(self, timeout_s: float) -> None:
        """While letters are being given back, a queue says fewer than it has: read until it is steady.

        A busy broker says 0 for seconds. Nobody else consumes: then it must come to say what was given back.
        """
        seen: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    depth = await self._drain.depth()
                    seen.append(depth.ready)
                    is_whole = depth.ready >= self.summary.returned or depth.consumers
                    if depth.is_sure or (
                        is_whole and len(seen) >= STEADY_COUNT and len(set(seen[-STEADY_COUNT:])) == 1
                    ):
                        break
                    await asyncio.sleep(STEADY_STEP_S)
        except (BrokerError, TimeoutError) as error:
            if not seen:
                self.summary.notes.append(f"how many letters remain could not be read; {str(error) or 'no answer'}")
        self.summary.remaining = seen[-1] if seen else None


def _copy(letter: RunLetter) -> Outgoing:
    """What is published in its place."""
    address, delivery = letter.route.address, letter.delivery
    assert address is not None  # noqa: S101  a letter without an address is held
    return Outgoing(address.exchange, address.routing_key, letter.properties, delivery.body, letter)


def why_not(outcome: Outcome) -> str:
    """Why a publish did not succeed, in words."""
    kind = outcome.kind.value
    if outcome.kind is OutcomeKind.NACKED:
        return f"{kind}: the target does not take it (it is full, or has no leader)"
    return f"{kind}: {outcome.code} {outcome.text}" if outcome.code else f"{kind}: {outcome.text}"
