"""Where the letters of a run come from and go to: a dead-letter queue of a broker, or a backup."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.core.message import Message
from holdfast.core.recovery import Depth, RunLetter, RunLimits
from holdfast.errors import Invalid
from holdfast.ports.recovery import DeadLetters, OnOutcome
from holdfast.services.recover.limits import Window
from holdfast.stores.files import Exported


class Source(Protocol):
    """Letters, a way to send each on, and to settle it. Raises BrokerError when the broker is gone or says no.

    Nothing here connects again by itself to take letters: when the connection is lost, `take` raises, every letter in
    hand is the broker's again, and the run decides whether to `open` again. An outcome always comes: *unknown* when
    nobody can say. Only *confirmed* allows a letter to be settled.
    """

    holds: bool  #: letters are in hand until they are settled or given back; False: there is nothing to settle
    failure: str  #: why not all letters can be read; the empty text while they can
    warnings: Sequence[str]  #: what could not be made as safe as it should be

    @property
    def trouble(self) -> str:
        """Why nothing can be published at the moment (an alarm, no connection); the empty text while it can."""

    @property
    def sent_again_count(self) -> int:
        """How many publishes were repeated because the outcome of the first was unknown."""

    async def alarm(self) -> str:
        """Why the broker takes no publishes, asked anew; the empty text when it does, or nobody can say."""

    async def refusal(self, exchange: str) -> str:
        """Why every publish to this exchange would be refused; the empty text when not, or nobody can say."""

    async def open(self) -> str:
        """Begin, or begin again after a loss, with one try; answers the consumer's tag. Raises RecoveryLocked."""

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        """So many letters are to come beside those that were taken, no more are delivered; None: whatever there is. So
        many are held: they do not count for what may be under way."""

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter] | None:
        """Wait for letters; none when none came in time, None when no more will ever come. Raises BrokerLost: nothing
        that was in hand still is."""

    def read(self, letter: RunLetter) -> Message:
        """The letter for filters and people."""

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """Publish each to its address, in this order; `on_outcome` is told of every letter once."""

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """Publish each into the dead-letter queue itself, as it is."""

    def settle(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        """They are done. Answers those that were not in our hands any more."""

    def forget_body(self, letter: RunLetter) -> None:
        """The letter is only held from now on."""

    async def stop(self) -> Sequence[RunLetter]:
        """No new letters. Answers what was delivered and not taken, and bears no other return."""

    async def give_back(self) -> int:
        """Everything that is unsettled goes back, in order, by one frame; only after `stop`. Answers how many."""

    async def abandon(self) -> None:
        """End the consuming connection at once: everything unsettled goes back by itself."""

    async def depth(self) -> Depth:
        """How many letters the queue says it has."""


class _BrokerSource:
    """What sources of letters have in common that go to a broker."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    @property
    def trouble(self) -> str:
        return self._letters.trouble

    @property
    def sent_again_count(self) -> int:
        return self._letters.sent_again_count

    async def alarm(self) -> str:
        return await self._letters.alarm()

    async def refusal(self, exchange: str) -> str:
        return await self._letters.refusal(exchange)

    def read(self, letter: RunLetter) -> Message:
        return self._letters.read(letter)

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        self._letters.send(letters, on_outcome, timeout_s=timeout_s)


class QueueSource(_BrokerSource):
    """A dead-letter queue of a broker."""

    holds = True
    failure = ""

    def __init__(self, letters: DeadLetters, limits: RunLimits) -> None:
        super().__init__(letters)
        self.warnings = letters.warnings
        self._window = Window(limits)
        self._is_open = False

    async def open(self) -> str:
        capacity_count = self._window.fits_count
        if self._is_open:
            await self._letters.reopen(capacity_count=capacity_count)
            return ""
        tag = await self._letters.open(capacity_count=capacity_count)
        self._is_open = True
        return tag

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        """As many letters in hand as the window allows by their size so far, beside those that are held."""
        fits = self._window.fits_count
        if (fits + held_count - self._letters.capacity_count) * 4 >= fits:
            await self._letters.want(wanted)
            await self._letters.widen(fits + held_count)
        await self._letters.want(wanted)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
        batch = await self._letters.take(count_max=count_max, timeout_s=timeout_s)
        self._window.came(batch)
        return batch

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        self._letters.put_back(letters, on_outcome, timeout_s=timeout_s)

    def settle(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        return self._letters.ack(letters)

    def forget_body(self, letter: RunLetter) -> None:
        self._letters.forget(letter)

    async def stop(self) -> Sequence[RunLetter]:
        await self._letters.stop()
        return self._letters.leftovers()

    async def give_back(self) -> int:
        return await self._letters.give_back()

    async def abandon(self) -> None:
        await self._letters.let_go()

    async def depth(self) -> Depth:
        return await self._letters.depth()


class BackupSource(_BrokerSource):
    """The letters of a file. There is nothing to settle: the file stays as it is, and so does the queue that they came
    from. A copy carries the id that its redrive from the queue had."""

    holds = False
    warnings: Sequence[str] = ()

    def __init__(self, letters: DeadLetters, backup: Iterator[Exported], limits: RunLimits) -> None:
        super().__init__(letters)
        self.failure = ""
        self._backup = backup
        self._bytes_max = limits.window_bytes_max
        self._read_count = 0

    async def open(self) -> str:
        return ""

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        pass

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter] | None:
        """As many as fit the window. What was read before a damaged line is published."""
        await asyncio.sleep(0)  # a signal may be heard
        batch: list[RunLetter] = []
        size = 0
        while len(batch) < count_max and size < self._bytes_max and (one := self._next()) is not None:
            batch.append(self._letters.restored(one.exchange, one.routing_key, one.properties, one.body))
            size += batch[-1].size_bytes
        return batch or None

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        raise NotImplementedError  # nothing is held

    def settle(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        return ()

    def forget_body(self, letter: RunLetter) -> None:
        pass

    async def stop(self) -> Sequence[RunLetter]:
        return ()

    async def give_back(self) -> int:
        return 0

    async def abandon(self) -> None:
        pass

    async def depth(self) -> Depth:
        """All that are in the file, as far as it can be read."""
        while self._next() is not None:
            pass
        return Depth(ready=self._read_count, is_sure=True)

    def _next(self) -> Exported | None:
        try:
            found = None if self.failure else next(self._backup, None)
        except Invalid as error:
            self.failure = error.message
            return None
        self._read_count += found is not None
        return found
