"""Publishes, and says of every message what became of it. Confirms, `mandatory` and delivery mode 2 are always on.

An outcome is one of: confirmed · returned · nacked · refused · unknown. Only *confirmed* allows a source to be settled.
When a channel or the connection ends, what was in flight is unknown and is sent again, so it may arrive twice; when
the time limit of a publish is over before an answer came, its outcome is *unknown*.

One bad publish (no such exchange, too large, a foreign user id) makes the broker close the channel under its
neighbours. All of them are then suspects: they go out one at a time on a second channel, where the guilty one is
alone and is reported as *refused*; the first channel goes on with everything else.

A channel that has published to a quorum queue while that had no leader nacks for ever on RabbitMQ 3.10, also when there
is a leader again. So a nack makes the publisher go on with a fresh channel soon after; the old one is closed when
everything on it has been answered.

One channel in confirm mode with its books: what is in flight on it, and what became of it.

What a recovery is told of its publishes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Self

from msgspec import Struct
from pamqp import commands as amqp

from holdfast.engines.rabbitmq.backoff import Backoff, BackoffTimer
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.commands import PublishEncoder, Unsendable
from holdfast.engines.rabbitmq.wire.confirms import CONFIRMED, Confirms, Outcome, OutcomeKind, UnknownTag
from holdfast.engines.rabbitmq.wire.events import Confirmed, ConnectionClosedByBroker, Event, Returned
from holdfast.errors import BrokerError, BrokerLost
from holdfast.ports.recovery import OnOutcome, RunLetter, Verdict
from holdfast.telemetry.events import emit


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


VERDICTS = {kind: Verdict(kind.value) for kind in OutcomeKind}


class Told(PublishBatch):
    """Tells each outcome to the run as soon as it is known."""

    __slots__ = ("_letters", "_on_outcome")

    def __init__(self, letters: Sequence[RunLetter], on_outcome: OnOutcome) -> None:
        super().__init__(len(letters), lambda: None)
        self._letters = letters
        self._on_outcome = on_outcome

    def settle(self, places: Sequence[int], outcome: Outcome) -> None:
        letters = self._letters
        self._on_outcome([letters[place] for place in places], VERDICTS[outcome.kind], outcome.code, outcome.text)
        self.missing -= len(places)
        if not self.missing:
            self.on_done()


WINDOW_MESSAGES = 8192
WINDOW_BYTES = 16 * 2**20
PUBLISH_TIMEOUT_S = 60.0
CONNECTION_FORCED = 320
RENEWAL = Backoff(first_s=0.25, delay_s_max=15.0)
NOT_IN_TIME = "no answer within {timeout_s:g} s"


class Publisher:
    """`async with Publisher(address) as publisher:` and `await publisher.publish(message)`.

    Opening it raises what `Connection.open` raises; after that, it connects again by itself.
    """

    def __init__(
        self,
        address: BrokerUrl,
        *,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        backoff: Backoff | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._timeout_s = timeout_s
        self._read_pause_s = 0.0
        self._patience = BackoffTimer(backoff or Backoff())
        self._waiting: deque[Ticket] = deque()
        self._suspects: deque[Ticket] = deque()
        self._alone_only = False  # a publish ended the whole connection: nothing else goes out until it is found
        self._only: Ticket | None = None  # what is in flight when nothing else is, on either channel
        self._connection: Connection | None = None
        self._main = self._lane()
        self._alone = self._lane()
        self._retiring: set[ConfirmChannel] = set()  # nothing more is sent on these
        self._renewals = BackoffTimer(RENEWAL)
        self._renewal: asyncio.TimerHandle | None = None
        self._renewal_due = False
        self._broken = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._trouble: BrokerError | None = None
        self._at_once = False  # the connection ended over a publish of ours, not because the broker is in trouble

    @property
    def blocked(self) -> str | None:
        """Why the broker takes nothing at the moment (memory, disk); None while it does."""
        return self._connection.blocked if self._connection else None

    @property
    def connected(self) -> bool:
        """Whether a publish would be sent now."""
        return self._main.is_open

    @property
    def version(self) -> str:
        """The broker's version."""
        return self._connection.session.version if self._connection else ""

    def pause_between_reads(self, pause_s: float) -> None:
        """Hear of outcomes later and of more at once: see `Connection.read_pause_s`."""
        self._read_pause_s = pause_s
        if self._connection is not None:
            self._connection.read_pause_s = pause_s

    async def publish(self, message: Outgoing, *, timeout_s: float | None = None) -> Outcome:
        """Publish one message and wait for what becomes of it. Raises only when the publisher is closed."""
        return (await self.publish_all((message,), timeout_s=timeout_s))[0]

    async def publish_all(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        """Publish a batch, pipelined, and wait until each message has its outcome; they are in the same order.

        Several batches may be under way at once. A cancelled call leaves its messages unknown.
        """
        if self._keeper is None or self._keeper.done():
            raise BrokerLost("the publisher is closed; nothing was sent")
        if not messages:
            return []
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        batch = PublishBatch(len(messages), lambda: None if done.done() else done.set_result(None))
        tickets = self._tickets(messages, batch)
        self._waiting.extend(tickets)
        self._pump()
        timer = loop.call_later(limit_s, self._give_up, tickets, limit_s)
        try:
            await done
        finally:
            timer.cancel()
            if batch.missing:
                self._give_up(tickets, 0.0)
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def send(self, messages: Sequence[Outgoing], batch: PublishBatch, *, timeout_s: float) -> None:
        """As `publish_all`, without waiting: `batch.settle` is called with each outcome as soon as it is known."""
        if self._keeper is None or self._keeper.done():
            raise BrokerLost("the publisher is closed; nothing was sent")
        tickets = self._tickets(messages, batch)
        self._waiting.extend(tickets)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, tickets, timeout_s)
        batch.on_done = timer.cancel
        self._pump()

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="publisher keeps its connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection. What is still under way becomes unknown."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._connection is not None:
            await self._connection.close()
        self._give_up([*self._waiting, *self._suspects], 0.0)

    # Sending.

    def _tickets(self, messages: Iterable[Outgoing], batch: PublishBatch) -> list[Ticket]:
        tickets = []
        persistent = properties.persistent
        for place, message in enumerate(messages):
            try:
                raw = persistent(message.properties)
            except properties.Unreadable as error:
                outcome = Outcome(OutcomeKind.REFUSED, 0, f"properties cannot be read: {error}")
                batch.settle([place], self._counted(outcome))
                continue
            body = message.body
            tickets.append(Ticket(message.exchange, message.routing_key, raw, body, batch, place, len(raw) + len(body)))
        return tickets

    def _pump(self) -> None:
        """Send what the windows allow: everything that can go now goes in one write."""
        if self._connection is None or not self._connection.writable or self._connection.blocked:
            return  # what is not sent while the broker reads nothing is at least known not to be stored
        if self._suspects and self._alone.is_open and not self._alone.flying and not self._held_back():
            self._only = self._suspects[0] if self._alone_only else None
            self._send(self._alone, self._suspects, messages_max=1)
        if self._waiting and self._main.is_open and not self._alone_only:
            self._send(self._main, self._waiting, messages_max=self._window_messages)

    def _held_back(self) -> bool:
        """To find out who ends the connection, all other channels have to be quiet."""
        return self._alone_only and any(lane.flying for lane in (self._main, *self._retiring))

    def _send(self, lane: ConfirmChannel, queue: deque[Ticket], *, messages_max: int) -> None:
        pieces: list[bytes | memoryview] = []
        refused: list[tuple[Ticket, Outcome]] = []
        count, size = lane.flying, lane.flying_bytes
        while queue and count < messages_max:
            ticket = queue[0]
            # One that is larger than the whole window goes alone.
            if count and size + ticket.size_bytes > self._window_bytes:
                break
            queue.popleft()
            if ticket.done:
                continue
            try:
                pieces += lane.encode(ticket)
            except Unsendable as error:
                refused.append((ticket, Outcome(OutcomeKind.REFUSED, 0, str(error))))
                continue
            count += 1
            size += ticket.size_bytes
            if ticket.sent_count > 1:
                self.counts["sent_again"] += 1
        if pieces:
            lane.write(b"".join(pieces))
        # Not before that: whoever is told may send at once, and then the broker would count in another order than we.
        for ticket, outcome in refused:
            if not ticket.done:
                self._settle(ticket, outcome)

    # Answers.

    def _on_outcomes(self, lane: ConfirmChannel, outcomes: list[tuple[Ticket, Outcome]]) -> None:
        confirmed: list[Ticket] = []
        for ticket, outcome in outcomes:
            if outcome is CONFIRMED and not ticket.done:
                ticket.done = True
                confirmed.append(ticket)
            else:
                self._on_outcome(lane, ticket, outcome)
        self.counts["confirmed"] += len(confirmed)
        for batch, tickets in groupby(confirmed, key=attrgetter("batch")):
            batch.settle([ticket.place for ticket in tickets], CONFIRMED)
        if lane is self._alone and not self._suspects:
            self._alone_only = False
        if lane in self._retiring and not lane.flying:
            self._broken.set()
        self._pump()

    def _on_outcome(self, lane: ConfirmChannel, ticket: Ticket, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.NACKED and self._renewal is None and lane not in self._retiring:
            self._renew_soon()
        if ticket.done:
            self.counts["answered_too_late"] += 1
        elif outcome.kind is OutcomeKind.UNKNOWN:
            self._suspects.append(ticket)  # alone, its answer cannot be anybody else's
        else:
            self._settle(ticket, outcome)

    def _on_lost(self, lane: ConfirmChannel, tickets: list[Ticket], error: BrokerError, close: Close) -> None:
        """A channel ended. By a publish of ours, or with the connection; in both cases nothing is known of these."""
        if lane is not self._main and lane is not self._alone and not tickets:
            return  # an old one, closed in order
        self._trouble = error
        self._broken.set()
        whole = isinstance(close, ConnectionClosedByBroker)
        blamed = close is not None and close.code != CONNECTION_FORCED
        self._at_once = blamed
        # Counted with those whose time was over: one of them may be the guilty one.
        guilty = len(tickets) == 1 and (not whole or tickets[0] is self._only)
        tickets = [ticket for ticket in tickets if not ticket.done]
        if close is None or not blamed:
            self._waiting.extendleft(reversed(tickets))
        elif guilty and tickets:
            self._settle(tickets[0], Outcome(OutcomeKind.REFUSED, close.code, close.text))
        else:
            self._suspects.extend(tickets)
            self._alone_only = self._alone_only or whole
        if not self._suspects:
            self._alone_only = False

    def _settle(self, ticket: Ticket, outcome: Outcome) -> None:
        ticket.done = True
        ticket.batch.settle([ticket.place], self._counted(outcome))

    def _counted(self, outcome: Outcome) -> Outcome:
        self.counts[outcome.kind.value] += 1
        return outcome

    def _give_up(self, tickets: Iterable[Ticket], limit_s: float) -> None:
        """The time is over: these are unknown. Those in flight keep their place in the window until answered."""
        text = NOT_IN_TIME.format(timeout_s=limit_s) if limit_s else "nobody waits for it any more"
        if self.blocked:
            text += f"; the broker takes nothing: {self.blocked}"
        elif not self.connected and self._trouble:
            text += f"; {self._trouble}"
        for ticket in tickets:
            if not ticket.done:
                self._settle(ticket, Outcome(OutcomeKind.UNKNOWN, 0, text))
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.done)
        self._suspects = deque(ticket for ticket in self._suspects if not ticket.done)
        if not self._suspects:
            self._alone_only = False

    # The connection.

    def _lane(self) -> ConfirmChannel:
        return ConfirmChannel(on_outcomes=self._on_outcomes, on_lost=self._on_lost, on_writable=self._pump)

    async def _keep(self) -> None:
        """Repair what broke, until the publisher is closed."""
        loop = asyncio.get_running_loop()
        while True:
            await self._broken.wait()
            if not self._at_once and not (self._connection and self._connection.is_open):
                await asyncio.sleep(self._patience.delay_s(loop.time()))
            try:
                await self._repair()
            except BrokerError as error:
                self._trouble = error
                self._at_once = False
                self._broken.set()
                emit("broker.lost", address=str(self._address), error=error)

    async def _repair(self) -> None:
        self._broken.clear()
        connection = self._connection
        if connection is None or not connection.is_open:
            await self._connect()
            emit("broker.found", address=str(self._address))
        else:
            for lane in (self._main, self._alone):
                if not lane.is_open:
                    await lane.open(connection)
            await self._renew(connection)
        self._pump()

    def _renew_soon(self) -> None:
        """Not at once, and ever more seldom while fresh channels get nacks as well: then the queue is just full."""
        loop = asyncio.get_running_loop()

        def due() -> None:
            self._renewal_due = True
            self._broken.set()

        self._renewal = loop.call_later(self._renewals.delay_s(loop.time()), due)

    async def _renew(self, connection: Connection) -> None:
        """Go on with fresh channels, if a nack asked for it; close the old ones when all on them is answered."""
        for lane in [lane for lane in self._retiring if not lane.flying]:
            self._retiring.discard(lane)
            await lane.close(connection)
        if self._renewal_due and not self._retiring:
            main, alone = self._lane(), self._lane()
            await main.open(connection)
            await alone.open(connection)
            self._retiring = {self._main, self._alone}
            self._main, self._alone = main, alone
            self.counts["renewed"] += 1
            self._renewal, self._renewal_due = None, False
            self._renewals.worked(asyncio.get_running_loop().time())
            self._broken.set()  # one of the old ones may be quiet already

    async def _connect(self) -> None:
        self._connection = connection = await Connection.open(self._address.named("holdfast publisher"))
        await self._main.open(connection)
        await self._alone.open(connection)
        connection.read_pause_s = self._read_pause_s
        self._retiring.clear()  # what was in flight on them was told to be lost
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal, self._renewal_due = None, False
        self._patience.worked(asyncio.get_running_loop().time())
