"""The channels of a recovery: the one that it consumes on, and those where letters that are held were left behind.

How many letters the broker sends is bounded by what is wanted (`allowance`), and the prefetch follows their size. When
either the prefetch has to change or letters that are held make acks slow (`letter_line`), consuming goes on on a fresh
channel: on one with several consumers a quorum queue gives letters back in the order of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized

from pamqp import commands as amqp

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.allowance import DeliveryBudget
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.consumer_channel import ConsumerChannel
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BrokerError

PREFETCH_MAX = 65_535
#: Channels that letters may be held on, of the 2 047 that a connection may have.
LINES_COUNT_MAX = 500
#: Until a consumer has been sent all that its prefetch allows, when there are more letters than that.
FILL_TIMEOUT_S = 2.0


class Lines:
    """`consume` on a connection, then `want` and `widen` as the run goes on. `ready` is what nobody has taken yet."""

    def __init__(
        self,
        queue: str,
        ready: Sized,
        *,
        on_arrived: Callable[[list[Delivery]], None],
        on_lost: Callable[[BrokerError], None],
    ) -> None:
        self.allowance = DeliveryBudget()
        self._queue = queue
        self._ready = ready
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._current: ConsumerChannel | None = None  # that we consume on
        self._all: dict[int, ConsumerChannel] = {}
        self._left: list[ConsumerChannel] = []  # after a loss: nothing of these counts any more
        self._count = 0
        self._fresh_count = 0  # with such a prefetch consuming goes on on a fresh line, as soon as it can
        self._fresh_by_s = 0.0
        self._moves_on = True

    def find(self, number: int) -> ConsumerChannel | None:
        """The line of this number; None when it was lost."""
        return self._all.get(number)

    @property
    def is_open(self) -> bool:
        """Whether letters can be settled."""
        return any(line.is_open for line in self._all.values())

    @property
    def capacity_count(self) -> int:
        """How many letters may be in hand at once."""
        return self.allowance.capacity_count + self._held_elsewhere_count

    async def consume(self, connection: Connection, capacity_count: int) -> str:
        """From the beginning, on this connection; answers the consumer's tag."""
        for line in self._left:
            if line.channel is not None and line.is_open:
                await connection.close_channel(line.channel)
        self._left.clear()
        self._connection = connection
        self._current = line = await self._open()
        self.allowance.capacity_count = 0
        wanted = self.allowance.wanted_count
        most = capacity_count if wanted is None else max(1, wanted)
        await self._add_consumer(line, min(capacity_count, PREFETCH_MAX, most))
        return line.tags[0]

    async def want(self, count: int | None) -> None:
        """So many letters are to come; see `ports.recovery.DeadLetters.want`."""
        line = self._current
        if line is None or not line.is_open:
            return
        need = self.allowance.need_count(len(self._ready))
        if need == 0 and line.tags and (count == 0 or line.books.pending):
            # All that are wanted are here. Acks that wait can go, so that a kill brings few letters back.
            await self._cancel(line)
        elif need and not line.tags:
            # Nobody consumes, and one that was counted turned out to be none of those: so many are still to come.
            await self._add_consumer(line, min(need, PREFETCH_MAX))
        elif line.is_slow and not self._fresh_count:
            self._plan_to_move_on(self.allowance.capacity_count)
        if self._fresh_count:
            await self._move_on(line)
        self.flush()

    async def widen(self, capacity_count: int) -> None:
        """Consume with another prefetch; that of a consumer which runs cannot be changed."""
        line = self._current
        if line is None or not line.tags:
            return  # after a loss it is for `consume` to find out whether the queue is still there
        elsewhere = self._held_elsewhere_count
        more = self.allowance.widened_by(
            capacity_count - elsewhere, unacked_count=line.unacked_count, ready_count=len(self._ready)
        )
        if more <= 0 or self._fresh_count:
            return
        if not self._plan_to_move_on(capacity_count - elsewhere - line.held_count):
            await self._add_consumer(line, min(more, PREFETCH_MAX))

    async def stop(self) -> None:
        """Consume no more."""
        if self._current is not None and self._current.is_open:
            await self._cancel(self._current)

    def flush(self) -> None:
        """Send acks: near the end as many as make the broker send no more letters than are wanted."""
        for line in self._all.values():
            if line is not self._current:
                line.flush()
            elif line.books.pending and not self._fresh_count:
                unacked_count, ready_count = line.unacked_count, len(self._ready)
                line.flush(self.allowance.acks_count_max(unacked_count=unacked_count, ready_count=ready_count))

    def flush_all(self) -> None:
        """Send all acks. Nobody consumes any more, or letters that come for these go back at once."""
        self.allowance.capacity_count = self._fresh_count = 0
        self.flush()

    async def give_back(self) -> int:
        """Everything that is unsettled; answers how much. One line after the other, the oldest letters first."""
        self.flush()
        return sum([await line.give_back() for line in self._all.values() if line.is_open])

    def leave(self) -> None:
        """Hear nothing more of any of them: what is unsettled is the broker's again, or goes back to it."""
        for line in self._all.values():
            line.leave()
        self._left += self._all.values()
        self._all.clear()
        self._current = None

    async def close(self) -> None:
        """Close the channels that were left."""
        if self._connection is not None:
            for line in self._left:
                if line.channel is not None:
                    await self._connection.close_channel(line.channel)
        self._left.clear()

    # Inside.

    async def _open(self) -> ConsumerChannel:
        assert self._connection is not None  # noqa: S101  consume() comes first
        self._count += 1
        line = ConsumerChannel(self._count, on_arrived=self._on_arrived, on_lost=self._on_lost)
        line.opened(await self._connection.channel(line))
        self._all[line.number] = line
        return line

    def _plan_to_move_on(self, capacity_count: int) -> bool:
        """Consume on a fresh channel soon, so many at once; False near the end, and where that failed before."""
        channel_max = self._connection.session.channel_max if self._connection else 0
        need = self.allowance.need_count(len(self._ready))
        is_far = need is None or need >= self.allowance.capacity_count + capacity_count
        has_room = len(self._all) < min(LINES_COUNT_MAX, (channel_max or PREFETCH_MAX) // 2)
        if capacity_count <= 0 or not is_far or not has_room or not self._moves_on:
            return False
        self._fresh_count = min(capacity_count, PREFETCH_MAX)
        self._fresh_by_s = asyncio.get_running_loop().time() + FILL_TIMEOUT_S
        return True

    async def _move_on(self, old: ConsumerChannel) -> None:
        """When nothing is on its way on the old channel: it would be returned when its consumer is cancelled, or
        overtaken. Until then acks wait, so that the broker comes to have sent all that it may."""
        if old.unacked_count >= self.allowance.capacity_count:
            prefetch = self._fresh_count
            fresh = await self._open()
            await self._cancel(old)
            self._current = fresh
            await self._add_consumer(fresh, prefetch)
        elif asyncio.get_running_loop().time() > self._fresh_by_s:
            self._fresh_count, self._moves_on = 0, False  # somebody else takes letters as well

    async def _add_consumer(self, line: ConsumerChannel, prefetch: int) -> None:
        assert line.channel is not None  # noqa: S101
        self.allowance.capacity_count += prefetch
        line.consumers_count += 1
        await line.channel.call(amqp.Basic.Qos(prefetch_count=prefetch))
        answer = await line.channel.call(methods.Consume(queue=self._queue))
        line.tags.append(str(getattr(answer, "consumer_tag", "")))

    async def _cancel(self, line: ConsumerChannel) -> None:
        """Consume no more. All acks may go then: nothing comes in the place of what they settle."""
        assert line.channel is not None  # noqa: S101
        tags, line.tags = line.tags, []
        for tag in tags:
            await line.channel.call(amqp.Basic.Cancel(tag))
        line.books.consumer_ended()
        self.flush_all()

    @property
    def _held_elsewhere_count(self) -> int:
        """Letters in hand of consumers that have ended."""
        past = [line.books.past_count if line is self._current else line.held_count for line in self._all.values()]
        return sum(past)
