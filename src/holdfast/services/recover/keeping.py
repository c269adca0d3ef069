"""Letters that cannot go: counted with their reason, held unacked, and given back at the end of the run."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.recovery import RunLimits, Summary, may_return
from holdfast.ports.recovery import DeadLetters, RunLetter, Verdict, address_text
from holdfast.services.recover.books import LetterTable
from holdfast.services.recover.notices import Notices, sample
from holdfast.services.recover.watch import RunClock

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

    def _on_put_back(self, letters: Sequence[RunLetter], verdict: Verdict, code: int, text: str) -> None:
        """They are in the queue a second time, with a count that begins anew: the first ones go."""
        landed = self._books.land(letters)
        if verdict is not Verdict.CONFIRMED:
            return  # they stay held; the end tries again
        for letter in landed:
            self._watch.progressed()
            self._books.release(letter)
            self._books.was_put_back(letter)
            self._summary.put_back += 1
            if not letter.in_hand or self._letters.ack([letter]):
                # Its delivery was lost before the ack: both are in the queue now, and nobody can tell them apart.
                self._summary.possible_duplicates += 1


def why_not(verdict: Verdict, code: int, text: str) -> str:
    """Why a publish did not succeed, in words."""
    if verdict is Verdict.NACKED:
        return "nacked: the target does not take it (it is full, or has no leader)"
    return f"{verdict.value}: {code} {text}" if code else f"{verdict.value}: {text}"
