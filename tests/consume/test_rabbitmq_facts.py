"""What RabbitMQ does that can lose a message, done to a consumer: it loses none. docs/rabbitmq-wire.md has the list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import Message, Retry
from holdfast.engines.rabbitmq import topology
from holdfast.engines.rabbitmq.topology import GROWN_S
from holdfast.ports.broker import Layout
from holdfast.wiring import SystemClock, open_rabbit_broker
from tests.consume.brokers import QUEUE, RabbitUnderTest
from tests.support.amqp import Admin, decoded, headers_of, outgoing, table
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node, versions, vhost_name

pytestmark = pytest.mark.rabbitmq

FAMILY = (QUEUE, f"{QUEUE}.retry", f"{QUEUE}.dlq")
QUICKLY = Retry(attempts=3, delay="100ms")
LAYOUTS: list[Layout] = ["per-consumer", "quorum"]
SENT_ROUND = [
    {"queue": f"{QUEUE}.retry", "reason": "expired", "count": 3, "exchange": "", "routing-keys": [QUEUE]},
    {"queue": QUEUE, "reason": "expired", "count": 3, "exchange": "", "routing-keys": [QUEUE]},
]
REJECTED = {"queue": QUEUE, "reason": "rejected", "exchange": "", "routing-keys": [QUEUE]}
#: What a client may have sent along as x-death. RabbitMQ 3 takes it for its own.
FORGED: dict[str, object] = {
    "it went round before": SENT_ROUND,
    "numbers": [1, 2],
    "without a count": [REJECTED],
    "a text": "no list at all",
    "a count of another type": [{**REJECTED, "count": table.Undecodable(b"I\0\0\0\0", "an int32")}],
    "a foreign queue": [{**REJECTED, "queue": "elsewhere", "count": 7}],
}


@pytest.fixture(params=versions())
async def broker(request: pytest.FixtureRequest, nodes: dict[str, Node]) -> AsyncIterator[RabbitUnderTest]:
    """Each version in turn."""
    async with Admin.open(nodes[request.param], vhost_name(request.node.name)) as admin:
        yield RabbitUnderTest(admin, "per-consumer")


def failing(
    broker: RabbitUnderTest, layout: Layout, *, retry: Retry = QUICKLY, cause: Exception | None = None
) -> tuple[holdfast.App, list[Message]]:
    app, seen = broker.app(), list[Message]()

    @app.consumer(QUEUE, retry=retry, layout=layout)
    async def handle(message: Message) -> None:
        seen.append(message)
        raise ValueError("no") from cause

    return app, seen


async def publish(broker: RabbitUnderTest, body: bytes, *, user: str = "guest:guest", **values: Any) -> None:
    await broker.admin.publish([outgoing(QUEUE, body, **values)], user=user)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by", ["publish", "broker"])
async def test_a_death_that_a_client_made_up_neither_ends_the_retries_nor_the_message(
    broker: RabbitUnderTest, layout: Layout, by: Any
) -> None:
    app, seen = failing(broker, layout, retry=Retry(attempts=3, delay="100ms", by=by))
    async with app.running(declare=True):
        for name, value in FORGED.items():
            await publish(broker, name.encode(), headers={"x-death": value})

        async def all_parked() -> bool:
            return {letter.body.decode() for letter in await broker.letters()} == set(FORGED)

        await eventually(all_parked)
    assert len(seen) == 3 * len(FORGED)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_message_that_expires_does_not_expire_in_its_wait_queue_or_its_dead_queue(
    broker: RabbitUnderTest, layout: Layout
) -> None:
    """The broker would send it round with nobody rejecting it, and drop it; in the dead queue it would be deleted."""
    app, seen = failing(broker, layout, retry=Retry(attempts=3, delay="300ms"))
    async with app.running(declare=True):
        await publish(broker, b"x", expiration="200")
        (letter,) = await eventually(broker.letters)
    assert [message.attempt for message in seen] == [1, 2, 3]
    assert "expiration" not in decoded(letter)
    assert headers_of(letter)["x-kept-expiration"] == "200"


async def test_a_message_of_another_user_is_retried_and_parked(broker: RabbitUnderTest) -> None:
    """Published again with its `user_id`, it would be refused, and the channel closed under its neighbours."""
    node, vhost = broker.admin.node, broker.admin.vhost
    node.api("PUT", "/users/other", {"password": "other", "tags": ""})
    node.api("PUT", f"/permissions/{vhost}/other", {"configure": ".*", "write": ".*", "read": ".*"})
    app, seen = failing(broker, "per-consumer")
    async with app.running(declare=True):
        await publish(broker, b"x", user="other:other", user_id="other")
        (letter,) = await eventually(broker.letters)
    assert len(seen) == 3
    assert headers_of(letter)["x-kept-user-id"] == "other"


async def test_copies_are_not_sent_again(broker: RabbitUnderTest) -> None:
    await broker.admin.queue("copies")
    app, _ = failing(broker, "per-consumer")
    async with app.running(declare=True):
        await publish(broker, b"x", headers={"CC": ["copies"]})
        (letter,) = await eventually(broker.letters)
        assert await broker.admin.count("copies") == 1, "one of the first publish, none of the retries"
    assert headers_of(letter)["x-kept-cc"] == ["copies"]


async def test_headers_that_leave_no_room_for_the_story_are_parked_without_it(broker: RabbitUnderTest) -> None:
    """A header frame over the frame size would end the connection, again and again."""
    app, _ = failing(broker, "per-consumer", cause=ValueError("a long story " * 100))
    async with app.running(declare=True):
        await publish(broker, b"x", headers={"large": "x" * (128 * 1024 - 600)})
        (letter,) = await eventually(broker.letters)
        await eventually(lambda: app.health[0].is_well)
    assert headers_of(letter)["x-parked-reason"] == "attempts"
    assert "x-error-stack" not in headers_of(letter)


async def test_a_broken_way_to_the_wait_queue_of_a_quorum_queue_loses_nothing(broker: RabbitUnderTest) -> None:
    """`by="broker"`: the broker carries, and a classic queue would drop what has no way to go."""
    node = broker.admin.node
    app, seen = failing(broker, "quorum", retry=Retry(attempts=2, delay="100ms", by="broker"))
    async with app.running(declare=True):
        arguments = node.api("GET", f"/queues/{broker.admin.vhost}/{QUEUE}.retry").json()["arguments"]
        await broker.admin.delete(f"{QUEUE}.retry")
        await broker.send(*[f"{number}".encode() for number in range(5)])
        await eventually(lambda: len(seen) == 5)
        await broker.admin.queue(f"{QUEUE}.retry", **arguments)

        async def all_parked() -> bool:
            return len(await broker.letters()) == 5

        await eventually(all_parked)
    assert len(seen) == 10


async def test_a_quorum_queue_that_was_just_declared_outlives_a_kill_of_its_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single node forgets one that is younger than a second, with everything that it confirmed."""
    monkeypatch.setattr(topology, "GROWN_S", GROWN_S)
    with Node("3.10") as node:
        async with Admin.open(node, "v", keep=True) as admin:
            broker = RabbitUnderTest(admin, "quorum")
            app, _ = failing(broker, "quorum", retry=Retry(delay="10m"))
            async with open_rabbit_broker(broker.url, clock=SystemClock(), management=None) as opened:
                await opened.declare(app.consumers[0].subscription)
                await admin.publish([outgoing(name) for name in FAMILY])
                node.kill()
        node.start()
        async with Admin.open(node, "v", keep=True) as admin:
            for name in FAMILY:
                # A count of zero is what a quorum queue says while it has no leader.
                assert await eventually(partial(admin.count, name))
