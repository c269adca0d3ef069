"""The brokers that the suite runs over: each can be sent to, and be asked what is parked and what is left."""

from __future__ import annotations

from typing import NamedTuple

import holdfast
from holdfast.core.item import NewItem
from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.broker import RabbitSubscription
from holdfast.ports.broker import Layout
from tests.support.amqp import Admin, headers_of, outgoing

QUEUE = "work"


class Letter(NamedTuple):
    """A parked message: its body, why it was parked, and by which error."""

    body: bytes
    reason: str
    error: str


class EmbeddedUnderTest:
    """The embedded queue. The app opens it; what is asked goes through the app while it runs."""

    def __init__(self, url: str, *, token: str = "") -> None:
        self.url = url
        self.token = token
        self.layout: Layout = "per-consumer"
        self._app: holdfast.App | None = None

    def app(self, *, stop_timeout: str = "10s") -> holdfast.App:
        self._app = holdfast.App(self.url, token=self.token, stop_timeout=stop_timeout)
        return self._app

    @property
    def queues(self) -> holdfast.Queues:
        assert self._app is not None
        return self._app.queues

    async def send(self, *bodies: bytes, queue: str = QUEUE) -> None:
        """Put messages into a queue that has been declared."""
        await self.queues.queue_produce(queue, [NewItem(payload=body, reference="ref", kind="kind") for body in bodies])

    async def parked(self, queue: str = QUEUE) -> list[Letter]:
        """What is in the queue's dead queue."""
        dead = await self.queues.storage_items_list(f"{queue}.dlq")
        reasons = [item.death_reason.partition("; ") for item in dead]
        return [Letter(item.payload, why[0], why[2]) for item, why in zip(dead, reasons, strict=True)]

    async def left(self, queue: str = QUEUE) -> int:
        """How many messages the queue has, ours and waiting ones included."""
        return await count_of(self.queues, queue)


class RabbitUnderTest:
    """A virtual host of RabbitMQ."""

    def __init__(self, admin: Admin, layout: Layout) -> None:
        self.admin = admin
        self.layout = layout
        self.url = admin.node.url(admin.vhost)
        self._app: holdfast.App | None = None

    def app(self, *, stop_timeout: str = "10s") -> holdfast.App:
        self._app = holdfast.App(self.url, management=self.admin.node.management_url, stop_timeout=stop_timeout)
        return self._app

    async def send(self, *bodies: bytes, queue: str = QUEUE) -> None:
        await self.admin.publish([outgoing(queue, body, message_id=f"id of {body!r}", type="kind") for body in bodies])

    async def letters(self, queue: str = QUEUE) -> list[Delivery]:
        """What is in the dead queue, held and given back."""
        return await self.admin.look(f"{queue}.dlq")

    async def parked(self, queue: str = QUEUE) -> list[Letter]:
        told = [(delivery.body, headers_of(delivery)) for delivery in await self.letters(queue)]
        return [
            Letter(body, str(found["x-parked-reason"]), f"{found['x-error-type']}: {found['x-error-message']}")
            for body, found in told
        ]

    async def left(self, queue: str = QUEUE) -> int:
        # A message on its way from the broker to us is in no count: nothing is believed before it was seen thrice.
        return max([await self._left(queue) for _ in range(3)])

    async def _left(self, queue: str) -> int:
        assert self._app is not None
        steps = len(self._app.consumers[0].policy.steps_us)
        waits = [f"{queue}.retry"] if steps == 1 else [f"{queue}.retry.{step}" for step in range(1, steps + 1)]
        ready = sum([await self.admin.count(name) for name in (queue, *waits)])
        held = 0
        for worker in self._app._workers:
            if isinstance(worker._consumer, RabbitSubscription) and worker.health.state != "stopped":
                held += worker._consumer._consumer.unsettled_count
        return ready + held


BrokerUnderTest = EmbeddedUnderTest | RabbitUnderTest


async def count_of(queues: holdfast.Queues, queue: str) -> int:
    """How many items a queue has, in sight or on their way."""
    (logical,) = (await queues.queue_stats(queue)).logical_queues
    return sum(part.total + part.scheduled + part.dying for part in logical.partitions)
