"""PostgreSQL + RabbitMQ + S3 for the collector's tests: a place, a producer, and what must be true in the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2
import msgspec
import psycopg
from msgspec import Struct

from holdfast.core.message import Outgoing
from holdfast.core.states import TransactionState
from holdfast.wiring import SystemClock, open_blobs, open_collect_store
from tests.collect.producing import NOTIFY, PRODUCER, body_of
from tests.collect.worker import SHAPE, TRANSACTION
from tests.support import amqp
from tests.support.amqp import Admin, RabbitConsumer, RabbitPublisher, message_id_of
from tests.support.ports import free_port

BUCKET = "results"


class Bucket:
    """A bucket of moto's S3 server, over HTTP on loopback; it can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()
        self.make()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
        }

    def make(self) -> None:
        assert httpx2.put(f"{self.address}/{BUCKET}", trust_env=False).status_code == 200

    def stop(self) -> None:
        """It refuses connections, until `start`; what it has, it keeps."""
        self._server.stop()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer  # half a second, which nobody else needs

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def close(self) -> None:
        self._server.stop()


@contextmanager
def running_bucket() -> Iterator[Bucket]:
    """A bucket; its address is in the environment until the end of the block."""
    bucket = Bucket()
    before = {name: os.environ.get(name) for name in bucket.env}
    os.environ.update(bucket.env)
    try:
        yield bucket
    finally:
        bucket.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Place(Struct, frozen=True):
    """Where one transaction happens."""

    url: str
    broker: str
    blobs: str

    @property
    def env(self) -> dict[str, str]:
        return {"TEST_URL": self.url, "TEST_BROKER": self.broker, "TEST_BLOBS": self.blobs}


def from_producer(queue: str, body: bytes, headers: Mapping[str, Any]) -> Outgoing:
    """A message of the producer's."""
    return amqp.outgoing(queue, body, message_id=None, headers=dict(headers), content_type="x/y")


async def answer_on(publisher: RabbitPublisher, transaction: str, shape: Mapping[str, int]) -> None:
    """The whole result over RabbitMQ: payloads first, then headers, each confirmed."""
    messages = [
        from_producer(
            f"transaction-{transaction}-payload",
            body_of(name, number),
            {"transaction-id": transaction, "series": name, "ordinal": number},
        )
        for name, count in shape.items()
        for number in range(count)
    ]
    messages += [
        from_producer(
            f"transaction-{transaction}-header",
            b"",
            {"transaction-id": transaction, "series": name, "count": count, "series-count": len(shape)},
        )
        for name, count in shape.items()
    ]
    outcomes = await publisher.publish(messages, timeout_s=60)
    assert all(outcome.stored for outcome in outcomes)


@asynccontextmanager
async def producing(admin: Admin) -> AsyncIterator[set[str]]:
    """A producer that answers each request once, however often it comes; yields the ids that it has seen."""
    await admin.queue(PRODUCER)
    await admin.queue(NOTIFY)
    seen: set[str] = set()

    async def work() -> None:
        async with (
            RabbitConsumer(admin.address(), PRODUCER, prefetch=10) as consumer,
            RabbitPublisher(admin.address()) as out,
        ):
            while True:
                (delivery,) = await consumer.batch(count_max=1)
                transaction = message_id_of(delivery)
                if transaction not in seen:
                    seen.add(transaction)
                    await answer_on(out, transaction, SHAPE)
                consumer.ack([delivery])

    task = asyncio.create_task(work())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def check_place(place: Place, admin: Admin, *, transaction: str = TRANSACTION) -> None:
    """Every blob right, one row per ordinal, its queues gone, at least one notice and all equal."""
    total = sum(SHAPE.values())
    store = open_collect_store(place.url, clock=SystemClock())
    await store.open()
    try:
        found = await store.find(transaction)
        assert found is not None
        assert (found.state, found.is_clean) == (TransactionState.COMPLETED, True), found
        async with open_blobs(place.blobs) as blobs:
            for name, count in SHAPE.items():
                parts = await store.parts(transaction, name, first=0, count_max=1000)
                assert [part.ordinal for part in parts] == list(range(count))
                for part in parts:
                    got = b"".join([chunk async for chunk in blobs.get(part.path)])
                    assert got == body_of(name, part.ordinal)
            paths = [stat.path async for stat in blobs.find(f"{transaction}/")]
            assert len(paths) == total + 1, "nothing beside the parts and the manifest"
    finally:
        await store.close()
    count = await admin.count(NOTIFY)
    assert count >= 1
    bodies = {delivery.body for delivery in await admin.drain(NOTIFY, count)}
    mine = {body for body in bodies if msgspec.json.decode(body)["transaction-id"] == transaction}
    assert len(mine) == 1, "notices differ"
    assert msgspec.json.decode(mine.pop())["parts_count"] == total
    assert await admin.count("collector.dlq") == 0


def rows_of(url: str, transaction: str) -> int:
    """How many rows the index has."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM holdfast.collect_parts WHERE transaction_id = %s", (transaction,)
        ).fetchone()
    assert row is not None
    return int(row[0])
