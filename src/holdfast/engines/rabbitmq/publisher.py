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
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Self, TypeAlias

from pamqp import commands as amqp

from holdfast.core.message import CONFIRMED, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.engines.rabbitmq.connection import CONNECTION_FORCED, Channel, Close, Connection, Listener, passes
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire.commands import PublishEncoder, Unsendable
from holdfast.engines.rabbitmq.wire.events import Confirmed, Event, Returned
from holdfast.errors import BrokerError, BrokerLost, BrokerUnreachable
from holdfast.ports.broker import OnOutcome
from holdfast.telemetry.events import emit

WINDOW_MESSAGES = 8192
WINDOW_BYTES = 16 * 2**20
PUBLISH_TIMEOUT_S = 60.0
#: So long a start waits for a broker that does not answer, where it need not be there.
FIRST_TIMEOUT_S = 3.0
RENEWAL = Backoff(first_s=0.25, delay_s_max=15.0)
NOT_IN_TIME = "no answer within {timeout_s:g} s"

NACKED = Outcome(OutcomeKind.NACKED)
AMBIGUOUS = Outcome(
    OutcomeKind.UNKNOWN, 0, "a publish like it was returned, and the broker's answer does not say which"
)

Likeness: TypeAlias = tuple[str, str, bytes, bytes]


@dataclass(slots=True, eq=False, kw_only=True)
class _Twins:
    """Publishes of which some were returned, and nobody can say which."""

    same: bool  #: equal in every byte, and so interchangeable
    members: set[int]
    acked: list[int] = field(default_factory=list)
    returned: list[Outcome] = field(default_factory=list)


class UnknownTag(Exception):
    """The broker answered a publish that was never sent: the books are wrong, and the channel must go."""


class Confirms:
    """Which publish of one channel an ack, a nack or a return of the broker belongs to: `sent` every publish, then tell
    it every answer. Pure: no socket, no clock.

    Acks and nacks carry the number of the publish. A return carries none: only the message itself. It is matched by
    everything that it carries (exchange, key, properties, body), never by the message id, which may repeat. Of
    publishes that are equal in every byte, nobody can tell which one came back; since they are interchangeable, their
    outcomes are told together, when the broker has answered all of them: so many returned, the others stored. A return
    that fits no publish exactly makes every publish that it may have been *unknown*: a wrong "stored" loses a message,
    a wrong "unknown" only sends it twice.
    """

    def __init__(self) -> None:
        self._next = 1
        self._lowest = 1  # every tag below it was answered by a `multiple`
        self._open: dict[int, Outgoing] = {}
        self._held: dict[int, Outgoing] = {}  # answered, but waiting for its twins
        self._returned: dict[int, Outcome] = {}
        self._twins: dict[int, _Twins] = {}
        # Made at the first return and kept up while anything is in flight: without returns it costs nothing.
        self._alike: defaultdict[Likeness, dict[int, None]] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def sent(self, publish: Outgoing) -> int:
        """Enter the next publish of the channel; answers its tag."""
        tag = self._next
        self._next = tag + 1
        self._open[tag] = publish
        if self._alike is not None:
            self._alike[_likeness(publish)][tag] = None
        return tag

    def answered(self, tag: int, *, multiple: bool, ack: bool) -> list[tuple[Outgoing, Outcome]]:
        """An ack or a nack: the outcomes that are certain now, in publish order. Raises UnknownTag."""
        if tag >= self._next or tag < 0:
            raise UnknownTag(f"the broker answered publish {tag}; only {self._next - 1} were sent")
        plain = CONFIRMED if ack else NACKED
        tags: Iterable[int] = (tag,)
        if multiple:
            # Tag 0 with `multiple` means: all that were sent.
            tags = range(self._lowest, (tag or self._next - 1) + 1)
            self._lowest = max(self._lowest, tags.stop)
        if self._alike is None:
            take = self._open.pop
            return [(publish, plain) for one in tags if (publish := take(one, None)) is not None]
        outcomes: list[tuple[Outgoing, Outcome]] = []
        for one in tags:
            if one in self._open:
                self._answer(one, plain, outcomes)
        if not self._open:
            self._alike = None
        return outcomes

    def returned(self, event: Returned) -> None:
        """A return: finds its publish, whose outcome is told with the ack that follows. Raises UnknownTag."""
        outcome = Outcome(OutcomeKind.RETURNED, event.code, event.text)
        if self._alike is None:
            self._alike = defaultdict(dict)
            for tag, publish in self._open.items():
                self._alike[_likeness(publish)][tag] = None
        alike = self._alike.get(_likeness(event))
        tags = alike or self._suspects(event)
        first = next(iter(tags))
        twins = self._twins.get(first)
        if len(tags) == 1 and twins is None:
            self._returned[first] = outcome
            self._unlist(first, self._open[first])
        elif twins is not None and twins.same and alike is not None and len(twins.members) == len(alike):
            twins.returned.append(outcome)
        else:
            self._join(list(tags), outcome, same=alike is not None)

    def lost(self) -> list[Outgoing]:
        """The channel is gone: everything that was not told yet, in publish order. These books are closed."""
        remaining = {**self._open, **self._held}
        self._open.clear()
        self._held.clear()
        return [remaining[tag] for tag in sorted(remaining)]

    def _answer(self, tag: int, plain: Outcome, outcomes: list[tuple[Outgoing, Outcome]]) -> None:
        publish = self._open.pop(tag)
        self._unlist(tag, publish)
        twins = self._twins.get(tag)
        if twins is None:
            outcomes.append((publish, self._returned.pop(tag, plain)))
            return
        twins.members.discard(tag)
        if plain is NACKED:
            # Whatever was returned, it was not this one: the broker acks what it returns.
            del self._twins[tag]
            outcomes.append((publish, plain))
        else:
            self._held[tag] = publish
            twins.acked.append(tag)
        if not twins.members:
            self._tell(twins, outcomes)

    def _tell(self, twins: _Twins, outcomes: list[tuple[Outgoing, Outcome]]) -> None:
        all_returned = len(twins.returned) >= len(twins.acked)
        for index, tag in enumerate(sorted(twins.acked)):
            del self._twins[tag]
            publish = self._held.pop(tag)
            if not twins.same and not all_returned:
                outcomes.append((publish, AMBIGUOUS))
            else:
                outcomes.append((publish, twins.returned[index] if index < len(twins.returned) else CONFIRMED))

    def _join(self, tags: list[int], outcome: Outcome, *, same: bool) -> None:
        """One of these was returned: from now on they are told together, with all whom they were told with before."""
        merged = _Twins(same=same, members=set(tags))
        for group in {id(self._twins[tag]): self._twins[tag] for tag in tags if tag in self._twins}.values():
            merged.members |= group.members
            merged.acked += group.acked
            merged.returned += group.returned
            merged.same = merged.same and group.same
        merged.returned.append(outcome)
        for tag in (*merged.members, *merged.acked):
            self._twins[tag] = merged

    def _suspects(self, event: Returned) -> list[int]:
        """Whom a return may be about when it fits none exactly: all that have the closest likeness in flight."""
        likenesses: tuple[Callable[[Outgoing | Returned], object], ...] = (
            attrgetter("exchange", "routing_key", "body"),
            attrgetter("exchange", "routing_key"),
            lambda _: None,
        )
        in_flight = {tag: sent for tag, sent in self._open.items() if tag not in self._returned}
        for of in likenesses:
            if suspects := [tag for tag, sent in in_flight.items() if of(sent) == of(event)]:
                return suspects
        raise UnknownTag("the broker returned a publish, and none is in flight")

    def _unlist(self, tag: int, publish: Outgoing) -> None:
        """It was answered, or its return was found: no later return can be about it."""
        if self._alike is not None:
            likeness = _likeness(publish)
            tags = self._alike.get(likeness)
            if tags is not None:
                tags.pop(tag, None)
                if not tags:
                    del self._alike[likeness]


def _likeness(publish: Outgoing | Returned) -> Likeness:
    return publish.exchange, publish.routing_key, properties.canonical(publish.properties), publish.body


@dataclass(slots=True, eq=False)
class PublishBatch:
    """The publishes of one call: how many have no outcome yet, who is told of each, and when they are given up."""

    missing: int
    on_outcome: OnOutcome
    timer: asyncio.TimerHandle

    def tell(self, messages: Sequence[Outgoing], outcome: Outcome) -> None:
        """What became of these."""
        self.missing -= len(messages)
        self.on_outcome(messages, outcome)
        if not self.missing:
            self.timer.cancel()


class ConfirmChannel(Listener):
    """`open`, then `send` within the window; its publisher hears what became of it."""

    def __init__(self, publisher: RabbitPublisher) -> None:
        self.flying_bytes = 0
        self._publisher = publisher
        self._confirms = Confirms()
        self._channel: Channel | None = None
        self._encoder: PublishEncoder | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be sent on."""
        return self._encoder is not None and self._channel is not None and self._channel.is_open

    @property
    def flying(self) -> int:
        """How many publishes are in flight."""
        return len(self._confirms)

    async def open(self, connection: Connection) -> None:
        """Open a channel of the connection and switch confirms on. Raises BrokerError."""
        self._confirms = Confirms()
        self.flying_bytes = 0
        self._encoder = None
        self._channel = await connection.channel(self)
        await self._channel.call(amqp.Confirm.Select())
        self._encoder = PublishEncoder(self._channel.number, frame_bytes_max=connection.session.frame_bytes_max)

    async def close(self) -> None:
        """Close the channel in order. Raises BrokerError."""
        if self._channel is not None:
            await self._channel.end()

    def send(self, queue: deque[Outgoing], *, count_max: int, bytes_max: int) -> list[tuple[Outgoing, Outcome]]:
        """As many of these as the window allows, in one write; answers those that no broker would take."""
        assert self._encoder is not None  # noqa: S101  callers ask is_open first
        pieces: list[bytes | memoryview] = []
        refused: list[tuple[Outgoing, Outcome]] = []
        pack, note = self._encoder.pieces, self._confirms.sent
        count, size = self.flying, self.flying_bytes
        while queue and count < count_max:
            message = queue[0]
            size_bytes = message.size_bytes
            # One that is larger than the whole window goes alone.
            if count and size + size_bytes > bytes_max:
                break
            queue.popleft()
            if message.outcome is not None:
                continue
            try:
                pieces += pack(message.exchange, message.routing_key, message.properties, message.body)
            except Unsendable as error:
                refused.append((message, Outcome(OutcomeKind.REFUSED, 0, str(error))))
                continue
            note(message)
            count += 1
            size += size_bytes
            message.sent_count += 1
            if message.sent_count > 1:
                self._publisher.counts["sent_again"] += 1
        self.flying_bytes = size
        if pieces and self._channel is not None:
            self._channel.write(b"".join(pieces))
        return refused

    def on_events(self, events: list[Event]) -> None:
        outcomes: list[tuple[Outgoing, Outcome]] = []
        try:
            for event in events:
                if type(event) is Confirmed:
                    outcomes += self._confirms.answered(event.tag, multiple=event.multiple, ack=event.ack)
                elif isinstance(event, Returned):
                    self._confirms.returned(event)
        except UnknownTag as error:
            # The broker and we no longer agree on what was sent: nothing of this channel can be believed.
            if self._channel is not None:
                self._channel.close(BrokerLost(f"the broker's answers make no sense; {error}"), None)
        if outcomes:
            self.flying_bytes -= sum([message.size_bytes for message, _ in outcomes])
            self._publisher.answered(self, outcomes)

    def on_writable(self) -> None:
        self._publisher.pump()

    def on_closed(self, error: BrokerError, close: Close) -> None:
        self._encoder = None
        self.flying_bytes = 0
        self._publisher.lost(self, self._confirms.lost(), error, close)


class RabbitPublisher:
    """`async with RabbitPublisher(url) as publisher:` and `await publisher.publish([message])`.

    Opening it raises what `Connection.open` raises; after that, it connects again by itself. One that `waits` does so
    from the start, where the broker is away and has not said no.
    """

    def __init__(
        self,
        url: BrokerUrl,
        *,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        backoff: Backoff | None = None,
        waits: bool = False,
    ) -> None:
        self._waits = waits
        self.counts: Counter[str] = Counter()
        self._url = url
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._timeout_s = timeout_s
        self._read_pause_s = 0.0
        self._patience = BackoffTimer(backoff or Backoff())
        self._waiting: deque[Outgoing] = deque()
        self._suspects: deque[Outgoing] = deque()
        self._alone_only = False  # a publish ended the whole connection: nothing else goes out until it is found
        self._only: Outgoing | None = None  # what is in flight when nothing else is, on either channel
        self._connection: Connection | None = None
        self._main = ConfirmChannel(self)
        self._alone = ConfirmChannel(self)
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
        return self._connection.session.blocked if self._connection else None

    @property
    def connected(self) -> bool:
        """Whether a publish would be sent now."""
        return self._main.is_open

    @property
    def version(self) -> str:
        """The broker's version. Raises BrokerUnreachable when it was never met."""
        if self._connection is None:
            raise BrokerUnreachable(f"{self._url} cannot be reached; {self._trouble}")
        return self._connection.session.version

    def pause_between_reads(self, pause_s: float) -> None:
        """Hear of outcomes later and of more at once: see `Connection.read_pause_s`."""
        self._read_pause_s = pause_s
        if self._connection is not None:
            self._connection.read_pause_s = pause_s

    @property
    def trouble(self) -> str:
        """Why nothing can be published at the moment; the empty text while it can."""
        if self.blocked:
            return f"the broker takes no publishes: {self.blocked}"
        return "" if self.connected else "no connection to publish on"

    @property
    def sent_again(self) -> int:
        """How many publishes were repeated because the outcome of the first was unknown."""
        return self.counts["sent_again"]

    async def publish(self, messages: Sequence[Outgoing], *, timeout_s: float | None = None) -> list[Outcome]:
        """Publish a batch, pipelined, and wait until each message has its outcome; they are in the same order.

        Several batches may be under way at once. A cancelled call leaves its messages unknown. Raises BrokerLost when
        the publisher is closed.
        """
        done, missing = asyncio.Event(), len(messages)

        def on_outcome(some: Sequence[Outgoing], _: Outcome) -> None:
            nonlocal missing
            missing -= len(some)
            if not missing:
                done.set()

        self.send(messages, on_outcome, timeout_s=self._timeout_s if timeout_s is None else timeout_s)
        try:
            if missing:
                await done.wait()
        finally:
            if missing:
                self._give_up(messages, 0.0)
        return [message.outcome for message in messages if message.outcome is not None]

    def send(self, messages: Sequence[Outgoing], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        """As `publish`, without waiting: `on_outcome` is called with messages that share an outcome as soon as it is
        known, once for each message."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, messages, timeout_s)
        try:
            self._begin(messages, PublishBatch(len(messages), on_outcome, timer))
        except BaseException:
            timer.cancel()
            raise

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(FIRST_TIMEOUT_S if self._waits else None):
                await self._connect()
        except (BrokerError, TimeoutError) as error:
            self._trouble = error if isinstance(error, BrokerError) else BrokerUnreachable("it does not answer")
            if not self._waits or not passes(self._trouble):
                await self.close()
                raise
            emit("broker.awaited", address=str(self._url), error=self._trouble)
            self._broken.set()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="publisher keeps its connection")
        return self

    async def __aexit__(self, *error: object) -> None:
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

    def _begin(self, messages: Sequence[Outgoing], batch: PublishBatch) -> None:
        """Send what can go now, the others wait for their turn. Raises BrokerLost, and nothing was sent."""
        if self._keeper is None or self._keeper.done():
            raise BrokerLost("the publisher is closed; nothing was sent")
        waiting = []
        persistent = properties.persistent
        for message in messages:
            if message.batch is not None:
                raise ValueError("a message was published before; each publish needs an Outgoing of its own")
            message.batch = batch
            try:
                message.properties = raw = persistent(message.properties)
            except properties.Unreadable as error:
                self._tell(message, Outcome(OutcomeKind.REFUSED, 0, f"properties cannot be read: {error}"))
                continue
            message.size_bytes = len(raw) + len(message.body)
            waiting.append(message)
        self._waiting.extend(waiting)
        self.pump()

    def pump(self) -> None:
        """Send what the windows allow: everything that can go now goes in one write."""
        if self._connection is None or not self._connection.writable or self._connection.session.blocked:
            return  # what is not sent while the broker reads nothing is at least known not to be stored
        if self._suspects and self._alone.is_open and not self._alone.flying and not self._held_back():
            self._only = self._suspects[0] if self._alone_only else None
            self._send(self._alone, self._suspects, count_max=1)
        if self._waiting and self._main.is_open and not self._alone_only:
            self._send(self._main, self._waiting, count_max=self._window_messages)

    def _held_back(self) -> bool:
        """To find out who ends the connection, all other channels have to be quiet."""
        return self._alone_only and any(channel.flying for channel in (self._main, *self._retiring))

    def _send(self, channel: ConfirmChannel, queue: deque[Outgoing], *, count_max: int) -> None:
        # Told after the write: whoever is told may send at once, and then the broker would count otherwise than we.
        for message, outcome in channel.send(queue, count_max=count_max, bytes_max=self._window_bytes):
            if message.outcome is None:
                self._tell(message, outcome)

    # Answers.

    def answered(self, channel: ConfirmChannel, outcomes: list[tuple[Outgoing, Outcome]]) -> None:
        """What became of some that were sent on a channel."""
        confirmed: list[Outgoing] = []
        for message, outcome in outcomes:
            if outcome is CONFIRMED and message.outcome is None:
                message.outcome = CONFIRMED
                confirmed.append(message)
            else:
                self._on_outcome(channel, message, outcome)
        self.counts["confirmed"] += len(confirmed)
        for batch, messages in groupby(confirmed, key=attrgetter("batch")):
            batch.tell(list(messages), CONFIRMED)
        if channel is self._alone and not self._suspects:
            self._alone_only = False
        if channel in self._retiring and not channel.flying:
            self._broken.set()
        self.pump()

    def _on_outcome(self, channel: ConfirmChannel, message: Outgoing, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.NACKED and self._renewal is None and channel not in self._retiring:
            self._renew_soon()
        if message.outcome is not None:
            self.counts["answered_too_late"] += 1
        elif outcome.kind is OutcomeKind.UNKNOWN and not message.once:
            self._suspects.append(message)  # alone, its answer cannot be anybody else's
        else:
            self._tell(message, outcome)

    def lost(self, channel: ConfirmChannel, messages: list[Outgoing], error: BrokerError, close: Close) -> None:
        """A channel ended. By a publish of ours, or with the connection; in both cases nothing is known of these."""
        if channel is not self._main and channel is not self._alone and not messages:
            return  # an old one, closed in order
        self._trouble = error
        self._broken.set()
        whole = close is not None and close.channel == 0
        blamed = close is not None and close.code != CONNECTION_FORCED
        self._at_once = blamed
        # Counted with those whose time was over: one of them may be the guilty one.
        guilty = len(messages) == 1 and (not whole or messages[0] is self._only)
        messages = [message for message in messages if message.outcome is None]
        is_found = blamed and guilty and bool(messages)
        if not is_found:
            for message in messages:
                if message.once:
                    self._tell(message, Outcome(OutcomeKind.UNKNOWN, 0, str(error)))
            messages = [message for message in messages if message.outcome is None]
        if close is None or not blamed:
            self._waiting.extendleft(reversed(messages))
        elif is_found:
            self._tell(messages[0], Outcome(OutcomeKind.REFUSED, close.code, close.text))
        else:
            self._suspects.extend(messages)
            self._alone_only = self._alone_only or whole
        if not self._suspects:
            self._alone_only = False

    def _tell(self, message: Outgoing, outcome: Outcome) -> None:
        self.counts[outcome.kind.value] += 1
        message.outcome = outcome
        message.batch.tell((message,), outcome)

    def _give_up(self, messages: Iterable[Outgoing], limit_s: float) -> None:
        """The time is over: these are unknown. Those in flight keep their place in the window until answered."""
        text = NOT_IN_TIME.format(timeout_s=limit_s) if limit_s else "nobody waits for it any more"
        if self.blocked:
            text += f"; the broker takes nothing: {self.blocked}"
        elif not self.connected and self._trouble:
            text += f"; {self._trouble}"
        for message in messages:
            if message.outcome is None:
                self._tell(message, Outcome(OutcomeKind.UNKNOWN, 0, text))
        self._waiting = deque(message for message in self._waiting if message.outcome is None)
        self._suspects = deque(message for message in self._suspects if message.outcome is None)
        if not self._suspects:
            self._alone_only = False

    # The connection.

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
                emit("broker.lost", address=str(self._url), error=error)

    async def _repair(self) -> None:
        self._broken.clear()
        connection = self._connection
        if connection is None or not connection.is_open:
            await self._connect()
            emit("broker.found", address=str(self._url))
        else:
            for channel in (self._main, self._alone):
                if not channel.is_open:
                    await channel.open(connection)
            await self._renew(connection)
        self.pump()

    def _renew_soon(self) -> None:
        """Not at once, and ever more seldom while fresh channels get nacks as well: then the queue is just full."""
        loop = asyncio.get_running_loop()

        def due() -> None:
            self._renewal_due = True
            self._broken.set()

        self._renewal = loop.call_later(self._renewals.delay_s(loop.time()), due)

    async def _renew(self, connection: Connection) -> None:
        """Go on with fresh channels, if a nack asked for it; close the old ones when all on them is answered."""
        for channel in [channel for channel in self._retiring if not channel.flying]:
            self._retiring.discard(channel)
            await channel.close()
        if self._renewal_due and not self._retiring:
            main, alone = ConfirmChannel(self), ConfirmChannel(self)
            await main.open(connection)
            await alone.open(connection)
            self._retiring = {self._main, self._alone}
            self._main, self._alone = main, alone
            self.counts["renewed"] += 1
            self._renewal, self._renewal_due = None, False
            self._renewals.worked(asyncio.get_running_loop().time())
            self._broken.set()  # one of the old ones may be quiet already

    async def _connect(self) -> None:
        self._connection = connection = await Connection.open(self._url.named("holdfast publisher"))
        await self._main.open(connection)
        await self._alone.open(connection)
        connection.read_pause_s = self._read_pause_s
        self._retiring.clear()  # what was in flight on them was told to be lost
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal, self._renewal_due = None, False
        self._patience.worked(asyncio.get_running_loop().time())
