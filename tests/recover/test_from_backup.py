"""`--from-backup`: what was asked for is done, no more, and nothing is said of a queue that was not looked at."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.recover.dead_letter_queue import EXCHANGE, DeadLetterQueue, header, letter, summary
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
async def backup(dlq: DeadLetterQueue) -> Path:
    """Forty letters of two types and one unknown, whose copies are gone again."""
    await dlq.fill(letter(n, kind=("CollectionScan", "CacheGeneration")[n % 2]) for n in range(40))
    file = dlq.folder / "letters.jsonl"
    assert (await dlq.recover("--backup", file)).code == 0
    for target in ("collection.scan", "cache.generation"):
        await dlq.admin.drain(target, 20)
    return file


async def counts(dlq: DeadLetterQueue) -> tuple[int, int]:
    return await dlq.admin.count("collection.scan"), await dlq.admin.count("cache.generation")


async def test_a_dry_run_publishes_nothing(dlq: DeadLetterQueue, backup: Path) -> None:
    ended = await dlq.recover("--from-backup", backup, "--dry-run")
    told = summary(ended)
    assert ended.code == 0, ended
    assert await counts(dlq) == (0, 0)
    assert (told["dry_run"], told["found"], told["recovered"], told["remaining"]) == (True, 40, 0, None)
    assert told["planned"]["CollectionScan"] == {f"exchange '{EXCHANGE}' with key 'collection.scan'": 20}


async def test_a_filter_a_limit_and_a_rate_are_kept(dlq: DeadLetterQueue, backup: Path) -> None:
    ended = await dlq.recover(
        "--from-backup", backup, "--where", "type=CacheGeneration", "--limit", "10", "--rate", "20/s"
    )
    told = summary(ended)
    assert ended.code == 3
    assert await counts(dlq) == (0, 10)
    assert (told["recovered"], told["filtered"], told["unseen"], told["found"]) == (10, 10, 20, 40)
    assert told["duration_s"] > 0.3
    assert told["reasons"]["left out by --where"]["count"] == 10


async def test_nothing_is_said_of_the_queue(dlq: DeadLetterQueue, backup: Path) -> None:
    await dlq.fill([letter(99)])
    arguments = ("recover", dlq.url, dlq.name, "--from-backup", str(backup), "--routes", str(dlq.routes))
    text = await asyncio.to_thread(dlq.command(), *arguments)
    assert text.code == 0, text
    assert "Total Recovered: 40 messages" in text.text
    assert "DLQ Empty" not in text.text
    assert "in DLQ" not in text.text
    assert f"Backup '{backup}'" in text.text
    await asyncio.to_thread(dlq.command(), "recover", dlq.url, "no.such.dlq", *arguments[3:])
    assert await counts(dlq) == (40, 40)


async def test_a_route_that_leads_nowhere_is_refused_at_the_start(dlq: DeadLetterQueue, backup: Path) -> None:
    dlq.routes.write_text("[routes]\nCollectionScan = { exchange = '', key = 'missing.queue' }")
    ended = await dlq.recover("--from-backup", backup)
    assert ended.code == 1
    assert "queue 'missing.queue' does not exist" in ended.stderr


async def test_a_signal_stops_cleanly(dlq: DeadLetterQueue, backup: Path) -> None:
    with dlq.start("--from-backup", backup, "--rate", "10/s") as process:
        await eventually(lambda: _some(dlq))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert process.returncode == 3
    assert told["stopped_by"] == "signal"
    assert 0 < told["recovered"] < 40
    assert told["recovered"] + told["unseen"] == told["found"] == 40
    assert sum(await counts(dlq)) == told["recovered"]


async def test_a_damaged_line_ends_it_with_a_summary(dlq: DeadLetterQueue, backup: Path) -> None:
    lines = backup.read_bytes().splitlines()
    backup.write_bytes(b"\n".join([*lines[:6], b"{}", *lines[6:]]))
    ended = await dlq.recover("--from-backup", backup)
    told = summary(ended)
    assert ended.code == 1
    assert told["recovered"] == 6
    assert "line 7" in told["failure"]
    assert await counts(dlq) == (3, 3)


async def test_the_queue_may_be_left_out(dlq: DeadLetterQueue, backup: Path) -> None:
    arguments = ("recover", "--from-backup", str(backup), "--to", "library_scan_queue", "--json", "--limit", "1")
    ended = await asyncio.to_thread(lambda: dlq.command()(*arguments, HOLDFAST_BROKER_URL=dlq.url))
    assert summary(ended)["recovered"] == 1
    [copy] = await dlq.admin.drain("library_scan_queue", 1)
    assert header(copy, "x-redriven-count") == 1


@pytest.mark.parametrize("more", [("--backup", "b"), ("--journal", "j"), ("--strict",)])
def test_what_is_for_a_queue_is_refused(more: tuple[str, ...], tmp_path: Path) -> None:
    dlq = DeadLetterQueue(admin=None, folder=tmp_path)  # type: ignore[arg-type]  # no broker is asked
    ended = dlq.command()("recover", "amqp://127.0.0.1:1", "some.dlq", "--from-backup", "x.jsonl", *more)
    assert ended.code == 2, ended
    assert "--from-backup reads none" in ended.stderr


async def _some(dlq: DeadLetterQueue) -> bool:
    return sum(await counts(dlq)) > 2
