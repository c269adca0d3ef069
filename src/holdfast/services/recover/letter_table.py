"""Which letters are under way, which are held, and which of them a lost connection took out of our hands."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from holdfast.ports.recovery import RunLetter

#: Letters that were acked last: a broker that is killed may forget acks of a classic queue and deliver them again, as
#: many as its journal has room for, 32 768 deliveries and acks. Half of it fits into a set of a quarter of the memory.
ACKED_COUNT_MAX = 38_000


class LetterTable:
    """One run's letters. `flying` are published and unanswered, `held` wait for the end to be given back."""

    def __init__(self) -> None:
        self.flying: set[RunLetter] = set()
        self.flying_bytes = 0
        self.held: dict[RunLetter, None] = {}
        self._lost: defaultdict[bytes, deque[RunLetter]] = defaultdict(deque)
        self.lost_count = 0  #: letters that are still to come again
        # The last ones, and those before them: forgotten half by half, since to find the oldest of so many takes long.
        self._acked: set[bytes] = set()
        self._acked_before: set[bytes] = set()
        self._put_back: Counter[bytes] = Counter()

    def fly(self, letters: Sequence[RunLetter]) -> None:
        """They are published."""
        self.flying.update(letters)
        self.flying_bytes += sum([letter.size_bytes for letter in letters])

    def land(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        """Their outcome is known; answers those that somebody still waits for."""
        flying = self.flying
        landed = [letter for letter in letters if letter in flying]
        flying.difference_update(landed)
        self.flying_bytes -= sum([letter.size_bytes for letter in landed])
        return landed

    def hold(self, letter: RunLetter) -> None:
        """It is kept."""
        letter.kept = True
        self.held[letter] = None

    def lose(self, confirmed: Iterable[RunLetter] = ()) -> None:
        """The connection is gone: nothing is in our hands any more. All of it will be delivered again."""
        for letter in (*self.flying, *self.held, *confirmed):
            if letter.in_hand:
                self.miss(letter)
        self.held.clear()

    def miss(self, letter: RunLetter) -> None:
        """Its delivery is gone; the letter itself is not done."""
        letter.in_hand = False
        self._lost[letter.digest].append(letter)
        self.lost_count += 1

    def find(self, again: RunLetter) -> RunLetter | None:
        """The letter of which this is another delivery: the same bytes, lost from our hands; each is found once."""
        waiting = self._lost.get(again.digest) if again.redelivered else None
        if not waiting:
            return None
        letter = waiting.popleft()
        self.lost_count -= 1
        if not waiting:
            del self._lost[again.digest]
        letter.raw, letter.in_hand, letter.returns = again.raw, True, again.returns
        return letter

    def lost(self) -> list[RunLetter]:
        """Those that have not come again."""
        return [letter for letters in self._lost.values() for letter in letters]

    def release(self, letter: RunLetter) -> None:
        """It is not held any more."""
        self.held.pop(letter, None)

    def was_put_back(self, letter: RunLetter) -> None:
        """It went to the end of its queue by a publish, and may be delivered from there."""
        self._put_back[letter.digest] += 1

    @property
    def has_put_back(self) -> bool:
        """Whether any did."""
        return bool(self._put_back)

    def is_put_back(self, letter: RunLetter) -> bool:
        """Whether this is one of those; each is found once."""
        if letter.redelivered or not self._put_back.get(letter.digest):
            return False
        self._put_back[letter.digest] -= 1
        return True

    def acked(self, letters: Iterable[RunLetter]) -> None:
        """These are done."""
        self._acked.update([letter.digest for letter in letters])
        if len(self._acked) * 2 > ACKED_COUNT_MAX:
            self._acked, self._acked_before = set(), self._acked

    def was_acked(self, letter: RunLetter) -> bool:
        """Whether a letter that came again looks like one that we are done with. Not a reason to ack it."""
        return letter.redelivered and (letter.digest in self._acked or letter.digest in self._acked_before)
