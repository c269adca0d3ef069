"""The journal of a recovery: what it recognises, and above all what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.engines.folder import journal as module
from holdfast.engines.folder.journal import FileJournal
from holdfast.errors import CannotStart

A, B = b"a" * 16, b"b" * 16


def killed(journal: FileJournal) -> None:
    """The process is gone: the file is as it was written, and nobody holds its lock."""
    os.close(journal._file)


def opened(path: Path, *, source: str = "q") -> FileJournal:
    return FileJournal.open(path, source=source, run="r")


def test_what_was_confirmed_and_not_acked_is_recognised_once(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A, A, B])
    journal.acking([B])
    killed(journal)
    following = opened(path)
    assert following.follows_killed_run
    assert [following.recognise(A), following.recognise(A), following.recognise(A)] == [True, True, False]
    assert not following.recognise(B), "its ack may have been sent"
    killed(following)
    assert not opened(path).recognise(A), "an entry that was used up stays so after a second kill"


def test_a_clean_end_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A])
    journal.close(clean=True)
    assert not path.exists()
    following = opened(path)
    assert not following.follows_killed_run
    assert not following.recognise(A)
    following.close(clean=True)


def test_a_run_that_ended_by_an_error_leaves_its_entries_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A])
    journal.close(clean=False)
    following = opened(path)
    assert following.follows_killed_run, "what comes again without an entry counts as a possible duplicate"
    assert following.recognise(A)
    following.close(clean=True)


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    opened(path).close(clean=False)
    assert not path.exists()


def test_after_a_restart_of_the_machine_nothing_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A])
    killed(journal)
    monkeypatch.setattr(module, "_boot", lambda: "another boot")
    following = opened(path)
    assert following.follows_killed_run
    assert not following.recognise(A)
    following.close(clean=True)


def test_a_torn_record_is_left_out_and_a_damaged_one_ends_all_belief(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A, B])
    killed(journal)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    following = opened(path)
    assert following.recognise(A)
    assert not following.recognise(B)
    killed(following)
    path.write_bytes(whole + b"\0" * 17)
    assert not opened(path).recognise(A)


def test_two_runs_cannot_share_one(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    with pytest.raises(CannotStart, match="journal is in use"):
        opened(tmp_path / "j")
    journal.close(clean=True)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(CannotStart, match="another file"):
        opened(path)
    assert path.read_text() == "mine\n"


def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 2_000)
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([B])
    for _ in range(1_000):
        journal.confirmed([A])
        journal.acking([A])
    assert path.stat().st_size < 5_000
    killed(journal)
    assert opened(path).recognise(B)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStart, match="--no-journal"):
        opened(tmp_path / "file" / "j")
