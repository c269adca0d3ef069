"""Consumes one queue on a connection of its own, settles in batches, and never stops in silence.

The broker may cancel the consumer, close the channel (a message was held for too long) or be gone: consuming then
goes on by itself after a wait, or `batch` raises. Deliveries of the old channel are the broker's again; settling one
of them does nothing: the message is not lost, it comes again, and the work is done twice.

AMQP's prefetch counts messages, not bytes: with a limit in bytes it begins with one, and follows the largest so far.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, Self

from holdfast.core.message import Delivery
from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.engines.rabbitmq.connection import Connection, passes
from holdfast.engines.rabbitmq.consumer_channel import ConsumerChannel, count_consumers, wait_until_settled
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.errors import BrokerError, BrokerLost, ConsumerLost
from holdfast.telemetry.events import emit

PREFETCH = 4000
PREFETCH_MAX = 65_535
DOWN_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 10.0
#: How many are pushed before it is known how large they are, where that matters.
FIRST_COUNT = 1


class ResumingConsumer:
    """`async with ResumingConsumer(url, "q") as consumer:`, then `batch()` and `ack()`.

    Opening it raises BrokerError: at the start nothing is retried, so that a wrong name is seen at once. With
    `on_start="resume"`, for a broker that has answered before, only what it refuses is raised.
    """

    def __init__(
        self,
        url: BrokerUrl,
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
        self.interruptions_count = 0
        self.on_interrupted: Callable[[], None] = lambda: None  #: before the deliveries of the channel are let go of
        self.stood_count = 0  #: how many messages had come before, or stood in the queue, when consuming was resumed
        self._lost_count = 0
        self._url = url.named(f"holdfast consumer of {queue}")
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
        self._current = self._channel(0)  # that we consume on, or did last
        self._keeper: asyncio.Task[None] | None = None
        self._count_before: int | None = None  # consumers of the queue while ours was certainly among them
        self._flush_due = False
        self._stopping = False

    @property
    def connected(self) -> bool:
        """Whether messages can come now."""
        return self._current.is_open and bool(self._current.tags)

    @property
    def unsettled_count(self) -> int:
        """Messages of ours that are neither acked nor given back."""
        return len(self._current.tracker)

    def holds(self, delivery: Delivery) -> bool:
        """Whether it came on the channel that we consume on now; if not, the broker has it again."""
        return delivery.channel == self._current.number and not self._current.is_left

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

    def ack(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """These are done. The frames go out together, at the end of this round of the event loop.

        Answers those that are the broker's again: they come a second time.
        """
        number = self._current.number
        tags = [delivery.tag for delivery in deliveries if delivery.channel == number]
        missed = self._current.tracker.ack(tags)
        self._flush_soon()
        if len(tags) == len(deliveries) and not missed:
            return ()
        return [one for one in deliveries if one.channel != number or one.tag in missed]

    def give_back(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Back to the queue (nack with requeue); at once, so hold them rather than give back in a loop."""
        return self._nack(deliveries, requeue=True)

    def dead_letter(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """To the queue's dead-letter exchange (nack without requeue). Without one, the broker deletes them."""
        return self._nack(deliveries, requeue=False)

    async def stop(self) -> None:
        """No new messages; what is unsettled can still be settled. Raises BrokerError when the broker is gone."""
        self._stopping = True
        self._news.set()
        await self._look_around()
        await self._current.cancel()

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
        current, connection = self._current, self._connection
        if connection is None or not current.is_open:
            return
        await self._look_around()
        # In this order: given back before the cancel, a quorum queue loses the order of its messages.
        await current.cancel(timeout_s=CLOSE_TIMEOUT_S)
        self.flush()
        await current.give_back_all()
        current.leave()  # what ends now, ends on purpose
        if self._count_before is not None:
            await wait_until_settled(connection, self.queue, count_before=self._count_before)
        await current.close()

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

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def flush(self) -> None:
        """Send what was settled, now."""
        self._flush_due = False
        self._current.flush()

    # What the channel calls.

    def _arrived(self, deliveries: list[Delivery]) -> None:
        self._ready.extend(deliveries)
        self._news.set()

    def _interrupted(self, error: BrokerError | None) -> None:
        """Whatever of the channel nobody has settled is the broker's again, also what nobody has taken yet."""
        self._trouble = error or BrokerLost(f"the broker cancelled the consumer; queue '{self.queue}'")
        self.flush()  # after a cancel the channel lives: what was settled before still counts
        self.interruptions_count += 1
        self.on_interrupted()
        self._lost_count += self.unsettled_count
        self._current.leave()
        self._ready.clear()
        self._broken.set()

    # Inside.

    def _nack(self, deliveries: Sequence[Delivery], *, requeue: bool) -> Sequence[Delivery]:
        number, take = self._current.number, self._current.tracker.nack
        missed = [one for one in deliveries if one.channel != number or not take(one.tag, requeue=requeue)]
        self._flush_soon()
        return missed

    def _flush_soon(self) -> None:
        if not self._flush_due and self._current.tracker.pending:
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
        current = self._current
        if not current.tags:
            return
        with suppress(BrokerError):  # the channel is gone: consuming is taken up again with the new number
            await current.cancel()
            if self._has_left(current):
                return
            await current.consume(self.queue, prefetch)
            if self._has_left(current):  # it was stopped while there was nothing to cancel
                await current.cancel()

    def _has_left(self, channel: ConsumerChannel) -> bool:
        return self._stopping or channel.is_left

    async def _look_around(self) -> None:
        """Count the queue's consumers while ours is one: it is not cancelled yet, or holds messages still."""
        if self._connection is not None and (self._current.tags or self.unsettled_count):
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
                emit("broker.lost", address=str(self._url), error=error)

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
        self._connection = connection = await Connection.renewed(self._connection, self._url)
        await self._current.close()
        current = self._channel(self._current.number + 1)
        current.opened(await connection.channel(current))
        self._current = current
        if self.interruptions_count:
            self.stood_count = (await connection.depth(self.queue)).ready + self._lost_count
            self._lost_count = 0
        await current.consume(self.queue, self._prefetch)
        self._patience.worked(asyncio.get_running_loop().time())

    def _channel(self, number: int) -> ConsumerChannel:
        return ConsumerChannel(number, on_arrived=self._arrived, on_lost=self._interrupted)
