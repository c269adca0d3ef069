"""Who recovers a queue holds its lock: also after the connection was lost, and somebody else has it by then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from holdfast.core.recovery import RunLimits
from holdfast.engines.rabbitmq.connection import Connection
from holdfast.engines.rabbitmq.drain import RabbitDrain, take_lock
from holdfast.errors import BrokerLost, RecoveryLocked
from holdfast.proof.proxy import Proxy
from tests.support.amqp import Admin
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

QUEUE = "dead"
QUEUE_DECLARE, BASIC_QOS, BASIC_CONSUME = b"\0\x32\0\x0a", b"\0\x3c\0\x0a", b"\0\x3c\0\x14"


@asynccontextmanager
async def recovering(admin: Admin, proxy: Proxy, *, heartbeat_s: int) -> AsyncIterator[RabbitDrain]:
    """One that consumes through the proxy."""
    await admin.queue(QUEUE)
    address = admin.broker_url(port=proxy.port, more=f"?heartbeat={heartbeat_s}")
    drain = RabbitDrain(address, QUEUE, RunLimits(window_count_max=10, window_bytes_max=2**20))
    await drain.connect()
    try:
        await drain.open()
        yield drain
    finally:
        await drain.close()


async def locked_by_another(admin: Admin, proxy: Proxy) -> Connection:
    """The connections through the proxy are lost, and somebody else comes first."""
    await proxy.refuse()
    await proxy.cut()
    other = await Connection.open(admin.broker_url())
    await take_lock(other, QUEUE, patience_s=10.0)
    proxy.accept()
    return other


@pytest.mark.parametrize("looks", [False, True])
async def test_without_the_lock_nothing_is_consumed_however_often_it_is_tried(admin: Admin, looks: bool) -> None:
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        recovering(admin, proxy, heartbeat_s=1) as drain,
        await locked_by_another(admin, proxy) as other,
    ):
        for _ in range(2):
            if looks:  # which needs a connection, and makes one
                assert (await drain.depth()).consumers == 0
            with pytest.raises(RecoveryLocked):
                await drain.open()
        assert (await drain.depth()).consumers == 0
        await other.close()
        await drain.open()
        assert (await drain.depth()).consumers == 1
        async with await Connection.open(admin.broker_url()) as third:
            with pytest.raises(RecoveryLocked):
                await take_lock(third, QUEUE, patience_s=0.0)


async def test_a_lock_that_a_lost_connection_has_not_let_go_yet_is_waited_for(admin: Admin) -> None:
    """The broker may notice its end later than we do: two heartbeats later at the most."""
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        recovering(admin, proxy, heartbeat_s=30) as drain,
        await locked_by_another(admin, proxy) as lost,
    ):
        refused = asyncio.Event()
        proxy.cut_when("down", partial(_notes, b"RESOURCE_LOCKED", refused))
        waiting = asyncio.create_task(drain.open())
        await asyncio.wait_for(refused.wait(), 60.0)
        await lost.close()
        await asyncio.wait_for(waiting, 60.0)
        assert (await drain.depth()).consumers == 1


async def test_whoever_waits_for_the_lock_can_be_stopped(admin: Admin) -> None:
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        recovering(admin, proxy, heartbeat_s=30) as drain,
        await locked_by_another(admin, proxy) as other,
    ):
        waiting = asyncio.create_task(drain.open())
        await eventually(lambda: proxy.connected_count >= 1)
        began_s = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - began_s < 30.0
        await drain.stop(lambda delivery: False)
        assert await drain.give_back_all(others_count=0) == 0
        assert (await drain.depth()).consumers == 0
        await other.close()
        await drain.open()
        assert (await drain.depth()).consumers == 1


@pytest.mark.parametrize("question", [QUEUE_DECLARE, BASIC_QOS, BASIC_CONSUME], ids=["lock", "qos", "consume"])
async def test_a_cancelled_return_leaves_no_consumer_behind(admin: Admin, question: bytes) -> None:
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        recovering(admin, proxy, heartbeat_s=30) as drain,
    ):
        await proxy.cut()
        with pytest.raises(BrokerLost):
            await drain.take(count_max=1, timeout_s=10.0)
        asked = asyncio.Event()
        proxy.cut_when("up", partial(_notes, question, asked))
        waiting = asyncio.create_task(drain.open())
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await drain.stop(lambda delivery: False)
        await drain.give_back_all(others_count=0)
        await eventually(lambda: _has_no_consumer(drain))
        await drain.open()
        assert (await drain.depth()).consumers == 1


def _notes(question: bytes, asked: asyncio.Event, recent: bytes) -> bool:
    if question in recent:
        asked.set()
    return False


async def _has_no_consumer(drain: RabbitDrain) -> bool:
    return (await drain.depth()).consumers == 0
