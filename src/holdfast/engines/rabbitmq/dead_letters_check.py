"""What is looked at before a recovery takes its first letter: broker, alarms, limits, and whether targets route.

AMQP tells whether queues and exchanges are there. What they are bound to, their type and their limits only the
management API can say; without it the delivery limit is assumed from the broker's version, on the safe side.
"""

from __future__ import annotations

from pamqp import base

from holdfast.core.message import Address as Destination
from holdfast.core.routes import Mode, RouteTable
from holdfast.core.topology import Version
from holdfast.engines.rabbitmq.bindings import Bindings
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.limit_cure import PRIORITY_UNSEEN, cure, priority_above
from holdfast.engines.rabbitmq.management import ManagedQueue, Management
from holdfast.engines.rabbitmq.recovery_lock import NoEvents
from holdfast.engines.rabbitmq.wire import methods
from holdfast.errors import BrokerRefused, HoldfastError
from holdfast.ports.recovery import Depth, Preflight

NOT_FOUND = 404
#: Since 4.0 every quorum queue has it unless told otherwise.
DELIVERY_LIMIT_DEFAULT = 20
MANAGEMENT_TIMEOUT_S = 5.0


class Inspection:
    """`run` once, on the connection that will consume."""

    def __init__(self, connection: Connection, queue: str, management: str | None) -> None:
        self._connection = connection
        self._queue = queue
        self._management = management
        self._seen: Bindings | None = None
        self._info: ManagedQueue | None = None
        self._priority = PRIORITY_UNSEEN

    def receivers(self, address: Destination) -> list[str]:
        """The queues that a message with this address reaches; none when nobody could say."""
        if not address.exchange:
            return [address.routing_key]
        reached = self._seen.reached(address.exchange, address.routing_key) if self._seen else None
        return sorted(reached or ())

    def blocked(self, address: Destination) -> str:
        """Why nothing that is sent there gets to where it is meant for; empty when it does, or nobody could say."""
        exchange, key = address.exchange, address.routing_key
        where = f"exchange '{exchange}', key '{key}'"
        if self._queue and self._queue in self.receivers(address):
            return f"cyclic: {where}: leads into the dead-letter queue itself"
        if self._seen is None or not exchange or not (other := self._seen.only_alternate(exchange, key)):
            return ""
        return f"unroutable: {where}: only the alternate exchange '{other}' takes it"

    async def alarm(self) -> str:
        """Why the broker takes no publishes; empty when it does, or the management API does not say."""
        if self._management is None or self._seen is None:
            return ""
        try:
            async with Management(self._management, timeout_s=MANAGEMENT_TIMEOUT_S) as management:
                alarm = await management.alarms()
        except HoldfastError:
            return ""
        return f"the broker takes no publishes: {alarm}" if alarm else ""

    async def refusal(self, connection: Connection, exchange: str) -> str:
        """Why every publish to this exchange would be refused; empty when it would not, or nobody can say."""
        self._connection = connection  # that of the start may be lost
        try:
            await self._ask(methods.ExchangeDeclare(exchange=exchange, passive=True))
        except BrokerRefused as error:
            return f"refused: {error.message}" if error.reply_code == NOT_FOUND else ""
        return ""

    async def run(self, table: RouteTable) -> Preflight:
        """Raises BrokerRefused when the queue is not there or may not be read. Without a queue: of the targets."""
        session = self._connection.session
        answer = await self._ask(methods.QueueDeclare(queue=self._queue, passive=True)) if self._queue else None
        product = str(session.server_properties.get("product") or "broker")
        found = Preflight(
            broker=f"{product} {session.version}",
            depth=Depth(
                ready=int(getattr(answer, "message_count", 0) or 0),
                consumers=int(getattr(answer, "consumer_count", 0) or 0),
            ),
        )
        version = _version(session.version)
        if self._queue:
            found.delivery_limit = DELIVERY_LIMIT_DEFAULT if version >= Version(4, 0) else None
            found.limit_is_assumed = True
        self._seen = world = await self._world(found)
        if self._info is not None and world is not None:
            _limits(found, self._info, version)
        if found.delivery_limit is not None:
            info = self._info if world is not None else None
            found.cure = cure(self._queue, self._connection.address.login.vhost, version, info, self._priority)
        may_be_quorum = found.queue_type in ("quorum", "")
        found.gives_back_at_tail = may_be_quorum and version < Version(4, 0) and not found.delivery_limit
        for destination in table.fixed_addresses():
            await self._check(destination, world, found)
        if table.mode is Mode.EXCHANGE and world is None:
            found.warnings.append("which other queues get a copy cannot be said without the management API")
        named = sorted({f"'{one.exchange}'" for one in table.fixed_addresses() if one.exchange})
        if world is None and (named or table.mode not in (Mode.SOURCE, Mode.PLACE)):
            found.warnings.append(
                f"whether the keys of {', '.join(named) or 'exchanges'} reach a queue, or an alternate exchange only, "
                "cannot be known without the management API"
            )
        return found

    async def _check(self, destination: Destination, world: Bindings | None, found: Preflight) -> None:
        key, exchange = destination.routing_key, destination.exchange
        if not exchange:
            if key == self._queue:
                found.cycles.append(f"queue '{key}' is the dead-letter queue itself")
            elif not await self._there(methods.QueueDeclare(queue=key, passive=True), found):
                found.missing.append(f"queue '{key}' does not exist")
            return
        if not await self._there(methods.ExchangeDeclare(exchange=exchange, passive=True), found):
            found.missing.append(f"{not_there(exchange)} (route with key '{key}')")
            return
        if world is None:
            return
        reached = world.reached(exchange, key)
        if reached is None:
            found.warnings.append(f"whether exchange '{exchange}' routes '{key}' depends on headers, not checked")
            return
        if not reached:
            found.missing.append(f"exchange '{exchange}' routes key '{key}' to no queue")
        elif other := world.only_alternate(exchange, key):
            found.missing.append(
                f"exchange '{exchange}' routes key '{key}' to no queue: only the alternate exchange '{other}' takes it"
            )
        elif self._queue in reached:
            found.cycles.append(f"exchange '{exchange}' routes key '{key}' into '{self._queue}' itself")
        found.copies = {**found.copies, str(destination): sorted(reached)}

    async def _there(self, passive: base.Frame, found: Preflight) -> bool:
        try:
            await self._ask(passive)
        except BrokerRefused as error:
            if error.reply_code == NOT_FOUND:
                return False
            found.warnings.append(f"a target could not be checked; {error.message}")
        return True

    async def _ask(self, method: base.Frame) -> base.Frame:
        """On a channel of its own: every refusal closes one."""
        channel = await self._connection.channel(NoEvents())
        answer = await channel.call(method)
        await self._connection.close_channel(channel)
        return answer

    async def _world(self, found: Preflight) -> Bindings | None:
        if self._management is None:
            return None
        vhost = self._connection.address.login.vhost
        try:
            async with Management(self._management, timeout_s=MANAGEMENT_TIMEOUT_S) as management:
                overview = await management.overview()
                ours = str(self._connection.session.server_properties.get("cluster_name") or "")
                if overview.cluster_name != ours:
                    found.warnings.append(
                        f"the management API at {management.address} is that of another broker "
                        f"('{overview.cluster_name}', not '{ours}'); not used"
                    )
                    return None
                found.alarm = await management.alarms() or ""
                self._info = await management.queue(vhost, self._queue) if self._queue else None
                self._priority = await priority_above(management, self._info)
                world = Bindings(await management.exchanges(vhost), await management.bindings(vhost))
        except HoldfastError as error:
            found.warnings.append(f"the management API could not be asked, checks are fewer; {error.message}")
            return None
        found.has_management = True
        return world


def not_there(exchange: str) -> str:
    """How the findings say that an exchange is missing."""
    return f"exchange '{exchange}' does not exist"


def _limits(found: Preflight, info: ManagedQueue, version: Version) -> None:
    found.queue_type = info.type
    found.limit_is_assumed = False
    if info.type != "quorum":
        found.delivery_limit = None
        return
    given = [info.arguments.get("x-delivery-limit"), info.effective_policy.get("delivery-limit")]
    finite = [limit for limit in given if isinstance(limit, int) and limit >= 0]
    unlimited = any(limit == -1 for limit in given)
    if finite:
        found.delivery_limit = min(finite)
    elif version >= Version(4, 0) and not unlimited:
        found.delivery_limit = DELIVERY_LIMIT_DEFAULT
    else:
        found.delivery_limit = None
        if unlimited and version < Version(4, 0):
            found.delivery_limit = 0
            found.warnings.append(f"queue '{info.name}' has x-delivery-limit -1, which this version takes for zero")


def _version(text: str) -> Version:
    try:
        return Version.parse(text)
    except HoldfastError:
        return Version(3, 0)
