"""The brokers that the suite runs over: each can be sent to, and be asked what is parked and what is left."""

from __future__ import annotations

from typing import Any, NamedTuple

import holdfast
from holdfast.core.item import NewItem, cause_of
from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.broker import RabbitConsumer
from holdfast.ports.broker import Layout
from holdfast.wiring import SystemClock, open_rabbit_broker
from tests.support.amqp import Admin, headers_of, outgoing

QUEUE = "work"


class Letter(NamedTuple):
    """A parked message: its body, why it was parked, and by which error."""

    body: bytes
    reason: str
    error: str


class _UnderTest:
    """A broker, and the app on it that was made last."""

    def __init__(self, url: str, layout: Layout, **options: Any) -> None:
        self.url = url
        self.layout = layout
        self._options = options
        self._app: holdfast.App | None = None

    def app(self, *, stop_timeout: str = "10s") -> holdfast.App:
        self._app = holdfast.App(self.url, stop_timeout=stop_timeout, **self._options)
        return self._app


class EmbeddedUnderTest(_UnderTest):
    """The embedded queue. The app opens it; what is asked goes through the app while it runs."""

    def __init__(self, url: str, *, token: str = "") -> None:
        super().__init__(url, "per-consumer", token=token)

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
        reasons = [cause_of(item).partition("; ") for item in dead]
        return [Letter(item.payload, why[0], why[2]) for item, why in zip(dead, reasons, strict=True)]

    async def left(self, queue: str = QUEUE) -> int:
        """How many messages the queue has, ours and waiting ones included."""
        return await count_of(self.queues, queue)


class RabbitUnderTest(_UnderTest):
    """A virtual host of RabbitMQ."""

    def __init__(self, admin: Admin, layout: Layout) -> None:
        super().__init__(admin.url, layout, management=admin.node.management_url)
        self.admin = admin

    async def send(self, *bodies: bytes, queue: str = QUEUE) -> None:
        await self.admin.publish([outgoing(queue, body, message_id=f"id of {body!r}", type="kind") for body in bodies])

    async def declare(self, app: holdfast.App) -> None:
        """The queues of an app with one consumer, from now on the app that is asked."""
        self._app = app
        async with open_rabbit_broker(self.url, clock=SystemClock(), management=None) as opened:
            await opened.declare(app.consumers[0].subscription)

    async def letters(self, queue: str = QUEUE) -> list[Delivery]:
        """What is in the dead queue, held and given back."""
        return await self.admin.look(f"{queue}.dlq")

    async def parked(self, queue: str = QUEUE) -> list[Letter]:
        letters = [(letter.body, headers_of(letter)) for letter in await self.letters(queue)]
        error = "{x-error-type}: {x-error-message}".format_map
        return [Letter(body, str(told["x-parked-reason"]), error(told)) for body, told in letters]

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
            if isinstance(worker._consumer, RabbitConsumer) and worker.health.state != "stopped":
                held += worker._consumer._consumer.unsettled_count
        return ready + held


BrokerUnderTest = EmbeddedUnderTest | RabbitUnderTest


async def count_of(queues: holdfast.Queues, queue: str) -> int:
    """How many items a queue has, in sight or on their way."""
    (logical,) = (await queues.queue_stats(queue)).logical_queues
    return sum(part.total + part.scheduled + part.dying for part in logical.partitions)
