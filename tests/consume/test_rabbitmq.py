"""Consumers on RabbitMQ alone: headers on the wire, what must be there at the start, poison, and kills."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

import holdfast
from holdfast import Message, Permanent, Retry
from holdfast.core.message import Outgoing
from holdfast.errors import CannotStart, Invalid
from tests.consume.brokers import QUEUE, RabbitUnderTest
from tests.consume.conftest import LAYOUTS
from tests.consume.killed_app import make_app
from tests.consume.test_kills import BODIES, POINTS, WORKING, argv, done_in
from tests.support.amqp import Admin, ResumingConsumer, decoded, headers_of, outgoing, properties, raw_header, table
from tests.support.eventually import eventually
from tests.support.forking import forked_process

pytestmark = pytest.mark.rabbitmq

#: One value of every type that only the raw bytes keep: re-encoded, an int8 and a float become something else.
ODD = {"tiny": b"b\x05", "single": b"f\x3f\x8c\xcc\xcd", "millis": b"T" + (1_700_000_000_000).to_bytes(8, "big")}


def failing_app(broker: RabbitUnderTest, *, retry: Retry) -> tuple[holdfast.App, list[Message]]:
    app, seen = broker.app(), list[Message]()

    @app.consumer(QUEUE, retry=retry, name="me", layout=broker.layout)
    async def handle(message: Message) -> None:
        seen.append(message)
        raise Permanent("never") if message.body == b"bad" else ValueError("no")

    return app, seen


async def publish(broker: RabbitUnderTest, body: bytes, raw: bytes) -> None:
    await broker.admin.publish([Outgoing("", QUEUE, raw, body)])


async def test_a_parked_message_keeps_every_byte_and_tells_its_story(rabbit: RabbitUnderTest) -> None:
    app, seen = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    async with app.running(declare=True):
        headers = table.splice(table.EMPTY, put={**ODD, "traceparent": table.encode_value("00-aa-bb-01")})
        pieces = properties.split(properties.encode({"message_id": "m1", "type": "t", "expiration": "600000"}))
        await publish(rabbit, b"\x00\xff", properties.join({**pieces, "headers": headers}))
        (letter,) = await eventually(rabbit.letters)
    raw = properties.split(letter.properties)["headers"]
    for name, value in ODD.items():
        assert raw_header(raw, name) == value
    found = headers_of(letter)
    assert letter.body == b"\x00\xff"
    assert found["traceparent"] == "00-aa-bb-01"
    assert (found["x-retry-count"], found["x-parked-reason"], found["x-parked-by"]) == (1, "attempts", "me")
    assert (found["x-original-queue"], found["x-original-exchange"], found["x-original-routing-key"]) == (
        QUEUE,
        "",
        QUEUE,
    )
    assert (found["x-error-type"], found["x-error-message"]) == ("ValueError", "no")
    assert found["x-kept-expiration"] == "600000"
    assert "x-death" not in found
    assert "expiration" not in decoded(letter)
    assert decoded(letter)["delivery_mode"] == 2
    assert [message.attempt for message in seen] == [1, 2]


async def test_the_broker_can_carry_to_the_wait_queue(rabbit: RabbitUnderTest) -> None:
    app, seen = failing_app(rabbit, retry=Retry(attempts=3, delay="100ms", by="broker"))
    async with app.running(declare=True):
        await rabbit.send(b"x")
        (letter,) = await eventually(rabbit.letters)
    assert [message.attempt for message in seen] == [1, 2, 3]
    found = headers_of(letter)
    assert found["x-retry-count"] == 2
    assert found["x-original-queue"] == QUEUE


@pytest.mark.parametrize("by", ["publish", "broker"])
async def test_a_handler_sees_the_same_at_every_attempt(
    every_admin: Admin, by: Literal["publish", "broker"], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    rabbit = RabbitUnderTest(every_admin, LAYOUTS[every_admin.node.version])
    app, seen = failing_app(rabbit, retry=Retry(attempts=3, delay="100ms", by=by))
    sent_at = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    more: dict[str, Any] = {"reply_to": "answers", "timestamp": sent_at, "priority": 4, "app_id": "shop"}
    more["expiration"] = "600000"
    # Somebody else's: it is not where this message came from.
    more["headers"] = {"x-original-queue": QUEUE, "x-original-exchange": "other", "x-original-routing-key": "other"}
    async with app.running(declare=True):
        await every_admin.exchange("orders")
        await every_admin.bind(QUEUE, "orders", "orders.new")
        await every_admin.publish([outgoing("orders.new", b"x", exchange="orders", **more)])
        await eventually(rabbit.letters)
    shown = [
        (m.attempt, m.exchange, m.routing_key, m.reply_to, m.timestamp, m.priority, m.app_id, m.expiration)
        for m in seen
    ]
    same = ("orders", "orders.new", "answers", sent_at, 4, "shop", "600000")
    assert shown == [(attempt, *same) for attempt in (1, 2, 3)]
    told = [record.fields for record in caplog.records if getattr(record, "event", "") == "message.failed"]  # type: ignore[attr-defined]
    assert [fields["routingKey"] for fields in told] == ["orders.new"] * 3


async def test_attempts_that_others_counted_are_not_charged(every_admin: Admin) -> None:
    rabbit = RabbitUnderTest(every_admin, LAYOUTS[every_admin.node.version])
    app, seen = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    elsewhere: dict[str, Any] = {
        "queue": QUEUE,
        "reason": "rejected",
        "count": 9,
        "exchange": "",
        "routing-keys": ["k"],
    }
    async with app.running(declare=True):
        counted: dict[str, Any] = {"x-retry-count": 7, "x-death": [elsewhere]}
        await every_admin.publish([outgoing(QUEUE, b"x", headers=counted)])
        (letter,) = await eventually(rabbit.letters)
    assert [message.attempt for message in seen] == [1, 2]
    assert (headers_of(letter)["x-parked-reason"], headers_of(letter)["x-retry-count"]) == ("attempts", 1)


def test_that_the_broker_carries_can_be_said_in_a_word(rabbit: RabbitUnderTest) -> None:
    app = rabbit.app()
    app.consumer(QUEUE, retry="broker")(print)
    assert app.consumers[0].policy == Retry(by="broker")
    with pytest.raises(Invalid, match="by is invalid; 'sometimes'"):
        app.consumer("other", retry="sometimes")  # type: ignore[arg-type]


async def test_a_queue_that_would_not_give_back_is_refused(rabbit: RabbitUnderTest) -> None:
    app, _ = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    await rabbit.declare(app)
    await rabbit.admin.delete(f"{QUEUE}.retry")
    await rabbit.admin.queue(f"{QUEUE}.retry")
    with pytest.raises(CannotStart, match=r"'work\.retry' is not as its consumer needs it"):
        await app.run()


async def test_a_dead_queue_that_nothing_leads_to_is_refused(rabbit: RabbitUnderTest) -> None:
    app, _ = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    await rabbit.declare(app)
    await rabbit.admin.delete(f"{QUEUE}.dlq")
    with pytest.raises(CannotStart, match=r"'work\.dlq' does not exist"):
        await app.run()
    await rabbit.admin.queue(f"{QUEUE}.dlq")
    with pytest.raises(CannotStart, match=r"'dlq.work' does not lead to dead queue 'work.dlq'"):
        await app.run()
    async with app.running(declare=True):
        assert app.health


async def test_without_the_management_api_a_probe_shows_whether_the_dead_queue_is_led_to(
    rabbit: RabbitUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    app = holdfast.App(rabbit.url)
    app.consumer(QUEUE, retry=Retry(attempts=2, delay="100ms"))(print)
    await rabbit.declare(app)
    async with app.running():
        assert await rabbit.admin.count(f"{QUEUE}.dlq") == 0, "the probe was taken out again"
    await rabbit.admin.delete(f"{QUEUE}.dlq")
    await rabbit.admin.queue(f"{QUEUE}.dlq")
    with pytest.raises(CannotStart, match=r"'dlq.work' does not lead to dead queue 'work.dlq'.*returned"):
        await app.run()
    async with app.running(declare=True):
        await rabbit.send(b"letter", queue=f"{QUEUE}.dlq")
    assert "could not be checked" not in caplog.text
    async with app.running():
        assert "it is in use" in caplog.text
        assert await rabbit.admin.count(f"{QUEUE}.dlq") == 1


TOPOLOGY = """
[defaults]
layout = "quorum"

[queues."work"]
retry_delay = ["100ms", "300ms"]
names = { wait_queue = "later-{queue}", dead_queue = "graves.{queue}", dead_exchange = "x.{queue}" }
"""


async def test_a_topology_file_names_the_queues_of_a_consumer(rabbit: RabbitUnderTest, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(TOPOLOGY)
    app, attempts, waits = holdfast.App(rabbit.url, topology=file), list[int](), list[object]()

    @app.consumer(QUEUE, retry=Retry(attempts=3))
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        waits.append(message.headers.get("x-first-death-queue"))
        raise ValueError("no")

    async with app.running(declare=True):
        await rabbit.send(b"x")
        (letter,) = await rabbit.admin.drain(f"graves.{QUEUE}", 1)
    assert attempts == [1, 2, 3]
    assert waits == [None, f"later-{QUEUE}.1", f"later-{QUEUE}.2"]
    assert headers_of(letter)["x-original-queue"] == QUEUE
    other = holdfast.App(rabbit.url, topology=file)
    other.consumer("stranger")(print)
    with pytest.raises(Invalid, match="topology has no such queue; 'stranger'"):
        await other.run()


async def test_what_cannot_be_parked_is_held_and_goes_on_when_it_can(rabbit: RabbitUnderTest) -> None:
    app, seen = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    async with app.running(declare=True):
        await rabbit.admin.delete(f"{QUEUE}.dlq")
        await rabbit.send(b"bad")
        await eventually(lambda: "returned" in app.health[0].trouble)
        assert await rabbit.left() == 1
        await rabbit.admin.queue(f"{QUEUE}.dlq")
        await rabbit.admin.bind(f"{QUEUE}.dlq", f"dlq.{QUEUE}", "parking")
        assert len(await eventually(rabbit.letters)) == 1
        await eventually(lambda: app.health[0].is_well)
    assert len(seen) == 1


async def lose(broker: RabbitUnderTest) -> None:
    """What a process that dies does: it has the message, and its connection ends."""
    consumer = ResumingConsumer(broker.admin.broker_url(), QUEUE, prefetch=1)
    async with consumer:
        assert len(await consumer.batch(timeout_s=60.0)) == 1
        assert consumer._connection is not None
        consumer._stopping = True
        consumer._connection._abort()

    async def is_back() -> bool:
        return await broker.admin.count(QUEUE) == 1

    await eventually(is_back)


async def test_a_message_that_ends_processes_is_parked_on_a_classic_queue(rabbit: RabbitUnderTest) -> None:
    app, seen = failing_app(rabbit, retry=Retry(attempts=2, delay="100ms"))
    await rabbit.declare(app)
    await rabbit.send(b"x")
    await lose(rabbit)
    async with app.running():
        # It waits with its first attempt used up, and runs its second, which fails.
        (letter,) = await eventually(rabbit.letters)
    assert [message.attempt for message in seen] == [2]
    assert headers_of(letter)["x-retry-count"] == 1


async def test_a_message_that_ends_processes_is_parked_on_a_quorum_queue(rabbit: RabbitUnderTest) -> None:
    app, seen = rabbit.app(), list[Message]()

    @app.consumer(QUEUE, retry=Retry(attempts=2, delay="100ms"), layout="quorum")
    async def handle(message: Message) -> None:
        seen.append(message)

    await rabbit.declare(app)
    await rabbit.send(b"x")
    for _ in range(2):
        await lose(rabbit)
    async with app.running():
        ((_, reason, _),) = await eventually(rabbit.parked)
    assert (reason, seen) == ("poison", [])


@pytest.mark.parametrize("point", ["rabbitmq.after_wait_confirm", "rabbitmq.after_park_confirm", *POINTS])
async def test_a_kill_between_publish_and_ack_loses_nothing(
    rabbit: RabbitUnderTest, point: str, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    app = make_app(rabbit.url, done)
    rabbit._app = app
    await rabbit.declare(app)
    await rabbit.send(*BODIES)
    env = {"TEST_URL": rabbit.url, "TEST_DONE": str(done), "HOLDFAST_CRASH_AT": f"{point}:2"}
    async with forked_process(argv(), env=env) as child:
        assert await child.wait() == -9, child.stderr.tail
    async with app.running():

        async def is_settled() -> bool:
            parked = {letter.body for letter in await rabbit.letters()}
            return set(done_in(done)) | parked == set(BODIES) and await rabbit.left() == 0

        await eventually(is_settled)
        parked = [letter.body for letter in await rabbit.letters()]
    assert set(parked) == set(BODIES) - WORKING
    assert len(parked) <= len(set(parked)) + 2, "what was published and not acked is there twice"
    assert set(done_in(done)) == WORKING


async def test_a_connection_that_is_lost_is_taken_up_again(rabbit: RabbitUnderTest) -> None:
    app, begun, go_on = rabbit.app(), list[int](), asyncio.Event()

    @app.consumer(QUEUE, retry=Retry(attempts=5, delay="100ms"))
    async def handle(message: Message) -> None:
        begun.append(message.attempt)
        await go_on.wait()

    async with app.running(declare=True):
        await rabbit.send(b"x")
        await eventually(lambda: begun == [1])
        consumer = app._workers[0]._consumer
        consumer._consumer._connection._abort()  # type: ignore[union-attr]
        # It comes again, is put aside once because nobody can say how often it came, and runs a second time.
        await eventually(lambda: begun == [1, 2])
        go_on.set()

        async def is_done() -> bool:
            return await rabbit.left() == 0

        await eventually(is_done)
        assert await rabbit.parked() == []
