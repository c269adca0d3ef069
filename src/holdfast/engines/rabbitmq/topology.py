"""A virtual host of RabbitMQ, to be read, added to and probed: all of it for the topology service, and for a consumer
what it needs beside its queue, wait queues that lead back and a dead queue. Reading needs the management API; adding is
AMQP's.

A probe is a marked message that is sent along a path and has to arrive; whatever else is in the queues is given back
as it was. It has the type `holdfast.probe` and a header of its own, so that a consumer that meets one can tell.

Queues of our own (those of a collected result) are classic on a broker of one node: a quorum queue that is declared
within a second before a single node is killed loses confirmed messages, and these are always young. They are quorum
queues only where the caller says that the cluster has three nodes or more. None has `x-expires`: it drops messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self, TypeVar
from uuid import uuid4

from msgspec import Struct, structs
from pamqp import base

from holdfast.core.message import Delivery, Outgoing
from holdfast.core.moments import format_duration
from holdfast.core.topology.definitions import is_brokers_own, to_definitions
from holdfast.core.topology.layouts import QueueEntry, TopologyFile, UnroutableEntry, design, no_limit
from holdfast.core.topology.model import (
    QUEUE_TYPE,
    Binding,
    Exchange,
    FamilyQueue,
    Queue,
    Topology,
    Version,
    plain_queue,
    topology,
)
from holdfast.engines.rabbitmq.connection import NOT_FOUND, PRECONDITION_FAILED, Connection, retry_call
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.management import ManagedQueue, Management
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BadAddress, BrokerError, BrokerRefused, Invalid
from holdfast.ports.broker import Subscription
from holdfast.ports.topology import LiveTopology, Probe, ProbeResult, QueueState, Thing
from holdfast.telemetry.events import emit

T = TypeVar("T")
A = TypeVar("A")

#: How old the management API's counts may be: a queue tells them every five seconds, and the API collects what was told
#: every five. A queue that looks empty for longer has been empty since the first look.
COUNTS_AGE_S_MAX = 15.0
LOOK_S = 1.0
GROWN_S = 1.5

PROBE_TIMEOUT_S = 10.0
MARK = "x-holdfast-probe"
TYPE = "holdfast.probe"
#: So many messages of others are held, at the most, while the probe is looked for behind them.
HELD_COUNT_MAX = 10_000
ROOM_COUNT = 100
LEFT_OVER_MS_MAX = 60_000


class RabbitTopology:
    """`async with RabbitTopology(url) as broker:`; `management` is its API, by default on the same host."""

    def __init__(self, url: str, *, management: str | None = None, counts_age_s_max: float = COUNTS_AGE_S_MAX) -> None:
        self._url = BrokerUrl.parse(url)
        self._management = Management(
            management or self._url.default_management(),
            ca_file=self._url.tls.ca_file if self._url.tls else None,
        )
        self._counts_age_s_max = counts_age_s_max
        self._amqp = TopologyConnection(self._url.named("holdfast topology"))

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._url.login.vhost

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        async with self._management:  # which ends with it
            await self._amqp.close()
        await self._amqp.grown()

    async def version(self) -> Version:
        """The broker's version. Raises BadAddress when the two addresses are not of the same broker."""
        overview = await self._management.overview()
        connection = await self._amqp.open()
        name = str(connection.session.server_properties.get("cluster_name", ""))
        if name and overview.cluster_name and name != overview.cluster_name:
            # Else the plan would be made from what one broker has, and carried out on the other.
            raise BadAddress(
                f"management address is another broker's; {self._management.address} is '{overview.cluster_name}', "
                f"{self._url} is '{name}'"
            )
        return Version.parse(overview.rabbitmq_version)

    async def read(self) -> LiveTopology:
        """Everything in the virtual host, by the management API."""
        version = await self.version()
        exchanges = await self._management.exchanges(self.vhost)
        queues = await self._management.queues(self.vhost)
        bindings = await self._management.bindings(self.vhost)
        policies = await self._management.policies(self.vhost)
        lasting = [queue for queue in queues if not queue.exclusive and not queue.name.startswith("amq.")]
        ours = [exchange for exchange in exchanges if not is_brokers_own(exchange.name)]
        names = {queue.name for queue in lasting}
        kept = [
            each for each in bindings if each.source and (each.destination_type != "queue" or each.destination in names)
        ]
        known = {policy.name: policy for policy in policies}
        return LiveTopology(
            vhost=self.vhost,
            version=version,
            declared=topology(
                exchanges=[each.effective({}) for each in ours],
                queues=[plain_queue(each) for each in lasting],
                bindings=kept,
                policies=policies,
                checked=False,
            ),
            effective=topology(
                exchanges=[each.effective(known) for each in ours],
                queues=[plain_queue(each.in_force) for each in lasting],
                bindings=kept,
                checked=False,
            ),
            states={queue.name: _state(queue) for queue in lasting},
        )

    async def create(self, thing: Thing) -> None:
        """Declare or bind. Raises BrokerRefused when something else of that name is there."""
        await self._amqp.make(thing)

    async def delete(self, thing: Thing) -> None:
        """Delete or unbind. A classic queue and an exchange only if they are empty and unused at that moment."""
        await (await self._amqp.open()).ask(_unmaking(thing))

    async def not_empty(self, queues: Sequence[str]) -> dict[str, str]:
        """Look again and again, for longer than a count can be old."""
        loop = asyncio.get_running_loop()
        enough_at = loop.time() + self._counts_age_s_max
        reasons = await self._look(queues)
        while len(reasons) < len(queues) and loop.time() < enough_at:
            await asyncio.sleep(LOOK_S)
            reasons |= await self._look([name for name in queues if name not in reasons])
        return reasons

    async def import_topology(self, topology: Topology) -> None:
        """By the management API."""
        await self._management.import_definitions(self.vhost, to_definitions(topology, vhost=None))

    async def probe(self, probe: Probe, *, anyway: bool) -> ProbeResult:
        """Send it, where the queues on its way are free or it is sent `anyway`."""
        depths = {}
        for name in probe.queues:
            try:
                depths[name] = await (await self._amqp.open()).depth(name)
            except BrokerRefused as error:
                return ProbeResult(name=probe.name, outcome="lost", reason=f"queue '{name}' cannot be used; {error}")
        busy = [f"'{name}' has {depth.ready} messages and {depth.consumers} consumers"
                for name, depth in depths.items() if depth.ready or depth.consumers]  # fmt: skip
        if busy and not anyway:
            return ProbeResult(name=probe.name, outcome="skipped", reason=f"{', '.join(busy)}; --probe sends it anyway")
        return await send_probe(self._url, probe, {name: depth.ready for name, depth in depths.items()})

    async def _look(self, queues: Sequence[str]) -> dict[str, str]:
        reasons = {}
        for name in queues:
            depth = await (await self._amqp.open()).depth(name)
            state = _state(await self._management.queue(self.vhost, name))
            consumers, messages = state.consumers_count or 0, state.messages_count or 0
            if count := max(depth.consumers, consumers):
                reasons[name] = f"{count} consumers are on it"
            elif count := max(depth.ready, messages):
                reasons[name] = f"it has {count} messages, unacknowledged and pending included"
            elif state.messages_count is None:
                reasons[name] = "the management API does not say yet how many messages it has; try again in a moment"
        return reasons


async def send_probe(url: BrokerUrl, probe: Probe, depths: Mapping[str, int]) -> ProbeResult:
    """Send it and take it out where it has to arrive. `depths` says how many messages are in its queues."""
    deep = [name for name, depth in depths.items() if depth + ROOM_COUNT > HELD_COUNT_MAX]
    if deep:
        reason = f"'{deep[0]}' has {depths[deep[0]]} messages, and a probe is not looked for behind so many"
        return ProbeResult(name=probe.name, outcome="skipped", reason=reason)
    if probe.waits_in is not None and depths[probe.waits_in]:
        reason = f"'{probe.waits_in}' has messages, and a delay cannot be cut short behind others"
        return ProbeResult(name=probe.name, outcome="skipped", reason=reason)
    mark = uuid4().hex
    try:
        reason = await _carry(url, probe, mark, depths)
    except BrokerError as error:
        reason = str(error)
    if not reason:
        return ProbeResult(name=probe.name, outcome="arrived")
    return ProbeResult(name=probe.name, outcome="lost", reason=f"{reason} (message id {_message_id(mark)})")


async def _carry(url: BrokerUrl, probe: Probe, mark: str, depths: Mapping[str, int]) -> str:
    """Why it did not arrive; empty when it did. Raises BrokerError: then nobody knows."""
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(RabbitPublisher(url))
        consumers = {
            name: await stack.enter_async_context(
                ResumingConsumer(url, name, prefetch=depths.get(name, 0) + ROOM_COUNT, on_loss="raise")
            )
            for name in (probe.rejected_in, probe.arrives_in)
            if name is not None
        }
        outcome = (await publisher.publish([_message(probe, mark)], timeout_s=PROBE_TIMEOUT_S))[0]
        if not outcome.stored:
            return f"the broker did not take it: {outcome.kind.value} {outcome.text}".strip()
        for name, settle in (
            (probe.rejected_in, ResumingConsumer.dead_letter),
            (probe.arrives_in, ResumingConsumer.ack),
        ):
            if name is None:
                continue
            found = await _find(consumers[name], mark)
            if found is None:
                return f"it did not arrive in '{name}' within {PROBE_TIMEOUT_S:g} s"
            settle(consumers[name], [found])
    return ""


async def _find(consumer: ResumingConsumer, mark: str) -> Delivery | None:
    """The probe among what comes. The others stay unsettled: closing the consumer gives them back, in order."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            while True:
                for delivery in await consumer.batch():
                    if mark.encode() in delivery.properties:  # nobody else has it: it was made for this probe
                        return delivery
    except TimeoutError:
        return None


class TopologyConnection:
    """Makes what is missing, on one connection, which is opened when it is needed; `grown` returns when the youngest
    quorum queue that was made is old enough.

    A broker of a single node that is killed forgets a quorum queue that is younger than about a second, with everything
    that it has confirmed in it (it writes down the names of its queues twice a second). So whoever declares one lets it
    grow that old before anybody relies on it.
    """

    def __init__(self, url: BrokerUrl) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._born_at_s: float | None = None

    async def open(self) -> Connection:
        """For questions as well. Raises as `Connection.open`."""
        async with self._opening:
            self._connection = await Connection.renewed(self._connection, self._url)
            return self._connection

    async def make(self, thing: Thing) -> None:
        """Declare or bind. Raises BrokerRefused when something else of that name is there."""
        await (await self.open()).ask(_making(thing))
        if isinstance(thing, Queue) and thing.type == "quorum":
            self._born_at_s = asyncio.get_running_loop().time()

    async def grown(self) -> None:
        """Wait, where there is something to wait for."""
        if self._born_at_s is not None:
            await asyncio.sleep(self._born_at_s + GROWN_S - asyncio.get_running_loop().time())
            self._born_at_s = None

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


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
    # Of the topology the part that one consumer needs.
    names = {name, family.dead.queue, *(wait.queue for wait in family.waits)}
    queues = {queue.name: queue for queue in made.topology.queues if queue.name in names}
    bindings = tuple(binding for binding in made.topology.bindings if binding.destination in names)
    exchanges = {family.dead.exchange, *(each.source for each in bindings), *(q.dead_exchange for q in queues.values())}
    return QueueFamily(
        main=queues[name],
        waits=family.waits,
        dead=family.dead,
        exchanges=tuple(exchange for exchange in made.topology.exchanges if exchange.name in exchanges),
        queues=tuple(queues.values()),
        bindings=bindings,
    )


class Declarer:
    """Makes and checks what consumers need, on a connection of its own."""

    def __init__(self, url: BrokerUrl, *, management: str | None, quorum: bool = False) -> None:
        self._url = url.named("holdfast consumer set-up")
        self._management = management
        self._quorum = quorum
        self._amqp = TopologyConnection(self._url)

    async def missing(self, subscription: Subscription, family: QueueFamily) -> list[str]:
        """Everything that stands in the way of a safe retry or parking, in words."""
        dead = family.dead
        found = [
            f"queue '{name}' does not exist, create it or use --declare"
            for name in (family.main.name, *(wait.queue for wait in family.waits), dead.queue)
            if not await self._insist(Connection.has_queue, name)
        ]
        if dead.exchange and not await self._insist(Connection.has_exchange, dead.exchange):
            found.append(f"exchange '{dead.exchange}' of dead queue '{dead.queue}' does not exist, use --declare")
        if found:
            return found
        for queue in family.queues:
            needed = queue.name in family.wait_names or (queue is family.main and subscription.policy.by == "broker")
            difference = await self._difference(queue)
            if difference and (needed or await self._counts_returns(queue, difference)):
                found.append(f"queue '{queue.name}' is not as its consumer needs it; {difference}")
        return found or await self._unrouted(subscription, family)

    async def declare(self, family: QueueFamily) -> None:
        """Make what is not there; what is there is left as it is. A binding that is there already is no news."""
        wanted: list[Thing] = [
            each for each in family.exchanges if not await self._insist(Connection.has_exchange, each.name)
        ]
        wanted += [each for each in family.queues if not await self._insist(Connection.has_queue, each.name)]
        for thing in (*wanted, *family.bindings):
            await retry_call(partial(self._amqp.make, thing), url=self._url, is_met=True)
        await self._amqp.grown()

    async def close(self) -> None:
        """End the connection."""
        await self._amqp.close()

    async def declare_own(self, queues: Sequence[str]) -> None:
        """Make queues of our own durable; what is there stays as it is. One try."""
        kind = "quorum" if self._quorum else "classic"
        for queue in queues:
            connection = await self._amqp.open()
            if not await connection.has_queue(queue):
                arguments = no_limit(kind, Version.parse(connection.session.version))
                await connection.ask(_making(Queue(name=queue, type=kind, arguments=arguments)))

    async def delete_empty(self, queue: str) -> bool:
        """The broker itself looks whether it is empty, in the moment in which it deletes it. One try.

        For a quorum queue it cannot: one that is empty is left standing, because a message that came between a look and
        the deletion would be gone without a trace.
        """
        connection = await self._amqp.open()
        try:
            if self._quorum:
                return not (await connection.depth(queue)).ready
            await connection.ask(methods.QueueDelete(queue=queue, if_empty=True))
        except BrokerRefused as error:
            if error.reply_code not in (NOT_FOUND, PRECONDITION_FAILED):
                raise
            return error.reply_code == NOT_FOUND
        return True

    # Inside.

    async def _difference(self, queue: Queue) -> str:
        """Declared again as it should be, a queue that is so changes nothing, and another one is refused."""
        try:
            await self._insist(Connection.ask, _making(queue))
        except BrokerRefused as error:
            return error.message
        return ""

    async def _counts_returns(self, queue: Queue, difference: str) -> bool:
        """Whether a quorum queue stands in the place of a classic one, as far as can be told: its limit would delete
        what comes back too often. One without any limit does as well."""
        if queue.type == "quorum" or QUEUE_TYPE not in difference:
            return False
        version = Version.parse((await self._amqp.open()).session.version)
        without = {**queue.arguments, **no_limit("quorum", version)}
        return bool(await self._difference(structs.replace(queue, type="quorum", arguments=without)))

    async def _unrouted(self, subscription: Subscription, family: QueueFamily) -> list[str]:
        """Whether the dead exchange leads to the dead queue: by the management API, else by a probe."""
        dead = family.dead
        if not dead.exchange:
            return []
        if self._management is None:
            why = await retry_call(lambda: self._unproved(subscription, dead), url=self._url, is_met=True)
        else:
            async with Management(self._management) as management:
                bindings = await management.bindings(self._url.login.vhost)
            leads = any(each.source == dead.exchange and each.destination == dead.queue for each in bindings)
            why = "" if leads else "it has no binding"
        if not why:
            return []
        text = f"exchange '{dead.exchange}' does not lead to dead queue '{dead.queue}', bind it or use --declare"
        return [f"{text} ({why})"]

    async def _unproved(self, subscription: Subscription, dead: FamilyQueue) -> str:
        """Why a marked message that was sent to an empty dead queue did not arrive; letters are left alone.

        Raises BrokerError when the connection was lost meanwhile.
        """
        depth = await self._insist(Connection.depth, dead.queue)
        if depth.ready or depth.consumers:
            way = f"whether exchange '{dead.exchange}' leads to '{dead.queue}'"
            why = f"{way}: it is in use, and no management address was given"
            emit("consumer.unchecked", queue=subscription.queue, error=why)
            return ""
        probe = Probe(name="dead letters", exchange=dead.exchange, key=dead.key, arrives_in=dead.queue)
        try:
            return await _carry(self._url, probe, uuid4().hex, {dead.queue: 0})
        except BrokerRefused as error:
            return error.message

    async def _insist(self, ask: Callable[[Connection, A], Awaitable[T]], what: A) -> T:
        """What is asked here may be asked twice. The publisher has met the broker before."""

        async def once() -> T:
            return await ask(await self._amqp.open(), what)

        return await retry_call(once, url=self._url, is_met=True)


def _state(info: ManagedQueue) -> QueueState:
    counts = [info.messages, info.messages_ready, info.messages_unacknowledged, info.messages_dlx]
    known = [count for count in counts if count is not None]
    return QueueState(
        messages_count=None if info.messages is None else max(known),
        consumers_count=info.consumers,
        policy=info.policy,
    )


def _making(thing: Thing) -> base.Frame:
    match thing:
        case Exchange():
            return methods.ExchangeDeclare(
                exchange=thing.name,
                exchange_type=thing.type,
                durable=thing.durable,
                auto_delete=thing.auto_delete,
                internal=thing.internal,
                arguments=thing.arguments,
            )
        case Queue():
            return methods.QueueDeclare(
                queue=thing.name, durable=thing.durable, auto_delete=thing.auto_delete, arguments=thing.all_arguments
            )
    return _bound(thing, methods.QueueBind, methods.ExchangeBind)


def _unmaking(thing: Thing) -> base.Frame:
    match thing:
        case Exchange():
            return methods.ExchangeDelete(exchange=thing.name, if_unused=True)
        case Queue():
            # Quorum queues do not know these conditions: there, the looks of `not_empty` are all there is.
            careful = thing.type == "classic"
            return methods.QueueDelete(queue=thing.name, if_unused=careful, if_empty=careful)
    return _bound(thing, methods.QueueUnbind, methods.ExchangeUnbind)


def _bound(binding: Binding, to_queue: Callable[..., base.Frame], to_exchange: Callable[..., base.Frame]) -> base.Frame:
    more = {"routing_key": binding.key, "arguments": binding.arguments}
    if binding.destination_type == "queue":
        return to_queue(queue=binding.destination, exchange=binding.source, **more)
    return to_exchange(destination=binding.destination, source=binding.source, **more)


def _message(probe: Probe, mark: str) -> Outgoing:
    values: dict[str, str | dict[str, str]] = {"message_id": _message_id(mark), "type": TYPE, "headers": {MARK: mark}}
    # In milliseconds. The delay of a wait queue is not what is being proved; elsewhere a probe that comes again, since
    # a crash of the broker has undone its ack, goes away by itself.
    values["expiration"] = "1" if probe.expires else str(LEFT_OVER_MS_MAX)
    body = b"A probe of 'holdfast topology'. It may be deleted."
    return Outgoing(probe.exchange, probe.key, properties.encode(values), body)


def _message_id(mark: str) -> str:
    return f"holdfast-probe-{mark}"
