"""RabbitMQ from outside: what tests declare, publish, count and read, over connections of their own.

Tests of the engine itself are in `tests/engines/rabbitmq`. Whatever all others need of it is here, and only here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pamqp import commands as amqp

from holdfast.core.message import Delivery, Outgoing
from holdfast.engines.rabbitmq.connection import Channel, Close, Connection, Listener
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.engines.rabbitmq.wire.events import Event
from holdfast.errors import BrokerError
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

#: At once: each has to be confirmed in time, however many there are.
PUBLISHED_COUNT = 5_000

#: `properties` and `table` are for tests that write or compare the bytes themselves.
__all__ = [
    "Admin",
    "BrokerUrl",
    "RabbitPublisher",
    "Recorder",
    "ResumingConsumer",
    "decoded",
    "headers_of",
    "message_id_of",
    "outgoing",
    "properties",
    "raw_header",
    "table",
]


class Recorder(Listener):
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.close: Close = None

    def on_events(self, events: list[Event]) -> None:
        self.events += events

    def on_closed(self, error: BrokerError, close: Close) -> None:
        self.close = close


def raw_header(headers: bytes, name: str) -> bytes | None:
    """The raw type and value of the first entry with this name in a header table; None when there is none."""
    wanted = name.encode()
    for found, start, end in table.scan(headers).entries:
        if found == wanted:
            return headers[start + 1 + len(found) : end]
    return None


def outgoing(
    key: str, body: bytes = b"x", *, exchange: str = "", message_id: str | None = "m", **more: object
) -> Outgoing:
    """A message to a queue; `more` are further properties, `headers` among them."""
    named = {} if message_id is None else {"message_id": message_id}
    return Outgoing(exchange, key, properties.encode({**named, **more}), body)  # type: ignore[dict-item]


def decoded(message: Delivery | Outgoing) -> Mapping[str, object]:
    """The properties of a message by their names."""
    return properties.decode(message.properties)


def headers_of(message: Delivery | Outgoing) -> dict[str, object]:
    """The headers of a message."""
    headers = decoded(message).get("headers")
    return dict(headers) if isinstance(headers, dict) else {}


def message_id_of(message: Delivery | Outgoing) -> str:
    """The id of a message that has one."""
    return str(decoded(message)["message_id"])


@dataclass
class Admin:
    """One virtual host of one node."""

    node: Node
    vhost: str
    channel: Channel

    @classmethod
    @asynccontextmanager
    async def open(cls, node: Node, vhost: str, *, keep: bool = False) -> AsyncIterator[Admin]:
        """Make the virtual host, and delete it at the end unless it is to be kept."""
        node.create_vhost(vhost)
        try:
            async with await Connection.open(BrokerUrl.parse(node.url(vhost))) as connection:
                yield cls(node, vhost, await connection.channel(Recorder()))
        finally:
            if node.pid and not keep:
                node.delete_vhost(vhost)

    @property
    def url(self) -> str:
        """The address of the virtual host."""
        return self.node.url(self.vhost)

    def broker_url(self, *, port: int | None = None, more: str = "") -> BrokerUrl:
        """The same, taken apart; `port` for a proxy."""
        return BrokerUrl.parse(self.node.url(self.vhost, port=port, more=more))

    async def queue(self, name: str, **arguments: int | str) -> str:
        """A durable queue."""
        await self.channel.call(methods.QueueDeclare(queue=name, durable=True, arguments=dict(arguments)))
        return name

    async def quorum_queue(self, name: str, **arguments: int | str) -> str:
        """A quorum queue."""
        return await self.queue(name, **{"x-queue-type": "quorum", **arguments})

    async def exchange(self, name: str, kind: str = "direct", **arguments: int | str) -> str:
        """A durable exchange."""
        declare = methods.ExchangeDeclare(exchange=name, exchange_type=kind, durable=True, arguments=dict(arguments))
        await self.channel.call(declare)
        return name

    async def bind(self, queue: str, exchange: str, key: str = "") -> None:
        """A binding."""
        await self.channel.call(methods.QueueBind(queue=queue, exchange=exchange, routing_key=key))

    async def delete(self, queue: str) -> None:
        """Delete a queue with everything in it."""
        await self.channel.call(methods.QueueDelete(queue=queue))

    async def count(self, queue: str) -> int:
        """How many messages are ready in it."""
        return (await self._declared(queue)).message_count or 0

    async def consumers_count(self, queue: str) -> int:
        """How many consumers it has. One that is gone counts until the queue has got back what it had."""
        return (await self._declared(queue)).consumer_count or 0

    async def _declared(self, queue: str) -> amqp.Queue.DeclareOk:
        answer = await self.channel.call(methods.QueueDeclare(queue=queue, passive=True))
        assert isinstance(answer, amqp.Queue.DeclareOk)
        return answer

    async def publish(self, messages: Sequence[Outgoing], *, user: str = "guest:guest") -> None:
        """Confirmed and not returned, every one of them."""
        async with RabbitPublisher(BrokerUrl.parse(self.node.url(self.vhost, user=user))) as publisher:
            for start in range(0, len(messages), PUBLISHED_COUNT):
                outcomes = await publisher.publish(messages[start : start + PUBLISHED_COUNT])
                assert all(outcome.stored for outcome in outcomes)

    async def look(self, queue: str) -> list[Delivery]:
        """What is ready in it, held and given back."""
        count = await self.count(queue)
        held: list[Delivery] = []
        if count:
            async with ResumingConsumer(self.broker_url(), queue, prefetch=count) as consumer:
                while len(held) < count and (batch := await consumer.batch(timeout_s=60.0)):
                    held += batch

            async def are_back() -> bool:
                return await self.count(queue) >= len(held)

            await eventually(are_back)  # a closed channel's messages are ready again a moment later
        return held

    async def drain(self, queue: str, count: int) -> list[Delivery]:
        """Take and ack exactly `count` messages; fails when there are fewer."""
        taken: list[Delivery] = []
        async with ResumingConsumer(self.broker_url(), queue, prefetch=max(1, min(count, 4000))) as consumer:
            while len(taken) < count:
                batch = await consumer.batch(count_max=count - len(taken), timeout_s=60.0)
                assert batch, f"{len(taken)} of {count} messages came"
                consumer.ack(batch)
                taken += batch
        return taken
