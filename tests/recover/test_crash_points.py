"""SIGKILL of the recovery at every named place; the next run finds everything, and nothing is lost or taken twice."""

from __future__ import annotations

import pytest

from holdfast.proof import crash_points
from tests.recover.dead_letter_queue import DeadLetterQueue, ended_by_kill, header, letter, summary

pytestmark = pytest.mark.rabbitmq

POINTS = (
    "recover.after_take",
    "recover.before_publish",
    "recover.after_publish",
    "recover.after_confirm",
    "recover.before_journal",
    "recover.after_journal",
    "recover.after_ack",
)
COUNT = 400


def test_no_crash_point_is_left_out() -> None:
    assert {name for name in crash_points() if name.startswith("recover.")} == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_and_run_again(any_dlq: DeadLetterQueue, point: str) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 10 == 9]) for n in range(COUNT))
    killed = dlq.start("--window", "100", HOLDFAST_CRASH_AT=f"{point}:2")
    with killed:
        assert ended_by_kill(killed), killed.returncode
    ended = await dlq.recover()
    told = summary(ended)
    assert ended.code == 3
    assert told["skipped"] == COUNT // 10
    seen = await dlq.found()
    report = dlq.books.check(duplicates_max=told["possible_duplicates"])
    for name in report.duplicated:
        copies = [one for one in seen["collection.scan"] if dlq.name_of(one) == name]
        assert len({header(one, "x-redrive-id") for one in copies}) == 1, "a duplicate can be told by its redrive id"


async def test_what_was_published_and_not_acked_is_recognised(any_dlq: DeadLetterQueue) -> None:
    """Killed after the journal was written and before the ack: the next run acks without publishing again."""
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(50))
    killed = dlq.start("--one-at-a-time", HOLDFAST_CRASH_AT="recover.after_journal:5")
    with killed:
        assert ended_by_kill(killed)
    told = summary(await dlq.recover())
    assert told["recognised"] == 1
    assert told["recovered"] == 46
    assert told["possible_duplicates"] == 0
    await dlq.check(duplicates_max=0)


async def test_an_entry_of_a_finished_run_never_matches(dlq: DeadLetterQueue) -> None:
    """The same letter again, redelivered, after a run that ended cleanly: it is published."""
    await dlq.fill([letter(1)], counted=False)
    assert (await dlq.recover()).code == 0
    await dlq.fill([letter(1)], counted=False)
    held = await dlq.recover("--dry-run")  # now it is marked as redelivered
    assert summary(held)["returned"] == 1
    told = summary(await dlq.recover())
    assert (told["recovered"], told["recognised"]) == (1, 0)
    assert await dlq.admin.count("collection.scan") == 2


async def test_a_twin_of_a_published_letter_is_published(any_dlq: DeadLetterQueue) -> None:
    """One entry, two letters of the same bytes that both come again: used twice, it would ack one that went nowhere."""
    dlq = any_dlq
    await dlq.fill([letter(1), letter(1)], counted=False)
    assert summary(await dlq.recover("--dry-run"))["returned"] == 2  # from now on both are marked as redelivered
    with dlq.start("--one-at-a-time", HOLDFAST_CRASH_AT="recover.after_journal:1") as killed:
        assert ended_by_kill(killed)
    assert await dlq.admin.count("collection.scan") == 1
    told = summary(await dlq.recover())
    assert (told["recovered"], told["recognised"], told["remaining"]) == (2, 1, 0)
    assert await dlq.admin.count("collection.scan") == 2


async def test_without_a_journal_nothing_is_lost_either(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(COUNT))
    killed = dlq.start("--no-journal", HOLDFAST_CRASH_AT="recover.after_confirm:1")
    with killed:
        assert ended_by_kill(killed)
    ended = await dlq.recover("--no-journal")
    assert ended.code == 0
    await dlq.check(duplicates_max=None)


async def test_a_journal_of_another_queue_is_refused(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(10))
    file = dlq.folder / "some.journal"
    killed = dlq.start("--journal", file, HOLDFAST_CRASH_AT="recover.after_take:1")
    with killed:
        assert ended_by_kill(killed)
    await dlq.queue("other.dlq")
    dlq.name = "other.dlq"
    ended = await dlq.recover("--journal", file)
    assert ended.code == 1
    assert "journal belongs to another queue" in ended.stderr
