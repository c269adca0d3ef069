"""Letters that are larger than the window: reading pauses, and nobody waits for an answer that is not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from holdfast.core.message import Address, Delivery
from holdfast.core.recovery import RecoveryOrder, RunLimits
from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.drain import RabbitDrain
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.errors import BrokerLost
from holdfast.proof.proxy import Proxy
from holdfast.services.recover.run import RecoveryRun
from holdfast.wiring import SystemClock, open_recovery
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

QUEUE = "dead"
LETTER_BYTES = 300_000
WINDOW_BYTES = 1_000_000
COUNT = 20
SOON_S = 10.0


class Consuming:
    """A run, and its drain at hand."""

    def __init__(self, drain: RabbitDrain, run: RecoveryRun) -> None:
        self.drain = drain
        self.refusal = run._refusal
        self._run = run

    async def stop(self) -> Sequence[Delivery]:
        return await self.drain.stop(self._run._is_near_limit)


@asynccontextmanager
async def consuming(admin: Admin, *, capacity_count: int, port: int | None = None) -> AsyncIterator[Consuming]:
    """A recovery of a queue with letters of which three fit into the window."""
    async with RabbitPublisher(admin.broker_url()) as publisher:
        await publisher.publish([outgoing(QUEUE, b"%08d" % n + bytes(LETTER_BYTES)) for n in range(COUNT)])
    table = RouteTable(mode=Mode.ADDRESS, address=Address(exchange="", routing_key=await admin.queue("there")))
    limits = RunLimits(window_count_max=capacity_count, window_bytes_max=WINDOW_BYTES)
    order = RecoveryOrder(dead_queue=QUEUE, table=table, limits=limits, run="r", by="me")
    url, management = admin.node.url(admin.vhost, port=port), admin.node.management_url
    async with open_recovery(url, order, management=management) as broker:
        assert isinstance(broker.drain, RabbitDrain)
        run = RecoveryRun(broker, order, await broker.inspector.preflight(table), clock=SystemClock())
        source = Consuming(broker.drain, run)
        await source.drain.open()
        await eventually(lambda: len(source.drain._ready) * LETTER_BYTES >= WINDOW_BYTES)
        yield source


async def take(drain: RabbitDrain, count: int) -> Sequence[Delivery]:
    """So many, each acked as soon as it has come: there is room for the next ones then."""
    taken: list[Delivery] = []
    async with asyncio.timeout(SOON_S):
        while len(taken) < count:
            await drain.allow(None, held_count=drain._channels.capacity_count)
            batch = await drain.take(count_max=count - len(taken), timeout_s=1.0)
            assert not drain.ack(batch)
            taken += batch
    return taken


@pytest.mark.parametrize(("limit", "kept"), [(100, False), (5, True)])
async def test_a_stop_does_not_wait_for_room(admin: Admin, limit: int, kept: bool) -> None:
    """What comes until the broker knows of it is kept in memory only if it could not bear a return."""
    await admin.quorum_queue(QUEUE, **{"x-delivery-limit": limit})
    async with consuming(admin, capacity_count=COUNT) as source:
        await take(source.drain, 1)
        peak_count = 0
        arrived = source.drain._arrived

        def counted(deliveries: list[Delivery]) -> None:
            nonlocal peak_count
            arrived(deliveries)
            peak_count = max(peak_count, len(source.drain._ready))

        for channel in source.drain._channels._all.values():
            channel._on_arrived = counted
        async with asyncio.timeout(SOON_S):
            leftovers = await source.stop()
        assert peak_count == COUNT - 1 if kept else peak_count * LETTER_BYTES < 2 * WINDOW_BYTES
        assert len(leftovers) == (COUNT - 1 if kept else 0)
        assert await source.drain.give_back_all(others_count=0) == COUNT - 1
    await eventually(lambda: _has(admin, COUNT - 1))


async def test_a_wider_window_waits_until_there_is_room(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with consuming(admin, capacity_count=4) as source:
        drain = source.drain
        async with asyncio.timeout(SOON_S):
            await drain.allow(None, held_count=97)
        assert drain._channels.capacity_count == 4
        await take(drain, 3)
        await drain.allow(None, held_count=97)
        await take(drain, COUNT - 3)
        assert drain._channels.capacity_count == 100
        await source.stop()
        assert await source.drain.give_back_all(others_count=0) == 0
    assert await admin.count(QUEUE) == 0


async def test_the_depth_can_be_read_while_nothing_else_is(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with consuming(admin, capacity_count=4) as source, asyncio.timeout(SOON_S):
        depth = await source.drain.depth()
        assert (depth.ready, depth.untaken) == (COUNT - 4, 4)


async def test_an_exchange_that_cannot_be_asked_for_ends_nothing_that_goes_on(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        consuming(admin, capacity_count=4, port=proxy.port) as source,
        asyncio.timeout(SOON_S),
    ):
        assert "no exchange 'missing'" in await source.refusal("missing")
        await proxy.refuse()
        assert await source.refusal("missing") == "", "nobody can say"
        assert len(await take(source.drain, 8)) == 8
        await proxy.cut()
        with pytest.raises(BrokerLost):
            await take(source.drain, COUNT)
        with pytest.raises(BrokerLost):
            await source.refusal("missing")


async def _has(admin: Admin, count: int) -> bool:
    return await admin.count(QUEUE) == count
