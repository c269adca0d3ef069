"""What cannot be meant, or cannot be read: a clear error, and nothing taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.core.message import Outgoing
from tests.recover.dead_letter_queue import EXCHANGE, DeadLetterQueue, letter, summary
from tests.support.amqp import properties
from tests.support.command import Ended

pytestmark = pytest.mark.rabbitmq


async def recover(dlq: DeadLetterQueue, *arguments: str | Path) -> Ended:
    """Without the routes file that the dlq has."""
    return await asyncio.to_thread(dlq.command(), "recover", *map(str, arguments))


async def test_a_missing_queue(dlq: DeadLetterQueue) -> None:
    ended = await recover(dlq, dlq.url, "no.such.dlq")
    assert ended.code == 1
    assert "no queue 'no.such.dlq'" in ended.stderr


async def test_a_route_to_a_missing_queue_or_exchange_is_refused_at_the_start(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(10))
    for text, what in (
        ("[routes]\nCollectionScan = { exchange = '', key = 'missing.queue' }", "queue 'missing.queue' does not exist"),
        ("exchange = 'missing'\n[routes]\nCollectionScan = 'k'", "exchange 'missing' does not exist"),
    ):
        dlq.routes.write_text(text)
        ended = await dlq.recover()
        assert ended.code == 1
        assert what in ended.stderr
        assert "nothing was taken" in ended.stderr
        assert await dlq.admin.count(dlq.name) == 10
    going = await dlq.recover("--keep-unroutable")
    assert going.code == 3
    assert summary(going)["failed"] == 10
    await dlq.check()


async def test_a_key_that_is_not_bound_is_seen_by_the_management_api(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3))
    dlq.routes.write_text(f"exchange = '{EXCHANGE}'\n[routes]\nCollectionScan = 'not.bound'")
    ended = await dlq.recover("--management", dlq.admin.node.management_url)
    assert ended.code == 1
    assert "routes key 'not.bound' to no queue" in ended.stderr
    await dlq.check()


async def test_a_cyclic_route(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(3))
    assert (await recover(dlq, dlq.url, dlq.name, "--to", dlq.name)).code == 1
    await dlq.admin.bind(dlq.name, EXCHANGE, "loop")
    dlq.routes.write_text(f"exchange = '{EXCHANGE}'\n[routes]\nCollectionScan = 'loop'")
    ended = await dlq.recover("--management", dlq.admin.node.management_url)
    assert ended.code == 1
    assert "route is cyclic" in ended.stderr
    await dlq.check()


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
    dlq = DeadLetterQueue(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = dlq.command()("recover", "amqp://127.0.0.1:1", "some.dlq", *arguments)
    assert ended.code == 2, ended
    assert ended.stderr.startswith("error: ")


def test_a_name_that_no_queue_has(tmp_path: Path) -> None:
    dlq = DeadLetterQueue(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = dlq.command()("recover", "amqp://127.0.0.1:1", "ü" * 128, "--to-source")
    assert ended.code == 2, ended
    assert "DLQ is invalid" in ended.stderr


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    dlq = DeadLetterQueue(admin=None, folder=tmp_path)  # type: ignore[arg-type]
    ended = dlq.command()("recover", "amqp://user:secret@127.0.0.1:1", "some.dlq")
    assert ended.code == 1
    assert "cannot be reached" in ended.stderr
    assert "holdfast serve" not in ended.stderr
    assert "check that it runs, and its host and port" in ended.stderr
    assert "secret" not in ended.stderr


async def test_headers_that_nobody_can_read_are_carried_or_kept(dlq: DeadLetterQueue) -> None:
    """A table with a type that does not exist cannot be sent to a broker at all; what can be is carried."""
    odd = properties.encode({"headers": {"MessageType": "CollectionScan", "x-death": [1, {"a": None}], "": "no name"}})
    await dlq.fill([Outgoing("", "", odd, b""), Outgoing("", "", properties.NONE, b"no properties at all")])
    told = summary(await dlq.recover())
    assert (told["recovered"], told["skipped"]) == (1, 1)
    await dlq.check()
