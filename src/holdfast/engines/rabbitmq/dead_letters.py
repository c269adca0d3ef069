"""One dead-letter queue for a recovery: letters in, copies out, and the settling of each.

One connection consumes, acks and holds the run's lock, another publishes: under an alarm the broker stops reading
from connections that publish, acks included. Reading pauses while the letters in hand are too many bytes, so that the
broker's prefetch, which counts letters, cannot fill our memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from holdfast.core.message import Address as Destination
from holdfast.core.message import Delivery, Message, Outgoing
from holdfast.core.recovery import as_utf8, may_return
from holdfast.core.routes import RouteTable
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.consumer_channel import wait_until_settled
from holdfast.engines.rabbitmq.inspector import Inspection, find_rights, may_write
from holdfast.engines.rabbitmq.letter_lines import Lines
from holdfast.engines.rabbitmq.letters import read_message
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.recovery_lock import NoEvents, is_name, take_lock
from holdfast.engines.rabbitmq.redriver import Copy, Redriver, as_put_back
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BrokerError, BrokerLost, BrokerRefused
from holdfast.ports.broker import Told
from holdfast.ports.recovery import Depth, Exported, OnOutcome, Preflight, RunLetter

#: The copies on their way wait for their confirms here as well; more than this only costs memory.
PUBLISH_WINDOW_BYTES = 8 * 2**20
#: For the last acks. Another consumer that came while we ran is taken for ours: then it takes this long.
SETTLE_TIMEOUT_S = 10.0
#: With so many letters under way, to wait this long before the next read costs no time and saves the work of many.
READ_PAUSE_S = 0.01
READ_PAUSE_COUNT_MIN = 1_000


class RabbitDeadLetters:
    """`async with RabbitDeadLetters(…) as letters:`; see `ports.recovery.DeadLetters`."""

    def __init__(
        self, address: BrokerUrl, queue: str, redriver: Redriver, *, management: str | None, window_bytes_max: int
    ) -> None:
        self.queue = queue
        self.warnings: list[str] = []
        self._address = address.named(f"holdfast recovery of {queue}")
        self._management = management
        self._redriver = redriver
        self._window_bytes_max = window_bytes_max
        self._publisher = RabbitPublisher(address, window_bytes=min(window_bytes_max, PUBLISH_WINDOW_BYTES))
        self._connection: Connection | None = None
        self._locked: Connection | None = None  # that the lock was taken on, with which it ends
        self._ready: deque[Delivery] = deque()
        self._lines = Lines(queue, self._ready, on_arrived=self._arrived, on_lost=self._lost)
        self._owned_bytes = 0
        self._others_count = 0
        self._news = asyncio.Event()
        self._loss: BrokerError | None = None
        self._stopped = False
        self._is_full = False  # too many bytes in hand: nothing is read
        self._is_asking = False
        self._delivery_limit: int | None = None
        self._inspection: Inspection | None = None

    async def connect(self) -> None:
        """Connect both. Raises BrokerError: at the start nothing is tried again."""
        self._connection = await Connection.open(self._address)
        await self._publisher.__aenter__()

    @property
    def trouble(self) -> str:
        return self._publisher.trouble

    @property
    def is_lost(self) -> bool:
        return self._loss is not None

    @property
    def sent_again_count(self) -> int:
        return self._publisher.sent_again

    @property
    def untaken_count(self) -> int:
        return len(self._ready)

    @property
    def capacity_count(self) -> int:
        return self._lines.capacity_count

    async def inspect(self, table: RouteTable, *, targets_only: bool = False) -> Preflight:
        assert self._connection is not None  # noqa: S101  connect() comes first
        queue = "" if targets_only else self.queue
        self._inspection = Inspection(self._connection, queue, self._management)
        self._redriver.blocked = self._inspection.blocked
        found = await self._inspection.run(table)
        found.rights = await find_rights(self._connection, self._publisher, queue, table, found, self._management)
        self._delivery_limit = found.delivery_limit
        self._others_count = found.depth.consumers
        return found

    async def alarm(self) -> str:
        if self._publisher.blocked or self._inspection is None:
            return self.trouble
        return await self._inspection.alarm()

    async def refusal(self, exchange: str) -> str:
        if self._inspection is None or self._connection is None or not exchange or not is_name(exchange):
            return ""  # what is no name cannot be asked for, nor published to: the publisher says so
        try:
            # Not where letters come: they are on their way just then, and to hear the answer all would have to be read.
            async with await Connection.open(self._address) as own:
                return await _refusal(self._inspection, own, exchange)
        except BrokerError as error:
            if self._loss is None and self._connection.is_open:
                return ""  # nobody can say
            raise BrokerLost(f"exchange '{exchange}' could not be asked for; {error}") from error

    def receivers(self, address: Destination) -> Sequence[str]:
        return self._inspection.receivers(address) if self._inspection else ()

    async def open(self, *, capacity_count: int) -> str:
        assert self._connection is not None  # noqa: S101  connect() comes first
        self.warnings += await take_lock(self._connection, self.queue, patience_s=0.0)
        self._locked = self._connection
        return await self._consume(self._connection, capacity_count)

    async def reopen(self, *, capacity_count: int) -> None:
        try:
            if self._loss is None:
                await self.let_go()  # an answer did not come in time: to the run all is lost, and so it has to be
            connection = await self._connected()
            if connection is not self._locked:
                # The broker may not have noticed yet that our old connection is gone, which holds the lock.
                await take_lock(connection, self.queue, patience_s=2.0 * connection.session.heartbeat_s)
                self._locked = connection
            await self._consume(connection, capacity_count)
        except BrokerRefused:
            raise  # a channel ended, and what was asked for on it; the connection keeps the lock, if it has it
        except BaseException:
            # Also when cancelled: there may be a consumer that nobody knows of, and the lock or not.
            await self.let_go()
            raise

    async def want(self, count: int | None) -> None:
        self._lines.allowance.wanted_count = count
        if self._may_ask:
            with self._asking():
                await self._lines.want(count)

    async def widen(self, capacity_count: int) -> None:
        if self._may_ask and self._connection is not None:
            with self._asking():
                await self._lines.widen(capacity_count)
            self._set_pace(self._connection)

    async def take(self, *, count_max: int, timeout_s: float) -> Sequence[RunLetter]:
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
        self._lines.allowance.taken(count)
        return [taken(ready.popleft()) for _ in range(count)]

    def read(self, letter: RunLetter) -> Message:
        return read_message(letter.raw.delivery, self.queue)

    def export(self, letter: RunLetter) -> Exported:
        delivery: Delivery = letter.raw.delivery
        return Exported(
            exchange=as_utf8(delivery.exchange),
            routing_key=as_utf8(delivery.routing_key),
            properties=delivery.properties,
            body=delivery.body,
            message_id=as_utf8(self.read(letter).id),
        )

    def restored(self, letter: Exported) -> RunLetter:
        self._redriver.tick()
        return self._redriver.taken(
            Delivery(0, 0, False, letter.exchange, letter.routing_key, "", letter.properties, letter.body)
        )

    def send(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = []
        for letter in letters:
            copy: Copy = letter.raw
            address = letter.route.address
            assert address is not None  # noqa: S101  a letter without an address is held
            outgoing.append(
                Outgoing(address.exchange, address.routing_key, copy.properties, copy.delivery.body, letter)
            )
        self._publisher.send(outgoing, _told(on_outcome), timeout_s=timeout_s)

    def put_back(self, letters: Sequence[RunLetter], on_outcome: OnOutcome, *, timeout_s: float) -> None:
        outgoing = []
        for letter in letters:
            delivery: Delivery = letter.raw.delivery
            outgoing.append(Outgoing("", self.queue, as_put_back(delivery), delivery.body, letter))
        self._publisher.send(outgoing, _told(on_outcome), timeout_s=timeout_s)

    def ack(self, letters: Sequence[RunLetter]) -> Sequence[RunLetter]:
        missed: list[RunLetter] = []
        freed_bytes = 0
        for number, same in groupby(letters, key=_line_number):
            line = self._lines.find(number)
            if line is None:
                missed += same
                continue
            by_tag = {letter.raw.delivery.tag: letter for letter in same}
            missed += [by_tag.pop(tag) for tag in line.books.ack_all(by_tag)]
            freed_bytes += _owned_bytes([letter.raw.delivery for letter in by_tag.values()])
        self._free(freed_bytes)
        self._lines.flush()
        return missed

    def forget(self, letter: RunLetter) -> None:
        copy: Copy = letter.raw
        if copy.delivery.body or copy.properties:
            if (line := self._lines.find(copy.delivery.channel)) is not None:
                line.held_count += 1
                self._free(_owned_bytes((copy.delivery,)))
            copy.delivery.body = copy.delivery.properties = copy.properties = b""

    async def stop(self) -> None:
        self._stopped = True
        self._read_on()
        await self._lines.stop()

    def leftovers(self) -> Sequence[RunLetter]:
        leftovers = [self._redriver.taken(delivery) for delivery in self._ready if self._is_tired(delivery)]
        self._ready.clear()
        return leftovers

    async def give_back(self) -> int:
        connection = self._connection
        if connection is None or not self._lines.is_open:
            return 0
        count = await self._lines.give_back()
        if not await wait_until_settled(
            connection, self.queue, count_before=self._others_count + 1, timeout_s=SETTLE_TIMEOUT_S
        ):
            self.warnings.append(
                f"the queue has not taken all acks within {SETTLE_TIMEOUT_S:g} s, or somebody else began to consume: "
                "letters that are counted as recovered may come again"
            )
        self._leave()
        await self._lines.close()
        return count

    async def let_go(self) -> None:
        self._loss = self._loss or BrokerLost("the connection was ended")  # and with it acks that were on their way
        self._lines.flush_all()
        self._leave()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def depth(self) -> Depth:
        if self._is_full:  # nothing is read on the other one, no answer either
            async with await Connection.open(self._address) as own:
                return await self._depth(own)
        with self._asking():
            return await self._depth(await self._connected())

    async def close(self) -> None:
        self._leave()
        await self._publisher.close()
        if self._connection is not None:
            await self._connection.close()

    # What a line calls.

    def _arrived(self, deliveries: list[Delivery]) -> None:
        if self._stopped:
            # On their way when we said stop: they go back with the rest, and only for these is more than that to do.
            deliveries = [delivery for delivery in deliveries if self._is_tired(delivery)]
        self._owned_bytes += _owned_bytes(deliveries)
        self._ready.extend(deliveries)
        self._news.set()
        self._pause_if_full()

    def _lost(self, error: BrokerError) -> None:
        """Whatever is unsettled is the broker's again."""
        self._lines.flush_all()  # after a cancel the channel lives: what was settled before still counts
        self._loss = error
        self._leave()
        self._news.set()

    # Inside.

    async def _connected(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            if self._connection is not None:
                await self._connection.close()
            self._connection = await Connection.open(self._address)
        return self._connection

    async def _depth(self, connection: Connection) -> Depth:
        channel = await connection.channel(NoEvents())
        try:
            answer = await channel.call(methods.QueueDeclare(queue=self.queue, passive=True))
        finally:
            if channel.is_open:
                await connection.close_channel(channel)
        return Depth(
            ready=int(getattr(answer, "message_count", 0) or 0),
            consumers=int(getattr(answer, "consumer_count", 0) or 0),
        )

    async def _consume(self, connection: Connection, capacity_count: int) -> str:
        self._owned_bytes = 0
        self._loss = None
        tag = await self._lines.consume(connection, capacity_count)
        self._set_pace(connection)
        return tag

    def _set_pace(self, connection: Connection) -> None:
        pause_s = READ_PAUSE_S if self.capacity_count >= READ_PAUSE_COUNT_MIN else 0.0
        connection.read_pause_s = pause_s
        self._publisher.pause_between_reads(pause_s)

    def _free(self, size_bytes: int) -> None:
        """So many bytes of letters in hand are gone: read again when there is room."""
        self._owned_bytes -= size_bytes
        if self._owned_bytes <= self._window_bytes_max // 2:
            self._read_on()

    def _pause_if_full(self) -> None:
        is_full = self._owned_bytes >= self._window_bytes_max
        if is_full and not self._stopped and not self._is_asking and self._connection is not None:
            self._is_full = True
            self._connection.pause_reading()

    def _read_on(self) -> None:
        self._is_full = False
        if self._connection is not None:
            self._connection.resume_reading()

    @property
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

    def _is_tired(self, delivery: Delivery) -> bool:
        """Whether it could not bear another return."""
        if self._delivery_limit is None:
            return False
        returns = self._redriver.taken(delivery).returns if delivery.redelivered else None
        return not may_return(returns or 0, self._delivery_limit)

    def _leave(self) -> None:
        self._lines.leave()
        self._ready.clear()
        self._read_on()


def _told(on_outcome: OnOutcome) -> Told:
    return lambda messages, outcome: on_outcome([message.made_from for message in messages], outcome)


async def _refusal(inspection: Inspection, connection: Connection, exchange: str) -> str:
    why = await inspection.refusal(connection, exchange)
    if not why and await may_write(connection, exchange) is False:
        why = f"refused: 403 exchange '{exchange}' may not be written to"
    return why


def _line_number(letter: RunLetter) -> int:
    """Of the line that it came on; 0: it is not in our hands any more."""
    number: int = letter.raw.delivery.channel
    return number if letter.in_hand else 0


def _owned_bytes(deliveries: Sequence[Delivery]) -> int:
    """What letters in hand take, with their copies."""
    return sum([len(one.properties) * 2 + len(one.body) for one in deliveries])
