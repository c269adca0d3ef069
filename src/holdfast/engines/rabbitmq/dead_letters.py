"""One dead-letter queue for a recovery: letters in, copies out, and the settling of each.

One connection consumes, acks and holds the run's lock, another publishes: under an alarm the broker stops reading
from connections that publish, acks included. Reading pauses while the letters in hand are too many bytes, so that the
broker's prefetch, which counts letters, cannot fill our memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from pamqp import commands as amqp

from holdfast.core.message import Address as Destination
from holdfast.core.message import Message
from holdfast.core.routes import RouteTable
from holdfast.engines.rabbitmq.address import Address
from holdfast.engines.rabbitmq.allowance import Allowance
from holdfast.engines.rabbitmq.channel import Channel
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.dead_letters_check import Inspection
from holdfast.engines.rabbitmq.lane import Outgoing
from holdfast.engines.rabbitmq.publisher import Publisher
from holdfast.engines.rabbitmq.reading import read_message
from holdfast.engines.rabbitmq.recovery_lock import Deaf, take_lock
from holdfast.engines.rabbitmq.redriver import Copy, Redriver, as_put_back
from holdfast.engines.rabbitmq.rights import find_rights
from holdfast.engines.rabbitmq.told import Ear, Told
from holdfast.engines.rabbitmq.unsettled import Unsettled
from holdfast.engines.rabbitmq.wire import commands, methods
from holdfast.engines.rabbitmq.wire.events import Delivery
from holdfast.errors import BrokerError, BrokerLost
from holdfast.ports.recovery import Depth, Exported, Findings, OnOutcome, Taken

PREFETCH_MAX = 65_535
#: The copies on their way wait for their confirms here as well; more than this only costs memory.
PUBLISH_WINDOW_BYTES = 8 * 2**20
#: Another consumer that came while we ran is taken for ours: then it takes this long.
SETTLE_TIMEOUT_S, SETTLE_STEP_S = 10.0, 0.02


class RabbitDeadLetters:
    """`async with RabbitDeadLetters(…) as letters:`; see `ports.recovery.DeadLetters`."""

    def __init__(
        self, address: Address, queue: str, redriver: Redriver, *, management: str | None, window_bytes_max: int
    ) -> None:
        self.queue = queue
        self.warnings: list[str] = []
        self._address = address.named(f"holdfast recovery of {queue}")
        self._management = management
        self._redriver = redriver
        self._window_bytes_max = window_bytes_max
        self._publisher = Publisher(address, window_bytes=min(window_bytes_max, PUBLISH_WINDOW_BYTES))
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._ear: Ear | None = None
        self._books = Unsettled(0)
        self._generation = 0
        self._ready: deque[Delivery] = deque()
        self._owned_bytes = 0
        self._tags: list[str] = []
        self._allowance = Allowance()
        self._others_count = 0
        self._news = asyncio.Event()
        self._loss: BrokerError | None = None
        self._stopped = False
        self._keeps_leftovers = False
        self._inspection: Inspection | None = None

    async def connect(self) -> None:
        """Connect both. Raises BrokerError: at the start nothing is tried again."""
        self._connection = await Connection.open(self._address)
        await self._publisher.__aenter__()

    @property
    def trouble(self) -> str:
        if self._publisher.blocked:
            return f"the broker takes no publishes: {self._publisher.blocked}"
        return "" if self._publisher.connected else "no connection to publish on"

    @property
    def sent_again_count(self) -> int:
        return self._publisher.counts["sent_again"]

    @property
    def untaken_count(self) -> int:
        return len(self._ready)

    @property
    def capacity_count(self) -> int:
        return self._allowance.capacity_count

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Findings:
        assert self._connection is not None  # noqa: S101  connect() comes first
        queue = "" if targets_only else self.queue
        self._inspection = Inspection(self._connection, queue, self._management)
        self._redriver.blocked = self._inspection.blocked
        found = await self._inspection.run(table)
        found.rights = await find_rights(self._connection, self._publisher, queue, table, found, self._management)
        self._keeps_leftovers = found.delivery_limit is not None
        self._others_count = found.depth.consumers
        return found

    def receivers(self, address: Destination) -> Sequence[str]:
        return self._inspection.receivers(address) if self._inspection else ()

    async def open(self, *, capacity_count: int) -> str:
        assert self._connection is not None  # noqa: S101  connect() comes first
        self.warnings += await take_lock(self._connection, self.queue, patience_s=0.0)
        await self._consume(capacity_count)
        return self._tags[0]

    async def reopen(self, *, capacity_count: int) -> None:
        if self._connection is None or not self._connection.is_open:
            if self._connection is not None:
                await self._connection.close()
            self._connection = await Connection.open(self._address)
            # The broker may not have noticed yet that our old connection is gone, which holds the lock.
            patience_s = 2.0 * self._connection.session.heartbeat_s
            await take_lock(self._connection, self.queue, patience_s=patience_s)
        elif self._channel is not None and self._channel.is_open:
            await self._connection.close_channel(self._channel)
        await self._consume(capacity_count)

    async def want(self, count: int | None) -> None:
        self._allowance.wanted_count = count
        if self._stopped or self._loss is not None or self._channel is None or not self._channel.is_open:
            return
        need = self._allowance.need_count(len(self._ready))
        if count == 0 and self._tags:
            # Not before the last is taken: of those that are here some may not count, and what a consumer holds when it
            # is cancelled makes no room for others when it is acked.
            await self._cancel()
        elif need and not self._tags:
            # Nobody consumes, and one that was counted turned out to be none of those: so many are still to come.
            self._allowance.capacity_count = self._unacked_count
            await self._add_consumer(min(need, PREFETCH_MAX))
        self._flush()

    async def widen(self, capacity_count: int) -> None:
        """One more consumer on the same channel: the prefetch of one that runs cannot be changed."""
        if self._stopped or self._loss is not None or not self._tags:
            return  # after a loss it is for `reopen` to find out whether the queue is still there
        more = self._allowance.widened_by(
            capacity_count, unacked_count=self._unacked_count, ready_count=len(self._ready)
        )
        if more > 0:
            await self._add_consumer(min(more, PREFETCH_MAX))

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[Taken]:
        if not self._ready:
            self._news.clear()
            if self._loss is None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._news.wait()
                except TimeoutError:
                    return ()
        if self._loss is not None:
            raise BrokerLost(f"consuming from '{self.queue}' was interrupted; {self._loss}") from self._loss
        ready, taken = self._ready, self._redriver.taken
        self._redriver.tick()
        count = min(count_max, len(ready))
        self._allowance.taken(count)
        return [taken(ready.popleft()) for _ in range(count)]

    def read(self, letter: Taken) -> Message:
        return read_message(letter.raw.delivery, self.queue)

    def export(self, letter: Taken) -> Exported:
        delivery: Delivery = letter.raw.delivery
        return Exported(
            exchange=delivery.exchange,
            routing_key=delivery.routing_key,
            properties=delivery.properties,
            body=delivery.body,
            message_id=self.read(letter).id,
        )

    def restored(self, letter: Exported) -> Taken:
        self._redriver.tick()
        return self._redriver.taken(
            Delivery(0, 0, False, letter.exchange, letter.routing_key, "", letter.properties, letter.body)
        )

    def send(self, letters: Sequence[Taken], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = []
        for letter in letters:
            copy: Copy = letter.raw
            address = letter.route.address
            assert address is not None  # noqa: S101  a letter without an address is held
            outgoing.append(Outgoing(address.exchange, address.routing_key, copy.properties, copy.delivery.body))
        self._publisher.send(outgoing, Told(letters, on_outcome), timeout_s=timeout_s)

    def put_back(self, letters: Sequence[Taken], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = []
        for letter in letters:
            delivery: Delivery = letter.raw.delivery
            outgoing.append(Outgoing("", self.queue, as_put_back(delivery), delivery.body))
        self._publisher.send(outgoing, Told(letters, on_outcome), timeout_s=timeout_s)

    def ack(self, letters: Sequence[Taken]) -> Sequence[Taken]:
        generation, freed_bytes = self._generation, 0
        tags: dict[int, Taken] = {}
        missed = []
        for letter in letters:
            delivery: Delivery = letter.raw.delivery
            if letter.in_hand and delivery.channel == generation:
                tags[delivery.tag] = letter
                freed_bytes += len(delivery.properties) * 2 + len(delivery.body)
            else:
                missed.append(letter)
        for tag in self._books.ack_all(tags):
            delivery = tags[tag].raw.delivery
            freed_bytes -= len(delivery.properties) * 2 + len(delivery.body)
            missed.append(tags[tag])
        self._free(freed_bytes)
        self._flush()
        return missed

    def forget(self, letter: Taken) -> None:
        copy: Copy = letter.raw
        if copy.delivery.body or copy.properties:
            if copy.delivery.channel == self._generation:
                self._free(len(copy.delivery.properties) * 2 + len(copy.delivery.body))
            copy.delivery.body = copy.delivery.properties = copy.properties = b""

    async def stop(self) -> None:
        self._stopped = True
        if self._channel is not None and self._channel.is_open:
            await self._cancel()

    def leftovers(self) -> Sequence[Taken]:
        ready, self._ready = self._ready, deque()
        return [self._redriver.taken(delivery) for delivery in ready] if self._keeps_leftovers else ()

    async def give_back(self) -> int:
        """All of the channel by one frame, tag 0: one by one is quadratic on a classic queue."""
        channel, connection = self._channel, self._connection
        if channel is None or connection is None or not channel.is_open:
            return 0
        self._flush()
        count = len(self._books)
        if count:
            channel.write(commands.nack(channel.number, 0, multiple=True, requeue=True))
        await self._settled()
        self._leave()
        await connection.close_channel(channel)
        return count

    async def _settled(self) -> None:
        """Wait until the queue has worked through what we sent, before the channel is closed.

        A channel passes on only some 30 acks to a quorum queue at once. It forgets the rest when it is closed, and the
        letters come back although they were acked. A consumer that is cancelled counts until its last letter is
        settled, so when ours are not counted any more, all is done.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLE_TIMEOUT_S
        while (await self.depth()).consumers > self._others_count and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_STEP_S)  # a broker has to be asked

    async def let_go(self) -> None:
        self._allowance.capacity_count = 0
        self._flush()  # letters that come for these go back at once
        self._leave()
        if self._connection is not None:
            await self._connection.close()
            self._connection = self._channel = None

    async def depth(self) -> Depth:
        if self._connection is None or not self._connection.is_open:
            self._connection = await Connection.open(self._address)
        channel = await self._connection.channel(Deaf())
        try:
            answer = await channel.call(methods.QueueDeclare(queue=self.queue, passive=True))
        finally:
            if channel.is_open:
                await self._connection.close_channel(channel)
        return Depth(
            ready=int(getattr(answer, "message_count", 0) or 0),
            consumers=int(getattr(answer, "consumer_count", 0) or 0),
        )

    async def close(self) -> None:
        self._leave()
        await self._publisher.close()
        if self._connection is not None:
            await self._connection.close()

    # What the channel's listener calls.

    def arrived(self, deliveries: list[Delivery]) -> None:
        """Letters came."""
        if not deliveries:
            return
        generation = self._generation
        size = 0
        for delivery in deliveries:
            delivery.channel = generation
            size += len(delivery.properties) * 2 + len(delivery.body)
        self._books.delivered_all([delivery.tag for delivery in deliveries])
        if self._stopped and not self._keeps_leftovers:
            return  # on their way when we said stop: they go back with the rest
        self._owned_bytes += size
        self._ready.extend(deliveries)
        self._news.set()
        if self._owned_bytes >= self._window_bytes_max and self._connection is not None:
            self._connection.pause_reading()

    def lost(self, error: BrokerError) -> None:
        """Whatever is unsettled is the broker's again."""
        self._allowance.capacity_count = 0  # nobody consumes
        self._flush()  # after a cancel the channel lives: what was settled before still counts
        self._loss = error
        self._leave()
        self._news.set()

    # Inside.

    async def _consume(self, capacity_count: int) -> None:
        assert self._connection is not None  # noqa: S101
        ear = Ear(self)
        channel = await self._connection.channel(ear)
        self._books = Unsettled(channel.number)
        self._generation += 1
        self._owned_bytes = 0
        self._loss = None
        self._channel, self._ear = channel, ear
        self._tags = []
        self._allowance.capacity_count = 0
        wanted = self._allowance.wanted_count
        await self._add_consumer(
            min(capacity_count, PREFETCH_MAX, capacity_count if wanted is None else max(1, wanted))
        )

    async def _add_consumer(self, prefetch: int) -> None:
        assert self._channel is not None  # noqa: S101
        self._allowance.capacity_count += prefetch
        await self._channel.call(amqp.Basic.Qos(prefetch_count=prefetch))
        answer = await self._channel.call(methods.Consume(queue=self.queue))
        self._tags.append(str(getattr(answer, "consumer_tag", "")))

    async def _cancel(self) -> None:
        """Consume no more. All acks may go then: nothing comes in the place of what they settle."""
        assert self._channel is not None  # noqa: S101
        if self._connection is not None:
            self._connection.resume_reading()
        tags, self._tags = self._tags, []
        for tag in tags:
            await self._channel.call(amqp.Basic.Cancel(tag))
        self._allowance.capacity_count = 0
        self._flush()

    @property
    def _unacked_count(self) -> int:
        """As the broker sees it."""
        return len(self._books) + self._books.unsent_count

    def _flush(self) -> None:
        """Send acks: near the end as many as make the broker send no more letters than are wanted."""
        if self._channel is not None and self._books.pending:
            unacked_count, ready_count = self._unacked_count, len(self._ready)
            most = self._allowance.acks_count_max(unacked_count=unacked_count, ready_count=ready_count)
            self._channel.write(self._books.flush(most))

    def _free(self, size_bytes: int) -> None:
        """So many bytes of letters in hand are gone: read again when there is room."""
        self._owned_bytes -= size_bytes
        if self._owned_bytes <= self._window_bytes_max // 2 and self._connection is not None:
            self._connection.resume_reading()

    def _leave(self) -> None:
        if self._ear is not None:
            self._ear.leave()
        self._ready.clear()
        self._books = Unsettled(0)
        self._generation += 1
        if self._connection is not None:
            self._connection.resume_reading()
