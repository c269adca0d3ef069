"""`--from-backup`: what was asked for is done, no more, and nothing is said of a queue that was not looked at."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.recover.world import EXCHANGE, World, header, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
async def backup(world: World) -> Path:
    """Forty letters of two types and one unknown, whose copies are gone again."""
    await world.fill(letter(n, kind=("CollectionScan", "CacheGeneration")[n % 2]) for n in range(40))
    file = world.folder / "letters.jsonl"
    assert (await world.recover("--backup", file)).code == 0
    for target in ("collection.scan", "cache.generation"):
        await world.admin.drain(target, 20)
    return file


async def counts(world: World) -> tuple[int, int]:
    return await world.admin.count("collection.scan"), await world.admin.count("cache.generation")


async def test_a_dry_run_publishes_nothing(world: World, backup: Path) -> None:
    ended = await world.recover("--from-backup", backup, "--dry-run")
    told = summary(ended)
    assert ended.code == 0, ended
    assert await counts(world) == (0, 0)
    assert (told["dry_run"], told["found"], told["recovered"], told["remaining"]) == (True, 40, 0, None)
    assert told["planned"]["CollectionScan"] == {f"exchange '{EXCHANGE}' with key 'collection.scan'": 20}


async def test_a_filter_a_limit_and_a_rate_are_kept(world: World, backup: Path) -> None:
    ended = await world.recover(
        "--from-backup", backup, "--where", "type=CacheGeneration", "--limit", "10", "--rate", "20/s"
    )
    told = summary(ended)
    assert ended.code == 3
    assert await counts(world) == (0, 10)
    assert (told["recovered"], told["filtered"], told["unseen"], told["found"]) == (10, 10, 20, 40)
    assert told["duration_s"] > 0.3
    assert told["reasons"]["left out by --where"]["count"] == 10


async def test_nothing_is_said_of_the_queue(world: World, backup: Path) -> None:
    await world.fill([letter(99)])
    arguments = ("recover", world.url, world.dlq, "--from-backup", str(backup), "--routes", str(world.routes))
    text = await asyncio.to_thread(world.command(), *arguments)
    assert text.code == 0, text
    assert "Total Recovered: 40 messages" in text.text
    assert "DLQ Empty" not in text.text
    assert "in DLQ" not in text.text
    assert f"Backup '{backup}'" in text.text
    await asyncio.to_thread(world.command(), "recover", world.url, "no.such.dlq", *arguments[3:])
    assert await counts(world) == (40, 40)


async def test_a_route_that_leads_nowhere_is_refused_at_the_start(world: World, backup: Path) -> None:
    world.routes.write_text("[routes]\nCollectionScan = { exchange = '', key = 'missing.queue' }")
    ended = await world.recover("--from-backup", backup)
    assert ended.code == 1
    assert "queue 'missing.queue' does not exist" in ended.stderr


async def test_a_signal_stops_cleanly(world: World, backup: Path) -> None:
    with world.start("--from-backup", backup, "--rate", "10/s") as process:
        await eventually(lambda: _some(world))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert process.returncode == 3
    assert told["stopped_by"] == "signal"
    assert 0 < told["recovered"] < 40
    assert told["recovered"] + told["unseen"] == told["found"] == 40
    assert sum(await counts(world)) == told["recovered"]


async def test_a_damaged_line_ends_it_with_a_summary(world: World, backup: Path) -> None:
    lines = backup.read_bytes().splitlines()
    backup.write_bytes(b"\n".join([*lines[:6], b"{}", *lines[6:]]))
    ended = await world.recover("--from-backup", backup)
    told = summary(ended)
    assert ended.code == 1
    assert told["recovered"] == 6
    assert "line 7" in told["failure"]
    assert await counts(world) == (3, 3)


async def test_the_queue_may_be_left_out(world: World, backup: Path) -> None:
    arguments = ("recover", "--from-backup", str(backup), "--to", "library_scan_queue", "--json", "--limit", "1")
    ended = await asyncio.to_thread(lambda: world.command()(*arguments, HOLDFAST_BROKER_URL=world.url))
    assert summary(ended)["recovered"] == 1
    [copy] = await world.admin.drain("library_scan_queue", 1)
    assert header(copy, "x-redriven-count") == 1


@pytest.mark.parametrize("more", [("--backup", "b"), ("--journal", "j"), ("--strict",)])
def test_what_is_for_a_queue_is_refused(more: tuple[str, ...], tmp_path: Path) -> None:
    world = World(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = world.command()("recover", "amqp://127.0.0.1:1", "some.dlq", "--from-backup", "x.jsonl", *more)
    assert ended.code == 2, ended
    assert "--from-backup reads none" in ended.stderr


async def _some(world: World) -> bool:
    return sum(await counts(world)) > 2
