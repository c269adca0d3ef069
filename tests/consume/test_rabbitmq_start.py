"""Consumers of RabbitMQ whose connection is lost while they start: they try again, unless the broker says no."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Literal

import pytest

import holdfast
from holdfast import Message
from holdfast.errors import BrokerRefused, BrokerUnreachable, CannotStart
from holdfast.proof.proxy import Proxy
from tests.consume.brokers import QUEUE, RabbitUnderTest
from tests.support.amqp import ResumingConsumer
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

#: Class and method of what passes while a consumer starts.
OPEN_CHANNEL, SELECT, DECLARE, QOS, CONSUME, CONSUME_OK = (20, 10), (85, 10), (50, 10), (60, 10), (60, 20), (60, 21)


def passing(method: tuple[int, int]) -> Callable[[bytes], bool]:
    pattern = re.compile(rb"\x01..\0\0.." + re.escape(bytes((0, method[0], 0, method[1]))), re.DOTALL)
    return lambda data: pattern.search(data) is not None


def make_app(broker: RabbitUnderTest, proxy: Proxy, *, probed: bool = False) -> tuple[holdfast.App, list[bytes]]:
    """Where the management API can be asked, no probe is sent: then the first to consume is the consumer itself."""
    management = None if probed else broker.admin.node.management_url
    app = holdfast.App(broker.admin.node.url(broker.admin.vhost, port=proxy.port), management=management)
    seen = list[bytes]()

    # What was on its way when a connection was lost may have been begun: it waits like a retry, so that is short here.
    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=3, delay="1s"))
    async def handle(message: Message) -> None:
        seen.append(message.body)

    broker._app = app
    return app, seen


@pytest.mark.parametrize("probed", [False, True], ids=["asked", "probed"])
@pytest.mark.parametrize(
    ("way", "method"),
    [
        ("up", OPEN_CHANNEL),
        ("up", SELECT),
        ("up", DECLARE),
        ("up", QOS),
        ("up", CONSUME),
        ("down", CONSUME_OK),
    ],
)
async def test_a_connection_that_is_lost_at_the_start_is_made_again(
    rabbit: RabbitUnderTest, way: Literal["up", "down"], method: tuple[int, int], probed: bool
) -> None:
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app, seen = make_app(rabbit, proxy, probed=probed)
        await rabbit.declare(app)
        await rabbit.send(b"x")
        trip = proxy.cut_when(way, passing(method))
        async with app.running():
            await eventually(lambda: seen == [b"x"])
            assert trip.fired.is_set()
            await eventually(lambda: app.health[0].is_well)


async def test_a_broker_that_goes_away_during_the_start_is_waited_for(rabbit: RabbitUnderTest) -> None:
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app, seen = make_app(rabbit, proxy)
        await rabbit.declare(app)
        await rabbit.send(b"x")
        trip = proxy.cut_when("up", passing(CONSUME))
        running = asyncio.create_task(app.run())
        await trip.fired.wait()
        await proxy.refuse()
        await proxy.cut()
        await eventually(lambda: bool(app.health) and "no connection" in app.health[0].trouble)
        assert not running.done()
        proxy.accept()
        await eventually(lambda: seen == [b"x"])
        app.stop()
        await running


async def test_a_start_that_waits_for_a_broker_can_be_stopped(rabbit: RabbitUnderTest) -> None:
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app, _ = make_app(rabbit, proxy)
        await rabbit.declare(app)
        trip = proxy.cut_when("up", passing(DECLARE))
        running = asyncio.create_task(app.run())
        await trip.fired.wait()
        await proxy.refuse()
        await proxy.cut()
        assert not running.done()
        app.stop()
        app.stop()
        async with asyncio.timeout(20):
            await running


async def test_what_the_broker_refuses_is_not_asked_again(rabbit: RabbitUnderTest) -> None:
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app, _ = make_app(rabbit, proxy)
        async with asyncio.timeout(60):
            with pytest.raises(CannotStart, match="queue 'work' does not exist"):
                await app.run()
            with pytest.raises(BrokerRefused, match="404"):
                await ResumingConsumer(rabbit.admin.broker_url(), "nowhere", on_start="resume").__aenter__()
        await proxy.refuse()
        async with asyncio.timeout(60):
            with pytest.raises(BrokerUnreachable, match="cannot be reached"):
                await app.run()
