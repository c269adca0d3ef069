"""PostgreSQL + RabbitMQ + S3 with everything breaking in turn, and an owner that falls asleep."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast.core.states import TransactionState
from tests.collect.producing import NOTIFY, PRODUCER, body_of
from tests.collect.shared import BUCKET, Bucket, check_shared, publish, rows_of, shared_place
from tests.collect.worker import TRANSACTION
from tests.support.amqp import Admin, RabbitPublisher
from tests.support.eventually import eventually
from tests.support.forking import forked_process
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node

pytestmark = [pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.s3]


async def test_an_owner_that_falls_asleep_is_taken_over_and_changes_nothing_when_it_wakes(
    tmp_path: Path, postgres_url: str, admin: Admin, bucket: Bucket
) -> None:
    # A sleeper keeps its connections: what the broker gave it comes back when its heartbeats are missed.
    place = shared_place(postgres_url, admin, tmp_path, blobs=f"s3://{BUCKET}/asleep", more="?heartbeat=1")
    for queue in (PRODUCER, NOTIFY):
        await admin.queue(queue)
    async with RabbitPublisher(admin.broker_url()) as publisher, forked_process(place.argv) as sleeper:
        await admin.drain(PRODUCER, 1)
        await publish(publisher, TRANSACTION, {"rows": range(12)})
        await eventually(lambda: rows_of(postgres_url, TRANSACTION) == 12)
        sleeper.stop()
        async with forked_process(place.argv) as other:
            await publish(publisher, TRANSACTION, {"rows": range(12, 30), "lines": range(7)}, rows=30, lines=7, none=0)
            assert await other.wait(timeout_s=60) == 0, other.stderr.tail
        sleeper.resume()
        assert await sleeper.wait(timeout_s=60) == 0, sleeper.stderr.tail
    await check_shared(place, admin)


async def test_broker_database_and_blob_store_break_in_the_middle_and_nothing_is_lost(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes while one of them is away waits for it, and says so."""
    count = 300
    with Node() as node, Cluster() as cluster:
        url = cluster.create_database("collect")
        async with Admin.open(node, "faults", keep=True) as admin:
            for queue in (PRODUCER, NOTIFY):
                await admin.queue(queue)
        broker = node.url("faults")
        address = admin.broker_url()
        async with (
            RabbitPublisher(address) as publisher,
            holdfast.Collector(url, blobs=f"s3://{BUCKET}/faults", broker=broker, lease_timeout="30s") as collector,
        ):
            await collector.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id="f", series=["a"])

            async def is_awaiting() -> bool:
                return (await collector.find("f")).state is TransactionState.AWAITING

            async def has(wanted: int) -> bool:
                try:
                    return [each.stored_count for each in await collector.progress("f")] >= [wanted]
                except holdfast.StorageFailed:
                    return False

            def waits_for(text: str) -> bool:
                told = [record.getMessage() for record in caplog.records if "waits and tries again" in record.msg]
                return any(text in each for each in told)

            await eventually(is_awaiting)
            sending = asyncio.create_task(publish(publisher, "f", {"a": range(100)}))
            await eventually(partial(has, 30))
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            await sending
            await eventually(partial(has, 100))
            await asyncio.to_thread(cluster.stop)
            await publish(publisher, "f", {"a": range(100, 200)})
            await eventually(partial(waits_for, "storage failed"))
            await asyncio.to_thread(cluster.start)
            await eventually(partial(has, 200))
            await asyncio.to_thread(bucket.stop)
            try:
                await publish(publisher, "f", {"a": range(200, count)}, a=count)
                await eventually(partial(waits_for, "blob storage failed"))
            finally:
                await asyncio.to_thread(bucket.start)
            assert (await collector.wait("f", timeout_s=90)).state is TransactionState.COMPLETED
            parts = [part.body async for part in collector.parts("f", "a")]
            assert parts == [body_of("a", number) for number in range(count)]
        assert rows_of(url, "f") == count
