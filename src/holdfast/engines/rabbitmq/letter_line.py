"""One channel that letters of a recovery come on, with the books of what is unsettled on it.

To settle a letter by itself the broker walks over all that came on the channel before it and are unsettled. So letters
that are held make every later ack slower: with 1 262 of them a classic queue took 1 700 acks a second, with one 12 000.
When that has cost enough, consuming goes on on a fresh channel, and what is held stays on the old one until the end.
"""

from __future__ import annotations

from collections.abc import Callable

from pamqp import commands as amqp

from holdfast.engines.rabbitmq.channel import Channel, Close
from holdfast.engines.rabbitmq.unsettled import AckTracker
from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire.events import Cancelled, Delivery, Event
from holdfast.errors import BrokerError, BrokerLost

#: So many letters walked over cost the broker about as much as some fresh channels.
WALKED_COUNT_MAX = 50_000
#: Changes from one consumer of a channel to another that are remembered.
JOINTS_COUNT_MAX = 1_000


class ConsumerChannel:
    """The listener of its channel. Once that is left, nothing of it is heard any more."""

    def __init__(
        self, number: int, *, on_arrived: Callable[[list[Delivery]], None], on_lost: Callable[[BrokerError], None]
    ) -> None:
        self.number = number  #: unlike that of a channel, never used again; deliveries carry it
        self.channel: Channel | None = None
        self.books = AckTracker(0)
        self.tags: list[str] = []  #: its consumers
        self.consumers_count = 0  #: so far
        self.held_count = 0
        self._joints: list[int] = []
        self._consumer_tag = ""  # of the last delivery
        self._walked_count = 0
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._is_left = False

    def opened(self, channel: Channel) -> None:
        """Letters may come."""
        self.channel = channel
        self.books = AckTracker(channel.number)

    @property
    def is_open(self) -> bool:
        """Whether its letters can be settled."""
        return self.channel is not None and self.channel.is_open

    @property
    def is_slow(self) -> bool:
        """Whether a fresh channel would cost less than to go on."""
        return self._walked_count >= WALKED_COUNT_MAX

    @property
    def unacked_count(self) -> int:
        """As the broker sees it, of the consumers that it has now."""
        return len(self.books) + self.books.unsent_count - self.books.past_count

    def flush(self, acks_count_max: int | None = None) -> None:
        """Send acks, no more than these."""
        if self.channel is not None and self.books.pending:
            self.channel.write(self.books.flush(acks_count_max))
            self._walked_count += self.books.singles_count * self.held_count

    async def give_back(self) -> int:
        """All of the channel by one frame, tag 0: one by one is quadratic on a classic queue. Answers how many.

        A quorum queue takes back what came by several consumers in either order, when it is one frame: so there is one
        for every change from one to another. Every channel is a process of its own in the broker: this one has passed
        them on when it answers a question.
        """
        count = len(self.books)
        if count and self.channel is not None:
            for tag in (*self.books.parts(self._joints), 0):
                self.channel.write(commands.nack(self.channel.number, tag, multiple=True, requeue=True))
            await self.channel.call(amqp.Basic.Qos(prefetch_count=1))
        return count

    def leave(self) -> None:
        """Hear nothing more."""
        self._is_left = True

    # What the channel calls.

    def on_events(self, events: list[Event]) -> None:
        if self._is_left:
            return
        deliveries = [event for event in events if type(event) is Delivery]
        if deliveries:
            number = self.number
            for delivery in deliveries:
                delivery.channel = number
            self.books.delivered_all([delivery.tag for delivery in deliveries])
            if self.consumers_count > 1:
                self._note_joints(deliveries)
            self._consumer_tag = deliveries[-1].consumer_tag
            self._on_arrived(deliveries)
        if len(deliveries) < len(events) and any(isinstance(event, Cancelled) for event in events):
            self._on_lost(BrokerLost("the broker cancelled the consumer"))

    def on_closed(self, error: BrokerError, close: Close) -> None:
        if not self._is_left:
            self._on_lost(error)

    def on_writable(self) -> None:
        """Acks are small, and never wait for the socket."""

    def _note_joints(self, deliveries: list[Delivery]) -> None:
        last = self._consumer_tag
        for delivery in deliveries:
            if delivery.consumer_tag != last and len(self._joints) < JOINTS_COUNT_MAX:
                self._joints.append(delivery.tag - 1)
            last = delivery.consumer_tag
