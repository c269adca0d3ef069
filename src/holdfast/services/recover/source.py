"""Where the letters of a run come from and go to: a dead-letter queue of a broker, or a backup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from holdfast.core.message import Delivery, Message, Outcome, Outgoing
from holdfast.core.recovery import Depth, Preflight, RunLetter, RunLimits, may_return
from holdfast.errors import BrokerError, BrokerLost, Invalid
from holdfast.ports.broker import RecoveryBroker, Told
from holdfast.stores.files import Exported

#: Called with letters that share an outcome.
OnOutcome: TypeAlias = Callable[[Sequence[RunLetter], Outcome], None]


class LetterSource(Protocol):
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
    """What sources have in common whose letters go to a broker."""

    def __init__(self, broker: RecoveryBroker) -> None:
        self._drain = broker.drain
        self._publisher = broker.publisher
        self._redriver = broker.redriver
        self._inspector = broker.inspector

    @property
    def trouble(self) -> str:
        return self._publisher.trouble

    @property
    def sent_again_count(self) -> int:
        return self._publisher.sent_again

    async def alarm(self) -> str:
        return await self._inspector.alarm()

    async def refusal(self, exchange: str) -> str:
        try:
            return await self._inspector.refusal(exchange)
        except BrokerError as error:
            if self._drain.is_connected:
                return ""  # nobody can say
            raise BrokerLost(f"exchange '{exchange}' could not be asked for; {error}") from error

    def read(self, letter: RunLetter) -> Message:
        return self._redriver.read(letter.delivery)

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = []
        for letter in letters:
            address = letter.route.address
            assert address is not None  # noqa: S101  a letter without an address is held
            body = letter.delivery.body
            outgoing.append(Outgoing(address.exchange, address.routing_key, letter.properties, body, letter))
        self._publisher.send(outgoing, _told(on_outcome), timeout_s=timeout_s)


class DeadQueueSource(_BrokerSource):
    """A dead-letter queue of a broker."""

    holds = True
    failure = ""

    def __init__(self, broker: RecoveryBroker, preflight: Preflight) -> None:
        super().__init__(broker)
        self.warnings: Sequence[str] = broker.drain.warnings
        self._others_count = preflight.depth.consumers
        self._delivery_limit = preflight.delivery_limit

    async def open(self) -> str:
        return await self._drain.open()

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        await self._drain.allow(wanted, held_count=held_count)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
        deliveries = await self._drain.take(count_max=count_max, timeout_s=timeout_s)
        self._redriver.tick()
        return list(map(self._redriver.letter, deliveries))

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = list(map(self._redriver.put_back, letters))
        self._publisher.send(outgoing, _told(on_outcome), timeout_s=timeout_s)

    def settle(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        missed = self._drain.ack([letter.delivery for letter in letters])
        if not missed:
            return ()
        gone = set(map(id, missed))
        return [letter for letter in letters if id(letter.delivery) in gone]

    def forget_body(self, letter: RunLetter) -> None:
        letter.properties = b""
        self._drain.forget_body(letter.delivery)

    async def stop(self) -> Sequence[RunLetter]:
        return list(map(self._redriver.letter, await self._drain.stop(self._is_near_limit)))

    async def give_back(self) -> int:
        return await self._drain.release_all(others_count=self._others_count)

    async def abandon(self) -> None:
        await self._drain.abandon()

    async def depth(self) -> Depth:
        return await self._drain.depth()

    def _is_near_limit(self, delivery: Delivery) -> bool:
        """Whether it could not bear another return."""
        if self._delivery_limit is None:
            return False
        returns = self._redriver.letter(delivery).returns if delivery.redelivered else None
        return not may_return(returns or 0, self._delivery_limit)


class BackupSource(_BrokerSource):
    """The letters of a file. There is nothing to settle: the file stays as it is, and so does the queue that they came
    from. A copy carries the id that its redrive from the queue had."""

    holds = False
    warnings: Sequence[str] = ()

    def __init__(self, broker: RecoveryBroker, backup: Iterator[Exported], limits: RunLimits) -> None:
        super().__init__(broker)
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
        self._redriver.tick()
        batch: list[RunLetter] = []
        size = 0
        while len(batch) < count_max and size < self._bytes_max and (one := self._next()) is not None:
            delivery = Delivery(0, 0, False, one.exchange, one.routing_key, "", one.properties, one.body)
            batch.append(self._redriver.letter(delivery))
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


def _told(on_outcome: OnOutcome) -> Told:
    return lambda messages, outcome: on_outcome([message.made_from for message in messages], outcome)
