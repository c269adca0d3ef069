"""Plan, apply and check on real brokers: what is made, what is left alone, and what is never deleted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast.core.topology.diff import DifferenceKind
from holdfast.core.topology.layouts import design
from holdfast.engines.rabbitmq.consumer import ResumingConsumer
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.topology import RabbitTopology
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.errors import BadAddress, BrokerRefused, BrokerUnreachable
from holdfast.services.topology import Topologies
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually
from tests.support.ports import free_ports
from tests.support.rabbitmq import Node
from tests.topology.conftest import broker, example, file, topologies

pytestmark = pytest.mark.rabbitmq


@pytest.mark.parametrize("name", ["media", "quorum", "shared-dlq"])
async def test_an_example_is_applied_read_back_and_proved(every_admin: Admin, name: str) -> None:
    wanted = example(name)
    async with topologies(every_admin) as service:
        plan = await service.check(wanted)
        assert {difference.kind for difference in plan.differences} == {DifferenceKind.MISSING}
        done = await service.apply(wanted)
        assert done.is_done
        assert len(done.created) == len(plan.differences)
        assert {probe.outcome for probe in done.probes} == {"arrived"}
        assert (await service.check(wanted)).is_clean
        again = await service.apply(wanted, probe=False)
        assert again.is_done
        assert not again.has_changed
        for queue in design(wanted, plan.version).topology.queues:
            assert await every_admin.count(queue.name) == 0, queue.name  # no probe was left behind


async def test_a_message_goes_the_way_that_the_layout_says(every_admin: Admin) -> None:
    """Rejected, it comes back to its own queue alone after the delay; parked, it is in the dead queue."""
    text = """
    [defaults]
    retry_delay = "50ms"
    [exchanges.events]
    [queues."q.one"]
    bindings = [{ exchange = "events", key = "#" }]
    [queues."q.two"]
    layout = "quorum"
    bindings = [{ exchange = "events", key = "#" }]
    """
    async with topologies(every_admin) as service, RabbitPublisher(every_admin.broker_url()) as publisher:
        assert (await service.apply(file(text))).is_done
        assert (await publisher.publish([outgoing("any", b"work", exchange="events")]))[0].stored
        for queue in ("q.one", "q.two"):
            async with ResumingConsumer(every_admin.broker_url(), queue, prefetch=1) as consumer:
                for _ in range(5):
                    (delivery,) = await consumer.batch(timeout_s=60.0)
                    assert delivery.body == b"work"
                    consumer.dead_letter([delivery])
                (delivery,) = await consumer.batch(timeout_s=60.0)
                consumer.ack([delivery])
        for exchange, key, queue in (("dlq.q.one", "parking", "q.one.dlq"), ("q.two.dlq", "", "q.two.dlq")):
            assert (await publisher.publish([outgoing(key, b"dead", exchange=exchange)]))[0].stored
            assert [letter.body for letter in await every_admin.drain(queue, 1)] == [b"dead"]
        assert (await publisher.publish([outgoing("x", exchange="retry.q.one")]))[0].stored  # by the net, no return
        assert len(await every_admin.drain("unroutable", 1)) == 1


async def test_a_letter_in_a_dead_queue_may_be_looked_at_as_often_as_one_likes(every_admin: Admin) -> None:
    """The default limit of 4.x would delete it at the 21st time, -1 on 3.x at the first."""
    async with topologies(every_admin) as service, RabbitPublisher(every_admin.broker_url()) as publisher:
        await service.apply(file('[queues.q]\nlayout = "quorum"'), probe=False)
        for queue in ("q", "q.dlq"):
            assert (await publisher.publish([outgoing(queue, b"letter")]))[0].stored
            async with ResumingConsumer(every_admin.broker_url(), queue, prefetch=1) as consumer:
                for _ in range(25):
                    consumer.give_back(await consumer.batch(timeout_s=60.0))
                (delivery,) = await consumer.batch(timeout_s=60.0)
                assert delivery.body == b"letter"
                consumer.ack([delivery])


async def test_what_differs_is_listed_with_its_way_out_and_left_alone(admin: Admin) -> None:
    await admin.queue("q", **{"x-max-length": 3})
    await admin.exchange("retry.q", "topic")
    async with topologies(admin) as service:
        done = await service.apply(file("[queues.q]"))
        left = {difference.name: difference for difference in done.remaining}
        assert set(left) == {"q", "retry.q"}
        assert {aspect.name for aspect in left["q"].aspects} == {
            "x-max-length",
            "x-dead-letter-exchange",
            "x-dead-letter-routing-key",
        }
        assert "apply with --delete" in left["q"].way_out
        assert "another name" in left["retry.q"].way_out
        assert done.has_changed
        assert not done.is_done
        assert not (await service.apply(file("[queues.q]"))).has_changed


async def test_what_a_policy_adds_counts_and_what_it_spoils_is_named(admin: Admin) -> None:
    node, vhost = admin.node, admin.vhost
    await admin.queue("q")
    wanted = file("[unroutable]\nenabled = false\n[queues.q]")
    async with topologies(admin) as service:
        (difference,) = (await service.apply(wanted, probe=False)).remaining
        assert '{"dead-letter-exchange": "retry.q", "dead-letter-routing-key": "retry"}' in difference.way_out
        right = {"dead-letter-exchange": "retry.q", "dead-letter-routing-key": "retry"}
        node.api("PUT", f"/policies/{vhost}/net", {"pattern": "^q$", "definition": right, "apply-to": "queues"})
        node.api("PUT", f"/policies/{vhost}/short", {"pattern": "dlq$", "definition": {"max-length": 3}})

        async def ways_out() -> bool:
            found = {difference.name: difference.way_out for difference in (await service.check(wanted)).differences}
            return found == {"q.dlq": "policy 'short' sets x-max-length: change or narrow it"}

        await eventually(ways_out)


async def test_nothing_is_deleted_unless_it_is_asked_for(admin: Admin) -> None:
    await admin.queue("q.old")
    await admin.exchange("q.gone")
    await admin.exchange("events", "topic")
    wanted = file('owns = ["q.*"]\n[unroutable]\nenabled = false\n[exchanges.events]\n[queues."q.new"]')
    async with topologies(admin, counts_age_s_max=0.0) as service:
        assert (await service.apply(wanted)).is_done
        await admin.bind("q.new", "events", "stray")
        plan = await service.check(wanted)
        assert {(d.kind, d.what) for d in plan.differences} == {
            (DifferenceKind.SUPERFLUOUS, "binding"),
            (DifferenceKind.SUPERFLUOUS, "queue"),
            (DifferenceKind.SUPERFLUOUS, "exchange"),
        }
        assert not (await service.apply(wanted, probe=False)).deleted

        async def counted() -> bool:
            return not (await service.apply(wanted, delete=True, probe=False)).kept

        await eventually(counted)
        assert (await service.check(wanted)).differences == ()


async def test_a_queue_is_made_anew_only_when_nothing_is_in_it(admin: Admin) -> None:
    """First a message is ready, then it is held by a consumer, then it is gone."""
    kinds = ("classic", "quorum")
    for kind in kinds:
        arguments: dict[str, int | str] = {"x-message-ttl": 3_600_000, "x-queue-type": kind}
        await admin.queue(kind, **arguments)
    lines = "".join(f'[queues.{kind}]\nlayout = "plain"\ntype = "{kind}"\n' for kind in kinds)
    wanted = file(f"[unroutable]\nenabled = false\n{lines}")
    async with topologies(admin, counts_age_s_max=0.0) as service, RabbitPublisher(admin.broker_url()) as publisher:

        async def reasons() -> set[str]:
            done = await service.apply(wanted, delete=True, probe=False)
            assert not done.has_changed
            assert done.kept.keys() == set(kinds)
            return {reason.split(",")[0] for reason in done.kept.values()}

        for kind in kinds:
            assert (await publisher.publish([outgoing(kind, b"precious")]))[0].stored
        await eventually(lambda: _all_are({"it has 1 messages"}, reasons))
        async with (
            ResumingConsumer(admin.broker_url(), "classic") as classic,
            ResumingConsumer(admin.broker_url(), "quorum") as quorum,
        ):
            for consumer in (classic, quorum):
                (delivery,) = await consumer.batch(timeout_s=60.0)
                assert await reasons() <= {"1 consumers are on it", "it has 1 messages"}
                consumer.ack([delivery])

        async def anew() -> bool:
            return (await service.apply(wanted, delete=True, probe=False)).is_done

        assert await eventually(anew)
        assert (await service.check(wanted)).differences == ()


async def _all_are(wanted: set[str], reasons: Callable[[], Awaitable[set[str]]]) -> bool:
    return await reasons() == wanted


async def test_old_counts_are_not_believed(admin: Admin) -> None:
    """The management API says "empty" for seconds after a message came and was taken, and after one was dead-lettered

    to where it cannot go: both are in no count of AMQP's.
    """
    await admin.queue("held", **{"x-max-length": 3})
    at_least_once = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    await admin.quorum_queue("pending", **{"x-dead-letter-exchange": "gone", **at_least_once})
    plain = 'layout = "plain"\ntype = '
    wanted = file(f'[unroutable]\nenabled = false\n[queues.held]\n{plain}"classic"\n[queues.pending]\n{plain}"quorum"')
    async with broker(admin) as careful, RabbitPublisher(admin.broker_url()) as publisher:

        async def known() -> bool:
            return all(state.is_idle for state in (await careful.read()).states.values())

        await eventually(known)
        for queue in ("held", "pending"):
            assert (await publisher.publish([outgoing(queue, b"precious")]))[0].stored
        async with (
            ResumingConsumer(admin.broker_url(), "held", prefetch=1) as holder,
            ResumingConsumer(admin.broker_url(), "pending", prefetch=1) as rejecter,
        ):
            assert await holder.batch(timeout_s=60.0)
            await holder.stop()  # held, and nobody consumes
            rejecter.dead_letter(await rejecter.batch(timeout_s=60.0))
            await rejecter.close()
            assert await admin.count("held") == await admin.count("pending") == 0
            done = await Topologies(careful).apply(wanted, delete=True, probe=False)
        assert {name: reason.split(",")[0] for name, reason in done.kept.items()} == {
            "held": "it has 1 messages",
            "pending": "it has 1 messages",
        }
        assert not done.has_changed


async def test_nothing_is_led_into_a_queue_that_is_not_as_it_should_be(admin: Admin) -> None:
    await admin.queue("q", **{"x-max-priority": 3})  # what is rejected in it is gone
    text = '[unroutable]\nenabled = false\n[exchanges.e]\n[queues.q]\nbindings = [{ exchange = "e", key = "#" }]'
    async with topologies(admin) as service:
        done = await service.apply(file(text))
        (held,) = [difference for difference in done.remaining if difference.what == "binding"]
        assert held.way_out == "it is made once queue 'q' is as the file says"
        assert "binding retry.q → queue q.retry by 'retry'" in done.created


async def test_without_the_management_api_nothing_is_changed_and_it_is_said(admin: Admin) -> None:
    (nobody,) = free_ports(1)
    url = admin.node.url(admin.vhost)
    async with RabbitTopology(url, management=f"http://guest:secret@127.0.0.1:{nobody}") as found:
        with pytest.raises(BrokerUnreachable, match="management API cannot be reached") as caught:
            await Topologies(found).apply(file("[queues.q]"))
    assert "secret" not in str(caught.value)
    async with RabbitTopology(url, management=admin.node.management_url.replace(":guest@", ":wrong@")) as found:
        with pytest.raises(BrokerRefused, match="management API refused"):
            await Topologies(found).apply(file("[queues.q]"))
    with pytest.raises(BrokerRefused, match="no queue 'q'"):
        await admin.count("q")


async def test_two_addresses_of_two_brokers_are_found_out(admin: Admin, nodes: dict[str, Node]) -> None:
    other = nodes["4.0"]
    async with RabbitTopology(admin.node.url(admin.vhost), management=other.management_url) as found:
        with pytest.raises(BadAddress, match="management address is another broker's"):
            await Topologies(found).apply(file("[queues.q]"))


async def test_the_first_refusal_ends_an_apply_so_that_no_queue_is_without_its_net(admin: Admin) -> None:
    node, vhost = admin.node, admin.vhost
    node.api("PUT", "/users/planner", {"password": "plan", "tags": "monitoring"})
    try:
        rights = {"configure": "^(retry|dlq).*", "write": ".*", "read": ".*"}
        node.api("PUT", f"/permissions/{vhost}/planner", rights)
        async with RabbitTopology(node.url(vhost, user="planner:plan"), management=node.management_url) as found:
            done = await Topologies(found).apply(file("[unroutable]\nenabled = false\n[queues.q]"))
        assert "queue 'q' could not be made; the broker refused; 403" in done.failure
        assert set(done.created) == {"exchange dlq.q", "exchange retry.q"}
        assert done.probes == ()
        assert not done.is_done
    finally:
        node.api("DELETE", "/users/planner")


async def test_odd_things_of_others_are_seen_and_left_alone(every_admin: Admin) -> None:
    node, vhost = every_admin.node, every_admin.vhost
    odd: Any = {"x-strange": [None, 1.5, {"deep": [True]}]}
    await every_admin.channel.call(methods.QueueDeclare(queue="theirs", durable=True, arguments=odd))
    node.api("PUT", f"/exchanges/{vhost}/theirs", {"type": "direct", "durable": False, "auto_delete": True})
    async with topologies(every_admin) as service:
        assert (await service.apply(file("[queues.q]"))).is_done
        exported = msgspec.json.encode(await service.export())
        assert b"x-strange" in exported


def test_the_management_api_is_looked_for_on_the_brokers_host() -> None:
    from holdfast.engines.rabbitmq.url import BrokerUrl

    assert BrokerUrl.parse("amqp://u:p%40@h:5/v").default_management() == "http://u:p%40@h:15672"
    assert BrokerUrl.parse("amqps://u:p@[::1]/v").default_management() == "https://u:p@[::1]:15671"
