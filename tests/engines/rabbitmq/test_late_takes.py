"""Messages that come in the very moment in which the time for them is up are handed out, not taken for silence."""

from __future__ import annotations

import asyncio

from holdfast.core.message import Delivery
from holdfast.core.recovery import RunLimits
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.drain import RabbitDrain
from holdfast.engines.rabbitmq.url import BrokerUrl

ADDRESS = BrokerUrl.parse("amqp://localhost")


def delivery() -> Delivery:
    return Delivery(0, 1, False, "", "q", "", b"", b"late")


async def test_a_consumer_hands_out_what_came_as_the_time_was_up() -> None:
    consumer = ResumingConsumer(ADDRESS, "q")
    taking = asyncio.create_task(consumer.batch(timeout_s=0))
    await asyncio.sleep(0)  # it waits, and the end of its time is the next thing to happen
    consumer._arrived([delivery()])
    assert [one.body for one in await taking] == [b"late"]
    assert await consumer.batch(timeout_s=0) == []


async def test_a_drain_hands_out_what_came_as_the_time_was_up() -> None:
    drain = RabbitDrain(ADDRESS, "q", RunLimits())
    taking = asyncio.create_task(drain.take(count_max=10, timeout_s=0))
    await asyncio.sleep(0)
    drain._ready.append(delivery())
    drain._news.set()
    assert [one.body for one in await taking] == [b"late"]
    assert not await drain.take(count_max=10, timeout_s=0)
