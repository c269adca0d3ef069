"""Consumers on RabbitMQ that are killed, or cut off, between publish and ack: nothing is lost, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

import holdfast
from holdfast.ports.broker import Layout
from holdfast.proof.proxy import Proxy
from holdfast.wiring import SystemClock, open_rabbit_broker
from tests.consume.brokers import RabbitUnderTest
from tests.consume.killed_app import make_app
from tests.consume.test_kills import BODIES, WORKING, argv, done_in
from tests.engines.rabbitmq.test_cuts import seen
from tests.support.amqp import Admin
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


async def declare(broker: RabbitUnderTest, app: holdfast.App) -> None:
    async with open_rabbit_broker(broker.url, clock=SystemClock(), management=None) as opened:
        await opened.declare(app.consumers[0].subscription)


@pytest.mark.parametrize("point", ["rabbitmq.after_wait_confirm", "rabbitmq.after_park_confirm"])
@pytest.mark.parametrize(("version", "layout"), [("3.10", "quorum"), ("4.0", "quorum"), ("4.0", "per-consumer")])
async def test_a_kill_loses_nothing_on_other_layouts_and_versions(
    request: pytest.FixtureRequest, nodes: dict[str, Node], tmp_path: Path, version: str, layout: Layout, point: str
) -> None:
    done = tmp_path / "done"
    async with Admin.open(nodes[version], vhost_name(request.node.name)) as admin:
        broker = RabbitUnderTest(admin, layout)
        app = broker._app = make_app(broker.url, done, layout)
        await declare(broker, app)
        await broker.send(*BODIES)
        env = {"TEST_URL": broker.url, "TEST_DONE": str(done), "TEST_LAYOUT": layout, "HOLDFAST_CRASH_AT": f"{point}:2"}
        async with forked_process(argv(), env=env) as child:
            assert await child.wait() == -9, child.stderr.tail
        async with app.running():
            await settled(broker, done)


@pytest.mark.parametrize("deliver", [False, True], ids=["lost", "answer-lost"])
@pytest.mark.parametrize(
    ("way", "kind"), [("down", "deliver"), ("up", "publish"), ("down", "ack"), ("up", "ack"), ("up", "body")]
)
async def test_a_cut_at_any_frame_of_a_consumer_loses_nothing(
    rabbit: RabbitUnderTest, tmp_path: Path, way: Literal["up", "down"], kind: str, deliver: bool
) -> None:
    done = tmp_path / "done"
    async with Proxy("127.0.0.1", rabbit.admin.node.port) as proxy:
        app = rabbit._app = make_app(rabbit.admin.node.url(rabbit.admin.vhost, port=proxy.port), done)
        await declare(rabbit, app)
        await rabbit.send(*BODIES)
        async with app.running():
            await eventually(lambda: app.health[0].state == "consuming")
            trip = proxy.cut_when(way, seen(kind), deliver=deliver)
            await settled(rabbit, done)
            assert trip.fired.is_set()
