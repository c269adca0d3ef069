"""Many results at a time over RabbitMQ, and queues of theirs that somebody left."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.collect.many import many_results, queues_left
from tests.collect.producing import NOTIFY, PRODUCER, cleaned
from tests.collect.shared import from_producer, producing
from tests.collect.worker import SHAPE
from tests.support.amqp import Admin
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


async def test_many_results_at_a_time_are_all_right_and_leave_no_queue(tmp_path: Path, admin: Admin) -> None:
    assert (await many_results(tmp_path, admin, count=200, kills=3))["results"] == 200


async def test_queues_that_were_left_are_removed_at_the_next_start(tmp_path: Path, admin: Admin) -> None:
    """An owner that woke up late had made them anew. What came into them goes to the dead queue."""

    def collector() -> holdfast.Collector:
        return holdfast.Collector(f"sqlite:///{tmp_path}/data", blobs=f"{tmp_path}/blobs", broker=admin.url)

    async with producing(admin), collector() as first:
        for name in ("a", "b"):
            await first.start(b"all", producer=PRODUCER, notify=NOTIFY, transaction_id=name, series=list(SHAPE))
            await cleaned(first, name)
    assert not queues_left(admin)
    for queue in ("transaction-a-header", "transaction-b-header", "transaction-b-payload"):
        await admin.queue(queue, **{"x-queue-type": "classic"})
    await admin.publish([from_producer("transaction-b-payload", b"late", {"transaction-id": "b"})])
    async with collector():
        await eventually(lambda: not queues_left(admin))
    assert [letter.body for letter in await admin.drain("collector.dlq", 1)] == [b"late"]
