"""One channel that messages come on: what is unsettled on it, the frames that settle it, and when a queue has worked
through the last of them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from pamqp import commands as amqp

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.connection import CALL_TIMEOUT_S, Channel, Close, Connection, Listener
from holdfast.engines.rabbitmq.wire import commands
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Cancelled, Event
from holdfast.errors import BrokerError

ASK_TIMEOUT_S = 3.0
#: A consumer that comes while we wait is taken for ours: then it takes this long.
SETTLE_TIMEOUT_S, SETTLE_STEP_S = 5.0, 0.02
#: Where others consume as well, one of them may have gone and not ours: the count has to be the same for this long.
STILL_S = 0.1
#: So many letters walked over cost the broker about as much as some fresh channels.
WALKED_COUNT_MAX = 50_000
#: Changes from one consumer of a channel to another that are remembered.
JOINTS_COUNT_MAX = 1_000


class ConsumerChannel(Listener):
    """The listener of a channel that messages come on. Once that is left, nothing of it is heard any more: whatever is
    unsettled on it is the broker's again. `on_lost` hears why, or None when the broker cancelled the consumer.

    To settle a letter by itself the broker walks over all that came on the channel before it and are unsettled. So
    letters that are held make every later ack slower: with 1 262 of them a classic queue took 1 700 acks a second, with
    one 12 000. When that has cost enough, consuming goes on on a fresh channel, and what is held stays on the old one
    until the end.
    """

    def __init__(
        self,
        number: int,
        *,
        on_arrived: Callable[[list[Delivery]], None],
        on_lost: Callable[[BrokerError | None], None],
    ) -> None:
        self.number = number  #: unlike that of a channel, never used again; deliveries carry it
        self.is_left = False
        self.channel: Channel | None = None
        self.tracker = AckTracker(0)
        self.tags: list[str] = []  #: its consumers
        self.consumers_count = 0  #: so far
        self.held_count = 0
        self._joints: list[int] = []
        self._consumer_tag = ""  # of the last delivery
        self._walked_count = 0
        self._on_arrived = on_arrived
        self._on_lost = on_lost

    def opened(self, channel: Channel) -> None:
        """Messages may come."""
        self.channel = channel
        self.tracker = AckTracker(channel.number)

    async def consume(self, queue: str, prefetch: int) -> None:
        """By one consumer more: the prefetch of one that runs cannot be changed. Raises BrokerError."""
        assert self.channel is not None  # noqa: S101  opened() comes first
        self.consumers_count += 1
        await self.channel.call(amqp.Basic.Qos(prefetch_count=prefetch))
        answer = await self.channel.call(methods.Consume(queue=queue))
        self.tags.append(str(getattr(answer, "consumer_tag", "")))

    async def cancel(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Consume no more: nothing comes in the place of what is settled from now on. Raises BrokerError."""
        tags, self.tags = self.tags, []
        for tag in tags:
            assert self.channel is not None  # noqa: S101  it was consumed on
            await self.channel.call(amqp.Basic.Cancel(tag), timeout_s=timeout_s)
        self.tracker.consumer_ended()

    @property
    def is_open(self) -> bool:
        """Whether what came on it can be settled."""
        return self.channel is not None and self.channel.is_open

    @property
    def is_slow(self) -> bool:
        """Whether a fresh channel would cost less than to go on."""
        return self._walked_count >= WALKED_COUNT_MAX

    @property
    def unacked_count(self) -> int:
        """As the broker sees it, of the consumers that it has now."""
        return len(self.tracker) + self.tracker.unsent_count - self.tracker.past_count

    def flush(self, acks_count_max: int | None = None) -> None:
        """Send acks, no more than these."""
        if self.channel is not None and self.tracker.pending:
            self.channel.write(self.tracker.flush(acks_count_max))
            self._walked_count += self.tracker.singles_count * self.held_count

    async def give_back_all(self) -> int:
        """All of the channel by one frame, tag 0: one by one is quadratic on a classic queue. Answers how many.

        A quorum queue takes back what came by several consumers in either order, when it is one frame: so there is one
        for every change from one to another. Every channel is a process of its own in the broker: this one has passed
        them on when it answers a question.
        """
        count = len(self.tracker)
        if count and self.channel is not None:
            for tag in (*self.tracker.parts(self._joints), 0):
                self.channel.write(commands.nack(self.channel.number, tag, multiple=True, requeue=True))
            await self.channel.call(amqp.Basic.Qos(prefetch_count=1))
        return count

    def leave(self) -> None:
        """Hear nothing more."""
        self.is_left = True
        self.tags = []
        self.tracker = AckTracker(0)

    async def close(self) -> None:
        """Close the channel in order. Raises BrokerError."""
        if self.channel is not None:
            await self.channel.end()

    # What the channel calls.

    def on_events(self, events: list[Event]) -> None:
        if self.is_left:
            return
        deliveries = [event for event in events if type(event) is Delivery]
        if deliveries:
            number = self.number
            for delivery in deliveries:
                delivery.channel = number
            self.tracker.delivered([delivery.tag for delivery in deliveries])
            if self.consumers_count > 1:
                self._note_joints(deliveries)
            self._consumer_tag = deliveries[-1].consumer_tag
            self._on_arrived(deliveries)
        if len(deliveries) < len(events) and any(isinstance(event, Cancelled) for event in events):
            self._on_lost(None)

    def on_closed(self, error: BrokerError, close: Close) -> None:
        if not self.is_left:
            self._on_lost(error)

    def _note_joints(self, deliveries: list[Delivery]) -> None:
        last = self._consumer_tag
        for delivery in deliveries:
            if delivery.consumer_tag != last and len(self._joints) < JOINTS_COUNT_MAX:
                self._joints.append(delivery.tag - 1)
            last = delivery.consumer_tag


class AckTracker:
    """Which deliveries of one channel are still unsettled, and the fewest frames that settle those that are done. Pure.

    Tags come in ascending order (`delivered`), are settled in any (`ack`, `nack`), and `flush` packs the frames.

    An ack with `multiple` settles everything up to its tag, so it may only be used for a prefix in which nothing is
    open. What is settled behind an open delivery goes out as frames of its own: waiting for the prefix would use up the
    prefetch whenever one message is held for long.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._open: dict[int, None] = {}  # a dict keeps the order: the lowest open tag is its first key
        self._acks: list[int] = []
        self._nacks: list[tuple[int, bool]] = []
        self._last_tag = self._past_tag = 0
        self.past_count = 0  #: unacked, as the broker sees it, of consumers that have ended
        self.singles_count = 0  #: acks that `flush` packed one by one, the last time

    def __len__(self) -> int:
        return len(self._open)

    @property
    def pending(self) -> bool:
        """Whether `flush` has something to say."""
        return bool(self._acks or self._nacks)

    @property
    def unsent_count(self) -> int:
        """Acks that `flush` has not packed yet."""
        return len(self._acks)

    def delivered(self, tags: Sequence[int]) -> None:
        """Messages came, in this order."""
        self._open.update(dict.fromkeys(tags))
        self._last_tag = tags[-1]

    def consumer_ended(self) -> None:
        """Nothing more comes in the place of what has come so far, when that is settled."""
        self._past_tag = self._last_tag
        self.past_count = len(self._open) + len(self._acks)

    def ack(self, tags: Iterable[int]) -> list[int]:
        """They are done. Answers those that are not open: settled before, or never delivered here."""
        still, acks, others = self._open, self._acks, []
        for tag in tags:
            if tag in still:
                del still[tag]
                acks.append(tag)
            else:
                others.append(tag)
        return others

    def nack(self, tag: int, *, requeue: bool) -> bool:
        """It goes back to the queue, or to the dead-letter exchange. False when it is not open."""
        if tag not in self._open:
            return False
        del self._open[tag]
        self._nacks.append((tag, requeue))
        return True

    def parts(self, joints: Iterable[int]) -> list[int]:
        """The last open tag of each part, when what is open is parted behind these tags; not that of the last part."""
        tags = list(self._open)
        counts = sorted({bisect_right(tags, joint) for joint in joints})
        return [tags[count - 1] for count in counts if 0 < count < len(tags)]

    def flush(self, acks_count_max: int | None = None) -> bytes:
        """The frames for everything that was settled since the last time; of the acks that make the broker send more,
        the lowest so many tags."""
        acks = sorted(self._acks)
        past_count = bisect_right(acks, self._past_tag) if self.past_count else 0
        self.past_count -= past_count
        if acks_count_max is None:
            self._acks = []
        else:
            count_max = past_count + acks_count_max
            acks, self._acks = acks[:count_max], acks[count_max:]
        nacks, self._nacks = sorted(self._nacks), []
        lowest_open = next(iter(self._open), None)
        frames = []
        # Nacks first, each run of the same kind: with `multiple` they would take along acks that were not sent yet.
        if nacks and not acks and _may_join(nacks, lowest_open):
            tag, requeue = nacks[-1]
            return commands.nack(self._channel, tag, multiple=True, requeue=requeue)
        for tag, requeue in nacks:
            frames.append(commands.nack(self._channel, tag, multiple=False, requeue=requeue))
        prefix = acks if lowest_open is None else acks[: bisect_left(acks, lowest_open)]
        if prefix:
            frames.append(commands.ack(self._channel, prefix[-1], multiple=True))
        singles = acks[len(prefix) :]
        self.singles_count = len(singles)
        frames += [commands.ack(self._channel, tag, multiple=False) for tag in singles]
        return b"".join(frames)


def _may_join(nacks: list[tuple[int, bool]], lowest_open: int | None) -> bool:
    same_kind = len({requeue for _, requeue in nacks}) == 1
    return same_kind and (lowest_open is None or nacks[-1][0] < lowest_open)


async def count_consumers(connection: Connection, queue: str) -> int | None:
    """How many consumers the queue has, those included that are cancelled and hold messages; None: nobody says."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return (await connection.depth(queue)).consumers
    except (BrokerError, TimeoutError):
        return None


async def wait_until_settled(
    connection: Connection, queue: str, *, count_before: int, timeout_s: float = SETTLE_TIMEOUT_S
) -> bool:
    """Wait until the queue has worked through the last acks of our consumer, which was cancelled: until it has fewer
    consumers than while ours was among them. False when that was not seen in time.

    A channel passes only some 30 acks on to a quorum queue at once, and forgets the rest when it is closed: those
    messages would run a second time. No answer tells when an ack has arrived, but a consumer that is cancelled counts
    among the queue's until the last of its messages is settled. Nothing here raises BrokerError: who cannot ask closes
    all the same.
    """
    loop = asyncio.get_running_loop()
    last, since_s = count_before, loop.time()
    try:
        async with asyncio.timeout(timeout_s):
            while count := (await connection.depth(queue)).consumers:
                if count != last:
                    last, since_s = count, loop.time()
                if count < count_before and loop.time() - since_s >= STILL_S:
                    break
                await asyncio.sleep(SETTLE_STEP_S)  # a broker has to be asked
    except (BrokerError, TimeoutError):
        return False
    return True
