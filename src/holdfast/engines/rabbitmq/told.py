"""What a recovery is told: what became of each publish, and what comes on the channel that it consumes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.engines.rabbitmq.channel import Close
from holdfast.engines.rabbitmq.lane import Batch
from holdfast.engines.rabbitmq.wire.confirms import Kind, Outcome
from holdfast.engines.rabbitmq.wire.events import Cancelled, Delivery, Event
from holdfast.errors import BrokerError, BrokerLost
from holdfast.ports.recovery import OnOutcome, Taken, Verdict

VERDICTS = {kind: Verdict(kind.value) for kind in Kind}


class Told(Batch):
    """Tells each outcome to the run as soon as it is known."""

    __slots__ = ("_letters", "_on_outcome")

    def __init__(self, letters: Sequence[Taken], on_outcome: OnOutcome) -> None:
        super().__init__(len(letters), lambda: None)
        self._letters = letters
        self._on_outcome = on_outcome

    def settle(self, places: Sequence[int], outcome: Outcome) -> None:
        letters = self._letters
        self._on_outcome([letters[place] for place in places], VERDICTS[outcome.kind], outcome.code, outcome.text)
        self.missing -= len(places)
        if not self.missing:
            self.on_done()


class Listening(Protocol):
    """Who consumes."""

    def arrived(self, deliveries: list[Delivery]) -> None:
        """Letters came."""

    def lost(self, error: BrokerError) -> None:
        """Whatever is unsettled is the broker's again."""


class Ear:
    """The listener of one channel. Once that channel is left, nothing of it is heard any more."""

    def __init__(self, owner: Listening) -> None:
        self._owner: Listening | None = owner

    def leave(self) -> None:
        """Hear nothing more."""
        self._owner = None

    def on_events(self, events: list[Event]) -> None:
        if self._owner is None:
            return
        self._owner.arrived([event for event in events if type(event) is Delivery])
        if any(isinstance(event, Cancelled) for event in events):
            self._owner.lost(BrokerLost("the broker cancelled the consumer"))

    def on_closed(self, error: BrokerError, close: Close) -> None:
        if self._owner is not None:
            self._owner.lost(error)

    def on_writable(self) -> None:
        """Acks are small, and never wait for the socket."""
