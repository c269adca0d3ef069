"""The consumer against real brokers: however it is interrupted, the next message arrives, or an error does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from holdfast.core.message import Delivery
from holdfast.core.moments import Backoff
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.wire.events import Cancelled
from holdfast.errors import BrokerLost, BrokerRefused, ConsumerLost
from holdfast.proof.proxy import Proxy
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

QUICK = Backoff(first_s=0.02, delay_s_max=0.2)


async def fill(admin: Admin, queue: str, bodies: list[bytes]) -> None:
    async with RabbitPublisher(admin.broker_url()) as publisher:
        outcomes = await publisher.publish([outgoing(queue, body) for body in bodies])
        assert all(outcome.stored for outcome in outcomes)


async def one(consumer: ResumingConsumer, *, timeout_s: float = 20.0) -> Delivery:
    (delivery,) = await consumer.batch(count_max=1, timeout_s=timeout_s)
    return delivery


async def test_messages_come_in_order_and_what_is_acked_is_gone(every_admin: Admin) -> None:
    for queue in (await every_admin.queue("c"), await every_admin.quorum_queue("q")):
        bodies = [b"%d" % i for i in range(300)]
        await fill(every_admin, queue, bodies)
        got: list[bytes] = []
        async with ResumingConsumer(every_admin.broker_url(), queue, prefetch=50) as consumer:
            while len(got) < 300:
                batch = await consumer.batch(count_max=37, timeout_s=60.0)
                got += [delivery.body for delivery in batch]
                consumer.ack(batch)
            assert consumer.unsettled_count == 0
        assert got == bodies
        assert await every_admin.count(queue) == 0


KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])


@KINDS
async def test_what_is_not_settled_is_the_queues_again_in_order(every_admin: Admin, kind: str) -> None:
    await every_admin.queue("q", **{"x-queue-type": kind})
    await fill(every_admin, "q", [b"%d" % i for i in range(200)])
    async with ResumingConsumer(every_admin.broker_url(), "q") as consumer:
        held: list[Delivery] = []
        while len(held) < 200:
            held += await consumer.batch(timeout_s=60.0)
        assert not consumer.ack([delivery for delivery in held if int(delivery.body) % 2])
        assert consumer.unsettled_count == 100
    assert [int(d.body) for d in await every_admin.drain("q", 100)] == list(range(0, 200, 2))


async def test_giving_back_and_dead_lettering_do_what_they_say(every_admin: Admin) -> None:
    await every_admin.queue("dead")
    target: dict[str, int | str] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    await every_admin.queue("q", **target)
    await fill(every_admin, "q", [b"back", b"dead"])
    async with ResumingConsumer(every_admin.broker_url(), "q", prefetch=2) as consumer:
        back, dead = await one(consumer), await one(consumer)
        consumer.give_back([back])
        consumer.dead_letter([dead])
        again = await one(consumer)
        assert (again.body, again.redelivered) == (b"back", True)
        consumer.ack([again])
    assert [d.body for d in await every_admin.drain("dead", 1)] == [b"dead"]


@asynccontextmanager
async def consuming(admin: Admin, queue: str, *, port: int | None = None) -> AsyncIterator[ResumingConsumer]:
    async with ResumingConsumer(admin.broker_url(port=port), queue, prefetch=10, backoff=QUICK) as consumer:
        yield consumer


@KINDS
async def test_a_deleted_queue_cancels_and_the_next_message_arrives_when_it_is_back(
    every_admin: Admin, kind: str
) -> None:
    await every_admin.queue("q", **{"x-queue-type": kind})
    await fill(every_admin, "q", [b"before"])
    async with consuming(every_admin, "q") as consumer:
        before = await one(consumer)
        await every_admin.delete("q")
        await eventually(lambda: consumer.interruptions_count >= 1)
        await every_admin.queue("q", **{"x-queue-type": kind})
        assert consumer.ack([before]) == [before]
        await fill(every_admin, "q", [b"after"])
        assert (await one(consumer)).body == b"after"


@KINDS
async def test_a_message_held_for_too_long_ends_the_consumer_and_comes_again(every_admin: Admin, kind: str) -> None:
    """By a closed channel on 3.10 and 4.0; on 4.3 by a cancel, and on its classic queues not at all."""
    if (kind, every_admin.node.version) == ("classic", "4.3"):
        pytest.skip("has no such timeout")
    with every_admin.node.consumer_timeout(500):
        await every_admin.queue("q", **{"x-queue-type": kind})
        await fill(every_admin, "q", [b"slow"])
        async with consuming(every_admin, "q") as consumer:
            first = await one(consumer)
            again = await one(consumer, timeout_s=30.0)
            assert (again.body, again.redelivered) == (b"slow", True)
            assert consumer.ack([first]) == [first]
            consumer.ack([again])
            await fill(every_admin, "q", [b"next"])
            assert (await one(consumer)).body == b"next"


async def test_a_cut_connection_is_made_again(every_admin: Admin) -> None:
    await every_admin.queue("q")
    await fill(every_admin, "q", [b"before"])
    async with (
        Proxy("127.0.0.1", every_admin.node.port) as proxy,
        consuming(every_admin, "q", port=proxy.port) as consumer,
    ):
        before = await one(consumer)
        await proxy.cut()
        again = await one(consumer)
        assert (again.body, again.redelivered) == (b"before", True)
        assert consumer.ack([before, again]) == [before]
        await eventually(lambda: consumer.unsettled_count == 0)
    assert await every_admin.count("q") == 0


async def test_a_connection_that_an_operator_closes_is_made_again(every_admin: Admin) -> None:
    await every_admin.queue("q")
    async with consuming(every_admin, "q") as consumer:
        every_admin.node.ctl("close_all_connections", "--vhost", every_admin.vhost, "test")
        await eventually(lambda: consumer.interruptions_count >= 1)
        async with Admin.open(every_admin.node, every_admin.vhost, keep=True) as other:
            await fill(other, "q", [b"after"])
        assert (await one(consumer)).body == b"after"


async def test_with_raise_the_caller_is_told(admin: Admin) -> None:
    await admin.queue("q")
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        ResumingConsumer(admin.broker_url(port=proxy.port), "q", on_loss="raise") as consumer,
    ):
        waiting = asyncio.create_task(consumer.batch())
        await eventually(lambda: consumer.connected)
        await proxy.cut()
        with pytest.raises(ConsumerLost, match="queue 'q'"):
            await waiting


async def test_it_does_not_try_for_ever(admin: Admin) -> None:
    await admin.queue("q")
    async with ResumingConsumer(admin.broker_url(), "q", backoff=QUICK, down_timeout_s=0.3) as consumer:
        await admin.delete("q")
        with pytest.raises(ConsumerLost, match="404"):
            await consumer.batch(timeout_s=60.0)


async def test_a_queue_that_is_not_there_is_said_at_the_start(admin: Admin) -> None:
    with pytest.raises(BrokerRefused, match="no queue 'nope'") as caught:
        async with ResumingConsumer(admin.broker_url(), "nope"):
            pass
    assert caught.value.reply_code == 404


async def test_after_stop_nothing_new_comes_but_what_is_held_can_be_settled(admin: Admin) -> None:
    await admin.queue("q")
    await fill(admin, "q", [b"held"])
    async with ResumingConsumer(admin.broker_url(), "q") as consumer:
        held = await one(consumer)
        await consumer.stop()
        await fill(admin, "q", [b"new"])
        assert await consumer.batch() == []
        consumer.ack([held])
        assert await consumer.batch() == []
    assert [d.body for d in await admin.drain("q", 1)] == [b"new"]


async def take_all(consumer: ResumingConsumer, count: int) -> list[Delivery]:
    held: list[Delivery] = []
    while len(held) < count:
        held += await consumer.batch(timeout_s=60.0)
    return held


def ack_one_by_one(consumer: ResumingConsumer, held: list[Delivery]) -> None:
    """So many frames, not one that settles all: the first is open until the others are on their way."""
    consumer.ack(held[1:])
    consumer.flush()
    consumer.ack(held[:1])


async def is_empty_for_good(admin: Admin, queue: str) -> bool:
    """Also when what a channel held has come back: a new consumer would get it."""
    async with ResumingConsumer(admin.broker_url(), queue) as consumer:
        return not await consumer.batch(timeout_s=0.3)


@pytest.mark.parametrize("stops", [False, True], ids=["closed", "stopped and closed"])
@KINDS
async def test_what_was_acked_just_before_the_close_does_not_come_again(
    every_admin: Admin, kind: str, stops: bool
) -> None:
    """A channel passes acks on to a quorum queue a few at a time, and forgets the others when it is closed."""
    await every_admin.queue("q", **{"x-queue-type": kind})
    for _ in range(4):
        await fill(every_admin, "q", [b"%d" % i for i in range(300)])
        async with ResumingConsumer(every_admin.broker_url(), "q") as consumer:
            held = await take_all(consumer, 300)
            if stops:
                await consumer.stop()
            ack_one_by_one(consumer, held)
        assert await is_empty_for_good(every_admin, "q")


async def test_consumers_that_close_together_do_not_take_anothers_end_for_their_own(every_admin: Admin) -> None:
    await every_admin.quorum_queue("q")
    await fill(every_admin, "q", [b"%d" % i for i in range(1200)])
    async with AsyncExitStack() as stack:
        opened = [ResumingConsumer(every_admin.broker_url(), "q", prefetch=300) for _ in range(4)]
        consumers = [await stack.enter_async_context(consumer) for consumer in opened]
        held = [await take_all(consumer, 300) for consumer in consumers]
        await asyncio.gather(*(consumer.stop() for consumer in consumers))
        for consumer, its in zip(consumers, held, strict=True):
            ack_one_by_one(consumer, its)
        await asyncio.gather(*(consumer.close() for consumer in consumers))
    assert await is_empty_for_good(every_admin, "q")


@pytest.mark.parametrize("turns", [0, 1, 5, 20])
async def test_a_close_that_is_cancelled_leaves_no_connection_open(every_admin: Admin, turns: int) -> None:
    await every_admin.quorum_queue("q")
    await fill(every_admin, "q", [b"x"])
    consumer = await ResumingConsumer(every_admin.broker_url(), "q").__aenter__()
    await one(consumer)
    closing = asyncio.create_task(consumer.close())
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)

    async def is_back() -> bool:
        return await every_admin.count("q") == 1

    await eventually(is_back)


async def test_a_close_that_may_not_look_at_the_queue_closes_all_the_same(every_admin: Admin) -> None:
    await every_admin.queue("q")
    await fill(every_admin, "q", [b"x"])
    async with ResumingConsumer(every_admin.broker_url(), "q") as consumer:
        await one(consumer)
        await every_admin.delete("q")
        async with asyncio.timeout(5):
            await consumer.close()


async def test_a_prefetch_that_means_something_else_is_refused(admin: Admin) -> None:
    for prefetch in (0, 65_536):
        with pytest.raises(ValueError, match="prefetch"):
            ResumingConsumer(admin.broker_url(), "q", prefetch=prefetch)


async def crash_and_pause(node: Node) -> None:
    async with Admin.open(node, "v", keep=True) as admin:
        await admin.queue("q")
        await fill(admin, "q", [b"%d" % i for i in range(50)])
        async with ResumingConsumer(admin.broker_url(more="?heartbeat=1"), "q", prefetch=10, backoff=QUICK) as consumer:
            first = await one(consumer)
            # A broker that hangs: only the missing heartbeats tell.
            await asyncio.to_thread(node.pause)
            await eventually(lambda: consumer.interruptions_count == 1)
            await asyncio.to_thread(node.resume)
            assert (await one(consumer)).body == first.body
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            seen: set[bytes] = set()
            while len(seen) < 50:
                batch = await consumer.batch(timeout_s=60.0)
                assert batch
                seen |= {delivery.body for delivery in batch}
                consumer.ack(batch)


@pytest.mark.parametrize("turns", range(3))
async def test_a_stop_that_is_cancelled_does_not_hold_up_the_close(every_admin: Admin, turns: int) -> None:
    await every_admin.queue("q")
    await fill(every_admin, "q", [b"x"])
    async with ResumingConsumer(every_admin.broker_url(), "q", prefetch=10) as consumer:
        await one(consumer)
        stopping = asyncio.create_task(consumer.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        async with asyncio.timeout(5):
            await consumer.close()
    assert await every_admin.count("q") == 1


@pytest.mark.parametrize("version", ["3.10"])
async def test_a_hanging_and_a_crashed_broker_are_survived(version: str) -> None:
    with Node(version) as node:
        await crash_and_pause(node)


async def test_a_channel_that_was_left_is_not_listened_to(admin: Admin) -> None:
    """Its tags would settle messages of the new one, which has the same numbers."""
    await admin.queue("q")
    async with ResumingConsumer(admin.broker_url(), "q") as consumer:
        left = consumer._current
        left.on_events([Cancelled(1, "tag")])
        await eventually(lambda: consumer.connected)
        await fill(admin, "q", [b"new"])
        new = await one(consumer)
        left.on_events([Delivery(1, new.tag + 1, False, "", "q", "", b"\0\0", b"old"), Cancelled(1, "tag")])
        left.on_closed(BrokerLost("late"), None)
        assert await consumer.batch(timeout_s=0.05) == []
        assert consumer.connected
        assert consumer.unsettled_count == 1
