"""What an app publishes on RabbitMQ alone: properties on the wire, returns, nacks, cuts, alarms, restarts."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast.errors import Invalid, NotStored, OutcomeUnknown, PublishFailed
from holdfast.proof.proxy import Proxy
from tests.support.amqp import Admin, decoded, message_id_of
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq


def proxied(admin: Admin, proxy: Proxy) -> holdfast.App:
    return holdfast.App(admin.node.url(admin.vhost, port=proxy.port))


def full(count_max: int) -> dict[str, int | str]:
    return {"x-max-length": count_max, "x-overflow": "reject-publish"}


def is_publish(recent: bytes) -> bool:
    return b"cut me" in recent


def is_confirm(recent: bytes) -> bool:
    return b"\x00\x3c\x00\x50" in recent  # basic.ack


async def test_everything_that_is_said_is_on_the_wire(every_admin: Admin) -> None:
    await every_admin.queue("q")
    await every_admin.exchange("e", "topic")
    await every_admin.bind("q", "e", "orders.#")
    async with holdfast.App(every_admin.url).sending() as app:
        published = await app.publish(
            exchange="e",
            routing_key="orders.new",
            body=[1],
            id="m-1",
            correlation_id="trail",
            type="order",
            headers={"tenant": 7, "tags": ["a"]},
            priority=5,
            reply_to="answers",
        )
    (delivery,) = await every_admin.drain("q", 1)
    assert published == holdfast.Published(id="m-1", sent_count=1)
    assert (delivery.exchange, delivery.routing_key, delivery.body) == ("e", "orders.new", b"[1]")
    assert decoded(delivery) == {
        "content_type": "application/json",
        "headers": {"tenant": 7, "tags": ["a"]},
        "delivery_mode": 2,
        "priority": 5,
        "correlation_id": "trail",
        "reply_to": "answers",
        "message_id": "m-1",
        "type": "order",
    }


async def test_what_is_unroutable_or_refused_is_known_not_to_be_stored(admin: Admin) -> None:
    await admin.queue("q")
    await admin.exchange("e", "topic")
    async with holdfast.App(admin.url).sending() as app:
        with pytest.raises(NotStored, match=r"exchange 'e' with key 'nobody': returned .312., NO_ROUTE"):
            await app.publish(exchange="e", routing_key="nobody", body=b"x")
        with pytest.raises(NotStored, match="no exchange 'gone'"):
            await app.publish(exchange="gone", routing_key="k", body=b"x")
        with pytest.raises(NotStored, match="nothing was sent, the routing key has 300 bytes"):
            await app.publish(routing_key="k" * 300, body=b"x")
        with pytest.raises(Invalid, match="publish cannot wait; RabbitMQ has no schedule"):
            await app.publish("q", b"x", in_="5s")
        with pytest.raises(Invalid, match="message is invalid; it cannot be written"):
            await app.publish("q", b"x", headers={"h": object()})
        assert (await app.publish("q", b"x")).sent_count == 1
    assert await admin.count("q") == 1


async def test_of_many_each_has_an_outcome_of_its_own(admin: Admin) -> None:
    await admin.queue("full", **full(2))
    async with holdfast.App(admin.url).sending() as app:
        with pytest.raises(OutcomeUnknown, match="2 of 4 messages are not confirmed") as failed:
            await app.publish_many("full", [b"1", b"2", b"3", b"4"], ids=["1", "2", "3", "4"])
    assert failed.value.ids == ("3", "4")
    assert {place: type(error) for place, error in failed.value.errors.items()} == {
        2: OutcomeUnknown,
        3: OutcomeUnknown,
    }
    assert [delivery.body for delivery in await admin.drain("full", 2)] == [b"1", b"2"]


async def test_a_nack_is_unknown_since_another_queue_may_have_it(every_admin: Admin) -> None:
    await every_admin.queue("full", **full(1))
    await every_admin.queue("roomy")
    await every_admin.exchange("e", "fanout")
    for queue in ("full", "roomy"):
        await every_admin.bind(queue, "e")
    async with holdfast.App(every_admin.url).sending() as app:
        await app.publish(exchange="e", body=b"1")
        with pytest.raises(OutcomeUnknown, match=r"message may be stored or not; .*nacked.*with the same id"):
            await app.publish(exchange="e", body=b"2")
    assert await every_admin.count("full") == 1


@pytest.mark.parametrize("deliver", [False, True], ids=["lost", "answer-lost"])
async def test_a_cut_connection_is_waited_for_and_the_repeat_has_the_same_id(admin: Admin, deliver: bool) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        trip = proxy.cut_when("down", is_confirm) if deliver else proxy.cut_when("up", is_publish)
        published = await app.publish("q", b"cut me", id="same")
        assert trip.fired.is_set()
    assert published == holdfast.Published(id="same", sent_count=2)
    ids = [message_id_of(delivery) for delivery in await admin.drain("q", 1 + deliver)]
    assert ids == ["same"] * (1 + deliver)


@pytest.mark.parametrize("deliver", [False, True], ids=["lost", "answer-lost"])
async def test_without_repeat_a_cut_connection_is_unknown_at_once(admin: Admin, deliver: bool) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        trip = proxy.cut_when("down", is_confirm) if deliver else proxy.cut_when("up", is_publish)
        with pytest.raises(OutcomeUnknown) as failed:
            await app.publish("q", b"cut me", repeat=False)
        assert trip.fired.is_set()
        assert failed.value.sent_count == 1
        assert (await app.publish("q", b"after")).sent_count == 1
    assert await admin.count("q") == 1 + deliver


async def test_what_was_cut_stays_unknown_though_its_repeat_is_returned(admin: Admin) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        trip = proxy.cut_when("down", is_confirm)
        await proxy.refuse()
        publishing = asyncio.create_task(app.publish("q", b"cut me", id="one"))
        await trip.fired.wait()
        await admin.delete("q")  # the first one was in it
        proxy.accept()
        with pytest.raises(OutcomeUnknown, match=r"returned .312., NO_ROUTE; sent 2 times, and an earlier one may be"):
            await publishing


async def test_a_broker_that_does_not_answer_in_time_leaves_it_unknown(admin: Admin) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        proxy.pause("down")
        with pytest.raises(OutcomeUnknown, match="no answer within"):
            await app.publish("q", b"x", timeout="300ms")
        proxy.resume()


async def test_a_cancelled_publish_may_be_stored_and_says_so(admin: Admin) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        proxy.pause("down")
        publishing = asyncio.create_task(app.publish("q", b"x", id="mine"))

        async def is_there() -> bool:
            return await admin.count("q") == 1

        await eventually(is_there)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await publishing
        assert "may be stored or not" in cancelled.value.__notes__[0]
        proxy.resume()
        assert (await app.publish("q", b"after")).sent_count == 1


async def test_a_broker_that_is_away_is_known_not_to_have_it(admin: Admin) -> None:
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        await proxy.refuse()
        await proxy.cut()
        with pytest.raises(PublishFailed):  # it may have gone out before the cut was noticed
            await app.publish("q", b"x", timeout="300ms")
        with pytest.raises(NotStored, match="nothing was sent"):
            await app.publish("q", b"x", timeout="300ms")
    with pytest.raises(NotStored, match=r"nothing was sent: .*cannot be reached"):
        await asyncio.to_thread(proxied(admin, proxy).publish_sync, "q", b"x")


async def test_what_finds_no_place_in_time_was_not_sent(admin: Admin) -> None:
    await admin.queue("q")
    async with Proxy("127.0.0.1", admin.node.port) as proxy, proxied(admin, proxy).sending() as app:
        proxy.pause("down")
        many = [asyncio.create_task(app.publish_many("q", [b"x"] * 200)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(NotStored, match="nothing was sent, its time was up before it was sent"):
            await app.publish("q", b"y", timeout="100ms")
        cancelled = asyncio.create_task(app.publish("q", b"y"))
        patient = asyncio.create_task(app.publish("q", b"z"))
        await asyncio.sleep(0)
        cancelled.cancel()
        proxy.resume()
        assert (await patient).sent_count == 1
        assert [len(published) for published in await asyncio.gather(*many)] == [200] * 5
    assert await admin.count("q") == 1001


async def test_an_alarm_and_a_restart_are_waited_for() -> None:
    with Node("4.0") as node:
        async with Admin.open(node, "v", keep=True) as admin:
            await admin.queue("q")
            async with holdfast.App(admin.url).sending() as app:
                with node.memory_alarm():
                    # What makes the broker say that it is blocked may be taken or not.
                    with pytest.raises(OutcomeUnknown):
                        await app.publish("q", b"stuck", timeout="1s")
                    with pytest.raises(NotStored, match=r"nothing was sent.*the broker takes nothing: .*memory"):
                        await app.publish("q", b"unsent", timeout="300ms")
                    waiting = asyncio.create_task(app.publish("q", b"waits", timeout="5m"))
                assert (await waiting).sent_count == 1
                await asyncio.to_thread(node.kill)
                waiting = asyncio.create_task(app.publish("q", b"over a restart", timeout="5m"))
                await asyncio.to_thread(node.start)
                assert (await waiting).sent_count >= 1
        async with Admin.open(node, "v") as admin:
            count = await eventually(lambda: admin.count("q"))
            bodies = {delivery.body for delivery in await admin.drain("q", count)}
    assert {b"waits", b"over a restart"} <= bodies
    assert b"unsent" not in bodies
