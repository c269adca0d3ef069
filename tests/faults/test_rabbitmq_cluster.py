"""A cluster whose nodes die or hang under publishers and consumers: nothing that was confirmed is lost."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast.core.message import Outcome, OutcomeKind
from tests.faults.consuming import QUEUE, consuming
from tests.support.amqp import Admin, BrokerUrl, RabbitPublisher, outgoing
from tests.support.eventually import eventually
from tests.support.rabbitmq_cluster import RabbitCluster

pytestmark = pytest.mark.rabbitmq


def test_the_nodes_are_a_cluster_and_queues_live_where_they_are_told_to(rabbitmq_cluster: RabbitCluster) -> None:
    vhost = rabbitmq_cluster.create_vhost("homes")
    rabbitmq_cluster.declare(vhost, "replicated", home=1, quorum=True)
    rabbitmq_cluster.declare(vhost, "alone", home=2)
    assert rabbitmq_cluster.leader_of(vhost, "replicated") is rabbitmq_cluster.nodes[1]
    assert rabbitmq_cluster.leader_of(vhost, "alone") is rabbitmq_cluster.nodes[2]
    assert sorted(rabbitmq_cluster.members_of(vhost, "replicated")) == sorted(n.name for n in rabbitmq_cluster.nodes)


async def test_a_leader_that_hangs_makes_a_publish_unknown_and_it_is_stored_later(
    rabbitmq_cluster: RabbitCluster,
) -> None:
    vhost = rabbitmq_cluster.create_vhost("hangs")
    rabbitmq_cluster.declare(vhost, QUEUE, home=2, quorum=True)
    async with RabbitPublisher(BrokerUrl.parse(rabbitmq_cluster.nodes[0].url(vhost))) as publisher:
        assert (await publisher.publish([outgoing(QUEUE, b"before")]))[0].stored
        leader = rabbitmq_cluster.leader_of(vhost, QUEUE)
        leader.pause()
        try:
            # Sooner than the others choose another leader, which they do after a second or more.
            outcome = (await publisher.publish([outgoing(QUEUE, b"meanwhile")], timeout_s=0.5))[0]
        finally:
            leader.resume()
        assert outcome.kind is OutcomeKind.UNKNOWN, "no answer is no answer"
        assert (await publisher.publish([outgoing(QUEUE, b"after")]))[0].stored
    # That is what makes it unknown and not failed.
    async with Admin.open(rabbitmq_cluster.nodes[0], vhost, keep=True) as admin:
        assert [delivery.body for delivery in await admin.drain(QUEUE, 3)] == [b"before", b"meanwhile", b"after"]


async def test_a_wait_queue_and_a_dead_queue_whose_node_is_down_hold_the_message(
    rabbitmq_cluster: RabbitCluster,
) -> None:
    vhost = rabbitmq_cluster.create_vhost("homeless")
    home, other = rabbitmq_cluster.nodes[2], rabbitmq_cluster.nodes[0]
    # By the management API: a probe whose ack is undone by the kill would be in the dead queue again.
    app, seen = holdfast.App(other.url(vhost), management=other.management_url), list[bytes]()

    @app.consumer(QUEUE, retry=holdfast.Retry(attempts=3, delay="200ms"))
    async def handle(message: holdfast.Message) -> None:
        seen.append(message.body)
        raise holdfast.Permanent("never") if message.body == b"bad" else ValueError("no")

    rabbitmq_cluster.declare(vhost, f"{QUEUE}.dlq", home=2)
    ttl: dict[str, int | str] = {"x-message-ttl": 200}
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": QUEUE}
    rabbitmq_cluster.declare(vhost, f"{QUEUE}.retry", home=2, **(ttl | back))  # type: ignore[arg-type]
    async with Admin.open(other, vhost, keep=True) as admin, app.running(declare=True):
        home.kill()
        assert all([(await _publish(admin, body)).stored for body in (b"bad", b"fail")])
        await eventually(lambda: sorted(seen) == [b"bad", b"fail"])
        await eventually(lambda: not app.health[0].is_well)
        assert "publish to" in app.health[0].trouble, "it says which way is closed"
        await asyncio.to_thread(home.start)
        await eventually(lambda: app.health[0].is_well)
        letters = await admin.drain(f"{QUEUE}.dlq", 2)
    assert sorted(letter.body for letter in letters) == [b"bad", b"fail"]
    assert sorted(seen) == [b"bad", b"fail", b"fail", b"fail"]


async def _publish(admin: Admin, body: bytes) -> Outcome:
    async with RabbitPublisher(admin.broker_url()) as publisher:
        return (await publisher.publish([outgoing(QUEUE, body, message_id=body.decode())]))[0]


async def test_the_leaders_node_is_killed_under_a_consumer_that_retries_and_parks(
    rabbitmq_cluster: RabbitCluster,
) -> None:
    vhost = rabbitmq_cluster.create_vhost("leader")
    async with consuming(rabbitmq_cluster.url(vhost)) as load:
        await eventually(lambda: len(load.found) >= 50)
        leader = rabbitmq_cluster.leader_of(vhost, QUEUE)
        assert leader is rabbitmq_cluster.nodes[0], "producer and consumer are on that node too"
        leader.kill()
        before = len(load.found)
        await eventually(lambda: len(load.found) >= before + 50)
        assert rabbitmq_cluster.leader_of(vhost, QUEUE) is not leader
        # What is in its wait queue stays there until the node is back: the broker's own dead-lettering is stuck (3.10).
        await asyncio.to_thread(rabbitmq_cluster.heal)
        report = await load.drained()
    report.check(duplicates_max=None)
    assert report.put_count >= 100
