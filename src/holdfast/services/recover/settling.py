"""What became of letters that were published: those that are stored are written down and acked, the others are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from holdfast.core.message import Address
from holdfast.core.recovery import Summary
from holdfast.ports.recovery import DeadLetters, Journal, RunLetter, Verdict, address_text
from holdfast.proof import crash_point
from holdfast.services.recover.books import LetterTable
from holdfast.services.recover.keeping import Keeper, why_not
from holdfast.services.recover.notices import Notices
from holdfast.services.recover.watch import RunClock

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

    def on_outcome(self, letters: Sequence[RunLetter], verdict: Verdict, code: int, text: str) -> None:
        """Letters that share this outcome."""
        landed = self._books.land(letters)
        if verdict is Verdict.CONFIRMED:
            for letter in landed:
                letter.stored = True
            if self.doubtful:
                self._summary.possible_duplicates += len(self.doubtful.intersection(landed))
                self.doubtful.difference_update(landed)
            self.stored += landed
            self._settle_soon()
            return
        for letter in landed:
            self._not_stored(letter, verdict, code, text)

    def _not_stored(self, letter: RunLetter, verdict: Verdict, code: int, text: str) -> None:
        address = letter.address or Address()
        if verdict is Verdict.REFUSED and code in EXCHANGE_REFUSALS and len(self.refused) < REFUSED_COUNT_MAX:
            # Rights by topic are rights to keys: the other keys of the exchange may be allowed.
            self.refused[address if TOPIC in text else address.exchange] = why_not(verdict, code, text)
        self._summary.unknown += verdict is Verdict.UNKNOWN
        # Of several queues that a letter goes to, one may have taken it though another did not.
        some_may_have_it = verdict is Verdict.NACKED and len(self._letters.receivers(address)) != 1
        self._summary.possible_duplicates += verdict is Verdict.UNKNOWN or some_may_have_it
        self._keeper.failed(letter, why_not(verdict, code, text))
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
