"""Publishes of a program: confirmed and mandatory, each until its outcome is certain or its time is up.

What was sent and not answered (a nack, a lost connection, no answer in time) stays unknown, whatever a repeat of it is
answered, unless that is confirmed: the first one may be stored. Only what was sent once and returned or refused by the
broker, or was never sent at all, is known not to be stored. A repeat has the same id.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.message import Address, Message, Outcome, OutcomeKind, Outgoing, Published
from holdfast.core.moments import Backoff
from holdfast.errors import BrokerLost, NotStored, OutcomeUnknown, PublishFailed
from holdfast.ports.broker import Broker

#: How many messages are under way at a time, for all callers together; the others wait for their turn.
UNDER_WAY_MAX = 1_000
BATCH_COUNT = 200
BACKOFF = Backoff(first_s=0.1, delay_s_max=1.0)
#: What a broker checks before it looks for a queue: too large, not allowed, no such exchange, a bad property. 0: it was
#: not even sent.
REFUSED_BEFORE = frozenset({0, 311, 403, 404, 406})
NOT_SENT = Outcome(OutcomeKind.UNKNOWN, 0, "its time was up before it was sent")


@dataclass(slots=True, kw_only=True)
class PublishState:
    """A message on its way, and what is known of it."""

    message: Message
    outgoing: Outgoing
    outcome: Outcome = NOT_SENT
    sent_count: int = 0

    def note(self, outcome: Outcome) -> None:
        """What became of what was sent last."""
        self.outcome = outcome
        self.sent_count += self.outgoing.sent_count

    @property
    def is_open(self) -> bool:
        """Whether a repeat could tell more."""
        return self.outcome.kind is OutcomeKind.UNKNOWN

    @property
    def is_not_stored(self) -> bool:
        """Whether everything that was sent of it was turned away, or nothing was sent."""
        kind, code = self.outcome.kind, self.outcome.code
        is_turned_away = kind is OutcomeKind.RETURNED or (kind is OutcomeKind.REFUSED and code in REFUSED_BEFORE)
        return self.sent_count == 0 or (is_turned_away and self.sent_count == self.outgoing.sent_count == 1)

    def failure(self, to: Address) -> PublishFailed:
        """The error that says so."""
        outcome, ids = self.outcome, [self.message.id]
        code = f" ({outcome.code})" if outcome.code else ""
        kind = outcome.kind.value if self.sent_count else "nothing was sent"
        told = f"'{self.message.id}' to {to}: {kind}{code}" + (f", {outcome.text}" if outcome.text else "")
        if self.is_not_stored:
            return NotStored(f"message is not stored; {told}", ids=ids, sent_count=self.sent_count)
        if self.sent_count > 1:
            told += f"; sent {self.sent_count} times, and an earlier one may be stored"
        text = f"message may be stored or not; {told}; publish it again with the same id"
        return OutcomeUnknown(text, ids=ids, sent_count=self.sent_count)


class Publishing:
    """Publishes on a broker that is open, for all who ask at the same time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._under_way = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # how many places each wants; first come first
        self._is_closed = False

    def close(self) -> None:
        """Nothing is repeated any more."""
        self._is_closed = True

    async def publish(
        self, messages: Sequence[Message], to: Address, *, at_us: int, timeout_s: float, repeats: bool
    ) -> list[Published]:
        """Returns when all are durable. Raises Invalid before anything is sent, and PublishFailed."""
        states = [PublishState(message=one, outgoing=self._outgoing(one, to, at_us, repeats)) for one in messages]
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            for start in range(0, len(states), BATCH_COUNT):
                await self._send(states[start : start + BATCH_COUNT], to, at_us, deadline_s, repeats=repeats)
        except asyncio.CancelledError as error:
            error.add_note("what was being published may be stored or not; publish it again with the same id")
            raise
        errors = {place: state.failure(to) for place, state in enumerate(states) if not state.outcome.stored}
        if errors:
            raise errors[0] if len(states) == 1 else _together(errors, len(states))
        return [Published(id=state.message.id, sent_count=state.sent_count) for state in states]

    def _outgoing(self, message: Message, to: Address, at_us: int, repeats: bool) -> Outgoing:
        outgoing = self._broker.outgoing(message, to, at_us=at_us)
        outgoing.once = not repeats
        return outgoing

    async def _send(
        self, states: Sequence[PublishState], to: Address, at_us: int, deadline_s: float, *, repeats: bool
    ) -> None:
        if not self._enter_at_once(len(states)):
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._enter(len(states))
            except TimeoutError:
                return  # too many were under way, for all of the time
        try:
            await self._until_told(states, to, at_us, deadline_s, repeats=repeats)
        except BrokerLost as error:  # the publisher is closed
            for state in states:
                if state.is_open:
                    state.outcome = Outcome(OutcomeKind.UNKNOWN, 0, error.message)
        finally:
            self._leave(len(states))

    async def _until_told(
        self, states: Sequence[PublishState], to: Address, at_us: int, deadline_s: float, *, repeats: bool
    ) -> None:
        """The publisher keeps the time: it tells the outcome of each, also when that is over."""
        loop = asyncio.get_running_loop()
        missing, failures = list(states), 0
        while (left_s := deadline_s - loop.time()) > 0:
            outcomes = await self._broker.publisher.publish([state.outgoing for state in missing], timeout_s=left_s)
            for state, outcome in zip(missing, outcomes, strict=True):
                state.note(outcome)
            missing = [state for state in missing if state.is_open]
            if not missing or not repeats or self._is_closed:
                return
            await asyncio.sleep(min(BACKOFF.delay_s(failures), max(0.0, deadline_s - loop.time())))
            failures += 1
            for state in missing:
                state.outgoing = self._outgoing(state.message, to, at_us, repeats)

    def _enter_at_once(self, count: int) -> bool:
        if self._waiting or self._under_way + count > UNDER_WAY_MAX:
            return False
        self._under_way += count
        return True

    async def _enter(self, count: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(count)  # it was let in, and goes
            else:
                with suppress(ValueError):  # it was passed by already
                    self._waiting.remove((count, turn))
                self._let_in()  # a smaller one behind it may fit
            raise

    def _leave(self, count: int) -> None:
        self._under_way -= count
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._under_way + self._waiting[0][0] <= UNDER_WAY_MAX:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._under_way += count
                turn.set_result(None)


def _together(errors: dict[int, PublishFailed], count: int) -> PublishFailed:
    """One error for many messages: unknown when any of them is."""
    first = next((error for error in errors.values() if isinstance(error, OutcomeUnknown)), next(iter(errors.values())))
    kind = OutcomeUnknown if isinstance(first, OutcomeUnknown) else NotStored
    ids = [one for error in errors.values() for one in error.ids]
    sent_count = max(error.sent_count for error in errors.values())
    text = f"{len(errors)} of {count} messages are not confirmed; the first of them: {first.message}"
    return kind(text, ids=ids, sent_count=sent_count, errors=errors)
