"""What somebody meets who types `holdfast recover`: where the URL comes from, which files it makes, how it ends."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, ended_by_kill, letter, summary
from tests.support.command import Command, Ended, Inside

pytestmark = pytest.mark.rabbitmq


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def text(dlq: DeadLetterQueue, *more: str | Path, **variables: str) -> Ended:
    """For people, with the routes of the dlq."""
    arguments = ("recover", *more, "--routes", dlq.routes)
    return await asyncio.to_thread(lambda: dlq.command()(*map(str, arguments), stdin=b"", **variables))


# --- the URL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(), ("-",)])
async def test_the_url_comes_from_the_environment(dlq: DeadLetterQueue, given: tuple[str, ...]) -> None:
    await dlq.fill(letter(n) for n in range(5))
    ended = await text(dlq, *given, dlq.name, HOLDFAST_BROKER_URL=dlq.url)
    assert ended.code == 0, ended
    assert "Total Recovered: 5 messages" in ended.text
    await dlq.check()


def test_without_any_url_it_says_where_to_put_it(tmp_path: Path) -> None:
    ended = Command(tmp_path, "memory://")("recover", "some.dlq")
    assert ended.code == 2
    assert "set HOLDFAST_BROKER_URL" in ended.stderr
    ended = Command(tmp_path, "memory://")("recover", "amqp://127.0.0.1:1")
    assert ended.code == 2
    assert "Missing argument 'DLQ'" in ended.stderr


def test_what_cannot_be_meant_is_bad_usage_before_anything_is_connected(tmp_path: Path) -> None:
    command = Inside(tmp_path, "memory://")
    place = ("recover", "amqp://127.0.0.1:1", "some.dlq")
    missing = command(*place, "--from-backup", "nosuch")
    assert missing.code == 2
    assert missing.stderr == "error: backup cannot be read; 'nosuch': No such file or directory\n"
    assert command(*place, "--from-backup", tmp_path).code == 2
    both = command(*place, "--journal", "j", "--no-journal")
    assert both.code == 2
    assert both.stderr == "error: only one of --journal and --no-journal can be given\n"


# --- files --------------------------------------------------------------------------------------------------------


async def test_files_with_letters_are_for_their_owner_alone(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(5))
    report, backup = dlq.folder / "report.json", dlq.folder / "letters.jsonl"
    assert (await dlq.recover("--backup", backup, "--report", report)).code == 0
    assert (mode(report), mode(backup)) == (0o600, 0o600)
    assert json.loads(report.read_text())["recovered"] == 5


async def test_a_report_that_cannot_be_written_is_noticed_before_the_start(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(5))
    ended = await dlq.recover("--report", dlq.folder / "missing" / "report.json")
    assert ended.code == 1
    assert "report cannot be written" in ended.stderr
    assert "nothing was taken" in ended.stderr
    assert await dlq.admin.count(dlq.name) == 5


async def test_a_report_that_fails_at_the_end_does_not_silence_the_summary(dlq: DeadLetterQueue) -> None:
    await dlq.fill(letter(n) for n in range(5))
    ended = await dlq.recover("--report", "/dev/full")
    assert ended.code == 1
    assert summary(ended)["recovered"] == 5
    assert "report cannot be written; '/dev/full': No space left on device" in ended.stderr


async def test_a_run_that_does_not_begin_leaves_no_report_and_keeps_the_old_one(dlq: DeadLetterQueue) -> None:
    old, new = dlq.folder / "old.json", dlq.folder / "new.json"
    old.write_text("old")
    dlq.name = "no.such.dlq"
    for file in (old, new):
        assert (await dlq.recover("--report", file)).code == 1
    assert old.read_text() == "old"
    assert not new.exists()


# --- the journal --------------------------------------------------------------------------------------------------


async def test_a_killed_run_is_known_from_every_folder(dlq: DeadLetterQueue, tmp_path: Path) -> None:
    await dlq.fill(letter(n) for n in range(30))
    killed = dlq.start("--one-at-a-time", HOLDFAST_CRASH_AT="recover.after_journal:5")
    with killed:
        assert ended_by_kill(killed)
    state = dlq.folder / "state"
    [journal] = (state / "holdfast" / "recover").iterdir()
    assert mode(journal) == 0o600
    assert "guest" not in journal.name
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = ("recover", dlq.url, dlq.name, "--routes", str(dlq.routes))
    command = Command(elsewhere, "memory://")
    ended = await asyncio.to_thread(lambda: command(*arguments, "--json", XDG_STATE_HOME=str(state)))
    assert f"Journal: {journal}" in ended.stderr
    assert summary(ended)["recognised"] == 1
    assert not journal.exists()
    await dlq.check()


async def test_letters_that_are_kept_are_no_possible_duplicates(any_dlq: DeadLetterQueue) -> None:
    """After a kill nobody knows of redelivered letters without an entry; but those that stay are in one place."""
    dlq = any_dlq
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 2]) for n in range(200))
    killed = dlq.start(HOLDFAST_CRASH_AT="recover.before_publish:1")
    with killed:
        assert ended_by_kill(killed)
    told = summary(await dlq.recover())
    assert (told["recovered"], told["skipped"]) == (100, 100)
    assert 0 < told["possible_duplicates"] <= 100
    await dlq.check()


# --- how it ends --------------------------------------------------------------------------------------------------


async def test_a_dry_run_in_which_all_could_go_is_a_good_one(any_dlq: DeadLetterQueue) -> None:
    dlq = any_dlq
    await dlq.fill(letter(n) for n in range(50))
    assert (await dlq.recover("--dry-run")).code == 0
    assert (await dlq.recover("--dry-run", "--limit", "10")).code == 3
    await dlq.fill([letter(99, kind="Strange")])
    assert (await dlq.recover("--dry-run")).code == 3
    await dlq.check()


async def test_what_is_said_of_a_kept_letter_is_true(dlq: DeadLetterQueue) -> None:
    await dlq.fill([letter(1, kind="Strange"), letter(2, kind=None, told={"x-death": []})])
    ended = await text(dlq, dlq.url, dlq.name)
    assert "Type 'Strange' is not in the route table. Keeping in DLQ for manual review." in ended.text
    said = [line for line in ended.text.splitlines() if line.startswith("Message has no MessageType or routing key")]
    assert len(said) == 1
    await dlq.check()


def test_a_broker_that_is_not_there_is_no_server_of_ours(tmp_path: Path) -> None:
    command = Command(tmp_path, "memory://")
    for arguments in (
        ("recover", "amqp://127.0.0.1:1", "some.dlq"),
        ("topology", "export", "--url", "amqp://127.0.0.1:1"),
    ):
        ended = command(*arguments)
        assert ended.code == 1
        assert "cannot be reached" in ended.stderr
        assert "holdfast serve" not in ended.stderr
        assert "check that it runs, and its host and port" in ended.stderr
