"""`--backup`: which letters are written, and what is said of a file that has letters already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CannotStart
from holdfast.stores.files import Exported, FileBackup, read_backup
from tests.recover.dead_letter_queue import DeadLetterQueue, ended_by_kill, letter, summary

ONE = Exported(exchange="", routing_key="q", properties=b"", body=b"x")


@pytest.mark.rabbitmq
async def test_it_has_the_letters_that_are_published_and_says_what_it_had_before(dlq: DeadLetterQueue) -> None:
    file = dlq.folder / "letters.jsonl"
    await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 2]) for n in range(10))
    first = await dlq.recover("--backup", file)
    assert summary(first)["recovered"] == len(list(read_backup(file))) == 5
    assert "has letters already" not in first.stderr
    before_bytes = file.stat().st_size
    await dlq.fill(letter(n) for n in range(20, 23))
    second = await dlq.recover("--backup", file)
    said = f"backup '{file}' has letters already ({before_bytes} bytes)"
    assert said in second.stderr
    assert len(list(read_backup(file))) == 8
    dry = await dlq.recover("--backup", file, "--dry-run")
    assert said not in dry.stderr
    assert len(list(read_backup(file))) == 8
    await dlq.check()


@pytest.mark.rabbitmq
async def test_a_dry_run_makes_no_file(dlq: DeadLetterQueue) -> None:
    file = dlq.folder / "letters.jsonl"
    await dlq.fill(letter(n) for n in range(3))
    assert (await dlq.recover("--backup", file, "--dry-run")).code == 0
    assert not file.exists()
    await dlq.check()


@pytest.mark.rabbitmq
async def test_a_letter_is_in_it_before_it_is_published(dlq: DeadLetterQueue) -> None:
    file = dlq.folder / "letters.jsonl"
    await dlq.fill(letter(n) for n in range(10))
    with dlq.start("--backup", file, HOLDFAST_CRASH_AT="recover.before_publish:1") as killed:
        assert ended_by_kill(killed), killed.returncode
    assert list(read_backup(file))
    assert await dlq.admin.count("collection.scan") == 0


async def test_it_is_on_disk_when_a_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "letters.jsonl"
    synced: list[bytes] = []
    folders: list[int] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            folders.append(descriptor)
        else:
            synced.append(path.read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    backup = FileBackup(path)
    assert len(folders) == 1, "the name of the file is on disk too"
    for count in (1, 2):
        await backup.write([ONE])
        assert len(synced[-1].splitlines()) == count
        assert synced[-1] == path.read_bytes()
    backup.close()


async def test_a_file_that_nothing_was_written_to_is_gone_unless_it_was_there(tmp_path: Path) -> None:
    new, old, used = tmp_path / "new", tmp_path / "old", tmp_path / "used"
    old.touch()
    for path in (new, old, used):
        backup = FileBackup(path)
        if path == used:
            await backup.write([ONE])
        backup.close()
        backup.close()
    assert [path.exists() for path in (new, old, used)] == [False, True, True]


async def test_what_somebody_else_wrote_or_put_there_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    mine, theirs = FileBackup(path), FileBackup(path)
    await theirs.write([ONE])
    mine.close()
    assert [one.body for one in read_backup(path)] == [b"x"]
    other = tmp_path / "other"
    backup = FileBackup(other)
    (tmp_path / "put").write_bytes(b"precious")
    os.replace(tmp_path / "put", other)
    backup.close()
    assert other.read_bytes() == b"precious"
    theirs.close()


async def test_a_letter_that_was_cut_off_by_a_kill_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "letters.jsonl"
    backup = FileBackup(path)
    await backup.write([ONE, ONE])
    backup.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(CannotStart, match="ends in the middle of a letter"):
        FileBackup(path)
    assert path.read_bytes() == whole[:-10]
