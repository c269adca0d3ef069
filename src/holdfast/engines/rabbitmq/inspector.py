"""What is asked of RabbitMQ before a letter is published: by a recovery before it takes its first letter (broker,
alarms, limits, permissions, whether targets route), and by a plan (whether an address routes, which queues get a copy,
and how long a letter that fails there takes to be dead again). Nothing here changes anything.

AMQP tells whether queues and exchanges are there. What they are bound to, their type, limits and delays only the
management API can say; without it the delivery limit is assumed from the broker's version, on the safe side.

The management API shows the rights of every user, but to administrators only. AMQP answers by refusing: a binding that
does not exist can be removed by whoever may write to its exchange, and an unroutable message comes back to whoever may
write to the default exchange; neither changes anything. Whether the queue may be read is seen when it is consumed.
"""

from __future__ import annotations

import json
import re
import shlex
import uuid
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace
from pamqp import base

from holdfast.core.death import DEAD_QUEUES, QueueNames
from holdfast.core.message import Address, OutcomeKind, Outgoing
from holdfast.core.plan import Retries, longest
from holdfast.core.recovery import Depth, Permission, Preflight
from holdfast.core.routes import Mode, RouteTable
from holdfast.core.topology.model import (
    DEAD_EXCHANGE,
    DEAD_EXCHANGES,
    DEAD_KEY,
    DELIVERY_LIMIT,
    TTL,
    Topology,
    Version,
)
from holdfast.core.topology.routing import Graph
from holdfast.core.topology.rules import DELIVERY_LIMIT_DEFAULT, HAS_DEFAULT_LIMIT, delivery_limit, loses
from holdfast.engines.rabbitmq.connection import ACCESS_REFUSED, NOT_FOUND, Connection
from holdfast.engines.rabbitmq.drain import LOCK_PREFIX, is_name, lock_name
from holdfast.engines.rabbitmq.management import ManagedPermission, ManagedQueue, Management
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import PORTS, BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.session import Login
from holdfast.errors import BrokerRefused, HoldfastError
from holdfast.ports.broker import QueueFacts, Reach

#: Where nobody could say which policy the queue has: above those that people usually make.
PRIORITY_UNSEEN = 100
#: What the default exchange is called where rights are given.
DEFAULT_EXCHANGE = "amq.default"
#: One that every broker has, to ask about others with.
SOURCES = ("amq.direct", "amq.fanout")
TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 10.0
MS_PER_S = 1_000
WAITS_IN_A_ROW_MAX = 10


class RabbitInspector:
    """See `ports.broker.Inspector`; on connections of its own. Known are the queues named, and those of the patterns.

    AMQP tells whether queues and exchanges are there; bindings and delays only the management API can say.
    """

    def __init__(
        self,
        url: BrokerUrl,
        management: str | None,
        *,
        known: Sequence[str] = (),
        patterns: Sequence[str] = DEAD_QUEUES,
        retries: Retries | None = None,
    ) -> None:
        self._url = url
        self._management = management
        self._known = tuple(known)
        self._patterns = tuple(patterns)
        self._retries = retries or Retries()

    async def queues(self) -> list[QueueFacts]:
        if self._management is None:
            return [one for name in self._known if (one := await self.queue(name)) is not None]
        async with Management(self._management) as api:
            infos = await api.queues(self._url.login.vhost)
        names = {info.name for info in infos}
        found = [_facts(info) for info in infos if self._knows(info.name)]
        return [replace(one, source_queue=_source(one.queue) if _source(one.queue) in names else "") for one in found]

    async def queue(self, name: str) -> QueueFacts | None:
        if not self._knows(name):
            return None
        source, vhost = _source(name), self._url.login.vhost
        try:
            if self._management is not None:
                async with Management(self._management) as api:
                    found = _facts(await api.queue(vhost, name))
                    return replace(
                        found, source_queue=source if source and await _has_queue(api, vhost, source) else ""
                    )
            async with await self._open() as connection:
                depth = await connection.depth(name)
                source = source if source and await connection.has_queue(source) else ""
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return None
            raise
        note = "its delivery limit is not known"
        return QueueFacts(queue=name, source_queue=source, ready=depth.ready, note=note)

    async def sources(self, queue: str, names: QueueNames) -> frozenset[str]:
        async with await self._open() as connection:
            seen, _ = await self._look(connection)
            if seen is None:
                return await _named_source(connection, queue)
        return seen.graph.leading_to(queue, names.is_main)

    async def reach(self, addresses: Sequence[Address]) -> dict[Address, Reach]:
        found: dict[Address, Reach] = {}
        async with await self._open() as connection:
            seen, trouble = await self._look(connection) if any(one.exchange for one in addresses) else (None, "")
            for address in dict.fromkeys(addresses):
                found[address] = await _reach(connection, address, seen.graph if seen else None, trouble)
        return found

    async def ladder_s(self, addresses: Sequence[Address]) -> float | None:
        async with await self._open() as connection:
            seen, _ = await self._look(connection)
        if seen is None:
            return self._retries.ladder_s()
        return longest([self._of_address(seen, address) for address in dict.fromkeys(addresses)])

    # Inside.

    async def _open(self) -> Connection:
        return await Connection.open(self._url.named("holdfast custody"))

    def _knows(self, name: str) -> bool:
        if name.startswith(LOCK_PREFIX):
            return False  # of a recovery that is running
        return name in self._known or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _of_address(self, seen: _Routing, address: Address) -> float | None:
        queues = seen.graph.reached(address.exchange, address.routing_key)
        ladder_s = longest([self._of_queue(seen, queue) for queue in queues or ()])
        return self._retries.ladder_s() if ladder_s is None else ladder_s

    def _of_queue(self, seen: _Routing, queue: str, waits: int = 0) -> float | None:
        if queue not in seen.queues or waits > WAITS_IN_A_ROW_MAX:
            return self._retries.ladder_s()
        delay_s = seen.delay_s(queue)
        if delay_s is not None:  # a wait queue: it sits there first
            further = longest([self._of_queue(seen, name, waits + 1) for name in seen.dead_from(queue) or ()])
            return None if further is None else delay_s + further
        if steps := seen.waits_of(queue):
            return self._retries.ladder_s(steps)
        # What is rejected is dead at once, where the broker does it and there is no wait queue.
        return self._retries.ladder_s() if self._retries.delays_s or not seen.dead_from(queue) else 0.0

    async def _look(self, connection: Connection) -> tuple[_Routing | None, str]:
        """What the management API shows, or why it shows nothing."""
        if self._management is None:
            return None, "there is no management API in the settings"
        try:
            async with Management(self._management, timeout_s=LOOK_TIMEOUT_S) as api:
                if (await api.overview()).cluster_name != _cluster(connection):
                    return None, f"the management API at {api.address} is that of another broker"
                return await _Routing.of(api, self._url.login.vhost), ""
        except HoldfastError as error:
            return None, f"the management API could not be asked; {error.message}"


class _Routing:
    """What the management API shows of a virtual host: queues with what holds for them, policies, and the paths."""

    def __init__(self, queues: Sequence[ManagedQueue], priorities: dict[str, int], graph: Graph) -> None:
        self.infos = {queue.name: queue for queue in queues}
        self.queues = {queue.name: queue.in_force.arguments for queue in queues}
        self.priorities = priorities
        self.graph = graph

    @classmethod
    async def of(cls, api: Management, vhost: str) -> _Routing:
        """Raises HoldfastError; without policies where these are not told: we make none."""
        queues, exchanges, bindings = await api.queues(vhost), await api.exchanges(vhost), await api.bindings(vhost)
        try:
            policies = {policy.name: policy for policy in await api.policies(vhost)}
        except HoldfastError:
            policies = {}
        in_force = Topology(
            exchanges=tuple(exchange.effective(policies) for exchange in exchanges),
            queues=tuple(queue.in_force for queue in queues),
            bindings=tuple(bindings),
        )
        return cls(queues, {name: policy.priority for name, policy in policies.items()}, Graph(in_force))

    def priority_above(self, info: ManagedQueue | None) -> int:
        """Of a policy that is in force instead of the one that the queue has."""
        if info is None or not info.policy:
            return 0
        return self.priorities.get(info.policy, PRIORITY_UNSEEN - 1) + 1

    def dead_from(self, queue: str) -> set[str] | None:
        """Where its dead letters go, when the queue says with which key."""
        exchange, key = self.queues[queue].get(DEAD_EXCHANGE), self.queues[queue].get(DEAD_KEY)
        if not isinstance(exchange, str):
            return None
        return self.graph.reached(exchange, key if isinstance(key, str) else "")

    def delay_s(self, queue: str) -> float | None:
        """How long a message sits in it before it goes on; None when it is no wait queue."""
        ttl = self.queues[queue].get(TTL)
        return ttl / MS_PER_S if isinstance(ttl, int) and self.dead_from(queue) else None

    def waits_of(self, queue: str) -> list[float]:
        """The delays of the wait queues that lead back into it, the shortest first."""
        found = [
            delay_s
            for name in self.queues
            if name != queue and (delay_s := self.delay_s(name)) is not None and queue in (self.dead_from(name) or ())
        ]
        return sorted(found)


async def _reach(connection: Connection, address: Address, graph: Graph | None, trouble: str) -> Reach:
    exchange, key = address.exchange, address.routing_key
    passive: base.Frame = methods.ExchangeDeclare(exchange=exchange, passive=True)
    try:
        await connection.ask(passive if exchange else methods.QueueDeclare(queue=key, passive=True))
    except BrokerRefused as error:
        return Reach(why=error.message, queues=())
    if not exchange:
        return Reach(queues=(key,))
    if graph is None:
        seen = "is seen only when letters are published, and what an alternate exchange takes not even then"
        return Reach(note=f"whether {address} routes {seen}: {trouble}")
    reached = graph.reached(exchange, key)
    if reached is None:
        return Reach(note=f"whether {address} routes depends on headers and was not checked")
    why = _why_nowhere(graph, address)
    return Reach(why=why, queues=() if why else tuple(sorted(reached)))


def _why_nowhere(graph: Graph, address: Address) -> str:
    """Why what is sent there does not get to where it is meant for; empty when it does, or headers decide."""
    exchange, key = address.exchange, address.routing_key
    nowhere = f"exchange '{exchange}' routes key '{key}' to no queue"
    if other := graph.only_alternate(exchange, key):
        # It would be confirmed, and lie where nobody looks for it.
        return f"{nowhere}: only the alternate exchange '{other}' takes it"
    return nowhere if graph.reached(exchange, key) == set() else ""


def _cluster(connection: Connection) -> str:
    return str(connection.session.server_properties.get("cluster_name") or "")


async def _has_queue(api: Management, vhost: str, name: str) -> bool:
    try:
        await api.queue(vhost, name)
    except BrokerRefused as error:
        if error.reply_code == NOT_FOUND:
            return False
        raise
    return True


async def _named_source(connection: Connection, dead_queue: str) -> frozenset[str]:
    """What can be seen of a layout without the management API: its main queue, and the exchange by which it parks."""
    queue = _source(dead_queue)
    if not queue or not await connection.has_queue(queue):
        return frozenset()
    exchanges = [pattern.format(queue=queue) for pattern in DEAD_EXCHANGES if is_name(pattern.format(queue=queue))]
    return frozenset([queue] if any([await connection.has_exchange(name) for name in exchanges]) else [])


def _facts(info: ManagedQueue) -> QueueFacts:
    free = info.type != "quorum" or info.in_force.arguments.get(DELIVERY_LIMIT) == -1
    return QueueFacts(
        queue=info.name,
        ready=info.messages_ready or 0,
        consumers=info.consumers or 0,
        peek_is_free=free,
        note="" if free else "a quorum queue with a delivery limit: each look counts, and the last one deletes",
    )


def _source(name: str) -> str:
    return name.removesuffix(".dlq") if name.endswith(".dlq") else ""


class RabbitRunInspector:
    """`preflight` once, on the connection that will consume; without a queue it is about the targets alone."""

    def __init__(
        self,
        connection: Connection,
        publisher: RabbitPublisher,
        queue: str,
        *,
        management: str | None,
        names: QueueNames | None = None,
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._queue = queue
        if not management and connection.url.hosts[0][1] in PORTS.values():
            management = connection.url.default_management()  # as its broker is, it may be on its default port
        self._management = management or None
        self._seen: _Routing | None = None
        self._names = names or QueueNames()
        self._sources: frozenset[str] | None = None
        self._shown: ManagedPermission | None = None  # where nobody tells us our rights

    @property
    def _graph(self) -> Graph | None:
        return self._seen.graph if self._seen else None

    def receivers(self, address: Address) -> list[str]:
        """The queues that a message with this address reaches; none when nobody could say."""
        if not address.exchange:
            return [address.routing_key]
        reached = self._graph.reached(address.exchange, address.routing_key) if self._graph else None
        return sorted(reached or ())

    def sources(self) -> frozenset[str]:
        """The queues that lead to the dead-letter queue, as they were seen at the start."""
        if self._sources is None:
            self._sources = self._graph.leading_to(self._queue, self._names.is_main) if self._graph else frozenset()
        return self._sources

    def blocked(self, address: Address) -> str:
        """Why nothing that is sent there gets to where it is meant for; empty when it does, or nobody could say."""
        exchange, key = address.exchange, address.routing_key
        where = f"exchange '{exchange}', key '{key}'"
        if self._queue and self._queue in self.receivers(address):
            return f"cyclic: {where}: leads into the dead-letter queue itself"
        if self._graph is None or not exchange or not (other := self._graph.only_alternate(exchange, key)):
            return ""
        return f"unroutable: {where}: only the alternate exchange '{other}' takes it"

    async def alarm(self) -> str:
        """Why the broker takes no publishes; empty when it does, or the management API does not say."""
        if self._publisher.blocked:
            return self._publisher.trouble
        if self._management is None or self._graph is None:
            return ""
        try:
            async with Management(self._management, timeout_s=TIMEOUT_S) as management:
                alarm = await management.alarms()
        except HoldfastError:
            return ""
        return f"the broker takes no publishes: {alarm}" if alarm else ""

    async def refusal(self, exchange: str) -> str:
        """Why every publish to this exchange would be refused; empty when it would not, or nobody can say."""
        if not exchange or not is_name(exchange):
            return ""  # what is no name cannot be asked for, nor published to: the publisher says so
        # Not where letters come: they are on their way just then, and to hear the answer all would have to be read.
        async with await Connection.open(self._connection.url) as own:
            try:
                await own.ask(methods.ExchangeDeclare(exchange=exchange, passive=True))
            except BrokerRefused as error:
                if error.reply_code == NOT_FOUND:
                    return f"refused: {error.message}"
            if await _may_write(own, exchange) is False:
                return f"refused: 403 exchange '{exchange}' may not be written to"
        return ""

    async def preflight(self, table: RouteTable) -> Preflight:
        """Everything. Raises BrokerRefused when the queue is not there or may not be read."""
        session = self._connection.session
        product = str(session.server_properties.get("product") or "broker")
        depth = await self._connection.depth(self._queue) if self._queue else Depth(ready=0)
        found = Preflight(broker=f"{product} {session.version}", depth=depth, receivers=self.receivers)
        await self._look(found)
        self._find_limit(found, _version(session.version))
        for address in table.fixed_addresses():
            await self._check(address, found)
        self._warn_of_losses(found, table, _version(session.version))
        if self._graph is None:
            self._sources = await _named_source(self._connection, self._queue)
            _warn_of_the_unseen(found, table)
        found.rights = await self._rights(table, found)
        return found

    # Inside.

    async def _look(self, found: Preflight) -> None:
        """At what the management API shows."""
        if self._management is None:
            return
        login, ours = self._connection.url.login, _cluster(self._connection)
        try:
            async with Management(self._management, timeout_s=TIMEOUT_S) as management:
                overview = await management.overview()
                if overview.cluster_name != ours:
                    found.warnings.append(
                        f"the management API at {management.address} is that of another broker "
                        f"('{overview.cluster_name}', not '{ours}'); not used"
                    )
                    return
                found.alarm = await management.alarms() or ""
                seen = await _Routing.of(management, login.vhost)
                self._shown = await _permission(management, login)
        except HoldfastError as error:
            found.warnings.append(f"the management API could not be asked, checks are fewer; {error.message}")
            return
        self._seen = seen
        found.has_management = True

    def _find_limit(self, found: Preflight, version: Version) -> None:
        has_default = version >= HAS_DEFAULT_LIMIT
        info = self._seen.infos.get(self._queue) if self._seen else None
        if info is not None:
            found.queue_type, in_force = info.type, info.in_force
            found.delivery_limit = delivery_limit(in_force, version)
            if info.type == "quorum" and in_force.arguments.get(DELIVERY_LIMIT) == -1 and not has_default:
                found.delivery_limit = 0
                found.warnings.append(f"queue '{info.name}' has x-delivery-limit -1, which this version takes for zero")
        elif self._queue:
            found.delivery_limit, found.limit_is_assumed = DELIVERY_LIMIT_DEFAULT if has_default else None, True
        if found.delivery_limit is not None:
            priority = self._seen.priority_above(info) if self._seen else PRIORITY_UNSEEN
            found.cure = _cure(self._queue, self._connection.url.login.vhost, version, info, priority)
        may_be_quorum = found.queue_type in ("quorum", "")
        found.gives_back_at_tail = may_be_quorum and not has_default and not found.delivery_limit

    async def _check(self, address: Address, found: Preflight) -> None:
        key, exchange = address.routing_key, address.exchange
        if not exchange and key == self._queue:
            found.cycles.append(f"queue '{key}' is the dead-letter queue itself")
            return
        try:
            is_there = await (self._connection.has_exchange(exchange) if exchange else self._connection.has_queue(key))
        except BrokerRefused as error:
            is_there = True
            found.warnings.append(f"a target could not be checked; {error.message}")
        if not is_there:
            missing = f"{_not_there(exchange)} (route with key '{key}')"
            found.missing.append(missing if exchange else f"queue '{key}' does not exist")
        elif exchange and self._graph is not None:
            self._check_routing(self._graph, address, found)

    def _check_routing(self, graph: Graph, address: Address, found: Preflight) -> None:
        key, exchange = address.routing_key, address.exchange
        reached = graph.reached(exchange, key)
        if reached is None:
            found.warnings.append(f"whether exchange '{exchange}' routes '{key}' depends on headers, not checked")
            return
        if why := _why_nowhere(graph, address):
            found.missing.append(why)
        elif self._queue in reached:
            found.cycles.append(f"exchange '{exchange}' routes key '{key}' into '{self._queue}' itself")
        found.copies = {**found.copies, str(address): sorted(reached)}

    def _warn_of_losses(self, found: Preflight, table: RouteTable, version: Version) -> None:
        """By the rules that a topology is judged by: where letters lie now, and where they are known to go."""
        infos = self._seen.infos if self._seen else {}
        targets = {name for address in table.fixed_addresses() for name in self.receivers(address)}
        targets |= self.sources() if table.goes_to_source else frozenset()
        for name in [self._queue, *sorted(targets - {self._queue})]:
            if name in infos:
                reasons = loses(infos[name].in_force, version, is_dead=name == self._queue)
                found.warnings += [f"queue '{name}': {reason}" for reason in reasons]

    async def _rights(self, table: RouteTable, found: Preflight) -> list[Permission]:
        """Of our user: to read the queue (if any), to take its lock, to write to every exchange."""
        shown, rights = self._shown, []
        if queue := self._queue:
            lock = lock_name(queue)
            rights = [
                Permission(verb="read", what=f"queue '{queue}'", given=_given(shown, "read", queue)),
                Permission(verb="configure", what=f"its lock '{lock}'", given=_given(shown, "configure", lock)),
            ]
        for exchange in _exchanges(table, found):
            if any(text.startswith(_not_there(exchange)) for text in found.missing):
                continue  # a binding to what is not there can be removed by everybody
            given = _given(shown, "write", exchange or DEFAULT_EXCHANGE)
            if given is None:
                asked = _may_write(self._connection, exchange) if exchange else _may_write_by_default(self._publisher)
                given = await asked
            what = f"exchange '{exchange}'" if exchange else "the default exchange"
            rights.append(Permission(verb="write", what=what, given=given))
        return rights


def _warn_of_the_unseen(found: Preflight, table: RouteTable) -> None:
    if table.mode is Mode.EXCHANGE:
        found.warnings.append("which other queues get a copy cannot be said without the management API")
    named = sorted({f"'{one.exchange}'" for one in table.fixed_addresses() if one.exchange})
    if named or not (table.goes_to_source or table.mode is Mode.ADDRESS):
        found.warnings.append(
            f"whether the keys of {', '.join(named) or 'exchanges'} reach a queue, or an alternate exchange only, "
            "cannot be known without the management API"
        )


def _not_there(exchange: str) -> str:
    """How the findings say that an exchange is missing."""
    return f"exchange '{exchange}' does not exist"


def _version(text: str) -> Version:
    try:
        return Version.parse(text)
    except HoldfastError:
        return Version(3, 0)


def _cure(queue: str, vhost: str, version: Version, info: ManagedQueue | None, priority: int) -> str:
    """In lines; a command has the last one to itself."""
    if version < HAS_DEFAULT_LIMIT:
        return "a queue without x-delivery-limit, or a policy without delivery-limit"
    own = info.arguments.get("x-delivery-limit") if info else None
    if isinstance(own, int) and own >= 0:
        return f"a queue that is declared without x-delivery-limit {own}, which no policy takes away"
    definition = {"delivery-limit": -1}
    if info is None:
        replaced = " (a queue has one policy: a policy of lower priority that the queue has is no longer in force)"
    elif info.policy:
        # Whatever else it sets for this queue would be gone with it.
        definition = {**info.effective_policy, **definition}
        replaced = f" (a queue has one policy: this one is in place of '{info.policy}', whose settings it keeps)"
    else:
        replaced = ""
    words = ["rabbitmqctl", "set_policy", "-p", vhost, "--priority", str(priority), "--apply-to", "queues"]
    words += [f"no-limit.{queue}", f"^{re.escape(queue)}$", json.dumps(definition)]
    return f"a policy{replaced}:\n{shlex.join(words)}"


async def _permission(management: Management, login: Login) -> ManagedPermission | None:
    """None where nobody tells us: we are no administrator, or another service decides."""
    try:
        return await management.permission(login.vhost, login.user) if login.mechanism == "PLAIN" else None
    except HoldfastError:
        return None


def _exchanges(table: RouteTable, found: Preflight) -> Iterable[str]:
    names = dict.fromkeys(address.exchange for address in table.fixed_addresses())
    if table.goes_to_source or found.delivery_limit is not None:
        names[""] = None  # also for what goes back by a publish
    return names


def _given(shown: ManagedPermission | None, verb: str, name: str) -> bool | None:
    if shown is None:
        return None
    pattern: str = getattr(shown, verb)
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return None  # the broker's expressions know more than ours


async def _may_write(connection: Connection, exchange: str) -> bool | None:
    """Asked by removing a binding that cannot be there. The right to write is looked at before that to read."""
    source = SOURCES[exchange == SOURCES[0]]
    try:
        await connection.ask(methods.ExchangeUnbind(destination=exchange, source=source, routing_key=uuid.uuid4().hex))
    except BrokerRefused as error:
        if error.reply_code != ACCESS_REFUSED:
            return None
        return f"exchange '{exchange}'" not in error.message
    return True


async def _may_write_by_default(publisher: RabbitPublisher) -> bool | None:
    nowhere = Outgoing("", f"holdfast.nowhere.{uuid.uuid4().hex}", properties.encode({}), b"")
    outcome = (await publisher.publish([nowhere], timeout_s=TIMEOUT_S))[0]
    if outcome.kind is OutcomeKind.RETURNED:
        return True
    return False if outcome.kind is OutcomeKind.REFUSED and outcome.code == ACCESS_REFUSED else None
