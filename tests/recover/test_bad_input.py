"""What cannot be meant, or cannot be read: a clear error, and nothing taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.core.message import Outgoing
from tests.recover.world import EXCHANGE, World, letter, summary
from tests.support.amqp import properties
from tests.support.command import Ended

pytestmark = pytest.mark.rabbitmq


async def recover(world: World, *arguments: str | Path) -> Ended:
    """Without the routes file that the world has."""
    return await asyncio.to_thread(world.command(), "recover", *map(str, arguments))


async def test_a_missing_queue(world: World) -> None:
    ended = await recover(world, world.url, "no.such.dlq")
    assert ended.code == 1
    assert "no queue 'no.such.dlq'" in ended.stderr


async def test_a_route_to_a_missing_queue_or_exchange_is_refused_at_the_start(world: World) -> None:
    await world.fill(letter(n) for n in range(10))
    for text, what in (
        ("[routes]\nCollectionScan = { exchange = '', key = 'missing.queue' }", "queue 'missing.queue' does not exist"),
        ("exchange = 'missing'\n[routes]\nCollectionScan = 'k'", "exchange 'missing' does not exist"),
    ):
        world.routes.write_text(text)
        ended = await world.recover()
        assert ended.code == 1
        assert what in ended.stderr
        assert "nothing was taken" in ended.stderr
        assert await world.admin.count(world.dlq) == 10
    going = await world.recover("--keep-unroutable")
    assert going.code == 3
    assert summary(going)["failed"] == 10
    await world.check()


async def test_a_key_that_is_not_bound_is_seen_by_the_management_api(world: World) -> None:
    await world.fill(letter(n) for n in range(3))
    world.routes.write_text(f"exchange = '{EXCHANGE}'\n[routes]\nCollectionScan = 'not.bound'")
    ended = await world.recover("--management", world.admin.node.management_url)
    assert ended.code == 1
    assert "routes key 'not.bound' to no queue" in ended.stderr
    await world.check()


async def test_a_cyclic_route(world: World) -> None:
    await world.fill(letter(n) for n in range(3))
    assert (await recover(world, world.url, world.dlq, "--to", world.dlq)).code == 1
    await world.admin.bind(world.dlq, EXCHANGE, "loop")
    world.routes.write_text(f"exchange = '{EXCHANGE}'\n[routes]\nCollectionScan = 'loop'")
    ended = await world.recover("--management", world.admin.node.management_url)
    assert ended.code == 1
    assert "route is cyclic" in ended.stderr
    await world.check()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--window", "0"],
        ["--limit", "0"],
        ["--rate", "fast"],
        ["--rate", "9" * 400],
        ["--where", "nonsense"],
        ["--total-timeout", "soon"],
        ["--to-source", "--to-exchange"],
        ["--to", "exchange=x"],
        ["--routes", "missing.toml"],
        ["--routes", "empty.toml"],
        ["--routes", "malformed.toml"],
        ["--no-such-option"],
    ],
)
def test_bad_usage(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("[routes]\n")
    (tmp_path / "malformed.toml").write_text("[routes\n")
    world = World(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = world.command()("recover", "amqp://127.0.0.1:1", "some.dlq", *arguments)
    assert ended.code == 2, ended
    assert ended.stderr.startswith("error: ")


def test_a_name_that_no_queue_has(tmp_path: Path) -> None:
    world = World(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = world.command()("recover", "amqp://127.0.0.1:1", "ü" * 128, "--to-source")
    assert ended.code == 2, ended
    assert "DLQ is invalid" in ended.stderr


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    world = World(admin=None, folder=tmp_path)  # type: ignore[arg-type]
    ended = world.command()("recover", "amqp://user:secret@127.0.0.1:1", "some.dlq")
    assert ended.code == 1
    assert "cannot be reached" in ended.stderr
    assert "holdfast serve" not in ended.stderr
    assert "check that it runs, and its host and port" in ended.stderr
    assert "secret" not in ended.stderr


async def test_headers_that_nobody_can_read_are_carried_or_kept(world: World) -> None:
    """A table with a type that does not exist cannot be sent to a broker at all; what can be is carried."""
    odd = properties.encode({"headers": {"MessageType": "CollectionScan", "x-death": [1, {"a": None}], "": "no name"}})
    await world.fill([Outgoing("", "", odd, b""), Outgoing("", "", properties.NONE, b"no properties at all")])
    told = summary(await world.recover())
    assert (told["recovered"], told["skipped"]) == (1, 1)
    await world.check()
