"""A move with its connections cut at every kind of frame: everything arrives, whatever else arrives twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Literal

import pytest

from holdfast.core.message import Outgoing
from holdfast.core.moments import Backoff
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.proof.conservation import Conservation
from holdfast.proof.proxy import Proxy
from tests.support.amqp import Admin, outgoing
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

QUICK = Backoff(first_s=0.01, delay_s_max=0.1)
COUNT = 60

METHODS = {
    "start": (10, 10),
    "start-ok": (10, 11),
    "tune": (10, 30),
    "tune-ok": (10, 31),
    "open": (10, 40),
    "open-ok": (10, 41),
    "channel.open": (20, 10),
    "channel.open-ok": (20, 11),
    "confirm.select": (85, 10),
    "confirm.select-ok": (85, 11),
    "qos": (60, 10),
    "qos-ok": (60, 11),
    "consume": (60, 20),
    "consume-ok": (60, 21),
    "publish": (60, 40),
    "deliver": (60, 60),
    "ack": (60, 80),
}
HANDSHAKE_UP = ["start-ok", "tune-ok", "open", "channel.open"]
HANDSHAKE_DOWN = ["start", "tune", "open-ok", "channel.open-ok"]
CASES = [
    *(("publisher", "up", kind) for kind in (*HANDSHAKE_UP, "confirm.select", "publish", "header", "body")),
    *(("publisher", "down", kind) for kind in (*HANDSHAKE_DOWN, "confirm.select-ok", "ack")),
    *(("consumer", "up", kind) for kind in ("qos", "consume", "ack")),
    *(("consumer", "down", kind) for kind in ("qos-ok", "consume-ok", "deliver", "header", "body")),
]


def seen(kind: str) -> Callable[[bytes], bool]:
    """Whether a frame of this kind is in the bytes."""
    if kind in ("header", "body"):
        start = rb"\x02..\0\0..\0\x3c\0\0" if kind == "header" else rb"\x03\0[\0-\x0f]\0\0.."
    else:
        class_id, method_id = METHODS[kind]
        start = rb"\x01..\0\0.." + re.escape(bytes((0, class_id, 0, method_id)))
    pattern = re.compile(start, re.DOTALL)
    return lambda data: pattern.search(data) is not None


async def move(consumer: ResumingConsumer, publisher: RabbitPublisher, moved: set[bytes]) -> None:
    """Publish first, settle second, until everything was moved at least once."""
    while len(moved) < COUNT or consumer.unsettled_count:
        batch = await consumer.batch(count_max=7, timeout_s=0.05)
        outcomes = await publisher.publish([Outgoing("", "to", d.properties, d.body) for d in batch])
        assert all(outcome.stored for outcome in outcomes)
        consumer.ack(batch)
        moved |= {delivery.body for delivery in batch}
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def own_vhost(nodes: dict[str, Node]) -> str:
    nodes["3.10"].create_vhost("cuts")
    return "cuts"


@pytest.fixture
async def queues(node: Node, own_vhost: str) -> AsyncIterator[Admin]:
    async with Admin.open(node, own_vhost, keep=True) as admin:
        for name in ("from", "to"):
            await admin.delete(name)
            await admin.queue(name)
        yield admin


@pytest.mark.parametrize("deliver", [False, True], ids=["lost", "answer-lost"])
@pytest.mark.parametrize(("who", "way", "kind"), CASES)
async def test_a_cut_at_any_frame_loses_nothing(
    queues: Admin, who: str, way: Literal["up", "down"], kind: str, deliver: bool
) -> None:
    books = Conservation()
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(Proxy("127.0.0.1", queues.node.port))
            for name in ("consumer", "publisher")
        }
        publisher = await stack.enter_async_context(
            RabbitPublisher(queues.broker_url(port=proxies["publisher"].port), backoff=QUICK)
        )
        for number in range(COUNT):
            books.put(f"{number}", b"%d" % number)
        messages = [outgoing("from", b"%d" % number, message_id=f"{number}") for number in range(COUNT)]
        assert all(outcome.stored for outcome in await publisher.publish(messages))
        address = queues.broker_url(port=proxies["consumer"].port)
        consumer = await stack.enter_async_context(ResumingConsumer(address, "from", prefetch=20, backoff=QUICK))
        trip = proxies[who].cut_when(way, seen(kind), deliver=deliver)
        # What is only said when a connection is made is cut while it is made again.
        await proxies[who].cut()
        async with asyncio.timeout(60):
            await move(consumer, publisher, set())
            assert trip.fired.is_set()
    # What is settled in vain comes again: a cut may leave copies in `from` as well, never a gap in both.
    for queue in ("from", "to"):
        for delivery in await queues.drain(queue, await queues.count(queue)):
            books.found(queue, delivery.body.decode(), delivery.body)
    books.check(duplicates_max=None)
