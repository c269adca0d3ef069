"""The publisher against real brokers: each message gets its own outcome, and none is called stored that is not."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import partial

import pytest

from holdfast.core.message import CONFIRMED, Outcome, OutcomeKind, Outgoing
from holdfast.core.moments import Backoff
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.wire import properties
from holdfast.errors import BrokerLost
from holdfast.proof.proxy import Proxy
from holdfast.telemetry.events import counts
from tests.engines.rabbitmq.raw import header_table
from tests.support.amqp import Admin, outgoing
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node

pytestmark = pytest.mark.rabbitmq

QUICK = Backoff(first_s=0.02, delay_s_max=0.2)


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


async def test_confirmed_means_that_it_is_there(every_admin: Admin) -> None:
    for queue in (await every_admin.queue("c"), await every_admin.quorum_queue("q")):
        async with RabbitPublisher(every_admin.broker_url()) as publisher:
            outcomes = await publisher.publish([outgoing(queue, b"%d" % i) for i in range(500)])
            assert set(kinds(outcomes)) == {"confirmed"}
        assert [d.body for d in await every_admin.drain(queue, 500)] == [b"%d" % i for i in range(500)]


async def test_an_unroutable_publish_is_returned_although_the_broker_acks_it(every_admin: Admin) -> None:
    await every_admin.exchange("x")
    async with RabbitPublisher(every_admin.broker_url()) as publisher:
        outcomes = await publisher.publish([outgoing("nowhere"), outgoing("nowhere", exchange="x")])
        assert outcomes == [Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")] * 2


async def test_a_return_finds_its_own_publish_when_ids_repeat(every_admin: Admin) -> None:
    """The case in which a client that goes by message id reports the lost one as stored, 50 of 50 times."""
    await every_admin.queue("there")
    async with RabbitPublisher(every_admin.broker_url()) as publisher:
        for round_ in range(50):
            pair = [outgoing("nowhere", message_id="same"), outgoing("there", message_id="same")]
            if round_ % 2:
                pair.reverse()
            outcomes = await publisher.publish(pair)
            assert [(m.routing_key, o.kind) for m, o in zip(pair, outcomes, strict=True)] == [
                (m.routing_key, OutcomeKind.RETURNED if m.routing_key == "nowhere" else OutcomeKind.CONFIRMED)
                for m in pair
            ]
    assert len(await every_admin.drain("there", 50)) == 50


async def test_a_mixed_batch_gets_mixed_outcomes(every_admin: Admin) -> None:
    await every_admin.queue("there")
    limits: dict[str, int | str] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await every_admin.queue("full", **limits)
    keys = ["there", "nowhere", "full"] * 40
    async with RabbitPublisher(every_admin.broker_url()) as publisher:
        outcomes = await publisher.publish([outgoing(key, b"%d" % i) for i, key in enumerate(keys)])
    assert kinds(outcomes[0::3]) == ["confirmed"] * 40
    assert kinds(outcomes[1::3]) == ["returned"] * 40
    assert kinds(outcomes[2::3]) == ["confirmed"] + ["nacked"] * 39
    assert await every_admin.count("there") == 40


async def test_a_channel_that_nacked_is_replaced_and_nothing_on_it_is_sent_twice(admin: Admin) -> None:
    await admin.queue("there")
    limits: dict[str, int | str] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await admin.queue("full", **limits)
    async with RabbitPublisher(admin.broker_url()) as publisher:
        assert kinds([(await publisher.publish([outgoing("full")]))[0] for _ in range(2)]) == ["confirmed", "nacked"]
        sent = 0
        while not publisher.counts["renewed"]:
            assert set(kinds(await publisher.publish([outgoing("there") for _ in range(50)]))) == {"confirmed"}
            sent += 50
        await eventually(lambda: not publisher._retiring)
        assert (await publisher.publish([outgoing("there")]))[0].stored
        assert not publisher.counts["sent_again"]
    assert await admin.count("there") == sent + 1


async def test_twins_of_which_all_are_unroutable_are_all_returned(admin: Admin) -> None:
    async with RabbitPublisher(admin.broker_url()) as publisher:
        assert set(kinds(await publisher.publish([outgoing("nowhere") for _ in range(3000)]))) == {"returned"}


def nan_header(queue: str) -> Outgoing:
    raw = properties.join({"headers": header_table({"nan": b"d" + struct.pack(">d", float("nan"))})})
    return Outgoing("", queue, raw, b"bad")


@pytest.mark.parametrize("fault", ["exchange", "user_id", "expiration", "nan"])
async def test_the_guilty_one_is_found_and_its_neighbours_are_stored(every_admin: Admin, fault: str) -> None:
    await every_admin.queue("q")
    bad = {
        "exchange": outgoing("q", b"bad", exchange="missing"),
        "user_id": outgoing("q", b"bad", user_id="somebody"),
        "expiration": outgoing("q", b"bad", expiration="soon"),
        "nan": nan_header("q"),  # this one ends the whole connection
    }[fault]
    messages = [outgoing("q", b"%d" % i) for i in range(40)]
    messages[7] = bad
    async with RabbitPublisher(every_admin.broker_url(), backoff=QUICK) as publisher:
        outcomes = await publisher.publish(messages)
        assert kinds(outcomes).count("confirmed") == 39
        assert outcomes[7].kind is OutcomeKind.REFUSED
        assert outcomes[7].code == {"exchange": 404, "nan": 541}.get(fault, 406)
        assert (await publisher.publish([outgoing("q", b"after")]))[0].stored
        again = publisher.counts["sent_again"]
    count = await eventually(lambda: every_admin.count("q"))
    assert 40 <= count <= 40 + again
    bodies = {delivery.body for delivery in await every_admin.drain("q", count)}
    assert bodies == {b"%d" % i for i in range(40) if i != 7} | {b"after"}


async def test_several_guilty_ones_are_each_found(admin: Admin) -> None:
    await admin.queue("q")
    messages = [outgoing("q", b"%d" % i, exchange="missing" if i % 10 == 3 else "") for i in range(60)]
    async with RabbitPublisher(admin.broker_url(), backoff=QUICK) as publisher:
        outcomes = await publisher.publish(messages)
    assert [i for i, outcome in enumerate(outcomes) if outcome.kind is OutcomeKind.REFUSED] == [3, 13, 23, 33, 43, 53]
    assert kinds(outcomes).count("confirmed") == 54


async def test_a_message_over_the_brokers_limit_is_refused_by_itself(every_admin: Admin) -> None:
    if every_admin.node.version == "3.10":
        pytest.skip("its limit is 128 MiB")
    await every_admin.queue("q")
    messages = [outgoing("q"), outgoing("q", bytes(17 * 2**20)), outgoing("q")]
    async with RabbitPublisher(every_admin.broker_url(), backoff=QUICK) as publisher:
        assert kinds(await publisher.publish(messages)) == ["confirmed", "refused", "confirmed"]


async def test_properties_that_no_frame_holds_are_refused_before_they_harm_anybody(admin: Admin) -> None:
    await admin.queue("q")
    raw = properties.splice_headers(properties.NONE, put={"stack": "x" * 140_000})
    async with RabbitPublisher(admin.broker_url()) as publisher:
        messages = [outgoing("q"), Outgoing("", "q", raw, b""), Outgoing("", "q", b"\xff\xff\xff", b""), outgoing("q")]
        assert kinds(await publisher.publish(messages)) == ["confirmed", "refused", "refused", "confirmed"]
        assert publisher.counts["sent_again"] == 0


@pytest.mark.parametrize("bad", ["no frame holds it", "nobody can read it"])
async def test_a_publish_out_of_an_outcome_takes_nobodys_confirm(every_admin: Admin, bad: str) -> None:
    await every_admin.queue("there")
    limits: dict[str, int | str] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await every_admin.queue("full", **limits)
    large = properties.splice_headers(properties.NONE, put={"stack": "x" * 140_000})
    raw = large if bad == "no frame holds it" else b"\xff\xff\xff"
    full, there = [outgoing("full") for _ in range(10)], [outgoing("there") for _ in range(10)]
    messages, reply = [*full, Outgoing("", "there", raw, b""), *there], outgoing("there", b"reply")
    async with RabbitPublisher(every_admin.broker_url()) as publisher:
        assert (await publisher.publish([outgoing("full")]))[0].stored

        def told(_: Sequence[Outgoing], outcome: Outcome) -> None:
            # As a recovery does that puts a letter back.
            if outcome.kind is OutcomeKind.REFUSED:
                publisher.send([reply], lambda _, outcome: None, timeout_s=30.0)

        publisher.send(messages, told, timeout_s=30.0)
        await eventually(lambda: all(one.outcome for one in [*messages, reply]))
    outcomes = [one.outcome for one in messages if one.outcome]
    assert kinds(outcomes) == ["nacked"] * 10 + ["refused"] + ["confirmed"] * 10
    assert reply.outcome == CONFIRMED
    assert await every_admin.count("there") == 11


async def test_a_message_is_published_once(admin: Admin) -> None:
    await admin.queue("q")
    twice = outgoing("q")
    async with RabbitPublisher(admin.broker_url()) as publisher:
        assert (await publisher.publish([twice]))[0].stored
        with pytest.raises(ValueError, match="an Outgoing of its own"):
            await publisher.publish([twice])
    assert await admin.count("q") == 1


async def test_small_windows_hold_in_messages_and_bytes(admin: Admin) -> None:
    await admin.queue("q")
    async with RabbitPublisher(admin.broker_url(), window_messages=7, window_bytes=1000) as publisher:
        batches = [publisher.publish([outgoing("q", b"x" * 300) for _ in range(20)]) for _ in range(5)]
        batches.append(publisher.publish([outgoing("q", b"larger than the window" * 100)]))
        outcomes = [one for batch in await asyncio.gather(*batches) for one in batch]
    assert set(kinds(outcomes)) == {"confirmed"}
    assert await admin.count("q") == 101


async def test_a_silent_broker_leaves_unknown_and_a_late_answer_is_not_believed(admin: Admin) -> None:
    await admin.queue("q")
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        RabbitPublisher(admin.broker_url(port=proxy.port), backoff=QUICK) as publisher,
    ):
        assert (await publisher.publish([outgoing("q")]))[0].stored
        proxy.pause("down")
        outcome = (await publisher.publish([outgoing("q")], timeout_s=0.2))[0]
        assert outcome.kind is OutcomeKind.UNKNOWN
        assert "no answer within 0.2 s" in outcome.text
        proxy.resume()
        assert (await publisher.publish([outgoing("q")]))[0].stored
        assert publisher.counts["answered_too_late"] == 1
    assert await admin.count("q") == 3


async def test_a_cut_connection_is_made_again_and_nothing_gets_lost(admin: Admin) -> None:
    await admin.queue("q")
    async with (
        Proxy("127.0.0.1", admin.node.port) as proxy,
        RabbitPublisher(admin.broker_url(port=proxy.port), backoff=QUICK) as publisher,
    ):
        proxy.cut_after("up", 100_000)
        proxy.cut_after("down", 3000)
        outcomes = await publisher.publish([outgoing("q", b"%d" % i) for i in range(5000)])
        assert set(kinds(outcomes)) == {"confirmed"}
        again = publisher.counts["sent_again"]
        assert again > 0
    count = await eventually(lambda: admin.count("q"))
    assert 5000 <= count <= 5000 + again
    assert {d.body for d in await admin.drain("q", count)} == {b"%d" % i for i in range(5000)}


async def test_a_broker_that_stays_away_makes_it_unknown_and_says_why(admin: Admin) -> None:
    async with Proxy("127.0.0.1", admin.node.port) as proxy:
        publisher = RabbitPublisher(admin.broker_url(port=proxy.port), backoff=QUICK)
        async with publisher:
            await proxy.refuse()
            await proxy.cut()
            outcome = (await publisher.publish([outgoing("q")], timeout_s=0.3))[0]
            assert outcome.kind is OutcomeKind.UNKNOWN
            assert "cannot be reached" in outcome.text
        with pytest.raises(BrokerLost, match="publisher is closed"):
            await publisher.publish([outgoing("q")])


async def test_a_cancelled_publish_does_not_disturb_the_next(admin: Admin) -> None:
    await admin.queue("q")
    messages = [outgoing("q") for _ in range(100)]
    async with RabbitPublisher(admin.broker_url()) as publisher:
        task = asyncio.create_task(publisher.publish(messages))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await publisher.publish([outgoing("q")]))[0].stored


@pytest.mark.parametrize("version", ["3.10", "4.0"])
async def test_an_alarm_blocks_and_a_crash_loses_nothing_that_was_confirmed(version: str) -> None:
    """One node of its own for both, since starting one takes seconds."""
    with Node(version) as node:
        async with Admin.open(node, "v", keep=True) as admin:
            await admin.queue("q")
            await admin.quorum_queue("quorum")  # the alarm takes long enough for it to outlive a kill
            async with RabbitPublisher(admin.broker_url(), backoff=QUICK) as publisher:
                with node.memory_alarm():
                    outcome = (await publisher.publish([outgoing("q", b"stuck")], timeout_s=1.0))[0]
                    assert outcome.kind is OutcomeKind.UNKNOWN
                    await eventually(lambda: "memory" in (publisher.blocked or ""))
                    unsent = (await publisher.publish([outgoing("q", b"unsent")], timeout_s=0.1))[0]
                    assert "the broker takes nothing" in unsent.text
                    assert counts["broker.blocked", ""] > counts["broker.unblocked", ""]
                await eventually(lambda: publisher.blocked is None)
                assert (await publisher.publish([outgoing("q", b"after")]))[0].stored
                messages = [outgoing(("q", "quorum")[i % 2], b"%d" % i) for i in range(20_000)]
                task = asyncio.create_task(publisher.publish(messages))
                await eventually(lambda: publisher.counts["confirmed"] > 2000)
                node.kill()
                # The whole process was held up meanwhile; what was confirmed before the kill is on disk.
                node.start()
                assert set(kinds(await task)) == {"confirmed"}
                again = publisher.counts["sent_again"]
        async with Admin.open(node, "v") as admin:
            bodies = set[bytes]()
            for queue in ("q", "quorum"):
                # A count of zero is what a quorum queue says while it has no leader.
                count = await eventually(partial(admin.count, queue))
                bodies |= {delivery.body for delivery in await admin.drain(queue, count)}
            assert bodies >= {b"%d" % i for i in range(20_000)} | {b"after"}
            assert b"unsent" not in bodies
            assert again > 0
