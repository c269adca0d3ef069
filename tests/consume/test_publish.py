"""What is published by an app, on every broker: kept as it was said, confirmed, or an error that says what is known."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import Message, Retry
from holdfast.errors import Invalid, NotStored
from tests.consume.brokers import QUEUE, BrokerUnderTest, EmbeddedUnderTest
from tests.support.eventually import eventually


@dataclasses.dataclass
class OrderRow:
    id: int


class OrderStruct(msgspec.Struct):
    id: int


def listening(broker: BrokerUnderTest) -> tuple[holdfast.App, list[Message]]:
    app, seen = broker.app(), list[Message]()

    @app.consumer(QUEUE, layout=broker.layout, retry=Retry(attempts=2, delay="150ms"))
    async def handle(message: Message) -> None:
        seen.append(message)

    return app, seen


async def test_what_is_published_is_handled_as_it_was_said(broker: BrokerUnderTest) -> None:
    app, seen = listening(broker)
    async with app.running(declare=True):
        published = await app.publish(QUEUE, {"id": 1}, id="first", correlation_id="trail", type="order.new")
        assert published == holdfast.Published(id="first", sent_count=1)
        await eventually(lambda: len(seen) == 1)
        (message,) = seen
        assert (message.body, message.type, message.correlation_id) == (b'{"id":1}', "order.new", "trail")
        assert (message.content_type, message.attempt) == ("application/json", 1)


async def test_bytes_stay_bytes_and_values_are_json(broker: BrokerUnderTest) -> None:
    app, seen = listening(broker)
    bodies: list[Any] = [b"\x00\xff", bytearray(b"a"), "grün", {"id": 1}, [1, 2], OrderRow(1), OrderStruct(1), b""]
    async with app.running(declare=True):
        published = await app.publish_many(QUEUE, bodies)
        assert len({one.id for one in published}) == len(bodies)
        await eventually(lambda: len(seen) == len(bodies))
    one = b'{"id":1}'
    assert {message.body for message in seen} == {b"\x00\xff", b"a", "grün".encode(), one, b"[1,2]", b""}
    assert sum(message.body == one for message in seen) == 3
    kinds = {message.body: message.content_type for message in seen}
    assert kinds[b"\x00\xff"] == ""
    assert (kinds["grün".encode()], kinds[b"[1,2]"]) == ("text/plain; charset=utf-8", "application/json")


async def test_what_no_queue_takes_is_known_not_to_be_stored(broker: BrokerUnderTest) -> None:
    app, _ = listening(broker)
    async with app.running(declare=True):
        with pytest.raises(NotStored, match="message is not stored; 'lost' to nowhere: returned") as failed:
            await app.publish("nowhere", b"x", id="lost")
        assert (failed.value.ids, failed.value.sent_count) == (("lost",), 1)
        with pytest.raises(NotStored, match="2 of 2") as all_failed:
            await app.publish_many("nowhere", [b"x", b"y"], ids=["a", "b"])
        assert (all_failed.value.ids, list(all_failed.value.errors)) == (("a", "b"), [0, 1])


async def test_an_app_sends_without_consuming(broker: BrokerUnderTest) -> None:
    if broker.url.startswith("memory:"):
        pytest.skip("memory is gone with the app that opened it")
    app, seen = listening(broker)
    async with app.running(declare=True):
        pass
    async with app.sending():
        await app.publish(QUEUE, b"1")
        with pytest.raises(Invalid, match="runs already"):
            async with app.sending():
                pass
    await asyncio.gather(*[asyncio.to_thread(app.publish_sync, QUEUE, body) for body in (b"2", b"3", b"4")])
    assert seen == []
    async with app.running():
        await eventually(lambda: sorted(message.body for message in seen) == [b"1", b"2", b"3", b"4"])
    with pytest.raises(Invalid, match="app is not open; publish while it runs"):
        await app.publish(QUEUE, b"x")


async def test_a_thread_publishes_through_the_app_that_runs(broker: BrokerUnderTest) -> None:
    app, done = broker.app(), list[bytes]()

    @app.consumer(QUEUE, layout=broker.layout)
    def handle(message: Message) -> None:
        done.append(message.body)
        if message.body == b"1":
            app.publish_sync(QUEUE, b"2")

    async with app.running(declare=True):
        await app.publish(QUEUE, b"1")
        await eventually(lambda: done == [b"1", b"2"])
        with pytest.raises(Invalid, match="it would stop the event loop"):
            app.publish_sync(QUEUE, b"3")
        with pytest.raises(NotStored):
            await asyncio.to_thread(app.publish_sync, "nowhere", b"x")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"body": 5}, "body is invalid; 'int' cannot be published"),
    ({"body": {"a": object()}}, "body is invalid; it has no form in JSON"),
    ({"body": {"a": 1}, "content_type": "text/csv"}, "content_type is invalid; 'text/csv' is not JSON"),
    ({}, "body is missing"),
    ({"body": b"", "queue": ""}, "address is missing"),
    ({"body": b"", "exchange": "e"}, "address is not clear"),
    ({"body": b"", "timeout": 0}, "timeout is invalid"),
    ({"body": b"", "timeout": "soon"}, "timeout is invalid"),
    ({"body": b"", "priority": 256}, "priority is invalid"),
    ({"body": b"", "headers": {1: 2}}, "headers are invalid"),
    ({"body": b"", "type": 5}, "type is invalid; it is a text, not 'int'"),
    ({"body": b"", "expiration": "5s"}, "expiration is not possible; .* let its queue expire it"),
    ({"body": b"", "in_": "5s", "at": datetime.now(UTC)}, "moment is not clear"),
    ({"body": b"", "at": datetime(2030, 1, 1)}, "at is invalid; give a datetime with its timezone"),  # noqa: DTZ001
    ({"body": b"", "id": "x" * 600}, "is invalid"),
]


async def test_what_makes_no_sense_is_refused_before_anything_is_sent(broker: BrokerUnderTest) -> None:
    app, seen = listening(broker)
    async with app.running(declare=True):
        for wrong, text in WRONG:
            with pytest.raises(Invalid, match=text):
                await app.publish(**{"queue": QUEUE, **wrong})
        with pytest.raises(TypeError, match="unexpected keyword argument 'prio'"):
            await app.publish(QUEUE, b"", prio=1)  # type: ignore[call-arg]
        with pytest.raises(Invalid, match="bodies are invalid; give a list"):
            await app.publish_many(QUEUE, b"abc")  # type: ignore[arg-type]
        with pytest.raises(Invalid, match="body is invalid"):
            await app.publish_many(QUEUE, [b"good", 5])  # type: ignore[list-item]
        for ids in (["a"], ["a", "a"], ["a", ""], "ab"):
            with pytest.raises(Invalid, match="ids are invalid"):
                await app.publish_many(QUEUE, [b"1", b"2"], ids=ids)
        assert await broker.left() == 0
    assert seen == []


async def test_more_than_may_be_under_way_is_sent_all_the_same(broker: BrokerUnderTest) -> None:
    app, seen = listening(broker)
    async with app.running(declare=True):
        await asyncio.gather(*[app.publish_many(QUEUE, [b"x"] * 150) for _ in range(10)])
        await eventually(lambda: len(seen) == 1500)


@pytest.mark.parametrize("more", [{"headers": {"a": 1}}, {"priority": 1}, {"reply_to": "q"}])
async def test_what_an_item_has_no_place_for_is_refused(more: dict[str, Any]) -> None:
    embedded = EmbeddedUnderTest("memory://")
    app, _ = listening(embedded)
    async with app.running(declare=True):
        with pytest.raises(Invalid, match=f"an embedded queue has no place for {next(iter(more))}"):
            await app.publish(QUEUE, b"x", **more)
        with pytest.raises(Invalid, match="no place for an exchange"):
            await app.publish(exchange="e", routing_key=QUEUE, body=b"x")
        assert await embedded.left() == 0


async def test_a_repeat_with_the_same_id_is_one_item() -> None:
    embedded = EmbeddedUnderTest("memory://")
    app, _ = listening(embedded)
    async with app.running(declare=True):
        await app.queues.queue_pause(QUEUE)
        for _ in range(2):
            await app.publish(QUEUE, b"x", id="order-7")
        assert await embedded.left() == 1


async def test_a_delay_is_the_schedule_of_an_item() -> None:
    embedded = EmbeddedUnderTest("memory://")
    app, seen = listening(embedded)
    async with app.running(declare=True):
        await app.publish(QUEUE, b"1", at=datetime.now(UTC) + timedelta(hours=1))
        await app.publish(QUEUE, b"2", in_="2h")
        (logical,) = (await app.queues.queue_stats(QUEUE)).logical_queues
        assert sum(part.scheduled for part in logical.partitions) == 2
    assert seen == []


async def test_one_that_is_refused_takes_no_neighbour_along() -> None:
    embedded = EmbeddedUnderTest("memory://")
    app, _ = listening(embedded)
    async with app.running(declare=True):
        await app.queues.queue_pause(QUEUE)
        app.queues.queue_produce = refusing(app.queues.queue_produce)  # type: ignore[method-assign]
        with pytest.raises(NotStored, match="1 of 3 messages are not confirmed") as failed:
            await app.publish_many(QUEUE, [b"1", b"bad", b"3"])
        assert list(failed.value.errors) == [1]
        assert await embedded.left() == 2


def refusing(produce: Callable[..., Any]) -> Callable[..., Any]:
    """A queue that does not take what is bad."""

    async def refuse(queue: str, items: list[holdfast.NewItem], **more: Any) -> object:
        if any(item.payload == b"bad" for item in items):
            raise Invalid("item is bad")
        return await produce(queue, items, **more)

    return refuse
