"""What a recovery run needs of a broker: letters of one dead-letter queue, a way to send each on, and to settle it.

Nothing here reconnects by itself on the consuming side: when the connection is lost, `take` raises, every letter in
hand is the broker's again, and the run decides whether to `reopen`. On the publishing side an outcome always comes:
*unknown* when nobody can say. Only *confirmed* allows an ack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from holdfast.core.message import Message, Outcome
from holdfast.core.recovery import Depth, Preflight, RunLetter
from holdfast.core.routes import RouteTable

#: Letters that share an outcome.
OnOutcome: TypeAlias = Callable[[Sequence[RunLetter], Outcome], None]


class DeadLetters(Protocol):
    """One dead-letter queue. Raises BrokerError throughout when the broker is gone or says no."""

    @property
    def trouble(self) -> str:
        """Why nothing can be published at the moment (an alarm, no connection); the empty text while it can."""

    @property
    def warnings(self) -> Sequence[str]:
        """What could not be made as safe as it should be."""

    @property
    def is_lost(self) -> bool:
        """Whether consuming was interrupted and not taken up again: what was acked last may still be in the queue."""

    @property
    def sent_again_count(self) -> int:
        """How many publishes were repeated because the outcome of the first was unknown."""

    @property
    def capacity_count(self) -> int:
        """How many letters may be in hand at once."""

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Preflight:
        """Look at the broker, the queue (unless the targets only are asked for) and the targets. Changes nothing."""

    async def alarm(self) -> str:
        """Why the broker takes no publishes, asked anew; the empty text when it does, or nobody can say."""

    async def refusal(self, exchange: str) -> str:
        """Why every publish to this exchange would be refused; the empty text when not, or nobody can say."""

    async def open(self, *, capacity_count: int) -> str:
        """Take the lock and consume; returns the consumer's tag. Raises RecoveryLocked."""

    async def reopen(self, *, capacity_count: int) -> None:
        """Connect, lock and consume again after a loss; one try."""

    async def want(self, count: int | None) -> None:
        """So many letters are to come beside those that were taken; no more are delivered. None: whatever there is."""

    async def widen(self, capacity_count: int) -> None:
        """Let so many letters be in hand at once, if so many are wanted."""

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
        """Wait for letters; none when none came in time. Raises BrokerLost: nothing that was in hand still is."""

    def read(self, letter: RunLetter) -> Message:
        """The letter for filters and people."""

    def restored(self, exchange: str, routing_key: str, properties: bytes, body: bytes) -> RunLetter:
        """A letter of a backup, to be sent; there is nothing to settle."""

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """Publish each to its address, in this order; `on_outcome` is told of every letter once."""

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """Publish each into the dead-letter queue itself, as it is."""

    def ack(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        """Settle those that are in hand; returns those that are not."""

    def forget(self, letter: RunLetter) -> None:
        """Drop the body: the letter is only held from now on."""

    async def stop(self) -> None:
        """No new letters."""

    def leftovers(self) -> Sequence[RunLetter]:
        """What was delivered and not taken when consuming stopped; only where returns are limited."""

    async def give_back(self) -> int:
        """Everything that is unsettled goes back, in order, by one frame; only after `stop`. Returns how many."""

    async def let_go(self) -> None:
        """End the consuming connection at once: everything unsettled goes back by itself."""

    async def depth(self) -> Depth:
        """How many letters the queue says it has."""

    async def close(self) -> None:
        """End both connections. What is unsettled goes back by itself."""
