"""Empties one dead-letter queue for a recovery: letters in, the settling of each, and the right to do that alone.

The connection consumes, acks and holds the run's lock; another one publishes: under an alarm the broker stops reading
from connections that publish, acks included. Reading pauses while the letters in hand are too many bytes, so that the
broker's prefetch, which counts letters, cannot fill our memory.

How many letters the broker sends is bounded by what is wanted (`DeliveryBudget`), and the prefetch follows their size.
When either the prefetch has to change or letters that are held make acks slow (`ConsumerChannel`), consuming goes on on
a fresh channel: on one with several consumers a quorum queue gives letters back in the order of these.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter

from msgspec.structs import replace

from holdfast.core.message import Delivery
from holdfast.core.recovery import Depth, RunLimits
from holdfast.engines.rabbitmq.connection import ACCESS_REFUSED, RESOURCE_LOCKED, Connection
from holdfast.engines.rabbitmq.consumer_channel import ConsumerChannel, wait_until_settled
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BrokerError, BrokerLost, BrokerRefused, RecoveryLocked
from holdfast.telemetry.events import emit

PREFETCH_MAX = 65_535
#: At first the sizes of the letters are not known: the prefetch is widened when they are.
CAPACITY_COUNT_FIRST = 100
#: Channels that letters may be held on, of the 2 047 that a connection may have.
CHANNELS_COUNT_MAX = 500
#: Until a consumer has been sent all that its prefetch allows, when there are more letters than that.
FILL_TIMEOUT_S = 2.0
#: For the last acks. Another consumer that came while we ran is taken for ours: then it takes this long.
SETTLE_TIMEOUT_S = 10.0
#: With so many letters under way, to wait this long before the next read costs no time and saves the work of many.
READ_PAUSE_S = 0.01
READ_PAUSE_COUNT_MIN = 1_000
LOCK_PREFIX = "recovery-lock."
LOCK_STEP_S = 0.5
NAME_BYTES_MAX = 255


class RabbitDrain:
    """See `ports.broker.DrainConsumer`; `connect` first, `close` at the end. `on_pace` is told how long to wait between
    reads."""

    def __init__(
        self, url: BrokerUrl, queue: str, limits: RunLimits, *, on_pace: Callable[[float], None] = lambda s: None
    ) -> None:
        self.queue = queue
        self.warnings: list[str] = []
        self._url = url.named(f"holdfast recovery of {queue}")
        self._bytes_max = limits.window_bytes_max
        self._on_pace = on_pace
        self._budget = DeliveryBudget(limits)
        self._connection: Connection | None = None
        self._locked: Connection | None = None  # that the lock was taken on, with which it ends
        self._budget.ready = self._ready = deque[Delivery]()
        self._channels = DrainChannels(queue, self._budget, on_arrived=self._arrived, on_lost=self._lost)
        self._owned_bytes = 0
        self._news = asyncio.Event()
        self._loss: BrokerError | None = None
        self._has_begun = False
        self._stopped = False
        self._is_wanted: Callable[[Delivery], bool] = lambda delivery: True  # of those that nobody has taken
        self._is_full = False  # too many bytes in hand: nothing is read
        self._is_asking = False

    async def connect(self) -> Connection:
        """Raises BrokerError: at the start nothing is tried again."""
        self._connection = await Connection.open(self._url)
        return self._connection

    @property
    def is_lost(self) -> bool:
        return self._loss is not None

    @property
    def is_connected(self) -> bool:
        return self._loss is None and self._connection is not None and self._connection.is_open

    async def open(self) -> str:
        if self._has_begun:
            return await self._reopen()
        assert self._connection is not None  # noqa: S101  connect() comes first
        self.warnings += await take_lock(self._connection, self.queue, patience_s=0.0)
        self._locked = self._connection
        tag = await self._consume(self._connection)
        self._has_begun = True
        return tag

    async def _reopen(self) -> str:
        try:
            if self._loss is None:
                await self.abandon()  # an answer did not come in time: to the run all is lost, and so it has to be
            connection = await self._connected()
            if connection is not self._locked:
                # The broker may not have noticed yet that our old connection is gone, which holds the lock.
                await take_lock(connection, self.queue, patience_s=2.0 * connection.session.heartbeat_s)
                self._locked = connection
            return await self._consume(connection)
        except BrokerRefused:
            raise  # a channel ended, and what was asked for on it; the connection keeps the lock, if it has it
        except BaseException:
            # Also when cancelled: there may be a consumer that nobody knows of, and the lock or not.
            await self.abandon()
            raise

    async def allow(self, wanted: int | None, *, held_count: int) -> None:
        self._budget.wanted_count = wanted
        if not self._may_ask():
            return
        fits_count = self._budget.fits_count
        with self._asking():
            # Held letters use up prefetch; to widen it the broker is asked, so not before they have a quarter of it.
            if (fits_count + held_count - self._channels.capacity_count) * 4 >= fits_count:
                await self._channels.allow()
                if self._may_ask() and self._connection is not None:
                    await self._channels.widen(fits_count + held_count)
                    self._set_pace(self._connection)
            if self._may_ask():
                await self._channels.allow()

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        if not self._ready:
            self._news.clear()
            if self._loss is None:
                with suppress(TimeoutError):  # what came in that very moment is there all the same
                    async with asyncio.timeout(timeout_s):
                        await self._news.wait()
        if self._loss is not None:
            raise BrokerLost(f"consuming from '{self.queue}' was interrupted; {self._loss}") from self._loss
        ready = self._ready
        count = min(count_max, len(ready))
        self._budget.taken(count)
        return [ready.popleft() for _ in range(count)]

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        missed: list[Delivery] = []
        freed_bytes = 0
        for number, same in groupby(deliveries, key=attrgetter("channel")):
            channel = self._channels.find(number)
            if channel is None:
                missed += same
                continue
            by_tag = {delivery.tag: delivery for delivery in same}
            missed += [by_tag.pop(tag) for tag in channel.tracker.ack(by_tag)]
            freed_bytes += _owned_bytes(by_tag.values())
        self._free(freed_bytes)
        self._channels.flush()
        return missed

    def forget_body(self, delivery: Delivery) -> None:
        if delivery.body or delivery.properties:
            if (channel := self._channels.find(delivery.channel)) is not None:
                channel.held_count += 1
                self._free(_owned_bytes((delivery,)))
            delivery.body = delivery.properties = b""

    async def stop(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        self._stopped, self._is_wanted = True, wanted
        self._read_on()
        await self._channels.stop()
        untaken = list(filter(wanted, self._ready))
        self._ready.clear()
        return untaken

    async def give_back_all(self, *, others_count: int) -> int:
        connection = self._connection
        if connection is None or not self._channels.is_open:
            return 0
        count = await self._channels.give_back_all()
        if not await wait_until_settled(
            connection, self.queue, count_before=others_count + 1, timeout_s=SETTLE_TIMEOUT_S
        ):
            self.warnings.append(
                f"the queue has not taken all acks within {SETTLE_TIMEOUT_S:g} s, or somebody else began to consume: "
                "letters that are counted as recovered may come again"
            )
        self._leave()
        await self._channels.close()
        return count

    async def abandon(self) -> None:
        self._loss = self._loss or BrokerLost("the connection was ended")  # and with it acks that were on their way
        self._channels.flush_all()
        self._leave()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def depth(self) -> Depth:
        if self._is_full:  # nothing is read on the other one, no answer either
            async with await Connection.open(self._url) as own:
                depth = await own.depth(self.queue)
        else:
            with self._asking():
                depth = await (await self._connected()).depth(self.queue)
        return replace(depth, untaken=len(self._ready))

    async def close(self) -> None:
        """End the connection. What is unsettled goes back by itself."""
        self._leave()
        if self._connection is not None:
            await self._connection.close()

    # What a channel calls.

    def _arrived(self, deliveries: list[Delivery]) -> None:
        if self._stopped:
            # On their way when we said stop: they go back with the rest, and only for these is more than that to do.
            deliveries = list(filter(self._is_wanted, deliveries))
        size_bytes = _owned_bytes(deliveries)
        self._owned_bytes += size_bytes
        self._budget.came(len(deliveries), size_bytes)
        self._ready.extend(deliveries)
        self._news.set()
        self._pause_if_full()

    def _lost(self, error: BrokerError | None) -> None:
        """Whatever is unsettled is the broker's again."""
        self._channels.flush_all()  # after a cancel the channel lives: what was settled before still counts
        self._loss = error or BrokerLost("the broker cancelled the consumer")
        self._leave()
        self._news.set()

    # Inside.

    async def _connected(self) -> Connection:
        self._connection = await Connection.renewed(self._connection, self._url)
        return self._connection

    async def _consume(self, connection: Connection) -> str:
        self._owned_bytes = 0
        self._loss = None
        tag = await self._channels.consume(connection, self._budget.fits_count)
        self._set_pace(connection)
        return tag

    def _set_pace(self, connection: Connection) -> None:
        connection.read_pause_s = READ_PAUSE_S if self._channels.capacity_count >= READ_PAUSE_COUNT_MIN else 0.0
        self._on_pace(connection.read_pause_s)

    def _free(self, size_bytes: int) -> None:
        """So many bytes of letters in hand are gone: read again when there is room."""
        self._owned_bytes -= size_bytes
        if self._owned_bytes <= self._bytes_max // 2:
            self._read_on()

    def _pause_if_full(self) -> None:
        is_full = self._owned_bytes >= self._bytes_max
        if is_full and not self._stopped and not self._is_asking and self._connection is not None:
            self._is_full = True
            self._connection.pause_reading()

    def _read_on(self) -> None:
        self._is_full = False
        if self._connection is not None:
            self._connection.resume_reading()

    def _may_ask(self) -> bool:
        """Not while nothing is read: the answer would not be, either. The run says again and again what it wants."""
        return not self._stopped and self._loss is None and not self._is_full

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Reading goes on meanwhile: the answer comes behind the letters that are on their way."""
        self._is_asking = True
        try:
            yield
        finally:
            self._is_asking = False
            self._pause_if_full()

    def _leave(self) -> None:
        self._channels.leave()
        self._ready.clear()
        self._read_on()


class DrainChannels:
    """The channels of a recovery: the one that it consumes on, and those where letters that are held were left behind.

    `consume` on a connection, then `allow` and `widen` as the run goes on.
    """

    def __init__(
        self,
        queue: str,
        budget: DeliveryBudget,
        *,
        on_arrived: Callable[[list[Delivery]], None],
        on_lost: Callable[[BrokerError | None], None],
    ) -> None:
        self._queue = queue
        self._budget = budget
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._current: ConsumerChannel | None = None  # that we consume on
        self._all: dict[int, ConsumerChannel] = {}
        self._left: list[ConsumerChannel] = []  # after a loss: nothing of these counts any more
        self._count = 0
        self._fresh_count = 0  # with such a prefetch consuming goes on on a fresh channel, as soon as it can
        self._fresh_by_s = 0.0
        self._moves_on = True

    def find(self, number: int) -> ConsumerChannel | None:
        """The channel of this number; None when it was lost."""
        return self._all.get(number)

    @property
    def is_open(self) -> bool:
        """Whether letters can be settled."""
        return any(channel.is_open for channel in self._all.values())

    @property
    def capacity_count(self) -> int:
        """How many letters may be in hand at once."""
        return self._budget.capacity_count + self._held_elsewhere_count

    async def consume(self, connection: Connection, capacity_count: int) -> str:
        """From the beginning, on this connection; answers the consumer's tag."""
        await self.close()
        self._connection = connection
        self._current = channel = await self._open()
        self._budget.capacity_count = 0
        wanted = self._budget.wanted_count
        most = capacity_count if wanted is None else max(1, wanted)
        await self._add_consumer(channel, min(capacity_count, PREFETCH_MAX, most))
        return channel.tags[0]

    async def allow(self) -> None:
        """As many letters may come as the budget says are wanted."""
        channel = self._current
        if channel is None or not channel.is_open:
            return
        need = self._budget.need_count
        if need == 0 and channel.tags and (self._budget.wanted_count == 0 or channel.tracker.pending):
            # All that are wanted are here. Acks that wait can go, so that a kill brings few letters back.
            await self._cancel(channel)
        elif need and not channel.tags:
            # Nobody consumes, and one that was counted turned out to be none of those: so many are still to come.
            await self._add_consumer(channel, min(need, PREFETCH_MAX))
        elif channel.is_slow and not self._fresh_count:
            self._plan_to_move_on(self._budget.capacity_count)
        if self._fresh_count:
            await self._move_on(channel)
        self.flush()

    async def widen(self, capacity_count: int) -> None:
        """Consume with another prefetch; that of a consumer which runs cannot be changed."""
        channel = self._current
        if channel is None or not channel.tags:
            return  # after a loss it is for `consume` to find out whether the queue is still there
        elsewhere = self._held_elsewhere_count
        more = self._budget.widened_by(capacity_count - elsewhere, unacked_count=channel.unacked_count)
        if more <= 0 or self._fresh_count:
            return
        if not self._plan_to_move_on(capacity_count - elsewhere - channel.held_count):
            await self._add_consumer(channel, min(more, PREFETCH_MAX))

    async def stop(self) -> None:
        """Consume no more."""
        if self._current is not None and self._current.is_open:
            await self._cancel(self._current)

    def flush(self) -> None:
        """Send acks: near the end as many as make the broker send no more letters than are wanted."""
        for channel in self._all.values():
            if channel is not self._current:
                channel.flush()
            elif channel.tracker.pending and not self._fresh_count:
                channel.flush(self._budget.acks_count_max(channel.unacked_count))

    def flush_all(self) -> None:
        """Send all acks. Nobody consumes any more, or letters that come for these go back at once."""
        self._budget.capacity_count = self._fresh_count = 0
        self.flush()

    async def give_back_all(self) -> int:
        """Everything that is unsettled; answers how much. One channel after the other, the oldest letters first."""
        self.flush()
        return sum([await channel.give_back_all() for channel in self._all.values() if channel.is_open])

    def leave(self) -> None:
        """Hear nothing more of any of them: what is unsettled is the broker's again, or goes back to it."""
        for channel in self._all.values():
            channel.leave()
        self._left += self._all.values()
        self._all.clear()
        self._current = None

    async def close(self) -> None:
        """Close the channels that were left."""
        for channel in self._left:
            await channel.close()
        self._left.clear()

    # Inside.

    async def _open(self) -> ConsumerChannel:
        assert self._connection is not None  # noqa: S101  consume() comes first
        self._count += 1
        channel = ConsumerChannel(self._count, on_arrived=self._on_arrived, on_lost=self._on_lost)
        channel.opened(await self._connection.channel(channel))
        self._all[channel.number] = channel
        return channel

    def _plan_to_move_on(self, capacity_count: int) -> bool:
        """Consume on a fresh channel soon, so many at once; False near the end, and where that failed before."""
        channel_max = self._connection.session.channel_max if self._connection else 0
        need = self._budget.need_count
        is_far = need is None or need >= self._budget.capacity_count + capacity_count
        has_room = len(self._all) < min(CHANNELS_COUNT_MAX, (channel_max or PREFETCH_MAX) // 2)
        if capacity_count <= 0 or not is_far or not has_room or not self._moves_on:
            return False
        self._fresh_count = min(capacity_count, PREFETCH_MAX)
        self._fresh_by_s = asyncio.get_running_loop().time() + FILL_TIMEOUT_S
        return True

    async def _move_on(self, old: ConsumerChannel) -> None:
        """When nothing is on its way on the old channel: it would be returned when its consumer is cancelled, or
        overtaken. Until then acks wait, so that the broker comes to have sent all that it may."""
        if old.unacked_count >= self._budget.capacity_count:
            prefetch = self._fresh_count
            fresh = await self._open()
            await self._cancel(old)
            self._current = fresh
            await self._add_consumer(fresh, prefetch)
        elif asyncio.get_running_loop().time() > self._fresh_by_s:
            self._fresh_count, self._moves_on = 0, False  # somebody else takes letters as well

    async def _add_consumer(self, channel: ConsumerChannel, prefetch: int) -> None:
        self._budget.capacity_count += prefetch
        await channel.consume(self._queue, prefetch)

    async def _cancel(self, channel: ConsumerChannel) -> None:
        """Consume no more. All acks may go then: nothing comes in the place of what they settle."""
        await channel.cancel()
        self.flush_all()

    @property
    def _held_elsewhere_count(self) -> int:
        """Letters in hand of consumers that have ended."""
        return sum(
            channel.tracker.past_count if channel is self._current else channel.held_count
            for channel in self._all.values()
        )


class DeliveryBudget:
    """How many letters may be under way, by their sizes so far, and how many the broker may still send, so that it
    never sends more than are wanted. Pure.

    A letter that is delivered and not wanted has to be given back, which counts as a return on a quorum queue, and puts
    it behind newer ones on RabbitMQ 3. The broker sends up to the prefetch, and one more for every ack: so near the end
    acks wait until the last wanted letter has come. By then nobody consumes any more, and they can go.

    `capacity_count` is what the consumers of a channel may have unacked, `wanted_count` how many are to come.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.capacity_count = 0
        self.wanted_count: int | None = None  #: beside those that were taken; None: whatever there is
        self.ready: Sized = ()  #: those that are here and not taken yet
        self._count_max = limits.window_count_max
        self._bytes_max = limits.window_bytes_max
        self._count = self._bytes = 0

    @property
    def fits_count(self) -> int:
        """How many letters fit into the window; at least one, however large."""
        if not self._count:
            return min(CAPACITY_COUNT_FIRST, self._count_max)
        return min(self._count_max, max(1, self._bytes_max * self._count // max(1, self._bytes)))

    @property
    def need_count(self) -> int | None:
        """How many more are to be delivered; None: whatever there is."""
        return None if self.wanted_count is None else max(0, self.wanted_count - len(self.ready))

    def came(self, count: int, size_bytes: int) -> None:
        """So many came, of so many bytes together."""
        self._count += count
        self._bytes += size_bytes

    def taken(self, count: int) -> None:
        """So many were taken; whether each was one of those wanted is said later."""
        if self.wanted_count is not None:
            self.wanted_count = max(0, self.wanted_count - count)

    def widened_by(self, capacity_count: int, *, unacked_count: int) -> int:
        """By how much the prefetch may grow towards `capacity_count`."""
        more = capacity_count - self.capacity_count
        need = self.need_count
        return more if need is None else min(more, need - self._room_count(unacked_count))

    def acks_count_max(self, unacked_count: int) -> int | None:
        """How many acks may be sent now; None: all. `unacked_count` is the broker's: acks that wait are in it."""
        need = self.need_count
        if need is None or not self.capacity_count:
            return None
        return max(0, need - self._room_count(unacked_count))

    def _room_count(self, unacked_count: int) -> int:
        """What the broker may send without another ack."""
        return max(0, self.capacity_count - unacked_count)


async def take_lock(connection: Connection, queue: str, *, patience_s: float) -> list[str]:
    """The right to recover a queue: an exclusive queue of a fixed name, which dies with its connection. An exclusive
    consumer would not do: quorum queues take a second one without a word.

    Returns warnings: without the permission to take it, a run goes on. Raises RecoveryLocked.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    name = lock_name(queue)
    while True:
        try:
            await connection.ask(methods.QueueDeclare(queue=name, exclusive=True, durable=False))
            return []
        except BrokerRefused as error:
            if error.reply_code == ACCESS_REFUSED:
                emit("recovery.unlocked", queue=queue, error=error.message)
                return [f"no lock could be taken, another recovery may run beside this; {error.message}"]
            if error.reply_code != RESOURCE_LOCKED:
                raise
            if loop.time() >= deadline_s:
                text = f"another recovery of '{queue}' is running; it holds queue '{name}'"
                raise RecoveryLocked(f"{text}, wait for its end or stop it") from error
        await asyncio.sleep(LOCK_STEP_S)


def is_name(text: str) -> bool:
    """Whether the broker could have a queue or an exchange of this name."""
    return len(text.encode("utf-8", "surrogateescape")) <= NAME_BYTES_MAX


def lock_name(queue: str) -> str:
    """The exclusive queue that stands for the right to recover this one."""
    name = LOCK_PREFIX + queue
    if is_name(name):
        return name
    return LOCK_PREFIX + hashlib.sha256(queue.encode("utf-8", "surrogateescape")).hexdigest()


def _owned_bytes(deliveries: Iterable[Delivery]) -> int:
    """What letters in hand take, with their copies."""
    return sum([len(one.properties) * 2 + len(one.body) for one in deliveries])
