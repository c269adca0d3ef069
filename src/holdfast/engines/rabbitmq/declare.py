"""What a consumer needs beside its queue, checked and made: wait queues that lead back, and a dead queue.

Asking again what a lost connection has left without an answer.

Quorum queues that were just declared.

A broker of a single node that is killed forgets a quorum queue that is younger than about a second, with everything
that it has confirmed in it (it writes down the names of its queues twice a second). So whoever declares one lets it
grow that old before anybody relies on it.
"""

from __future__ import annotations

from uuid import uuid4

from msgspec import Struct
from pamqp import base

from holdfast.core.moments import format_duration
from holdfast.core.topology.layouts import QueueEntry, TopologyFile, UnroutableEntry, design
from holdfast.core.topology.model import Binding, Design, Exchange, Family, FamilyQueue, Queue, Version
from holdfast.engines.rabbitmq.backoff import retry_call
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection
from holdfast.engines.rabbitmq.management import Management
from holdfast.engines.rabbitmq.topology import Prober, YoungQueues
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Event
from holdfast.errors import BrokerError, BrokerRefused, Invalid
from holdfast.ports.broker import Subscription
from holdfast.ports.topology import Probe
from holdfast.telemetry.events import emit

NOT_FOUND = 404
UNCHECKED = "whether"


class QueueFamily(Struct, frozen=True, kw_only=True):
    """A queue with its wait queues and its dead queue, as the topology service would make them."""

    main: Queue
    waits: tuple[FamilyQueue, ...]
    dead: FamilyQueue
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]

    @property
    def wait_names(self) -> frozenset[str]:
        """The names of the wait queues."""
        return frozenset(wait.queue for wait in self.waits)

    @property
    def steps_us(self) -> tuple[int, ...]:
        """How long a message sits in each wait queue."""
        return tuple((wait.delay_ms or 0) * 1000 for wait in self.waits)


def surroundings(subscription: Subscription, version: Version, file: TopologyFile | None = None) -> QueueFamily:
    """What the topology file says of the queue, else what the subscription's layout asks for. Raises Invalid."""
    name = subscription.queue
    if file is None:
        delays = [format_duration(step_us) for step_us in dict.fromkeys(subscription.policy.steps_us)]
        entry = QueueEntry(layout=subscription.layout, retry_delay=delays)
        file = TopologyFile(queues={name: entry}, unroutable=UnroutableEntry(enabled=False))
    elif name not in file.queues:
        raise Invalid(f"topology has no such queue; '{name}' of a consumer is none of its queues")
    made = design(file, version)
    family = next((family for family in made.families if family.queue == name), None)
    if family is None or family.dead is None or not family.waits:
        raise Invalid(f"layout has no place for retries; queue '{name}' has no wait queue or no dead queue")
    return _family_of(made, family, family.dead)


def _family_of(made: Design, family: Family, dead: FamilyQueue) -> QueueFamily:
    """The part of a topology that one consumer needs."""
    names = {family.queue, dead.queue, *(wait.queue for wait in family.waits)}
    queues = {queue.name: queue for queue in made.topology.queues if queue.name in names}
    bindings = tuple(binding for binding in made.topology.bindings if binding.destination in names)
    exchanges = {dead.exchange, *(binding.source for binding in bindings), *(q.dead_exchange for q in queues.values())}
    return QueueFamily(
        main=queues[family.queue],
        waits=family.waits,
        dead=dead,
        exchanges=tuple(exchange for exchange in made.topology.exchanges if exchange.name in exchanges),
        queues=tuple(queues.values()),
        bindings=bindings,
    )


class Declarer:
    """Asks the broker, on a connection of its own: every refusal closes a channel."""

    def __init__(self, address: BrokerUrl, *, management: str | None) -> None:
        self._address = address.named("holdfast consumer set-up")
        self._management = management
        self._newborn = YoungQueues()
        self._connection: Connection | None = None
        self._channel: Channel | None = None

    async def missing(self, subscription: Subscription, around: QueueFamily) -> list[str]:
        """Everything that stands in the way of a safe retry or parking, in words."""
        names = [around.main.name, *(wait.queue for wait in around.waits), around.dead.queue]
        found = [
            f"queue '{name}' does not exist, create it or use --declare"
            for name in names
            if not await self._there(methods.QueueDeclare(queue=name, passive=True))
        ]
        dead = around.dead
        if dead.exchange and not await self._there(methods.ExchangeDeclare(exchange=dead.exchange, passive=True)):
            found.append(f"exchange '{dead.exchange}' of dead queue '{dead.queue}' does not exist, use --declare")
        if found:
            return found
        for queue in around.queues:
            needed = queue.name in around.wait_names or (queue is around.main and subscription.policy.by == "broker")
            if needed and (difference := await self._difference(queue)):
                found.append(f"queue '{queue.name}' is not as its consumer needs it; {difference}")
        return found or await self._unrouted(subscription, around)

    async def declare(self, around: QueueFamily) -> None:
        """Make what is not there; what is there is left as it is. A binding that is there already is no news."""
        for exchange in around.exchanges:
            if not await self._there(methods.ExchangeDeclare(exchange=exchange.name, passive=True)):
                await self._call(
                    methods.ExchangeDeclare(
                        exchange=exchange.name,
                        exchange_type=exchange.type,
                        durable=exchange.durable,
                        arguments=exchange.arguments,
                    )
                )
        for queue in around.queues:
            if not await self._there(methods.QueueDeclare(queue=queue.name, passive=True)):
                await self._call(_declared(queue))
                if queue.type == "quorum":
                    self._newborn.born()
        for binding in around.bindings:
            await self._call(
                methods.QueueBind(queue=binding.destination, exchange=binding.source, routing_key=binding.key)
            )
        await self._newborn.grown()

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    # What the channel calls: nothing comes unasked.

    def on_events(self, events: list[Event]) -> None:
        """Nobody consumes here."""

    def on_closed(self, error: BrokerError, close: Close) -> None:
        """Whoever waits for an answer is told by the channel."""

    def on_writable(self) -> None:
        """Questions are small."""

    # Inside.

    async def _there(self, passive: base.Frame) -> bool:
        try:
            await self._call(passive)
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return False
            raise
        return True

    async def _difference(self, queue: Queue) -> str:
        """Declared again as it should be, a queue that is so changes nothing, and another one is refused."""
        try:
            await self._call(_declared(queue))
        except BrokerRefused as error:
            return error.message
        return ""

    async def _unrouted(self, subscription: Subscription, around: QueueFamily) -> list[str]:
        """Whether the dead exchange leads to the dead queue: by the management API, else by a probe."""
        dead = around.dead
        if not dead.exchange:
            return []
        if self._management is None:
            why = await retry_call(lambda: self._unproved(dead), address=self._address, is_met=True)
        else:
            async with Management(self._management) as management:
                bindings = await management.bindings(self._address.login.vhost)
            leads = any(each.source == dead.exchange and each.destination == dead.queue for each in bindings)
            why = "" if leads else "it has no binding"
        if not why:
            return []
        if why.startswith(UNCHECKED):
            emit("consumer.unchecked", queue=subscription.queue, error=why)
            return []
        text = f"exchange '{dead.exchange}' does not lead to dead queue '{dead.queue}', bind it or use --declare"
        return [f"{text} ({why})"]

    async def _unproved(self, dead: FamilyQueue) -> str:
        """Why a marked message that was sent to an empty dead queue did not arrive; letters are left alone.

        Raises BrokerError when the connection was lost meanwhile.
        """
        way = f"{UNCHECKED} exchange '{dead.exchange}' leads to '{dead.queue}'"
        answer = await self._call(methods.QueueDeclare(queue=dead.queue, passive=True))
        if getattr(answer, "message_count", 1) or getattr(answer, "consumer_count", 1):
            return f"{way}: it is in use, and no management address was given"
        prober = Prober(self._address)
        try:
            probe = Probe(name="dead letters", exchange=dead.exchange, key=dead.key, arrives_in=dead.queue)
            return await prober.carry(probe, uuid4().hex, {dead.queue: 0})
        except BrokerRefused as error:
            return error.message
        finally:
            await prober.close()

    async def _call(self, method: base.Frame) -> base.Frame:
        """What is asked here may be asked twice. The publisher has met the broker before."""
        return await retry_call(lambda: self._ask(method), address=self._address, is_met=True)

    async def _ask(self, method: base.Frame) -> base.Frame:
        if self._connection is None or not self._connection.is_open:
            self._connection = await Connection.open(self._address)
        if self._channel is None or not self._channel.is_open:
            self._channel = await self._connection.channel(self)
        return await self._channel.call(method)


def _declared(queue: Queue) -> base.Frame:
    return methods.QueueDeclare(queue=queue.name, durable=queue.durable, arguments=queue.all_arguments)
