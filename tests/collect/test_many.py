"""Many results at a time over RabbitMQ, and queues of theirs that somebody left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.core.states import TransactionState
from holdfast.proof.process import python_argv
from tests.collect.many import PREFIX
from tests.collect.producing import NOTIFY, PRODUCER, cleaned
from tests.collect.shared import from_producer, producing, rows_of
from tests.collect.worker import SHAPE, TOTAL, Place
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.forking import forked_process

pytestmark = pytest.mark.rabbitmq


RESULTS_COUNT = 200
KILLS_COUNT = 3


async def test_many_results_at_a_time_are_all_right_and_leave_no_queue(tmp_path: Path, admin: Admin) -> None:
    """Over one RabbitMQ, with the collector's process killed in the middle."""
    place = Place(f"sqlite:///{tmp_path}/data", f"{tmp_path}/data/blobs", str(tmp_path), admin.url)
    argv = python_argv("tests.collect.many", msgspec.json.encode(place).decode(), str(RESULTS_COUNT))
    async with producing(admin):
        for kill in range(KILLS_COUNT):
            async with forked_process(argv) as child:
                wanted = RESULTS_COUNT * TOTAL * (kill + 1) // (KILLS_COUNT + 1)
                await eventually(lambda wanted=wanted: parts_count(place) >= wanted, timeout_s=600)  # type: ignore[misc]
                await child.kill()
        async with forked_process(argv) as child:
            assert await child.wait(timeout_s=900) == 0, child.stderr.tail
    left = queues_left(admin)
    assert not left, f"{len(left)} queues of {RESULTS_COUNT} transactions are left: {left[:5]}"
    assert await admin.count("collector.dlq") == 0
    notices = [delivery.body for delivery in await admin.drain(NOTIFY, await admin.count(NOTIFY))]
    told = Counter(msgspec.json.decode(body)["transaction-id"] for body in notices)
    assert set(told) == {f"{PREFIX}{number}" for number in range(RESULTS_COUNT)}
    assert len(set(notices)) == RESULTS_COUNT, "notices of one transaction differ"
    async with holdfast.Collector(place.url, blobs=place.blobs, broker=place.broker) as collector:
        for name in told:
            assert (await collector.find(name)).state is TransactionState.COMPLETED
            assert rows_of(place.url, name) == TOTAL


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


def queues_left(admin: Admin) -> list[str]:
    """The queues of transactions that are there."""
    names = [queue["name"] for queue in admin.node.api("GET", f"/queues/{admin.vhost}").json()]
    return [name for name in names if name.startswith("transaction-")]


def parts_count(place: Place) -> int:
    """How many parts are stored, of all."""
    return sum(1 for file in Path(place.blobs).glob(f"{PREFIX}*/*/*"))
