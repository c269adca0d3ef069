"""A virtual host whose queues are quorum queues unless their type is said: a classic one stays classic there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

import holdfast
from holdfast.core.topology.definitions import from_definitions
from holdfast.engines.rabbitmq.broker import RabbitBroker, RabbitOptions
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.errors import CannotStart
from holdfast.ports.broker import Subscription
from holdfast.wiring import SystemClock
from tests.support.amqp import Admin, outgoing
from tests.support.rabbitmq import Node, versions, vhost_name
from tests.topology.conftest import EXAMPLES, file, topologies

pytestmark = pytest.mark.rabbitmq

#: One more than the default limit allows.
LOOKS_COUNT = 22
HAVE_DEFAULT_TYPES = [version for version in versions() if version != "3.10"]


@pytest.fixture(params=HAVE_DEFAULT_TYPES)
async def quorum_by_default(request: pytest.FixtureRequest, nodes: dict[str, Node]) -> AsyncIterator[Admin]:
    """A virtual host of 4.x with that default."""
    async with Admin.open(nodes[request.param], vhost_name(request.node.name)) as admin:
        admin.node.api("PUT", f"/vhosts/{admin.vhost}", {"default_queue_type": "quorum"})
        await admin.queue("proof")
        assert queues_of(admin) == {"proof": "quorum"}
        await admin.delete("proof")
        yield admin


def queues_of(admin: Admin) -> Mapping[str, str]:
    return {queue["name"]: queue["type"] for queue in admin.node.api("GET", f"/queues/{admin.vhost}").json()}


def app_of(admin: Admin, **more: str) -> holdfast.App:
    app = holdfast.App(admin.url, **more)  # type: ignore[arg-type]
    app.consumer("work", retry=holdfast.Retry(attempts=2, delay="100ms"))(print)
    return app


async def look_often(admin: Admin, queue: str) -> None:
    await admin.publish([outgoing(queue, b"letter")])
    async with ResumingConsumer(admin.broker_url(), queue, prefetch=1) as consumer:
        for _ in range(LOOKS_COUNT):
            (delivery,) = await consumer.batch(timeout_s=60.0)
            assert delivery.body == b"letter"
            consumer.give_back([delivery])
    assert [letter.body for letter in await admin.drain(queue, 1)] == [b"letter"]


async def test_what_is_applied_is_classic(quorum_by_default: Admin) -> None:
    async with topologies(quorum_by_default) as service:
        assert (await service.apply(file("[queues.work]"))).is_done
    assert set(queues_of(quorum_by_default).values()) == {"classic"}
    await look_often(quorum_by_default, "work.dlq")


async def test_what_is_imported_is_classic(quorum_by_default: Admin) -> None:
    data = (EXAMPLES / "media.definitions.json").read_bytes()
    async with topologies(quorum_by_default) as service:
        given = from_definitions(data, vhost=quorum_by_default.vhost, source="media")
        assert (await service.import_definitions(given)).remaining == ()
    assert set(queues_of(quorum_by_default).values()) == {"classic"}


async def test_what_a_consumer_declares_is_classic(quorum_by_default: Admin) -> None:
    async with app_of(quorum_by_default).running(declare=True):
        assert queues_of(quorum_by_default) == dict.fromkeys(["work", "work.retry", "work.dlq"], "classic")
    await look_often(quorum_by_default, "work.dlq")


@pytest.mark.parametrize("queue", ["work", "work.dlq"])
async def test_a_queue_that_was_made_a_quorum_queue_by_default_is_refused(quorum_by_default: Admin, queue: str) -> None:
    async with app_of(quorum_by_default).running(declare=True):
        declared = quorum_by_default.node.api("GET", f"/queues/{quorum_by_default.vhost}/{queue}").json()
    arguments = {name: value for name, value in declared["arguments"].items() if name != "x-queue-type"}
    await quorum_by_default.delete(queue)
    await quorum_by_default.queue(queue, **arguments)
    app = app_of(quorum_by_default)
    with pytest.raises(CannotStart, match=f"queue '{queue}' is not as its consumer needs it.*x-queue-type"):
        await app.run(declare=True)
    async with topologies(quorum_by_default) as service:
        assert not (await service.apply(file("[queues.work]"))).is_done


async def test_a_quorum_queue_without_a_limit_does_as_well(every_admin: Admin) -> None:
    limit = {} if every_admin.node.version == "3.10" else {"x-delivery-limit": -1}
    await every_admin.quorum_queue("work.dlq", **limit)
    async with app_of(every_admin).running(declare=True):
        assert queues_of(every_admin)["work.dlq"] == "quorum"


@pytest.mark.parametrize("quorum", [False, True])
async def test_the_collectors_own_queues_have_the_type_that_was_asked_for_and_no_limit(
    quorum_by_default: Admin, quorum: bool
) -> None:
    options = RabbitOptions(quorum=quorum)
    async with RabbitBroker(quorum_by_default.url, clock=SystemClock(), options=options) as broker:
        await broker.declare(Subscription(queue="parts", dead_queue="dead"))
    assert queues_of(quorum_by_default) == dict.fromkeys(["parts", "dead"], "quorum" if quorum else "classic")
    await look_often(quorum_by_default, "parts")
