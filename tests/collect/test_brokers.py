"""The collector's queues on every RabbitMQ, and on a cluster whose node dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from holdfast.core.states import TransactionState
from holdfast.engines.rabbitmq.broker import RabbitBroker
from holdfast.ports.broker import Subscription
from holdfast.wiring import SystemClock
from tests.collect.producing import NOTIFY, PRODUCER, body_of, cleaned
from tests.collect.shared import check_shared, from_producer, producing, publish, shared_place
from tests.collect.worker import SHAPE
from tests.support.amqp import Admin, BrokerUrl, RabbitPublisher
from tests.support.eventually import eventually
from tests.support.rabbitmq_cluster import RabbitCluster

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq]

PART_BYTES = 256 * 1024


async def test_a_result_on_every_broker(tmp_path: Path, postgres_url: str, every_admin: Admin) -> None:
    transaction = f"every-{every_admin.vhost}"
    place = shared_place(postgres_url, every_admin, tmp_path, transaction, blobs=str(tmp_path / "blobs"))
    async with (
        producing(every_admin),
        holdfast.Collector(postgres_url, blobs=place.blobs, broker=place.broker) as collector,
    ):
        await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id=transaction, series=list(SHAPE))
        ended = await cleaned(collector, transaction)
        assert ended.state is TransactionState.COMPLETED
    await check_shared(place, every_admin)


@pytest.mark.parametrize(("size_bytes", "held_max"), [(PART_BYTES, 5), (100, 33)], ids=["large", "small"])
async def test_the_broker_pushes_as_many_as_their_size_allows(
    every_admin: Admin, size_bytes: int, held_max: int
) -> None:
    """Four parts of 256 KiB are 1 MiB; beside them there is the one by which their size was learnt."""
    count = 60
    await every_admin.queue("sized")
    async with (
        RabbitPublisher(every_admin.broker_url()) as publisher,
        RabbitBroker(every_admin.node.url(every_admin.vhost), clock=SystemClock()) as broker,
    ):
        messages = [from_producer("sized", bytes(size_bytes), {"ordinal": number}) for number in range(count)]
        assert all(outcome.stored for outcome in await publisher.publish(messages, timeout_s=60))
        sized = Subscription(queue="sized", prefetch=32, bytes_max=4 * PART_BYTES, dead_queue="dead")
        async with broker.consumer(sized) as consumer:
            held = list(await consumer.take(32))
            while len(held) < held_max:
                async with asyncio.timeout(60):
                    held += await consumer.take(32)
            assert len(held) == held_max
            assert not await consumer.take(32, timeout_s=0.5)
            seen = len(held)
            while held:
                assert await consumer.ack(held) == []
                if seen == count:
                    break
                async with asyncio.timeout(60):
                    held = list(await consumer.take(32))
                seen += len(held)
            assert seen == count, "acked ones make room for all the others"
    assert await every_admin.count("sized") == 0


async def test_quorum_queues_on_a_cluster_whose_leader_is_killed_in_the_middle(
    tmp_path: Path, postgres_url: str, rabbitmq_cluster: RabbitCluster
) -> None:
    count, name = 200, f"on-a-cluster-{tmp_path.name}"  # the database is the same for every version
    vhost = rabbitmq_cluster.create_vhost("collect-quorum")
    for queue in (PRODUCER, NOTIFY):
        rabbitmq_cluster.declare(vhost, queue, quorum=True)
    broker = rabbitmq_cluster.url(vhost)
    async with (
        RabbitPublisher(BrokerUrl.parse(broker)) as publisher,
        holdfast.Collector(
            postgres_url, blobs=str(tmp_path / "blobs"), broker=broker, quorum=True, uploads_max=4
        ) as collector,
    ):
        await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id=name, series=["a"])

        async def is_awaiting() -> bool:
            return (await collector.find(name)).state is TransactionState.AWAITING

        async def has_begun() -> bool:
            return [each.stored_count for each in await collector.progress(name)] >= [20]

        await eventually(is_awaiting)
        payloads = f"transaction-{name}-payload"
        await eventually(lambda: len(rabbitmq_cluster.members_of(vhost, payloads)) == 3)
        await publish(publisher, name, {"a": range(count // 2)})
        await eventually(has_begun)
        await asyncio.to_thread(rabbitmq_cluster.leader_of(vhost, payloads).kill)
        await publish(publisher, name, {"a": range(count // 2, count)}, a=count)
        assert (await collector.wait(name, timeout_s=90)).state is TransactionState.COMPLETED
        parts = [part.body async for part in collector.parts(name, "a")]
    assert parts == [body_of("a", number) for number in range(count)]
