"""Consumers of a classic queue with a store of starts: what ends processes is parked, what was held is not charged."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import Message, Retry
from holdfast.errors import CannotStart
from tests.consume.brokers import QUEUE, RabbitUnderTest
from tests.consume.killed_app import make_starting_app as make_app
from tests.consume.test_kills import argv
from tests.support.amqp import headers_of
from tests.support.eventually import eventually
from tests.support.forking import forked_process

pytestmark = pytest.mark.rabbitmq


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def rows(store: Path) -> int:
    """How many starts are kept, seen from outside."""
    with closing(apsw.Connection(str(store / "starts.db"))) as db:
        return int(db.execute("SELECT count(*) FROM starts").get)


async def killed(broker: RabbitUnderTest, done: Path, store: Path) -> None:
    """Run the app in a process until its message ends it, and wait until the broker has all messages again."""
    held = await broker.admin.count(QUEUE)
    env = {"TEST_URL": broker.url, "TEST_DONE": str(done), "TEST_STORE": str(store)}
    async with forked_process(argv(), env=env) as child:
        assert await child.wait() == -9, child.stderr.tail

    async def are_back() -> bool:
        return await broker.admin.count(QUEUE) == held

    await eventually(are_back)


async def test_what_kills_its_process_is_parked_and_what_was_held_beside_it_is_not_charged(
    rabbit: RabbitUnderTest, tmp_path: Path
) -> None:
    done, store = tmp_path / "done", tmp_path / "store"
    app = make_app(rabbit.url, done, store, management=rabbit.admin.node.management_url)
    await rabbit.declare(app)
    await rabbit.send(b"kill", b"a", b"b")
    for _ in range(2):
        await killed(rabbit, done, store)
        assert await rabbit.admin.count(f"{QUEUE}.retry") == 0, "nothing steps aside where starts are known"
    assert lines(done) == ["kill 1", "kill 2"]
    async with app.running():
        (letter,) = await eventually(rabbit.letters)
        await eventually(lambda: lines(done) == ["kill 1", "kill 2", "a 1", "b 1"])
        await eventually(lambda: rows(store) == 0)
    found = headers_of(letter)
    assert (letter.body, found["x-parked-reason"], found["x-retry-count"]) == (b"kill", "poison", 2)


async def test_a_connection_that_is_lost_charges_only_what_was_begun(rabbit: RabbitUnderTest, tmp_path: Path) -> None:
    store = tmp_path / "store"
    app = holdfast.App(rabbit.url, store=f"sqlite:///{store}")
    begun, go_on = list[tuple[bytes, int]](), asyncio.Event()

    @app.consumer(QUEUE, retry=Retry(attempts=5, delay="100ms"), concurrency=1, prefetch=4)
    async def handle(message: Message) -> None:
        begun.append((message.body, message.attempt))
        await go_on.wait()

    rabbit._app = app
    async with app.running(declare=True):
        await rabbit.send(b"a", b"b")
        await eventually(lambda: begun == [(b"a", 1)])
        assert rows(store) == 1
        app._workers[0]._consumer._consumer._connection._abort()  # type: ignore[union-attr]
        go_on.set()
        await eventually(lambda: begun == [(b"a", 1), (b"a", 2), (b"b", 1)])

        async def is_done() -> bool:
            return await rabbit.left() == 0

        await eventually(is_done)
        await eventually(lambda: rows(store) == 0)


async def test_starts_that_the_broker_cannot_carry_are_published(rabbit: RabbitUnderTest, tmp_path: Path) -> None:
    """A rejection has no count of ours: after a kill the retry goes by publish, with all attempts on it."""
    done, store = tmp_path / "done", tmp_path / "store"
    await rabbit.declare(make_app(rabbit.url, done, store))
    await rabbit.send(b"kill")
    await killed(rabbit, done, store)
    app = holdfast.App(rabbit.url, store=f"sqlite:///{store}")
    attempts = list[int]()

    @app.consumer(QUEUE, retry=Retry(attempts=3, delay="100ms", by="broker"))
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("no")

    rabbit._app = app
    async with app.running():
        (letter,) = await eventually(rabbit.letters)
    assert attempts == [2, 3]
    assert headers_of(letter)["x-retry-count"] == 2


async def test_a_store_that_cannot_be_written_holds_the_message(rabbit: RabbitUnderTest, tmp_path: Path) -> None:
    done, store = tmp_path / "done", tmp_path / "store"
    app = make_app(rabbit.url, done, store)
    rabbit._app = app
    async with app.running(declare=True):
        with closing(apsw.Connection(str(store / "starts.db"))) as other:
            other.execute("BEGIN IMMEDIATE")
            await rabbit.send(b"a")
            await eventually(lambda: "locked by another program" in app.health[0].trouble)
            assert lines(done) == []
            other.execute("ROLLBACK")
        await eventually(lambda: lines(done) == ["a 1"])
        await eventually(lambda: app.health[0].is_well)


async def test_a_store_must_be_a_folder(rabbit: RabbitUnderTest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store, text in [
        ("memory://", "store of starts is invalid; 'memory://' is not sqlite:///FOLDER"),
        (f"sqlite:///{tmp_path}/file/x", "store of starts cannot be opened"),
    ]:
        app = holdfast.App(rabbit.url, store=store)
        app.consumer(QUEUE)(print)
        with pytest.raises(CannotStart, match=text):
            await app.run(declare=True)
