"""What a recovery run needs of a broker: letters of one dead-letter queue, a way to send each on, and to settle it.

Nothing here reconnects by itself on the consuming side: when the connection is lost, `take` raises, every letter in
hand is the broker's again, and the run decides whether to `reopen`. On the publishing side an outcome always comes:
*unknown* when nobody can say. Only *confirmed* allows an ack.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import Struct, field

from holdfast.core.message import Address, Message, Outcome
from holdfast.core.routes import Route, RouteTable


class RunLetter(Struct, eq=False, gc=False):
    """A letter in hand. It lives through lost connections: a later delivery of the same bytes takes its place.

    Nothing that it holds holds it, and there are thousands: the garbage collector need not look at them.
    """

    raw: Any  #: the broker's own
    digest: bytes
    route: Route
    redelivered: bool
    returns: int | None  #: how often the queue had it back; None where nobody counts
    size_bytes: int
    at_s: float = 0.0
    in_hand: bool = True  #: False: the delivery was lost with its connection
    stored: bool = False  #: its copy is confirmed
    kept: bool = False  #: it is held, to be given back at the end

    @property
    def address(self) -> Address | None:
        """Where it goes; None when it is kept."""
        return self.route.address


class Depth(Struct, frozen=True, kw_only=True):
    """What a queue says of itself. 0 may also mean that it has no leader at the moment."""

    ready: int
    consumers: int = 0


class Permission(Struct, frozen=True, kw_only=True):
    """Something that the user must be allowed to do."""

    verb: str  #: read, write or configure
    what: str
    given: bool | None  #: None: nobody could say

    def __str__(self) -> str:
        return f"{self.verb} {self.what}: {'not known' if self.given is None else 'yes' if self.given else 'NO'}"


class Preflight(Struct, kw_only=True):
    """What was found before the first letter is taken."""

    broker: str  #: name and version
    depth: Depth
    queue_type: str = ""  #: empty when nobody could say
    delivery_limit: int | None = None
    limit_is_assumed: bool = False
    cure: str = ""  #: what would take the limit away
    gives_back_at_tail: bool = False  #: what is given back to a queue that counts returns goes behind newer letters
    alarm: str = ""
    has_management: bool = False
    missing: list[str] = field(default_factory=list)  #: targets that are not there or do not route
    cycles: list[str] = field(default_factory=list)  #: targets that lead back into the dead-letter queue
    copies: Mapping[str, list[str]] = {}  #: address → all queues that get a copy
    rights: list[Permission] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


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
    def untaken_count(self) -> int:
        """Letters that are delivered and that nobody has taken yet."""

    @property
    def capacity_count(self) -> int:
        """How many letters may be in hand at once."""

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Preflight:
        """Look at the broker, the queue (unless the targets only are asked for) and the targets. Changes nothing."""

    async def alarm(self) -> str:
        """Why the broker takes no publishes, asked anew; the empty text when it does, or nobody can say."""

    async def refusal(self, exchange: str) -> str:
        """Why every publish to this exchange would be refused; the empty text when not, or nobody can say."""

    def receivers(self, address: Address) -> Sequence[str]:
        """The queues that get what is sent there, as `inspect` saw it; none when nobody could say."""

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

    def export(self, letter: RunLetter) -> Exported:
        """The letter byte by byte."""

    def restored(self, letter: Exported) -> RunLetter:
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


class RunEnd(enum.Enum):
    """How a run leaves its queue, as far as it matters to journals."""

    BROKEN = "broken"  #: by an error: what it noted is for the next run
    LOST = "lost"  #: without its connection: letters whose acks were lost with it may be there, nobody knows which
    PARTLY = "partly"  #: clean, and letters may be there that it has not looked at
    KEPT = "kept"  #: it has looked at every letter, and some are still there
    WHOLE = "whole"  #: nothing is left


class Journal(Protocol):
    """Which letters were published with a confirm and not yet acked. Beyond this run only for a run that was killed.

    In any doubt it knows nothing: a letter that is published twice is recognisable, one that is acked and was not
    published is lost.
    """

    @property
    def follows_killed_run(self) -> bool:
        """Whether an earlier run was killed, and letters may still be there that it has published."""

    @property
    def doubted_count(self) -> int:
        """How many letters runs that were killed have published, perhaps for the second time."""

    def doubt(self, count: int) -> None:
        """So many more are about to be published, perhaps for the second time: should this run be killed, the next one
        tells of them."""

    def confirmed(self, digests: Sequence[bytes]) -> None:
        """The broker has these. What earlier runs noted of letters with the same bytes is not believed any more."""

    def acking(self, digests: Sequence[bytes]) -> None:
        """Their acks are about to be sent: they will never be recognised again."""

    def recognise(self, digest: bytes) -> bool:
        """Whether a letter that came again was published and never acked; uses the entry up."""

    def close(self, end: RunEnd) -> None:
        """A clean end ends this run's entries; those of killed runs stay while letters of theirs may be there."""


class Exported(Struct, frozen=True, kw_only=True):
    """A letter byte by byte; `properties` are the broker's own bytes."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    message_id: str = ""


class Backup(Protocol):
    """Every letter, byte by byte, before it is published."""

    async def write(self, letters: Sequence[Exported]) -> None:
        """Returns when it is on disk."""


def address_text(address: Address | None) -> str:
    """An address as a key of counts: what a person would call it."""
    return "" if address is None else address.routing_key or address.exchange
