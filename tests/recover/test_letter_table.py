"""The table of a run's letters, whatever happens to them in whatever order: every change is one of the moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.message import Address, Delivery
from holdfast.core.recovery import RunLetter
from holdfast.core.routes import Route
from holdfast.core.states import RECOVERY_MOVES, RunState
from holdfast.services.recover import run
from holdfast.services.recover.letter_table import LetterTable

EXCHANGES = ("a", "b")
ENDS = frozenset((RunState.SETTLED, RunState.PUT_BACK, RunState.UNANSWERED, RunState.GIVEN_BACK))
LIMIT = 10
some = st.integers(0, 2**16)


class Letters(RuleBasedStateMachine):
    """Plays the run: it takes, sends, is answered, loses its connection, and ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LetterTable()
        self.letters: list[RunLetter] = []
        self.before: dict[RunLetter, RunState] = {}
        self.ended = False

    @initialize(holds=st.booleans())
    def begin(self, holds: bool) -> None:
        self.table = LetterTable(holds=holds)
        self.holds = holds

    def new(self, digest: int, exchange: str, returns: int, *, redelivered: bool = False) -> RunLetter:
        route = Route(address=Address(exchange=exchange), why="")
        delivery = Delivery(1, 1, redelivered, "", "", "", b"", b"")
        mark = bytes([digest % 5]) * 16
        return RunLetter(delivery, b"", mark, route, redelivered, returns, size_bytes=10 + digest % 7)

    def known(self, letter: RunLetter) -> RunLetter:
        self.letters.append(letter)
        self.before[letter] = RunState.OUTSIDE
        return letter

    def pick(self, mark: int, *fits: RunState) -> list[RunLetter]:
        """Some of the letters that were sent and are in these states."""
        there = [one for one in self.letters if one in self.table.sent and one.state in fits]
        return [one for place, one in enumerate(there) if mark >> (place % 16) & 1]

    @precondition(lambda self: not self.ended)
    @rule(digest=some, exchange=st.sampled_from(EXCHANGES), what=st.sampled_from(("wait", "hold", "recognise")))
    def taken(self, digest: int, exchange: str, what: str) -> None:
        letter = self.known(self.new(digest, exchange, digest % 12))
        if what == "recognise":
            self.table.recognise([letter])
            self.step()
            self.table.settle([letter], [letter.delivery] if digest % 3 == 0 and self.holds else ())
        else:
            self.table.hold(letter) if what == "hold" else self.table.wait([letter])

    @precondition(lambda self: not self.ended)
    @rule(count=st.integers(1, 4))
    def sent(self, count: int) -> None:
        letters = self.table.first(min(count, len(self.table.waiting)))
        assert list(self.table.waiting)[: len(letters)] == letters
        self.table.send(letters)

    @precondition(lambda self: not self.ended)
    @rule(exchange=st.sampled_from(EXCHANGES))
    def refused(self, exchange: str) -> None:
        for letter in self.table.refuse(exchange):
            self.table.hold(letter)

    @precondition(lambda self: not self.ended)
    @rule(mark=some, stored=st.booleans())
    def answered(self, mark: int, stored: bool) -> None:
        letters = self.pick(mark, RunState.SENT)
        assert self.table.answered(letters) == letters
        assert self.table.answered(letters) == []  # an answer counts once
        if stored:
            self.table.confirm(letters)
        else:
            for letter in letters:
                self.table.hold(letter)

    @precondition(lambda self: not self.ended)
    @rule(missed=some)
    def settled(self, missed: int) -> None:
        here = [one for one in self.table.take_confirmed() if one.here]
        lost = [one for place, one in enumerate(here) if self.holds and missed >> (place % 16) & 1]
        assert self.table.ackable(here) == [one.delivery for one in here]
        done = self.table.settle(here, [one.delivery for one in lost])
        assert [one for one in here if one not in lost] == list(done)

    @precondition(lambda self: not self.ended and self.holds)
    @rule(mark=some)
    def put_back(self, mark: int) -> None:
        held = [one for one in self.table.held if one.state is RunState.HELD]
        self.table.put_back([one for place, one in enumerate(held) if mark >> (place % 16) & 1])

    @precondition(lambda self: not self.ended)
    @rule(mark=some, stored=st.booleans())
    def put_back_answered(self, mark: int, stored: bool) -> None:
        letters = self.table.answered(self.pick(mark, RunState.PUTTING_BACK))
        self.table.was_put_back(letters) if stored else self.table.not_put_back(letters)

    @precondition(lambda self: not self.ended and self.holds)
    @rule()
    def lost(self) -> None:
        self.table.lose()
        assert not any(one.here for one in self.letters if one.state not in ENDS)

    @precondition(lambda self: not self.ended and self.table.away_count)
    @rule(mark=some)
    def came_again(self, mark: int) -> None:
        away = self.table.away()
        again = self.new(0, "a", 1, redelivered=True)
        again.digest = away[mark % len(away)].digest
        letter = self.table.take_again(again)
        assert letter is not None
        assert letter.here
        if letter.state is RunState.WAITING:
            self.table.wait([letter])
        elif letter.state is RunState.CONFIRMED:
            self.table.take_confirmed()
            self.table.settle([letter])
        elif letter.state in (RunState.HELD, RunState.PUT_BACK):
            self.table.hold(letter)

    @precondition(lambda self: not self.ended)
    @rule(stored=st.booleans(), leftovers=st.lists(some, max_size=2))
    def end(self, stored: bool, leftovers: list[int]) -> None:
        self.table.settle([one for one in self.table.take_confirmed() if one.here])
        self.step()
        self.table.give_up()
        self.step()
        letters = self.table.near_limit([self.known(self.new(one, "a", 9)) for one in leftovers], LIMIT)
        letters = letters if self.holds else []
        self.table.put_back(letters, at_end=True)
        self.step()
        self.table.was_put_back(letters) if stored else self.table.not_put_back(letters)
        self.step()
        confirmed = self.table.end()
        assert all(not one.here and one.state is RunState.SETTLED for one in confirmed)
        self.step()
        self.ended = True
        for one in self.letters:
            assert one.state in ENDS or not one.here or not self.holds or one.state is RunState.OUTSIDE, one.state

    @precondition(lambda self: self.ended)
    @rule()
    def nothing(self) -> None:
        """It is over."""

    def step(self) -> None:
        """Every change since the last time is one of the moves."""
        for letter in self.letters:
            was, self.before[letter] = self.before[letter], letter.state
            assert was is letter.state or (was, letter.state) in RECOVERY_MOVES, f"{was} to {letter.state}"

    @invariant()
    def moves(self) -> None:
        self.step()

    @invariant()
    def containers(self) -> None:
        table = self.table
        assert all(one.state is RunState.WAITING and one.here for one in table.waiting)
        assert all(one.state in (RunState.SENT, RunState.PUTTING_BACK) for one in table.sent)
        assert table.sent_bytes == sum(one.size_bytes for one in table.sent)
        assert all(one.state in (RunState.HELD, RunState.PUTTING_BACK) and one.here for one in table.held)
        away = table.away()
        assert len(away) == len(set(away)) == table.away_count
        assert not any(one.here for one in away)
        if not self.ended:
            for one in self.letters:
                is_out = one.here and self.holds and one.state is RunState.HELD
                assert one in table.held or not is_out
                assert one in table.waiting or not (one.here and one.state is RunState.WAITING)


Letters.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLetters: Callable[[], object] = Letters.TestCase


def test_nothing_is_acked_that_the_broker_does_not_have() -> None:
    table = LetterTable()
    letters = [Letters().new(n, "a", 0) for n in range(4)]
    stored, sent, held, put_back = letters
    table.wait(letters[:2])
    table.send(letters[:2])
    table.answered([stored])
    table.confirm([stored])
    table.hold(held)
    table.hold(put_back)
    table.put_back([put_back])
    for wrong in ([sent], [held], [put_back], [stored, sent]):
        with pytest.raises(RuntimeError, match="letters cannot be acked; some are"):
            table.ackable(wrong)
    table.was_put_back(table.answered([put_back]))
    assert table.ackable([stored, put_back]) == [stored.delivery, put_back.delivery]
    table.settle([stored])
    with pytest.raises(RuntimeError, match="letters cannot be acked; some are settled"):
        table.ackable([stored])  # a second ack could be that of a twin


def test_a_change_that_is_none_of_the_moves_ends_the_run() -> None:
    table = LetterTable()
    letter = Letters().new(0, "a", 0)
    table.hold(letter)
    with pytest.raises(RuntimeError, match="letters cannot be confirmed; some are held"):
        table.confirm([letter])


def test_the_run_acks_at_one_place() -> None:
    """Behind the gate of the table."""
    folder = Path(run.__file__).parent
    found = [line.strip() for file in folder.glob("*.py") for line in file.read_text().splitlines() if ".ack(" in line]
    assert found == ["return self._drain.ack(self._letters.ackable(letters))"]
