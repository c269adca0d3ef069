"""A recovery's consumers: however often one is ended and another begun, what is wanted comes, and no more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import pytest

from holdfast.core.message import Delivery
from holdfast.core.recovery import RunLimits
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.drain import DeliveryBudget, DrainChannels
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.errors import BrokerError
from tests.support.amqp import Admin, outgoing

pytestmark = pytest.mark.rabbitmq

CAME_TIMEOUT_S = 60.0


class Run:
    """What a recovery does with its channels."""

    def __init__(self, queue: str) -> None:
        self.budget = DeliveryBudget(RunLimits())
        self.budget.ready = self.ready = deque[Delivery]()
        self.channels = DrainChannels(queue, self.budget, on_arrived=self.arrived, on_lost=self.lost)
        self.came_count = 0
        self._news = asyncio.Event()

    def arrived(self, deliveries: list[Delivery]) -> None:
        self.came_count += len(deliveries)
        self.ready.extend(deliveries)
        self._news.set()

    def lost(self, error: BrokerError | None) -> None:
        raise AssertionError(error)

    async def want(self, count: int) -> None:
        self.budget.wanted_count = count
        await self.channels.allow()

    async def take(self, count: int) -> list[Delivery]:
        """So many, when they have come."""
        async with asyncio.timeout(CAME_TIMEOUT_S):
            while len(self.ready) < count:
                self._news.clear()
                await self._news.wait()
        self.budget.taken(count)
        return [self.ready.popleft() for _ in range(count)]

    def ack(self, deliveries: list[Delivery]) -> None:
        for one in deliveries:
            channel = self.channels.find(one.channel)
            assert channel is not None
            assert not channel.tracker.ack([one.tag])
        self.channels.flush()


@pytest.fixture(params=["classic", "quorum"])
async def run(request: pytest.FixtureRequest, admin: Admin) -> AsyncIterator[Run]:
    """Of a queue with 100 letters; ten are wanted."""
    make = admin.quorum_queue if request.param == "quorum" else admin.queue
    queue = await make("dead")
    async with RabbitPublisher(admin.broker_url()) as publisher:
        await publisher.publish([outgoing(queue, b"%02d" % number) for number in range(100)])
    run = Run(queue)
    connection = await Connection.open(admin.broker_url())
    try:
        run.budget.wanted_count = 10
        await run.channels.consume(connection, 100)
        yield run
    finally:
        run.channels.leave()
        await connection.close()


async def test_acks_of_an_ended_consumer_are_not_taken_for_room_of_the_next(run: Run) -> None:
    first = await run.take(10)
    await run.want(0)  # all have come: the consumer is ended
    await run.want(10)  # they were none of those that count, so that so many are still to come
    second = await run.take(10)
    await run.want(10)
    run.ack(first)  # which makes the broker send nothing
    run.ack(second)
    assert len(await run.take(10)) == 10
    assert run.came_count == 30


async def test_letters_of_an_ended_consumer_can_be_held_for_good(run: Run) -> None:
    await run.take(10)
    for _ in range(4):
        await run.want(0)
        await run.want(10)
        run.ack(await run.take(10))
    assert run.came_count == 50


async def test_what_came_by_several_consumers_of_a_channel_goes_back_in_order(run: Run, admin: Admin) -> None:
    """A quorum queue gives back consumer by consumer, in either order, what one frame gives back."""
    for wanted in (40, 30, 30):
        await run.want(wanted)
        await run.channels.widen(100)
        await run.take(wanted)
    await run.channels.stop()
    assert await run.channels.give_back_all() == 100
    bodies = [one.body for one in await admin.drain("dead", 100)]
    assert bodies == [b"%02d" % number for number in range(100)]
