"""What becomes of a message, on every broker: done, tried again, parked, given back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

import holdfast
from holdfast import Message, Permanent, Retry, RetryAfter
from holdfast.errors import CannotStart, Invalid
from holdfast.services.consume.once import MemoryMarks
from tests.consume.brokers import QUEUE, BrokerUnderTest
from tests.support.eventually import eventually

SOON = Retry(attempts=3, delay="150ms")


async def empty(broker: BrokerUnderTest) -> None:
    async def is_empty() -> bool:
        return await broker.left() == 0

    await eventually(is_empty)


async def test_a_message_that_is_handled_is_gone(broker: BrokerUnderTest) -> None:
    app, seen = broker.app(), Counter[bytes]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    async def handle(message: Message) -> None:
        seen[message.body] += 1
        assert (message.queue, message.attempt, message.attempts_max) == (QUEUE, 1, 3)
        assert not message.redelivered

    async with app.running(declare=True):
        await broker.send(*[f"{number}".encode() for number in range(50)])
        await eventually(lambda: len(seen) == 50)
        await empty(broker)
        assert await broker.parked() == []
    assert set(seen.values()) == {1}


async def test_attempts_is_how_often_the_handler_runs_then_it_is_parked(broker: BrokerUnderTest) -> None:
    app, attempts = broker.app(), list[int]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        assert message.is_last_attempt == (message.attempt == 3)
        raise ValueError("not today")

    async with app.running(declare=True):
        await broker.send(b"x")
        letters = await eventually(broker.parked)
        assert [tuple(letter) for letter in letters] == [(b"x", "attempts", "ValueError: not today")]
        await empty(broker)
    assert attempts == [1, 2, 3]


async def test_a_failure_that_passes_is_a_success_later(broker: BrokerUnderTest) -> None:
    app, done = broker.app(), asyncio.Event()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    async def handle(message: Message) -> None:
        if message.attempt < 3:
            raise ConnectionError("still down")
        done.set()

    async with app.running(declare=True):
        await broker.send(b"x")
        await asyncio.wait_for(done.wait(), 60.0)
        await empty(broker)
        assert await broker.parked() == []


class Refused(Exception):
    pass


@pytest.mark.parametrize("error", [Permanent("never"), Refused("never")])
async def test_a_permanent_error_parks_at_once(broker: BrokerUnderTest, error: Exception) -> None:
    app, runs = broker.app(), list[int]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, permanent=[Refused])
    async def handle(message: Message) -> None:
        runs.append(message.attempt)
        raise error

    async with app.running(declare=True):
        await broker.send(b"x")
        ((body, reason, text),) = await eventually(broker.parked)
        await empty(broker)
    assert (body, reason, runs) == (b"x", "permanent", [1])
    assert text.endswith(": never")


async def test_one_bad_message_takes_no_neighbour_along(broker: BrokerUnderTest) -> None:
    app, done = broker.app(), set[bytes]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, concurrency=4)
    async def handle(message: Message) -> None:
        match message.body:
            case b"exits":
                raise SystemExit(3)
            case b"cancels":
                raise asyncio.CancelledError
            case b"permanent":
                raise Permanent("no")
            case b"stops":
                raise StopIteration
        done.add(message.body)

    async with app.running(declare=True):
        await broker.send(b"exits", b"1", b"cancels", b"2", b"permanent", b"3", b"stops", b"4")
        await eventually(lambda: done == {b"1", b"2", b"3", b"4"})

        async def four_parked() -> bool:
            return len(await broker.parked()) == 4

        await eventually(four_parked)
        await empty(broker)
        reasons = {letter.body: letter.reason for letter in await broker.parked()}
    assert reasons == {b"exits": "attempts", b"cancels": "attempts", b"permanent": "permanent", b"stops": "attempts"}


async def test_a_handler_in_a_thread_is_handled_the_same(broker: BrokerUnderTest) -> None:
    app, threads = broker.app(), set[str]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    def handle(message: Message) -> None:
        threads.add(threading.current_thread().name)
        if message.body == b"exits":
            raise SystemExit(3)
        if message.body == b"bad":
            raise ValueError("no")

    async with app.running(declare=True):
        await broker.send(b"good", b"bad", b"exits")

        async def both_parked() -> bool:
            return {letter.body for letter in await broker.parked()} == {b"bad", b"exits"}

        await eventually(both_parked)
        await empty(broker)
    assert threads == {f"handler of {QUEUE}"}


async def test_an_async_handler_past_its_limit_is_cancelled_and_tried_again(broker: BrokerUnderTest) -> None:
    app, cancelled = broker.app(), list[int]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, timeout=0.05)
    async def handle(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message.attempt)
            raise

    async with app.running(declare=True):
        await broker.send(b"x")
        ((_, reason, text),) = await eventually(broker.parked)
    assert (reason, cancelled) == ("attempts", [1, 2, 3])
    assert text.endswith("not done within 0.05 s")


async def test_a_thread_past_its_limit_keeps_its_message_until_it_ends(
    broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    app, go_on, runs = broker.app(), threading.Event(), list[int]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, timeout=0.02)
    def handle(message: Message) -> None:
        runs.append(message.attempt)
        go_on.wait(60)

    async with app.running(declare=True):
        await broker.send(b"x")
        await eventually(lambda: any("past its time limit" in record.message for record in caplog.records))
        assert await broker.left() == 1
        assert app.health[0].running == 1
        go_on.set()
        await empty(broker)
        assert await broker.parked() == []
    assert runs == [1]


async def test_a_handler_that_asks_for_a_time_gets_it(broker: BrokerUnderTest) -> None:
    app, moments = broker.app(), list[float]()

    @app.consumer(QUEUE, layout=broker.layout, retry=Retry(attempts=2, delay=["150ms", "400ms"]))
    async def handle(message: Message) -> None:
        moments.append(asyncio.get_running_loop().time())
        if message.attempt == 1:
            raise RetryAfter("300ms")

    async with app.running(declare=True):
        await broker.send(b"x")
        await eventually(lambda: len(moments) == 2)
        await empty(broker)
    assert moments[1] - moments[0] >= 0.29


async def test_no_more_than_allowed_run_at_a_time(broker: BrokerUnderTest) -> None:
    app = broker.app()
    running, most, done = 0, 0, 0

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, concurrency=3)
    async def handle(message: Message) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        done += 1

    async with app.running(declare=True):
        await broker.send(*[f"{number}".encode() for number in range(30)])
        await eventually(lambda: done == 30)
        await empty(broker)
    assert most == 3


async def test_a_stop_lets_running_handlers_end_and_takes_nothing_new(broker: BrokerUnderTest) -> None:
    app, begun, go_on, done = broker.app(), asyncio.Event(), asyncio.Event(), list[bytes]()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON, concurrency=1)
    async def handle(message: Message) -> None:
        begun.set()
        await go_on.wait()
        done.append(message.body)

    async with app.running(declare=True):
        await broker.send(b"first", b"second")
        await asyncio.wait_for(begun.wait(), 60.0)
        (worker,) = app._workers
        worker.stop()
        await eventually(lambda: app.health[0].state == "stopping")
        go_on.set()

        async def only_the_second_is_left() -> bool:
            return await broker.left() == 1

        await eventually(only_the_second_is_left)
        await eventually(lambda: app.health[0].state == "stopped")
    assert done == [b"first"]


async def test_what_is_not_done_when_the_stop_is_over_goes_back(broker: BrokerUnderTest) -> None:
    app, begun, cancelled = broker.app(stop_timeout="50ms"), asyncio.Event(), asyncio.Event()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    async def handle(message: Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with app.running(declare=True):
        await broker.send(b"x")
        await asyncio.wait_for(begun.wait(), 60.0)
        (worker,) = app._workers
        worker.stop()
        await eventually(lambda: app.health[0].state == "stopped")
        assert cancelled.is_set()
        assert await broker.left() == 1
        assert await broker.parked() == []


async def test_a_consumer_refuses_to_start_where_a_message_could_get_lost(broker: BrokerUnderTest) -> None:
    app = broker.app()

    @app.consumer(QUEUE, layout=broker.layout)
    async def handle(message: Message) -> None: ...

    with pytest.raises(CannotStart, match=f"'{QUEUE}' does not exist"):
        await app.run()


async def test_run_ends_with_stop(broker: BrokerUnderTest) -> None:
    app = broker.app()

    @app.consumer(QUEUE, layout=broker.layout)
    async def handle(message: Message) -> None: ...

    running = asyncio.create_task(app.run(declare=True))
    await eventually(lambda: app.health and app.health[0].state == "consuming")
    with pytest.raises(Invalid, match="runs already"):
        await app.run()
    app.stop()
    await asyncio.wait_for(running, 60.0)
    assert app.health == []


async def test_a_message_is_handled_once_by_a_key(broker: BrokerUnderTest) -> None:
    app, runs = broker.app(), list[bytes]()
    marks = MemoryMarks()

    @app.consumer(QUEUE, layout=broker.layout, retry=SOON)
    @holdfast.once(marks, key=lambda message: message.body.decode())
    async def handle(message: Message) -> None:
        if message.attempt == 1 and message.body == b"b":
            raise ValueError("the mark must not be written")
        runs.append(message.body)

    async with app.running(declare=True):
        await broker.send(b"a", b"b")
        await empty(broker)
        await broker.send(b"a", b"b", b"c")
        await empty(broker)
    assert sorted(runs) == [b"a", b"b", b"c"]
