"""Every letter of a run and the state that it is in. Nothing else changes a state, and every change is one of the moves
in `core.states.RECOVERY_MOVES`, or stays as it was: any other would be a bug, and ends the run before it can do harm.

A letter is *here* while its delivery is ours. A lost connection changes no state: the letter is *away* then, is found
by its digest when it is delivered again, each once, and goes on where it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from holdfast.core.message import Delivery
from holdfast.core.recovery import RunLetter, may_return
from holdfast.core.states import RECOVERY_MOVES, RunState

#: Letters that were acked last: a broker that is killed may forget acks of a classic queue and deliver them again, as
#: many as its journal has room for, 32 768 deliveries and acks. Half of it fits into a set of a quarter of the memory.
ACKED_COUNT_MAX = 38_000

WAITING, SENT, CONFIRMED, HELD = RunState.WAITING, RunState.SENT, RunState.CONFIRMED, RunState.HELD
PUTTING_BACK, PUT_BACK = RunState.PUTTING_BACK, RunState.PUT_BACK
#: From which states a letter comes to each. One that was lost and comes again waits or is held as before.
BEFORE = {state: {first for first, then in RECOVERY_MOVES if then is state} for state in RunState}
BEFORE[WAITING].add(WAITING)
BEFORE[HELD].add(HELD)
#: The broker has its copy, or has it once more in its own queue.
STORED = {CONFIRMED, PUT_BACK}

state_of = attrgetter("state")


class LetterTable:
    """One run's letters. Whether a source has letters in hand until they are settled (`holds`) decides whether those
    that are kept are given back at the end, or need not be remembered."""

    def __init__(self, *, holds: bool = True) -> None:
        self.waiting: deque[RunLetter] = deque()  #: here, in the order in which they go
        self.sent: set[RunLetter] = set()  #: SENT or PUTTING_BACK: published and unanswered
        self.sent_bytes = 0
        self.held: dict[RunLetter, None] = {}  #: HELD or PUTTING_BACK, and here
        self.doubtful: set[RunLetter] = set()  #: a mark: published by an earlier run, perhaps
        self.away_count = 0  #: letters that are still to come again
        self.has_put_back = False  #: some go back by a publish
        self._holds = holds
        self._confirmed: list[RunLetter] = []  # and not written down yet
        self._away: defaultdict[bytes, deque[RunLetter]] = defaultdict(deque)
        # The last ones, and those before them: forgotten half by half, since to find the oldest of so many takes long.
        self._acked: set[bytes] = set()
        self._acked_before: set[bytes] = set()
        self._put_back: Counter[bytes] = Counter()
        self._given_up: list[RunLetter] = []

    # On the way out.

    def wait(self, letters: Sequence[RunLetter]) -> None:
        """They go next."""
        _move(letters, WAITING)
        self.waiting += letters

    def first(self, count: int) -> list[RunLetter]:
        """So many of those that wait."""
        return [self.waiting[index] for index in range(count)] if count < len(self.waiting) else [*self.waiting]

    def send(self, letters: Sequence[RunLetter]) -> None:
        """These, the first of those that wait, are published."""
        _move(letters, SENT)
        for _ in letters:
            self.waiting.popleft()
        self._unanswered(letters)

    def refuse(self, exchange: str) -> list[RunLetter]:
        """Nothing goes to this exchange: answers those that wait for it, which wait no more and are to be held."""
        refused: list[RunLetter] = []
        still, self.waiting = self.waiting, deque()
        for letter in still:
            is_there = letter.address is not None and letter.address.exchange == exchange
            (refused if is_there else self.waiting).append(letter)
        return refused

    def answered(self, letters: Sequence[RunLetter]) -> list[RunLetter]:
        """Their outcome is known; answers those that somebody still waits for."""
        sent = self.sent
        known = [letter for letter in letters if letter in sent]
        sent.difference_update(known)
        self.sent_bytes -= sum([letter.size_bytes for letter in known])
        return known

    def confirm(self, letters: Sequence[RunLetter]) -> None:
        """The broker has these: they may be written down, and acked."""
        _move(letters, CONFIRMED)
        self._confirmed += letters

    def take_confirmed(self) -> list[RunLetter]:
        """Those that were confirmed since the last time."""
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def ackable(self, letters: Sequence[RunLetter]) -> list[Delivery]:
        """The gate before every ack: the deliveries of letters that the broker has. Raises RuntimeError when there is
        another one among them, so that none is acked."""
        _check(letters, STORED, "acked")
        return [letter.delivery for letter in letters]

    def settle(self, letters: Sequence[RunLetter], missed: Sequence[Delivery] = ()) -> Sequence[RunLetter]:
        """These are acked, but for those whose delivery was lost: they will come again. Answers those that are done."""
        done = letters
        if missed:
            gone = set(map(id, missed))
            done = [letter for letter in letters if id(letter.delivery) not in gone]
            self.miss([letter for letter in letters if id(letter.delivery) in gone and letter.here])
        _move(done, RunState.SETTLED)
        self._acked.update([letter.digest for letter in done])
        if len(self._acked) * 2 > ACKED_COUNT_MAX:
            self._acked, self._acked_before = set(), self._acked
        return done

    def recognise(self, letters: Sequence[RunLetter]) -> None:
        """A killed run has noted that these are published: should their acks be lost, they are not published either."""
        _move(letters, CONFIRMED)

    # Kept.

    def hold(self, letter: RunLetter) -> bool:
        """It is kept, and given back at the end; False when there is nothing to hold: it is away, or no delivery."""
        _move([letter], HELD)
        if letter.here and self._holds:
            self.held[letter] = None
            return True
        return False

    def put_back(self, letters: Sequence[RunLetter], *, at_end: bool = False) -> None:
        """They are published into their own queue, and may be delivered from there before their confirms are heard; at
        the end, whoever does that waits for the answers itself."""
        _move(letters, PUTTING_BACK)
        self.has_put_back = self.has_put_back or bool(letters)
        self._put_back.update([letter.digest for letter in letters])
        if not at_end:
            self._unanswered(letters)

    def not_put_back(self, letters: Sequence[RunLetter]) -> None:
        """That was not confirmed: they stay held, also those that came again meanwhile; the end tries again."""
        for letter in letters:
            self.hold(letter)
            self._put_back[letter.digest] -= self._put_back[letter.digest] > 0

    def was_put_back(self, letters: Sequence[RunLetter]) -> None:
        """They went to the end of their queue by a publish."""
        _move(letters, PUT_BACK)
        for letter in letters:
            self.held.pop(letter, None)

    # Coming again.

    def lose(self) -> None:
        """The connection is gone: nothing is in our hands any more. All of it will be delivered again."""
        for group in (self.waiting, self.sent, self.held, self._confirmed):
            self.miss([letter for letter in group if letter.here])
        self.waiting.clear()
        self.held.clear()

    def miss(self, letters: Sequence[RunLetter]) -> None:
        """Their deliveries are gone; the letters themselves are not done."""
        for letter in letters:
            letter.here = False
            self._away[letter.digest].append(letter)
        self.away_count += len(letters)

    def take_again(self, again: RunLetter) -> RunLetter | None:
        """The letter of which this is another delivery: the same bytes, lost from our hands; each is found once."""
        waiting = self._away.get(again.digest) if again.redelivered else None
        if not waiting:
            return None
        letter = waiting.popleft()
        self.away_count -= 1
        if not waiting:
            del self._away[again.digest]
        letter.delivery, letter.properties = again.delivery, again.properties
        letter.here, letter.returns = True, again.returns
        return letter

    def away(self) -> list[RunLetter]:
        """Those that have not come again."""
        return [letter for letters in self._away.values() for letter in letters]

    def take_put_back(self, letter: RunLetter) -> bool:
        """Whether this is one of those that were put back; each is found once."""
        if letter.redelivered or not self._put_back.get(letter.digest):
            return False
        self._put_back[letter.digest] -= 1
        return True

    def was_acked(self, letter: RunLetter) -> bool:
        """Whether a letter that came again looks like one that we are done with. Not a reason to ack it."""
        return letter.redelivered and (letter.digest in self._acked or letter.digest in self._acked_before)

    # The end.

    def give_up(self) -> tuple[list[RunLetter], list[RunLetter]]:
        """Nobody has answered for these, and nobody waits any more: those that were sent, and those put back."""
        unanswered = [*self.sent]
        self.answered(unanswered)
        sent = [letter for letter in unanswered if letter.state is SENT]
        putting_back = [letter for letter in unanswered if letter.state is PUTTING_BACK]
        _move(sent, RunState.UNANSWERED)
        self.not_put_back(putting_back)
        self._given_up += unanswered
        return sent, putting_back

    def near_limit(self, leftovers: Sequence[RunLetter], delivery_limit: int) -> list[RunLetter]:
        """Whatever is still in hand would be returned, also what nobody answered for, and leftovers that nobody took:
        those of all that bear no other return."""
        self._given_up += leftovers
        candidates = dict.fromkeys([*self.held, *self.waiting, *self._given_up])
        return [one for one in candidates if one.here and not may_return(one.returns or 0, delivery_limit)]

    def unsent_count(self) -> int:
        """Letters that were taken and never published."""
        return len(self.waiting) + sum(letter.state is WAITING for letter in self.away())

    def end(self) -> list[RunLetter]:
        """What is in our hands was given back; answers those whose copy is confirmed, and whose ack never was sent."""
        rest = [*self.waiting, *self.held, *self._given_up]
        _move([letter for letter in rest if letter.state is WAITING or letter.state is HELD], RunState.GIVEN_BACK)
        self.waiting.clear()
        self.held.clear()
        confirmed = [letter for letter in self.away() if letter.state is CONFIRMED]
        _move(confirmed, RunState.SETTLED)
        return confirmed

    def _unanswered(self, letters: Sequence[RunLetter]) -> None:
        self.sent.update(letters)
        self.sent_bytes += sum([letter.size_bytes for letter in letters])


def _move(letters: Sequence[RunLetter], state: RunState) -> None:
    _check(letters, BEFORE[state], state)
    for letter in letters:
        letter.state = state


def _check(letters: Iterable[RunLetter], allowed: set[RunState], what: str) -> None:
    """In groups, since it is done four times for each letter."""
    if not allowed.issuperset(map(state_of, letters)):
        wrong = {letter.state.value for letter in letters} - allowed
        raise RuntimeError(f"letters cannot be {what}; some are {', '.join(sorted(wrong))}")
