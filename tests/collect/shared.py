"""For collectors on PostgreSQL, RabbitMQ and S3: a bucket, a producer; and what must be true of a result in the end,
there and on an embedded queue, whatever was killed on the way."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
import httpx2
import msgspec
import psycopg

import holdfast
from holdfast.core.collect import queue_names
from holdfast.core.message import Outgoing
from holdfast.core.states import TransactionState
from holdfast.wiring import SystemClock, open_blobs, open_collect_store
from tests.collect.producing import NOTIFY, PRODUCER, body_of, notices, parked
from tests.collect.worker import SHAPE, TOTAL, TRANSACTION, UPLOADS_MAX, Place
from tests.support import amqp
from tests.support.amqp import Admin, RabbitPublisher
from tests.support.ports import free_port

BUCKET = "results"


class Bucket:
    """A bucket of moto's S3 server, over HTTP on loopback; it can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()
        assert httpx2.put(f"{self.address}/{BUCKET}", trust_env=False).status_code == 200

    def stop(self) -> None:
        """It refuses connections, until `start`; what it has, it keeps."""
        self._server.stop()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer  # half a second, which nobody else needs

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()


def bucket() -> Iterator[Bucket]:
    """A bucket; its address is in the environment until the end of the block."""
    made = Bucket()
    login = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    with patch.dict(os.environ, login, AWS_ENDPOINT_URL=made.address, AWS_ALLOW_HTTP="true"):
        try:
            yield made
        finally:
            made.stop()


running_bucket = contextmanager(bucket)


def shared_place(
    url: str, admin: Admin, folder: Path | str, transaction: str = TRANSACTION, *, blobs: str = "", more: str = ""
) -> Place:
    """On this database and broker; `more` is for the broker's address."""
    broker = admin.node.url(admin.vhost, more=more)
    return Place(url, blobs or f"s3://{BUCKET}/{transaction}", str(folder), broker, transaction)


def from_producer(queue: str, body: bytes, headers: Mapping[str, Any]) -> Outgoing:
    """A message of the producer's."""
    return amqp.outgoing(queue, body, message_id=None, headers=dict(headers), content_type="x/y")


async def publish(publisher: RabbitPublisher, transaction: str, payloads: Mapping[str, range], **counts: int) -> None:
    """Payloads, then headers of the series that are named."""
    header, payload = queue_names(transaction)
    told = {"transaction-id": transaction}
    wanted: list[tuple[str, bytes, dict[str, object]]] = [
        (payload, body_of(name, number), {**told, "series": name, "ordinal": number})
        for name, numbers in payloads.items()
        for number in numbers
    ]
    for name, count in counts.items():
        wanted.append((header, b"", {**told, "series-count": len(counts), "series": name, "count": count}))
    # As a producer has to: what the broker has not confirmed, while it changes its leader, is sent again.
    async with asyncio.timeout(60):
        while wanted:
            outcomes = await publisher.publish([from_producer(*each) for each in wanted], timeout_s=60)
            wanted = [each for each, outcome in zip(wanted, outcomes, strict=True) if not outcome.stored]


@asynccontextmanager
async def producing(admin: Admin) -> AsyncIterator[None]:
    """A producer that answers each request once, however often it comes."""
    await admin.queue(NOTIFY)
    seen: set[str] = set()
    app = holdfast.App(admin.url, management=admin.node.management_url)
    async with RabbitPublisher(admin.broker_url()) as out:

        @app.consumer(PRODUCER)
        async def work(request: holdfast.Message) -> None:
            if request.id not in seen:
                seen.add(request.id)
                await publish(out, request.id, {name: range(count) for name, count in SHAPE.items()}, **SHAPE)

        async with app.running(declare=True):
            yield


async def check_embedded(place: Place) -> None:
    """Of an embedded queue: its queues are gone, nothing is parked, and all the rest."""
    async with holdfast.open(place.url) as queues:
        bodies = await notices(queues)
        assert await parked(queues) == []
        names = {queue.queue_name for queue in await queues.queues_list()}
        assert names == {"collector.dlq", "producer", "notify"}
    files = [file for file in Path(place.blobs, place.transaction).rglob("*") if file.is_file()]
    assert len(files) == TOTAL + 1, "nothing beside the parts and the manifest"
    await _check(place, bodies)


async def check_shared(place: Place, admin: Admin) -> None:
    """Of a place on RabbitMQ: nothing is parked, and all the rest. Notices of others are taken away too."""
    bodies = [delivery.body for delivery in await admin.drain(NOTIFY, await admin.count(NOTIFY))]
    assert await admin.count("collector.dlq") == 0
    await _check(place, [body for body in bodies if msgspec.json.decode(body)["transaction-id"] == place.transaction])


def check_uploads(place: Place, kills: int) -> int:
    """No more re-uploads than were under way at a kill; how many there were."""
    assert 0 <= place.again <= UPLOADS_MAX * kills, f"{place.again} re-uploads after {kills} kills"
    return place.again


async def _check(place: Place, bodies: Sequence[bytes]) -> None:
    """Every blob right, one row per ordinal, at least one notice and all equal."""
    assert len(bodies) >= 1
    assert len(set(bodies)) == 1, "notices differ"
    notice = msgspec.json.decode(bodies[0])
    assert notice["parts_count"] == TOTAL == len(notice["parts"])
    assert rows_of(place.url, place.transaction) == TOTAL, "one row per ordinal"
    store = open_collect_store(place.url, clock=SystemClock())
    await store.open()
    try:
        found = await store.find(place.transaction)
        assert found is not None
        assert (found.state, found.is_clean) == (TransactionState.COMPLETED, True), found
        async with open_blobs(place.blobs) as blobs:
            manifest = b"".join([chunk async for chunk in blobs.get(notice["manifest"]["path"])])
            assert hashlib.sha256(manifest).hexdigest() == notice["manifest"]["sha256"]
            for name, count in SHAPE.items():
                parts = await store.parts(place.transaction, name, first=0, count_max=1000)
                assert [part.ordinal for part in parts] == list(range(count))
                for part in parts:
                    got = b"".join([chunk async for chunk in blobs.get(part.path)])
                    assert got == body_of(name, part.ordinal)
            paths = [stat.path async for stat in blobs.find(f"{place.transaction}/")]
            assert len(paths) == TOTAL + 1, "nothing beside the parts and the manifest"
    finally:
        await store.close()


def rows_of(url: str, transaction: str) -> int:
    """How many rows the index has."""
    if url.startswith("sqlite:///"):
        file = apsw.Connection(url.removeprefix("sqlite:///") + "/collect/collect.db")
        return int(file.execute("SELECT count(*) FROM parts WHERE transaction_id = ?", (transaction,)).get)
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM holdfast.collect_parts WHERE transaction_id = %s", (transaction,)
        ).fetchone()
    assert row is not None
    return int(row[0])
