"""What a consumer needs beside its queue, checked and made: wait queues that lead back, and a dead queue.

Queues of our own (those of a collected result) are classic on a broker of one node: a quorum queue that is declared
within a second before a single node is killed loses confirmed messages, and these are always young. They are quorum
queues only where the caller says that the cluster has three nodes or more. None has `x-expires`: it drops messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from msgspec import Struct
from pamqp import base

from holdfast.core.moments import format_duration
from holdfast.core.topology.layouts import QueueEntry, TopologyFile, UnroutableEntry, design
from holdfast.core.topology.model import Binding, Design, Exchange, Family, FamilyQueue, Queue, Version
from holdfast.engines.rabbitmq.connection import Channel, Connection, NoEvents, retry_call
from holdfast.engines.rabbitmq.management import Management
from holdfast.engines.rabbitmq.topology import Prober, YoungQueues
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BrokerRefused, Invalid
from holdfast.ports.broker import Subscription
from holdfast.ports.topology import Probe
from holdfast.telemetry.events import emit

NOT_FOUND = 404
PRECONDITION_FAILED = 406
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


def family_for(subscription: Subscription, version: Version, file: TopologyFile | None = None) -> QueueFamily:
    """What the topology file says of the queue, else what the subscription's layout asks for. Raises Invalid."""
    name = subscription.queue
    if dead := subscription.dead_queue:
        family_queue = FamilyQueue(queue=dead, exchange="", key=dead)
        return QueueFamily(main=Queue(name=name), waits=(), dead=family_queue, exchanges=(), queues=(), bindings=())
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

    def __init__(self, address: BrokerUrl, *, management: str | None, quorum: bool = False) -> None:
        self._address = address.named("holdfast consumer set-up")
        self._management = management
        self._quorum = quorum
        self._young = YoungQueues()
        self._connection: Connection | None = None
        self._channel: Channel | None = None

    async def missing(self, subscription: Subscription, family: QueueFamily) -> list[str]:
        """Everything that stands in the way of a safe retry or parking, in words."""
        names = [family.main.name, *(wait.queue for wait in family.waits), family.dead.queue]
        found = [
            f"queue '{name}' does not exist, create it or use --declare"
            for name in names
            if not await self._there(methods.QueueDeclare(queue=name, passive=True))
        ]
        dead = family.dead
        if dead.exchange and not await self._there(methods.ExchangeDeclare(exchange=dead.exchange, passive=True)):
            found.append(f"exchange '{dead.exchange}' of dead queue '{dead.queue}' does not exist, use --declare")
        if found:
            return found
        for queue in family.queues:
            needed = queue.name in family.wait_names or (queue is family.main and subscription.policy.by == "broker")
            if needed and (difference := await self._difference(queue)):
                found.append(f"queue '{queue.name}' is not as its consumer needs it; {difference}")
        return found or await self._unrouted(subscription, family)

    async def declare(self, family: QueueFamily) -> None:
        """Make what is not there; what is there is left as it is. A binding that is there already is no news."""
        for exchange in family.exchanges:
            if not await self._there(methods.ExchangeDeclare(exchange=exchange.name, passive=True)):
                await self._call(
                    methods.ExchangeDeclare(
                        exchange=exchange.name,
                        exchange_type=exchange.type,
                        durable=exchange.durable,
                        arguments=exchange.arguments,
                    )
                )
        for queue in family.queues:
            if not await self._there(methods.QueueDeclare(queue=queue.name, passive=True)):
                await self._call(_declared(queue))
                if queue.type == "quorum":
                    self._young.born()
        for binding in family.bindings:
            await self._call(
                methods.QueueBind(queue=binding.destination, exchange=binding.source, routing_key=binding.key)
            )
        await self._young.grown()

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def declare_own(self, queues: Sequence[str]) -> None:
        """Make queues of our own durable; what is there stays as it is. One try."""
        for queue in queues:
            try:
                await self._ask(methods.QueueDeclare(queue=queue, passive=True))
            except BrokerRefused as error:
                if error.reply_code != NOT_FOUND:
                    raise
                arguments: dict[str, Any] = {"x-queue-type": "quorum"} if self._quorum else {}
                await self._ask(methods.QueueDeclare(queue=queue, durable=True, arguments=arguments))

    async def delete_empty(self, queue: str) -> bool:
        """The broker itself looks whether it is empty, in the moment in which it deletes it. One try.

        For a quorum queue it cannot: one that is empty is left standing, because a message that came between a look and
        the deletion would be gone without a trace.
        """
        try:
            if self._quorum:
                answer = await self._ask(methods.QueueDeclare(queue=queue, passive=True))
                return not getattr(answer, "message_count", 0)
            await self._ask(methods.QueueDelete(queue=queue, if_empty=True))
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return True
            if error.reply_code == PRECONDITION_FAILED:
                return False
            raise
        return True

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

    async def _unrouted(self, subscription: Subscription, family: QueueFamily) -> list[str]:
        """Whether the dead exchange leads to the dead queue: by the management API, else by a probe."""
        dead = family.dead
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
            self._channel = None
        if self._channel is None or not self._channel.is_open:
            self._channel = await self._connection.channel(NoEvents())
        return await self._channel.call(method)


def _declared(queue: Queue) -> base.Frame:
    return methods.QueueDeclare(queue=queue.name, durable=queue.durable, arguments=queue.all_arguments)
