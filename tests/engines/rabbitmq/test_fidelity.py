"""What goes in comes out, byte for byte: through our wire, the real broker, and a bare socket on the other side."""

from __future__ import annotations

import struct

import pytest

from holdfast.core.message import Outgoing
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.wire import properties, table
from tests.engines.rabbitmq.raw import HEADERS, SocketClient, header_table, short
from tests.support.amqp import Admin

pytestmark = pytest.mark.rabbitmq

EVERY_PROPERTY = {
    "content_type": short("text/plain"),
    "content_encoding": short(""),
    "headers": header_table(HEADERS),
    "delivery_mode": b"\2",
    "priority": b"\7",
    "correlation_id": b"\3\xff\xfe\xfd",
    "reply_to": short("somebody"),
    "expiration": short("600000"),
    "message_id": short("m" * 255),
    "timestamp": struct.pack(">Q", 1_700_000_000_000),
    "type": short("order.created"),
    "user_id": short("guest"),
    "app_id": short("app"),
    "cluster_id": short("cluster"),
}
RAW_LISTS = {
    "everything": properties.join(EVERY_PROPERTY),
    "nothing but the mode": properties.join({"delivery_mode": b"\2"}),
    "an empty table": properties.join({"headers": b"\0\0\0\0", "delivery_mode": b"\2"}),
    **{
        name[:20]: properties.join({"headers": header_table({name: raw}), "delivery_mode": b"\2"})
        for name, raw in HEADERS.items()
    },
}


def entries(raw: bytes) -> dict[str, bytes | dict[bytes, bytes]]:
    """Everything in a property list as raw bytes, except the order of the headers and the broker's own count."""
    pieces = properties.split(raw)
    headers = pieces.pop("headers", b"\0\0\0\0")
    found = {name: headers[start:end] for name, start, end in table.scan(headers).entries}
    found.pop(b"x-delivery-count", None)
    return {**pieces, "headers": found}


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_every_type_passes_through_a_move_byte_for_byte(every_admin: Admin, kind: str) -> None:
    """Put in by a bare socket, moved by consumer and publisher, taken out by a bare socket."""
    for name in ("from", "to"):
        await every_admin.queue(name, **{"x-queue-type": kind})
    with SocketClient.open(every_admin.node.port, every_admin.vhost) as bare:
        for raw in RAW_LISTS.values():
            bare.publish("from", raw, b"body")
        async with (
            ResumingConsumer(every_admin.broker_url(), "from") as consumer,
            RabbitPublisher(every_admin.broker_url()) as publisher,
        ):
            for _ in RAW_LISTS:
                (delivery,) = await consumer.batch(count_max=1, timeout_s=60.0)
                moved = Outgoing("", "to", delivery.properties, delivery.body)
                assert (await publisher.publish([moved]))[0].stored
                consumer.ack([delivery])
        for name, raw in RAW_LISTS.items():
            got, body = bare.get("to")
            assert entries(got) == entries(raw), name
            assert body == b"body"
            if kind == "classic" and every_admin.node.version == "3.10":
                assert got == raw  # the others sort the table, quorum queues add a count


async def test_spliced_keys_are_the_only_difference(every_admin: Admin) -> None:
    await every_admin.queue("to")
    raw = RAW_LISTS["everything"]
    changed = properties.splice_headers(raw, put={"x-retry-count": 3, "x-who": "me"}, drop=["double", "text-not-utf8"])
    changed = properties.splice(changed, drop=["expiration", "user_id"])
    async with RabbitPublisher(every_admin.broker_url()) as publisher:
        assert (await publisher.publish([Outgoing("", "to", changed, b"body")]))[0].stored
    with SocketClient.open(every_admin.node.port, every_admin.vhost) as bare:
        got, _ = bare.get("to")
    left = {name: value for name, value in HEADERS.items() if name not in ("double", "text-not-utf8")}
    put = {"x-retry-count": b"l" + struct.pack(">q", 3), "x-who": b"S\0\0\0\2me"}
    expected = {name: piece for name, piece in EVERY_PROPERTY.items() if name not in ("expiration", "user_id")}
    assert entries(got) == entries(properties.join({**expected, "headers": header_table(left | put)}))


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 1_000_000])
async def test_bodies_around_the_frame_size_arrive_whole(admin: Admin, size: int) -> None:
    await admin.queue("q")
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    async with RabbitPublisher(admin.broker_url()) as publisher:
        assert (await publisher.publish([Outgoing("", "q", properties.NONE, body)]))[0].stored
    with SocketClient.open(admin.node.port, admin.vhost) as bare:
        assert bare.get("q")[1] == body


async def test_the_smallest_frame_size_works_both_ways(admin: Admin) -> None:
    await admin.queue("q")
    address = admin.broker_url(more="?frame_max=8192")
    body = b"q" * 50_000
    async with RabbitPublisher(address) as publisher, ResumingConsumer(address, "q") as consumer:
        assert (await publisher.publish([Outgoing("", "q", properties.NONE, body)]))[0].stored
        (delivery,) = await consumer.batch(timeout_s=60.0)
        assert delivery.body == body


async def test_a_transient_message_is_published_persistent(admin: Admin) -> None:
    await admin.queue("q")
    async with RabbitPublisher(admin.broker_url()) as publisher:
        for raw in (properties.NONE, properties.encode({"delivery_mode": 1, "message_id": "m"})):
            assert (await publisher.publish([Outgoing("", "q", raw, b"")]))[0].stored
    with SocketClient.open(admin.node.port, admin.vhost) as bare:
        assert bare.get("q")[0] == properties.encode({"delivery_mode": 2})
        assert bare.get("q")[0] == properties.encode({"delivery_mode": 2, "message_id": "m"})


async def test_a_queue_of_any_name_can_be_consumed(admin: Admin) -> None:
    name = "größe (1) *!?"
    await admin.queue(name)
    async with RabbitPublisher(admin.broker_url()) as publisher, ResumingConsumer(admin.broker_url(), name) as consumer:
        assert (await publisher.publish([Outgoing("", name, properties.NONE, b"x")]))[0].stored
        (delivery,) = await consumer.batch(timeout_s=60.0)
        assert delivery.routing_key == name
