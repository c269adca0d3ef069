"""Consumers on RabbitMQ that are killed, or cut off, between publish and ack: nothing is lost, on any layout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

import holdfast
from holdfast.ports.broker import Layout
from holdfast.proof.proxy import Proxy
from tests.consume.brokers import RabbitUnderTest
from tests.consume.killed_app import make_app
from tests.consume.test_kills import BODIES, WORKING, argv, done_in
from tests.engines.rabbitmq.test_cuts import seen
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually
from tests.support.forking import forked_process
from tests.support.rabbitmq import Node, vhost_name

pytestmark = pytest.mark.rabbitmq


async def settled(broker: RabbitUnderTest, done: Path) -> None:
    """Everything is done or parked, and nothing is left anywhere else."""
    parked: set[bytes] = set()

    async def is_settled() -> bool:
        # Looking gives letters back, and a quorum queue takes its time: what was seen is not looked at again.
        parked.update(letter.body for letter in await broker.letters())
        return set(done_in(done)) | parked == set(BODIES) and await broker.left() == 0

    await eventually(is_settled)
    assert parked >= set(BODIES) - WORKING
    assert set(done_in(done)) <= WORKING


@pytest.mark.parametrize("point", ["rabbitmq.after_wait_confirm", "rabbitmq.after_park_confirm"])
@pytest.mark.parametrize(("version", "layout"), [("3.10", "quorum"), ("4.0", "quorum"), ("4.0", "per-consumer")])
async def test_a_kill_loses_nothing_on_other_layouts_and_versions(
    request: pytest.FixtureRequest, nodes: dict[str, Node], tmp_path: Path, version: str, layout: Layout, point: str
) -> None:
    done = tmp_path / "done"
    async with Admin.open(nodes[version], vhost_name(request.node.name)) as admin:
        broker = RabbitUnderTest(admin, layout)
        app = make_app(broker.url, done, layout)
        await broker.declare(app)
        await broker.send(*BODIES)
        env = {"TEST_URL": broker.url, "TEST_DONE": str(done), "TEST_LAYOUT": layout, "HOLDFAST_CRASH_AT": f"{point}:2"}
        async with forked_process(argv(), env=env) as child:
            assert await child.wait() == -9, child.stderr.tail
        async with app.running():
            await settled(broker, done)


async def test_a_kill_of_the_broker_is_no_attempt_at_what_stands_in_a_classic_queue() -> None:
    """Everything looks as if it had been delivered before, then, whoever had it."""
    bodies = [b"%d" % number for number in range(30)]
    seen: list[tuple[bytes, int]] = []
    with Node() as node:
        async with Admin.open(node, "killed", keep=True) as admin:
            rabbit = RabbitUnderTest(admin, "per-consumer")
        app, begun, free = rabbit.app(), asyncio.Event(), asyncio.Event()

        @app.consumer("work", retry=holdfast.Retry(attempts=2, delay="1h"), concurrency=1, prefetch=5)
        async def handle(message: holdfast.Message) -> None:
            begun.set()
            await free.wait()
            seen.append((message.body, message.attempt))

        async with app.running(declare=True):
            async with Admin.open(node, "killed", keep=True) as admin:
                await admin.publish([outgoing("work", body) for body in bodies])
            await begun.wait()
            for _ in range(2):
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)
                await eventually(lambda: app.health[0].is_well)
            free.set()
            # The first of them was being worked on: that one waits for an hour, or ran to its end after all.
            await eventually(lambda: {body for body, _ in seen} == set(bodies))
    assert {body for body, attempt in seen if attempt > 1} <= {b"0"}


async def test_a_kill_of_the_broker_takes_no_retry_out_of_quorum_queues() -> None:
    """What classic queues move to each other is not on the disk when they have moved it: there it would be gone."""
    bodies = {b"%d" % number for number in range(30)}
    failed, done, free = set[bytes](), set[bytes](), asyncio.Event()
    with Node("4.0") as node:
        async with Admin.open(node, "killed", keep=True) as admin:
            rabbit = RabbitUnderTest(admin, "quorum")
        app = rabbit.app()

        @app.consumer("work", retry=holdfast.Retry(attempts=5, delay="200ms"), concurrency=5, layout="quorum")
        async def handle(message: holdfast.Message) -> None:
            if message.attempt == 1:
                failed.add(message.body)
                raise ValueError("once")
            await free.wait()
            done.add(message.body)

        async with app.running(declare=True):
            async with Admin.open(node, "killed", keep=True) as admin:
                await admin.publish([outgoing("work", body) for body in bodies])
                await eventually(lambda: failed == bodies)

                async def are_back() -> bool:
                    return await admin.count("work.retry") == 0 and await admin.count("work") == len(bodies) - 5

                await eventually(are_back)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            free.set()
            await eventually(lambda: done == bodies)


async def test_a_message_that_outlasts_its_connection_again_and_again_is_parked(rabbit: RabbitUnderTest) -> None:
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app = holdfast.App(rabbit.admin.node.url(rabbit.admin.vhost, port=proxy.port))
        attempts: list[int] = []

        @app.consumer("work", retry=holdfast.Retry(attempts=3, delay="100ms"), concurrency=5)
        async def handle(message: holdfast.Message) -> None:
            attempts.append(message.attempt)
            await asyncio.Event().wait()

        await rabbit.declare(app)
        await rabbit.send(b"x")
        async with app.running():
            for count in (1, 2, 3):
                await eventually(lambda count=count: len(attempts) == count)  # type: ignore[misc]
                await proxy.cut()
            assert [letter.reason for letter in await eventually(rabbit.parked)] == ["poison"]
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("deliver", [False, True], ids=["lost", "answer-lost"])
@pytest.mark.parametrize(
    ("way", "kind"), [("down", "deliver"), ("up", "publish"), ("down", "ack"), ("up", "ack"), ("up", "body")]
)
async def test_a_cut_at_any_frame_of_a_consumer_loses_nothing(
    rabbit: RabbitUnderTest, tmp_path: Path, way: Literal["up", "down"], kind: str, deliver: bool
) -> None:
    done = tmp_path / "done"
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app = make_app(rabbit.admin.node.url(rabbit.admin.vhost, port=proxy.port), done)
        await rabbit.declare(app)
        await rabbit.send(*BODIES)
        async with app.running():
            await eventually(lambda: app.health[0].state == "consuming")
            trip = proxy.cut_when(way, seen(kind), deliver=deliver)
            await settled(rabbit, done)
            assert trip.fired.is_set()
