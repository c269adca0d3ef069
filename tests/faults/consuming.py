"""A producer and a consumer on RabbitMQ that keep books while brokers die: what was confirmed is done or parked.

The number of a message says what its handler does: some work, some work at their second attempt, some fail until they
are parked, some are permanent errors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import holdfast
from holdfast.core.message import OutcomeKind
from holdfast.proof.conservation import Conservation, ConservationReport
from tests.support.amqp import BrokerUrl, RabbitPublisher, ResumingConsumer, message_id_of, outgoing
from tests.support.eventually import eventually
from tests.support.rabbitmq_cluster import RabbitCluster

QUEUE = "work"
PAUSE_S = 0.005
PUBLISH_TIMEOUT_S = 20.0
DRAIN_TIMEOUT_S = 120.0
FOUND_COUNT_MAX = 200  # between two faults
PAUSED_S_MAX = 5.0


class Consuming:
    """`async with consuming(url) as load:`, then break things, then `await load.drained()`."""

    def __init__(self, url: str) -> None:
        self.books = Conservation()
        self.confirmed: set[str] = set()
        self.found: set[str] = set()
        self.unknown_count = 0
        self.app = holdfast.App(url, stop_timeout="20s")
        self._broker_url = BrokerUrl.parse(url)
        self._stopping = asyncio.Event()

        @self.app.consumer(QUEUE, retry=holdfast.Retry(attempts=4, delay="200ms"), layout="quorum", concurrency=8)
        async def handle(message: holdfast.Message) -> None:
            number = int(message.id)
            if number % 5 == 0:
                raise holdfast.Permanent("bad")
            if number % 5 == 1 or (number % 5 == 2 and message.attempt == 1):
                raise ValueError("not yet")
            self._find("done", message.id, message.body)

    async def drained(self) -> ConservationReport:
        """Stop producing, and wait until everything that was confirmed has been found; then count."""
        self._stopping.set()
        await eventually(lambda: self.confirmed <= self.found, timeout_s=DRAIN_TIMEOUT_S)
        return self.books.report()

    async def produce(self) -> None:
        """One message after the other; what has no clear answer is in doubt, and is not sent again."""
        number = 0
        async with RabbitPublisher(self._broker_url, timeout_s=PUBLISH_TIMEOUT_S) as publisher:
            while not self._stopping.is_set():
                number += 1
                name, body = str(number), f"body {number}".encode()
                self.books.put_in_doubt(name, body)
                outcome = (await publisher.publish([outgoing(QUEUE, body, message_id=name)]))[0]
                if outcome.stored:
                    self.books.put(name, body)
                    self.confirmed.add(name)
                elif outcome.kind is OutcomeKind.UNKNOWN:
                    self.unknown_count += 1
                await asyncio.sleep(PAUSE_S)

    async def collect(self) -> None:
        """Take what is parked."""
        async with ResumingConsumer(self._broker_url, f"{QUEUE}.dlq", prefetch=100) as consumer:
            while True:
                batch = await consumer.batch()
                for delivery in batch:
                    self._find("parked", message_id_of(delivery), delivery.body)
                consumer.ack(batch)

    def has_found(self, count: int) -> bool:
        return len(self.found) >= count

    def _find(self, place: str, name: str, body: bytes) -> None:
        self.books.found(place, name, body)
        self.found.add(name)


async def random_faults(cluster: RabbitCluster, *, faults: int, seed: int) -> ConservationReport:
    """Kill, stop or pause a node so many times under the load, each time until work goes on; then drain and count."""
    chance = random.Random(seed)
    vhost = cluster.create_vhost(f"faults-{seed}")
    async with consuming(cluster.url(vhost)) as load:
        for _ in range(faults):
            node, fault = chance.choice(cluster.nodes), chance.choice(["kill", "stop", "pause"])
            await asyncio.to_thread(getattr(node, fault))
            wanted = len(load.found) + chance.randint(1, FOUND_COUNT_MAX)
            if fault == "pause":
                # A leader that hangs is not replaced for a minute: nothing has to go on before it is back.
                await asyncio.sleep(chance.random() * PAUSED_S_MAX)
            else:
                await eventually(partial(load.has_found, wanted), timeout_s=DRAIN_TIMEOUT_S)
            await asyncio.to_thread(cluster.heal)
        return await load.drained()


@asynccontextmanager
async def consuming(url: str) -> AsyncIterator[Consuming]:
    """The load at work. Whatever ends one part of it ends the block."""
    load = Consuming(url)
    async with load.app.running(declare=True), asyncio.TaskGroup() as group:
        parts = [group.create_task(load.produce()), group.create_task(load.collect())]
        yield load
        for part in parts:
            part.cancel()
