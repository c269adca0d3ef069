"""Consumes one queue on a connection of its own, settles in batches, and never stops in silence.

The broker may cancel the consumer, close the channel (a message was held for too long) or be gone: consuming then
goes on by itself after a wait, or `batch` raises. Deliveries of the old channel are the broker's again; settling one
of them does nothing but count, because the message will come again.

AMQP's prefetch counts messages, not bytes: with a limit in bytes it begins with one, and follows the largest so far.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from pamqp import commands as amqp

from holdfast.core.message import Delivery
from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection, passes
from holdfast.engines.rabbitmq.consumer_channel import AckTracker, count_consumers, wait_until_settled
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Cancelled, Event
from holdfast.errors import BrokerError, BrokerLost, ConsumerLost
from holdfast.telemetry.events import emit

PREFETCH = 4000
PREFETCH_MAX = 65_535
DOWN_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 10.0
DELIVERIES_ALONE = {Delivery}
#: How many are pushed before it is known how large they are, where that matters.
FIRST_COUNT = 1


class _Listener:
    """The listener of one channel. Once the consumer has left that channel, nothing of it is heard any more."""

    def __init__(self, consumer: RabbitConsumer) -> None:
        self._consumer = consumer

    def on_events(self, events: list[Event]) -> None:
        if not self._consumer.listens_to(self):
            return
        if set(map(type, events)) == DELIVERIES_ALONE:
            self._consumer.take_in(events)  # type: ignore[arg-type]
            return
        self._consumer.take_in([event for event in events if type(event) is Delivery])
        if any(isinstance(event, Cancelled) for event in events):
            text = f"the broker cancelled the consumer; queue '{self._consumer.queue}'"
            self._consumer.interrupted(BrokerLost(text))

    def on_closed(self, error: BrokerError, close: Close) -> None:
        if self._consumer.listens_to(self):
            self._consumer.interrupted(error)

    def on_writable(self) -> None:
        """Settling is small, and never waits for the socket."""


class RabbitConsumer:
    """`async with RabbitConsumer(address, "q") as consumer:`, then `batch()` and `ack()`.

    Opening it raises BrokerError: at the start nothing is retried, so that a wrong name is seen at once. With
    `on_start="resume"`, for a broker that has answered before, only what it refuses is raised.
    """

    def __init__(
        self,
        address: BrokerUrl,
        queue: str,
        *,
        prefetch: int = PREFETCH,
        bytes_max: int = 0,
        on_loss: Literal["resume", "raise"] = "resume",
        on_start: Literal["resume", "raise"] = "raise",
        down_timeout_s: float = DOWN_TIMEOUT_S,
        backoff: Backoff | None = None,
    ) -> None:
        if not 1 <= prefetch <= PREFETCH_MAX:
            # Zero means "no limit" to the broker, and 2000 to a quorum queue.
            raise ValueError(f"prefetch must be from 1 to {PREFETCH_MAX}, not {prefetch}")
        self.queue = queue
        self.counts: Counter[str] = Counter()
        self._address = address.named(f"holdfast consumer of {queue}")
        self._prefetch = FIRST_COUNT if bytes_max else prefetch
        self._prefetch_max = prefetch
        self._bytes_max = bytes_max
        self._largest_bytes = 0  # nobody has seen one yet
        self._resumes = on_loss == "resume"
        self._starts_later = on_start == "resume"
        self._down_timeout_s = down_timeout_s
        self._patience = BackoffTimer(backoff or Backoff())
        self._ready: deque[Delivery] = deque()
        self._news = asyncio.Event()
        self._broken = asyncio.Event()
        self._trouble: BrokerError | None = None
        self._failure: BrokerError | None = None
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._listener: _Listener | None = None
        self._tracker = AckTracker(0)
        self._generation = 0
        self._keeper: asyncio.Task[None] | None = None
        self._consumer_tag = ""
        self._count_before: int | None = None  # consumers of the queue while ours was certainly among them
        self._flush_due = False
        self._stopping = False

    @property
    def connected(self) -> bool:
        """Whether messages can come now."""
        return self._channel is not None and self._channel.is_open and bool(self._consumer_tag)

    @property
    def unsettled_count(self) -> int:
        """Messages of ours that are neither acked nor given back."""
        return len(self._tracker)

    def holds(self, delivery: Delivery) -> bool:
        """Whether it came on the channel that we consume on now; if not, the broker has it again."""
        return delivery.channel == self._generation

    async def batch(self, *, count_max: int = 1000, timeout_s: float | None = None) -> list[Delivery]:
        """Wait for messages and take at most `count_max`; an empty list when none came in time, or after `stop`.

        Raises ConsumerLost when consuming ended for good.
        """
        if not self._ready:
            with suppress(TimeoutError):  # what came in that very moment is there all the same
                async with asyncio.timeout(timeout_s):
                    await self._wait_for_news()
        ready = self._ready
        if len(ready) <= count_max:
            batch = list(ready)
            ready.clear()
        else:
            batch = [ready.popleft() for _ in range(count_max)]
        if self._bytes_max and batch:
            await self._fit(max(len(delivery.body) for delivery in batch))
        return batch

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while batch := await self.batch(count_max=1):
            yield batch[0]

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """These are done. The frames go out together, at the end of this round of the event loop.

        Answers those that are the broker's again: they come a second time.
        """
        generation = self._generation
        tags = [delivery.tag for delivery in deliveries if delivery.channel == generation]
        missed = self._tracker.ack_all(tags)
        self._settled("acked", len(tags) - len(missed), len(deliveries))
        if len(tags) == len(deliveries) and not missed:
            return ()
        return [one for one in deliveries if one.channel != generation or one.tag in missed]

    def give_back(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Back to the queue (nack with requeue); at once, so hold them rather than give back in a loop."""
        return self._nack("given_back", deliveries, requeue=True)

    def dead_letter(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """To the queue's dead-letter exchange (nack without requeue). Without one, the broker deletes them."""
        return self._nack("dead_lettered", deliveries, requeue=False)

    async def stop(self) -> None:
        """No new messages; what is unsettled can still be settled. Raises BrokerError when the broker is gone."""
        self._stopping = True
        self._news.set()
        await self._look_around()
        if self._channel is not None and self._consumer_tag:
            tag, self._consumer_tag = self._consumer_tag, ""
            await self._channel.call(amqp.Basic.Cancel(tag))

    async def close(self) -> None:
        """Stop, give everything unsettled back, and wait until the broker has taken in all of it."""
        self._stopping = True
        try:
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait([self._keeper])
            await self._wind_up()
        except BrokerError as error:
            self._trouble = error  # then the broker gives them back by itself
        finally:  # also when whoever closes us is cancelled
            if self._connection is not None:
                await self._connection.close()

    async def _wind_up(self) -> None:
        channel, connection = self._channel, self._connection
        if connection is None or channel is None or not channel.is_open:
            return
        await self._look_around()
        # In this order: given back before the cancel, a quorum queue loses the order of its messages.
        if self._consumer_tag:
            await channel.call(amqp.Basic.Cancel(self._consumer_tag), timeout_s=CLOSE_TIMEOUT_S)
        self.flush()
        self._tracker.nack_all()
        self.flush()
        self._listener = None  # what ends now, ends on purpose
        if self._count_before is not None:
            await wait_until_settled(connection, self.queue, count_before=self._count_before)
        await connection.close_channel(channel)

    async def __aenter__(self) -> Self:
        try:
            await self._consume()
        except BaseException as error:
            if not (self._starts_later and isinstance(error, BrokerError) and passes(error)):
                await self.close()
                raise
            self._trouble = error
            self._broken.set()
        self._keeper = asyncio.create_task(self._keep(), name=f"consumer of {self.queue}")
        self._keeper.add_done_callback(self._keeper_ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def flush(self) -> None:
        """Send what was settled, now."""
        self._flush_due = False
        if self._channel is not None and self._tracker.pending:
            self._channel.write(self._tracker.flush())

    # What the channel's listener calls.

    def listens_to(self, listener: _Listener) -> bool:
        """Whether this is the channel that we consume on now."""
        return listener is self._listener

    def take_in(self, deliveries: list[Delivery]) -> None:
        """Messages came on the channel that we consume on."""
        generation = self._generation
        for delivery in deliveries:
            # The channel's number is of no use to anybody; which of our channels it came on, is.
            delivery.channel = generation
        self._tracker.delivered_all([delivery.tag for delivery in deliveries])
        self._ready.extend(deliveries)
        self._news.set()

    def interrupted(self, error: BrokerError) -> None:
        """Whatever of the old channel nobody has settled is the broker's again, also what nobody has taken yet."""
        self._trouble = error
        self._consumer_tag = ""
        self._listener = None
        self.flush()  # after a cancel the channel lives: what was settled before still counts
        self._generation += 1
        self.counts["interrupted"] += 1
        self.counts["taken_back"] += len(self._tracker)
        self._tracker = AckTracker(0)
        self._ready.clear()
        self._broken.set()

    # Inside.

    def _nack(self, what: str, deliveries: Sequence[Delivery], *, requeue: bool) -> Sequence[Delivery]:
        generation, take = self._generation, self._tracker.nack
        missed = [one for one in deliveries if one.channel != generation or not take(one.tag, requeue=requeue)]
        self._settled(what, len(deliveries) - len(missed), len(deliveries))
        return missed

    def _settled(self, what: str, taken: int, count: int) -> None:
        self.counts[what] += taken
        # The others are the broker's again and come a second time: the message is not lost, the work is done twice.
        self.counts["settled_in_vain"] += count - taken
        if not self._flush_due and self._tracker.pending:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    async def _fit(self, largest_bytes: int) -> None:
        """Let as many be ours as their size allows: as many as that of the largest one so far."""
        if largest_bytes <= self._largest_bytes and self._largest_bytes:
            return
        is_first, self._largest_bytes = not self._largest_bytes, max(largest_bytes, 1)
        wanted = max(1, min(self._prefetch_max, self._bytes_max // self._largest_bytes))
        if is_first or wanted < self._prefetch:
            await self._begin_anew(wanted)

    async def _begin_anew(self, prefetch: int) -> None:
        """With another prefetch, on the same channel; what is here already stays ours and is not counted."""
        self._prefetch = prefetch
        channel, tag = self._channel, self._consumer_tag
        if channel is None or not tag:
            return
        self._consumer_tag = ""
        with suppress(BrokerError):  # the channel is gone: consuming is taken up again with the new number
            await channel.call(amqp.Basic.Cancel(tag))
            if self._has_left(channel):
                return
            await channel.call(amqp.Basic.Qos(prefetch_count=prefetch))
            answer = await channel.call(methods.Consume(queue=self.queue))
            tag = str(getattr(answer, "consumer_tag", ""))
            if self._has_left(channel):  # it was stopped while there was nothing to cancel
                await channel.call(amqp.Basic.Cancel(tag))
            else:
                self._consumer_tag = tag

    def _has_left(self, channel: Channel) -> bool:
        return self._stopping or channel is not self._channel

    async def _look_around(self) -> None:
        """Count the queue's consumers while ours is one: it is not cancelled yet, or holds messages still."""
        if self._connection is not None and (self._consumer_tag or self._tracker):
            self._count_before = await count_consumers(self._connection, self.queue)

    async def _wait_for_news(self) -> None:
        while not self._ready and not self._stopping:
            if self._failure is not None:
                raise ConsumerLost(f"consuming ended; queue '{self.queue}': {self._failure}") from self._failure
            self._news.clear()
            await self._news.wait()

    async def _keep(self) -> None:
        """Take consuming up again whenever it is interrupted, until that fails for too long."""
        while True:
            await self._broken.wait()
            if self._stopping:
                return
            error = self._trouble
            if not self._resumes:
                self._end(error or BrokerLost("the connection was lost"))
                return
            emit("broker.consumer_lost", queue=self.queue, error=error)
            if not await self._resume():
                return
            emit("broker.consumer_resumed", queue=self.queue)

    async def _resume(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._down_timeout_s
        while True:
            await asyncio.sleep(self._patience.delay_s(loop.time()))
            try:
                await self._consume()
                return True
            except BrokerError as error:
                self._trouble = error
                if loop.time() > deadline:
                    self._end(error)
                    return False
                emit("broker.lost", address=str(self._address), error=error)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """A bug in the keeper must not look like an empty queue."""
        if not keeper.cancelled() and (bug := keeper.exception()) is not None:
            self._end(BrokerError(f"consuming met a bug; {type(bug).__name__}: {bug}"))

    def _end(self, error: BrokerError) -> None:
        self._failure = error
        self._news.set()

    async def _consume(self) -> None:
        """A fresh channel every time: a tag of the old one must not settle a message of the new one."""
        self._broken.clear()
        if self._connection is None or not self._connection.is_open:
            if self._connection is not None:
                await self._connection.close()
            self._connection = await Connection.open(self._address)
        elif self._channel is not None and self._channel.is_open:
            await self._connection.close_channel(self._channel)
        listener = _Listener(self)
        channel = await self._connection.channel(listener)
        await channel.call(amqp.Basic.Qos(prefetch_count=self._prefetch))
        self._tracker = AckTracker(channel.number)
        self._channel, self._listener = channel, listener
        answer = await channel.call(methods.Consume(queue=self.queue))
        self._consumer_tag = str(getattr(answer, "consumer_tag", ""))
        self._patience.worked(asyncio.get_running_loop().time())
