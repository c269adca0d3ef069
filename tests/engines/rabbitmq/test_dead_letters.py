"""Letters that are larger than the window: reading pauses, and nobody waits for an answer that is not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from holdfast.core.death import RedriveStamp
from holdfast.core.message import Address
from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.dead_letters import RabbitDeadLetters
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.redriver import Redriver
from holdfast.errors import BrokerLost
from holdfast.ports.recovery import RunLetter
from holdfast.proof.proxy import Proxy
from tests.engines.rabbitmq.admin import Admin, outgoing
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

QUEUE = "dead"
LETTER_BYTES = 300_000
WINDOW_BYTES = 1_000_000
COUNT = 20
SOON_S = 60.0


@asynccontextmanager
async def consuming(admin: Admin, *, capacity_count: int, port: int | None = None) -> AsyncIterator[RabbitDeadLetters]:
    """A recovery of a queue with letters of which three fit into the window."""
    async with RabbitPublisher(admin.address()) as publisher:
        await publisher.publish([outgoing(QUEUE, b"%08d" % n + bytes(LETTER_BYTES)) for n in range(COUNT)])
    table = RouteTable(mode=Mode.PLACE, place=Address(exchange="", routing_key=await admin.queue("there")))
    redriver = Redriver(RedriveStamp(run="r", by="me", dead_queue=QUEUE), table, now=lambda: datetime.now(UTC))
    management = admin.node.management_url
    address = admin.address(port=port)
    letters = RabbitDeadLetters(address, QUEUE, redriver, management=management, window_bytes_max=WINDOW_BYTES)
    await letters.connect()
    try:
        await letters.inspect(table)
        await letters.open(capacity_count=capacity_count)
        await eventually(lambda: letters.untaken_count * LETTER_BYTES >= WINDOW_BYTES)
        yield letters
    finally:
        await letters.close()


async def take(letters: RabbitDeadLetters, count: int) -> Sequence[RunLetter]:
    """So many, each acked as soon as it has come: there is room for the next ones then."""
    taken: list[RunLetter] = []
    async with asyncio.timeout(SOON_S):
        while len(taken) < count:
            await letters.want(None)
            batch = await letters.take(count_max=count - len(taken), timeout_s=1.0)
            assert not letters.ack(batch)
            taken += batch
    return taken


@pytest.mark.parametrize(("limit", "kept"), [(100, False), (5, True)])
async def test_a_stop_does_not_wait_for_room(admin: Admin, limit: int, kept: bool) -> None:
    """What comes until the broker knows of it is kept in memory only if it could not bear a return."""
    await admin.quorum_queue(QUEUE, **{"x-delivery-limit": limit})
    async with consuming(admin, capacity_count=COUNT) as letters:
        await take(letters, 1)
        async with asyncio.timeout(SOON_S):
            await letters.stop()
        assert letters.untaken_count == COUNT - 1 if kept else letters.untaken_count * LETTER_BYTES < 2 * WINDOW_BYTES
        assert len(letters.leftovers()) == (COUNT - 1 if kept else 0)
        assert await letters.give_back() == COUNT - 1
    await eventually(lambda: _has(admin, COUNT - 1))


async def test_a_wider_window_waits_until_there_is_room(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with consuming(admin, capacity_count=4) as letters:
        async with asyncio.timeout(SOON_S):
            await letters.widen(100)
            await letters.want(None)
        assert letters.capacity_count == 4
        await take(letters, 3)
        await letters.widen(100)
        await take(letters, COUNT - 3)
        assert letters.capacity_count == 100
        await letters.stop()
        assert await letters.give_back() == 0
    assert await admin.count(QUEUE) == 0


async def test_the_depth_can_be_read_while_nothing_else_is(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with consuming(admin, capacity_count=4) as letters, asyncio.timeout(SOON_S):
        assert (await letters.depth()).ready == COUNT - 4
        assert letters.untaken_count == 4


async def test_an_exchange_that_cannot_be_asked_for_ends_nothing_that_goes_on(admin: Admin) -> None:
    await admin.queue(QUEUE)
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        consuming(admin, capacity_count=4, port=proxy.port) as letters,
        asyncio.timeout(SOON_S),
    ):
        assert "no exchange 'missing'" in await letters.refusal("missing")
        await proxy.refuse()
        assert await letters.refusal("missing") == "", "nobody can say"
        assert len(await take(letters, 8)) == 8
        await proxy.cut()
        with pytest.raises(BrokerLost):
            await take(letters, COUNT)
        with pytest.raises(BrokerLost):
            await letters.refusal("missing")


async def _has(admin: Admin, count: int) -> bool:
    return await admin.count(QUEUE) == count
