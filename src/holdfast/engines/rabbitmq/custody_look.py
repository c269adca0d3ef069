"""What a plan wants to know of RabbitMQ before a letter is sent: whether an address routes, which queues get a copy,
and how long a letter that fails there takes to be dead again.

AMQP tells whether queues and exchanges are there; bindings and delays only the management API can say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pamqp import base

from holdfast.core.message import Address as Destination
from holdfast.core.redrive_task import Retries
from holdfast.core.topology import DEAD_EXCHANGE, DEAD_KEY, TTL, effective
from holdfast.engines.rabbitmq.address import BrokerUrl
from holdfast.engines.rabbitmq.bindings import Bindings
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.management import Management
from holdfast.engines.rabbitmq.recovery_lock import NoEvents
from holdfast.engines.rabbitmq.wire import methods
from holdfast.errors import BrokerRefused, HoldfastError
from holdfast.ports.custody import Reach

LOOK_TIMEOUT_S = 10.0
MS_PER_S = 1_000
WAITS_IN_A_ROW_MAX = 10


class _World:
    """Queues with what holds for them, and their bindings."""

    def __init__(self, queues: dict[str, dict[str, Any]], bindings: Bindings) -> None:
        self.queues = queues
        self._bindings = bindings

    def reached(self, address: Destination) -> set[str] | None:
        """Queues that get it; None where headers decide."""
        if not address.exchange:
            return {address.routing_key} & self.queues.keys()
        return self._bindings.reached(address.exchange, address.routing_key)

    def only_alternate(self, address: Destination) -> str:
        """The alternate exchange that takes it because no binding does; empty when one does."""
        return self._bindings.only_alternate(address.exchange, address.routing_key) if address.exchange else ""

    def dead_from(self, queue: str) -> set[str] | None:
        """Where its dead letters go, when the queue says with which key."""
        exchange, key = self.queues[queue].get(DEAD_EXCHANGE), self.queues[queue].get(DEAD_KEY)
        if not isinstance(exchange, str):
            return None
        return self.reached(Destination(exchange=exchange, routing_key=key if isinstance(key, str) else ""))

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


class Outlook:
    """`look` and `ladder_s` on connections of their own."""

    def __init__(self, address: BrokerUrl, management: str | None, retries: Retries) -> None:
        self._address = address
        self._management = management
        self._retries = retries

    async def look(self, addresses: Sequence[Destination]) -> dict[Destination, Reach]:
        """Where each address leads now."""
        found: dict[Destination, Reach] = {}
        async with await Connection.open(self._address.named("holdfast custody")) as connection:
            world, trouble = await self._world(connection) if any(one.exchange for one in addresses) else (None, "")
            for address in dict.fromkeys(addresses):
                found[address] = await _looked(connection, address, world, trouble)
        return found

    async def ladder_s(self, addresses: Sequence[Destination]) -> float | None:
        """The longest of all; None when nothing tells of one of them."""
        async with await Connection.open(self._address.named("holdfast custody")) as connection:
            world, _ = await self._world(connection)
        if world is None:
            return self._retries.ladder_s()
        ladders = [self._of_address(world, address) for address in dict.fromkeys(addresses)]
        known = [ladder for ladder in ladders if ladder is not None]
        return max(known) if known and len(known) == len(ladders) else None

    def _of_address(self, world: _World, address: Destination) -> float | None:
        queues = world.reached(address)
        ladders = [self._of_queue(world, queue) for queue in queues or ()]
        known = [ladder for ladder in ladders if ladder is not None]
        return max(known) if known and len(known) == len(ladders) else self._retries.ladder_s()

    def _of_queue(self, world: _World, queue: str, waits: int = 0) -> float | None:
        if queue not in world.queues or waits > WAITS_IN_A_ROW_MAX:
            return self._retries.ladder_s()
        delay_s = world.delay_s(queue)
        if delay_s is not None:  # a wait queue: it sits there first
            further = [self._of_queue(world, name, waits + 1) for name in world.dead_from(queue) or ()]
            known = [ladder for ladder in further if ladder is not None]
            return delay_s + max(known) if known and len(known) == len(further) else None
        if steps := world.waits_of(queue):
            return self._retries.ladder_s(steps)
        # What is rejected is dead at once, where the broker does it and there is no wait queue.
        dead = world.dead_from(queue)
        return self._retries.ladder_s() if self._retries.delays_s or not dead else 0.0

    async def _world(self, connection: Connection) -> tuple[_World | None, str]:
        """What the management API shows, or why it shows nothing."""
        if self._management is None:
            return None, "there is no management API in the settings"
        vhost = self._address.login.vhost
        try:
            async with Management(self._management, timeout_s=LOOK_TIMEOUT_S) as api:
                ours = str(connection.session.server_properties.get("cluster_name") or "")
                if (await api.overview()).cluster_name != ours:
                    return None, f"the management API at {api.address} is that of another broker"
                bindings = Bindings(await api.exchanges(vhost), await api.bindings(vhost))
                queues = await api.queues(vhost)
        except HoldfastError as error:
            return None, f"the management API could not be asked; {error.message}"
        return _World({one.name: effective(one.arguments, one.effective_policy) for one in queues}, bindings), ""


async def _looked(connection: Connection, address: Destination, world: _World | None, trouble: str) -> Reach:
    exchange, key = address.exchange, address.routing_key
    if not exchange:
        why = await _refusal(connection, methods.QueueDeclare(queue=key, passive=True))
        return Reach(why=why, queues=() if why else (key,))
    if why := await _refusal(connection, methods.ExchangeDeclare(exchange=exchange, passive=True)):
        return Reach(why=why, queues=())
    if world is None:
        seen = "is seen only when letters are published, and what an alternate exchange takes not even then"
        return Reach(note=f"whether {address} routes {seen}: {trouble}")
    reached = world.reached(address)
    if reached is None:
        return Reach(note=f"whether {address} routes depends on headers and was not checked")
    nowhere = f"exchange '{exchange}' routes key '{key}' to no queue"
    if other := world.only_alternate(address):
        # It would be confirmed, and lie where nobody looks for it.
        return Reach(why=f"{nowhere}: only the alternate exchange '{other}' takes it", queues=())
    return Reach(why="" if reached else nowhere, queues=tuple(sorted(reached)))


async def _refusal(connection: Connection, method: base.Frame) -> str:
    """On a channel of its own: every refusal closes one."""
    channel = await connection.channel(NoEvents())
    try:
        await channel.call(method)
    except BrokerRefused as error:
        return error.message
    await connection.close_channel(channel)
    return ""
