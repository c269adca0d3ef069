"""A virtual host of RabbitMQ, to be read, added to and probed. Reading needs the management API; adding is AMQP's.

A probe is a marked message that is sent along a path and has to arrive; whatever else is in the queues is given back
as it was. It has the type `holdfast.probe` and a header of its own, so that a consumer that meets one can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self
from urllib.parse import quote
from uuid import uuid4

from msgspec import structs
from pamqp import base
from pamqp import commands as amqp

from holdfast.core.message import Delivery, Outgoing
from holdfast.core.topology.definitions import is_brokers_own, to_definitions
from holdfast.core.topology.model import (
    ALTERNATE,
    Arguments,
    Binding,
    Exchange,
    Queue,
    Topology,
    Version,
    effective,
    plain_queue,
    topology,
)
from holdfast.engines.rabbitmq.connection import Channel, Connection, NoEvents
from holdfast.engines.rabbitmq.consumer import RabbitConsumer
from holdfast.engines.rabbitmq.management import ManagedExchange, ManagedQueue, Management
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BadAddress, BrokerError, BrokerRefused
from holdfast.ports.topology import LiveTopology, Probe, ProbeResult, QueueState, Thing

#: How old the management API's counts may be: a queue tells them every five seconds, and the API collects what was told
#: every five. A queue that looks empty for longer has been empty since the first look.
COUNTS_AGE_S_MAX = 15.0
LOOK_S = 1.0
GROWN_S = 1.5
MANAGEMENT_PORTS = {False: ("http", 15672), True: ("https", 15671)}

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
        self._address = BrokerUrl.parse(url)
        self._management = Management(
            management or default_management(self._address),
            ca_file=self._address.tls.ca_file if self._address.tls else None,
        )
        self._counts_age_s_max = counts_age_s_max
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._prober = Prober(self._address)
        self._young = YoungQueues()
        self._stack = AsyncExitStack()

    @property
    def vhost(self) -> str:
        """The virtual host."""
        return self._address.login.vhost

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._management)
        self._stack.push_async_callback(self._prober.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.close()
        await self._stack.aclose()
        await self._young.grown()

    async def version(self) -> Version:
        """The broker's version. Raises BadAddress when the two addresses are not of the same broker."""
        overview = await self._management.overview()
        connection = await self._open()
        name = str(connection.session.server_properties.get("cluster_name", ""))
        if name and overview.cluster_name and name != overview.cluster_name:
            # Else the plan would be made from what one broker has, and carried out on the other.
            raise BadAddress(
                f"management address is another broker's; {self._management.address} is '{overview.cluster_name}', "
                f"{self._address} is '{name}'"
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
        known = {policy.name: policy.definition for policy in policies}
        return LiveTopology(
            vhost=self.vhost,
            version=version,
            declared=topology(
                exchanges=[_exchange(each, {}) for each in ours],
                queues=[plain_queue(each) for each in lasting],
                bindings=kept,
                policies=policies,
                checked=False,
            ),
            effective=topology(
                exchanges=[_exchange(each, known.get(each.policy or "", {})) for each in ours],
                queues=[_effective(each) for each in lasting],
                bindings=kept,
                checked=False,
            ),
            states={queue.name: _state(queue) for queue in lasting},
        )

    async def create(self, thing: Thing) -> None:
        """Declare or bind. Raises BrokerRefused when something else of that name is there."""
        await self._call(_making(thing))
        if isinstance(thing, Queue) and thing.type == "quorum":
            self._young.born()

    async def delete(self, thing: Thing) -> None:
        """Delete or unbind. A classic queue and an exchange only if they are empty and unused at that moment."""
        await self._call(_unmaking(thing))

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
                depths[name] = await self._depth(name)
            except BrokerRefused as error:
                return ProbeResult(name=probe.name, outcome="lost", reason=f"queue '{name}' cannot be used; {error}")
        busy = [f"'{name}' has {ready} messages and {consumers} consumers"
                for name, (ready, consumers) in depths.items() if ready or consumers]  # fmt: skip
        if busy and not anyway:
            return ProbeResult(name=probe.name, outcome="skipped", reason=f"{', '.join(busy)}; --probe sends it anyway")
        return await self._prober.send(probe, {name: ready for name, (ready, _) in depths.items()})

    async def _call(self, method: base.Frame) -> base.Frame:
        """On a channel that lives: the broker closes it with every refusal. One at a time, so that each has its own."""
        async with self._turn:
            connection = await self._open()
            if self._channel is None or not self._channel.is_open:
                self._channel = await connection.channel(NoEvents())
            return await self._channel.call(method)

    async def _open(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            self._connection = await Connection.open(self._address.named("holdfast topology"))
        return self._connection

    async def _depth(self, queue: str) -> tuple[int, int]:
        """How many messages are ready, and how many consumers there are, now."""
        answer = await self._call(methods.QueueDeclare(queue=queue, passive=True))
        assert isinstance(answer, amqp.Queue.DeclareOk)  # noqa: S101  the answer to that question
        return answer.message_count or 0, answer.consumer_count or 0

    async def _look(self, queues: Sequence[str]) -> dict[str, str]:
        reasons = {}
        for name in queues:
            ready, consumers = await self._depth(name)
            info = await self._management.queue(self.vhost, name)
            state = _state(info)
            if consumers or state.consumers_count:
                reasons[name] = f"{max(consumers, state.consumers_count or 0)} consumers are on it"
            elif ready or state.messages_count:
                reasons[name] = (
                    f"it has {max(ready, state.messages_count or 0)} messages, unacknowledged and pending included"
                )
            elif state.messages_count is None:
                reasons[name] = "the management API does not say yet how many messages it has; try again in a moment"
        return reasons


class Prober:
    """Sends probes; one publisher for all of them, opened with the first."""

    def __init__(self, address: BrokerUrl, *, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._publisher: RabbitPublisher | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        """End the connection."""
        if self._publisher is not None:
            await self._publisher.close()

    async def send(self, probe: Probe, depths: Mapping[str, int]) -> ProbeResult:
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
            reason = await self.carry(probe, mark, depths)
        except BrokerError as error:
            reason = str(error)
        if not reason:
            return ProbeResult(name=probe.name, outcome="arrived")
        return ProbeResult(name=probe.name, outcome="lost", reason=f"{reason} (message id {_message_id(mark)})")

    async def carry(self, probe: Probe, mark: str, depths: Mapping[str, int]) -> str:
        """Why it did not arrive; empty when it did. Raises BrokerError: then nobody knows."""
        async with AsyncExitStack() as stack:
            consumers = {
                name: await stack.enter_async_context(
                    RabbitConsumer(self._address, name, prefetch=depths.get(name, 0) + ROOM_COUNT, on_loss="raise")
                )
                for name in (probe.rejected_in, probe.arrives_in)
                if name is not None
            }
            outcome = (await (await self._open()).publish([_message(probe, mark)], timeout_s=self._timeout_s))[0]
            if not outcome.stored:
                return f"the broker did not take it: {outcome.kind.value} {outcome.text}".strip()
            if probe.rejected_in is not None:
                found = await self._find(consumers[probe.rejected_in], mark)
                if found is None:
                    return f"it did not arrive in '{probe.rejected_in}' within {self._timeout_s:g} s"
                consumers[probe.rejected_in].dead_letter([found])
            found = await self._find(consumers[probe.arrives_in], mark)
            if found is None:
                return f"it did not arrive in '{probe.arrives_in}' within {self._timeout_s:g} s"
            consumers[probe.arrives_in].ack([found])
        return ""

    async def _find(self, consumer: RabbitConsumer, mark: str) -> Delivery | None:
        """The probe among what comes. The others stay unsettled: closing the consumer gives them back, in order."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    for delivery in await consumer.batch():
                        if mark.encode() in delivery.properties and _marked(delivery) == mark:
                            return delivery
        except TimeoutError:
            return None

    async def _open(self) -> RabbitPublisher:
        async with self._opening:
            if self._publisher is None:
                self._publisher = await RabbitPublisher(self._address).__aenter__()
            return self._publisher


class YoungQueues:
    """`born` for each quorum queue that was made; `grown` returns when the youngest is old enough.

    A broker of a single node that is killed forgets a quorum queue that is younger than about a second, with everything
    that it has confirmed in it (it writes down the names of its queues twice a second). So whoever declares one lets it
    grow that old before anybody relies on it.
    """

    def __init__(self) -> None:
        self._born_at_s: float | None = None

    def born(self) -> None:
        """A quorum queue was made now."""
        self._born_at_s = asyncio.get_running_loop().time()

    async def grown(self) -> None:
        """Wait, where there is something to wait for."""
        if self._born_at_s is not None:
            await asyncio.sleep(self._born_at_s + GROWN_S - asyncio.get_running_loop().time())
            self._born_at_s = None


def default_management(address: BrokerUrl) -> str:
    """Where the management API usually is: on the same host, with the same login."""
    scheme, port = MANAGEMENT_PORTS[address.tls is not None]
    host = address.hosts[0][0]
    login = f"{quote(address.login.user, safe='')}:{quote(address.login.password, safe='')}"
    return f"{scheme}://{login}@{f'[{host}]' if ':' in host else host}:{port}"


def _exchange(told: ManagedExchange, policy: Arguments) -> Exchange:
    """Without the policy's name, and with the alternate exchange that the policy adds."""
    added = {ALTERNATE: policy[ALTERNATE]} if ALTERNATE in policy else {}
    own = {name: getattr(told, name) for name in Exchange.__struct_fields__}
    return Exchange(**own | {"arguments": added | told.arguments})


def _effective(told: ManagedQueue) -> Queue:
    queue = plain_queue(told)
    return structs.replace(queue, arguments=effective(queue.arguments, told.effective_policy))


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


def _marked(delivery: Delivery) -> object:
    headers = properties.decode(delivery.properties).get("headers")
    return headers.get(MARK) if isinstance(headers, dict) else None
