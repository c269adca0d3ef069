"""One channel in confirm mode with its books: what is in flight on it, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from pamqp import commands as amqp

from holdfast.engines.rabbitmq.channel import Channel, Close
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.wire.commands import PublishEncoder
from holdfast.engines.rabbitmq.wire.confirms import Confirms, Outcome, UnknownTag
from holdfast.engines.rabbitmq.wire.events import Confirmed, Event, Returned
from holdfast.errors import BrokerError, BrokerLost


class Outgoing(Struct, eq=False, gc=False):
    """A message to publish. `properties` are raw (`wire.properties`); the publisher sets delivery mode 2 in them."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class Ticket(Struct, eq=False, gc=False):
    """A publish on its way: the message as it is sent, and the batch that waits for it, at which place.

    Not for the garbage collector: a batch holds its tickets by its timer alone, which goes with the last outcome.
    """

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    batch: PublishBatch
    place: int
    size_bytes: int  #: what it counts for in the window
    done: bool = False
    sent_count: int = 0


class PublishBatch:
    """The publishes of one call, and their outcomes as they come in."""

    __slots__ = ("missing", "on_done", "outcomes")

    def __init__(self, count: int, on_done: Callable[[], None]) -> None:
        self.outcomes: list[Outcome | None] = [None] * count
        self.missing = count
        self.on_done = on_done

    def settle(self, places: Sequence[int], outcome: Outcome) -> None:
        """What became of these; the caller is woken by the last."""
        for place in places:
            self.outcomes[place] = outcome
        self.missing -= len(places)
        if not self.missing:
            self.on_done()


class ConfirmChannel:
    """`open`, then `send` within the window; `on_outcomes` and `on_lost` are called with what became of it."""

    def __init__(
        self,
        *,
        on_outcomes: Callable[[ConfirmChannel, list[tuple[Ticket, Outcome]]], None],
        on_lost: Callable[[ConfirmChannel, list[Ticket], BrokerError, Close], None],
        on_writable: Callable[[], None],
    ) -> None:
        self.flying_bytes = 0
        self._tell = on_outcomes
        self._tell_lost = on_lost
        self.on_writable = on_writable
        self._books: Confirms[Ticket] = Confirms()
        self._channel: Channel | None = None
        self._encoder: PublishEncoder | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be sent on."""
        return self._encoder is not None and self._channel is not None and self._channel.is_open

    @property
    def flying(self) -> int:
        """How many publishes are in flight."""
        return len(self._books)

    async def open(self, connection: Connection) -> None:
        """Open a channel of the connection and switch confirms on. Raises BrokerError."""
        self._books = Confirms()
        self.flying_bytes = 0
        self._encoder = None
        self._channel = await connection.channel(self)
        await self._channel.call(amqp.Confirm.Select())
        self._encoder = PublishEncoder(self._channel.number, frame_bytes_max=connection.session.frame_bytes_max)

    async def close(self, connection: Connection) -> None:
        """Close the channel in order. Raises BrokerError."""
        if self._channel is not None:
            await connection.close_channel(self._channel)

    def encode(self, ticket: Ticket) -> Sequence[bytes | memoryview]:
        """Enter a publish into the books and pack it; the caller joins and writes. Raises Unsendable, not entered."""
        assert self._encoder is not None  # noqa: S101  callers ask is_open first
        pieces = self._encoder.pieces(ticket.exchange, ticket.routing_key, ticket.properties, ticket.body)
        self._books.sent(ticket)
        ticket.sent_count += 1
        self.flying_bytes += ticket.size_bytes
        return pieces

    def write(self, data: bytes) -> None:
        """Send what `encode` packed."""
        if self._channel is not None:
            self._channel.write(data)

    def on_events(self, events: list[Event]) -> None:
        outcomes: list[tuple[Ticket, Outcome]] = []
        try:
            for event in events:
                if isinstance(event, Confirmed):
                    outcomes += self._books.answered(event.tag, multiple=event.multiple, ack=event.ack)
                elif isinstance(event, Returned):
                    self._books.returned(event)
        except UnknownTag as error:
            # The broker and we no longer agree on what was sent: nothing of this channel can be believed.
            if self._channel is not None:
                self._channel.close(BrokerLost(f"the broker's answers make no sense; {error}"), None)
        if outcomes:
            self.flying_bytes -= sum(ticket.size_bytes for ticket, _ in outcomes)
            self._tell(self, outcomes)

    def on_closed(self, error: BrokerError, close: Close) -> None:
        self._encoder = None
        self.flying_bytes = 0
        self._tell_lost(self, self._books.lost(), error, close)
