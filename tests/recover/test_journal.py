"""The journal of a recovery: what it recognises, and above all what it does not."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.core.recovery import RunEnd
from holdfast.errors import CannotStart
from holdfast.stores import journal as module
from holdfast.stores.journal import FileJournal, JournalPaths

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def killed(journal: FileJournal) -> None:
    """The process is gone: the file is as it was written, and nobody holds its lock."""
    for file in journal._files:
        os.close(file.number)


def opened(
    path: Path | None, *, origin: str = "q", others: Sequence[Path] = (), usual: Path | None = None
) -> FileJournal:
    return FileJournal(JournalPaths(origin=origin, own=path, usual=usual, others=tuple(others)), "r")


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
    journal.close(RunEnd.WHOLE)
    assert not path.exists()
    following = opened(path)
    assert not following.follows_killed_run
    assert not following.recognise(A)
    following.close(RunEnd.WHOLE)


def test_a_run_that_ended_by_an_error_leaves_its_entries_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A])
    journal.close(RunEnd.BROKEN)
    following = opened(path)
    assert following.follows_killed_run, "what comes again without an entry counts as a possible duplicate"
    assert following.recognise(A)
    following.close(RunEnd.WHOLE)


def test_of_a_run_that_ended_without_its_connection_only_that_is_known(tmp_path: Path) -> None:
    """Its acks may be lost: what comes again may have been published, and nothing tells which."""
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A, B])
    journal.acking([B])
    journal.close(RunEnd.LOST)
    following = opened(path)
    assert following.follows_killed_run
    assert not following.recognise(A)
    following.close(RunEnd.WHOLE)
    assert not path.exists()


def test_what_a_killed_run_left_is_kept_by_one_that_ends_without_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = opened(path)
    journal.confirmed([A])
    killed(journal)
    lost = opened(path)
    lost.confirmed([B])
    lost.close(RunEnd.LOST)
    following = opened(path)
    assert (following.recognise(B), following.recognise(A)) == (False, True)
    following.close(RunEnd.WHOLE)


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for end in (RunEnd.BROKEN, RunEnd.LOST):
        opened(path).close(end)
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
    following.close(RunEnd.WHOLE)


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


def test_what_is_noted_behind_a_torn_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    left_behind(path, A, B)
    path.write_bytes(path.read_bytes()[:-3])
    run = opened(None, others=[path])
    run.confirmed([A])
    killed(run)
    assert not opened(path).recognise(A)


def test_two_runs_cannot_share_one(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    with pytest.raises(CannotStart, match="journal is in use"):
        opened(tmp_path / "j")
    journal.close(RunEnd.WHOLE)


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


# --- a clean run after a killed one -------------------------------------------------------------------------------


def left_behind(path: Path, *digests: bytes) -> None:
    """What a run leaves that was killed between these confirms and their acks."""
    journal = opened(path)
    journal.confirmed(digests)
    killed(journal)


@pytest.mark.parametrize("own", ["j", "another", None])
def test_a_clean_run_that_has_not_seen_all_leaves_what_a_killed_one_left(tmp_path: Path, own: str | None) -> None:
    path = tmp_path / "j"
    left_behind(path, A, B)
    short = opened(tmp_path / own if own else None, others=[path])
    assert short.follows_killed_run
    assert short.recognise(A) is (own is not None), "a run without a journal recognises nothing"
    short.confirmed([C])
    short.close(RunEnd.PARTLY)
    assert sorted(tmp_path.iterdir()) == [path]
    following = opened(path)
    assert following.follows_killed_run
    assert following.recognise(B)
    assert not following.recognise(C), "an entry of a finished run never matches"
    assert following.recognise(A) is (own is None)
    following.close(RunEnd.WHOLE)
    assert not path.exists()


@pytest.mark.parametrize("own", ["j", "another", None])
def test_a_letter_that_is_published_again_ends_the_entries_of_its_bytes(tmp_path: Path, own: str | None) -> None:
    """Whether the letter of the entry is still in the queue, nobody can say any more. Also when the run is killed."""
    path = tmp_path / "j"
    left_behind(path, A, A, B)
    short = opened(tmp_path / own if own else None, others=[path])
    short.confirmed([A])
    short.acking([A])
    killed(short)
    following = opened(path)
    assert not following.recognise(A)
    assert following.recognise(B)
    following.close(RunEnd.WHOLE)


@pytest.mark.parametrize("own", ["j", "another", None])
def test_letters_that_were_seen_and_kept_may_have_been_published_by_a_killed_run(
    tmp_path: Path, own: str | None
) -> None:
    """The entries end, since their letters are not in the queue; that a run was killed is still to be known."""
    path = tmp_path / "j"
    left_behind(path, A)
    opened(tmp_path / own if own else None, others=[path]).close(RunEnd.KEPT)
    assert sorted(tmp_path.iterdir()) == [path]
    following = opened(path)
    assert following.follows_killed_run
    assert not following.recognise(A)
    following.close(RunEnd.WHOLE)


@pytest.mark.parametrize("own", ["another", None])
def test_a_run_that_ends_with_nothing_left_ends_every_journal_of_its_queue(tmp_path: Path, own: str | None) -> None:
    first, second, strange = tmp_path / "first", tmp_path / "second", tmp_path / "strange"
    left_behind(first, A)
    left_behind(second, B)
    strange.write_text("mine\n")
    foreign = tmp_path / "foreign"
    opened(foreign, origin="another queue").close(RunEnd.BROKEN)
    journal = opened(foreign, origin="another queue")
    journal.confirmed([A])
    killed(journal)
    others = [first, second, strange, foreign, tmp_path / "absent"]
    run = opened(tmp_path / own if own else None, others=others)
    assert run.recognise(B) is (own is not None)
    assert first.exists()
    assert second.exists(), "not before the end"
    run.close(RunEnd.WHOLE)
    assert sorted(tmp_path.iterdir()) == [foreign, strange]


@pytest.mark.parametrize("end", [RunEnd.PARTLY, RunEnd.KEPT, RunEnd.WHOLE])
def test_a_clean_run_that_follows_no_killed_one_leaves_nothing(tmp_path: Path, end: RunEnd) -> None:
    journal = opened(tmp_path / "j", others=[tmp_path / "absent"])
    assert not journal.follows_killed_run
    journal.confirmed([A])
    journal.close(end)
    assert not list(tmp_path.iterdir())


def test_a_run_that_did_not_begin_leaves_the_journals_of_others_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    left_behind(path, A)
    before = path.read_bytes()
    opened(tmp_path / "own", others=[path]).close(RunEnd.BROKEN)
    opened(None, others=[path]).close(RunEnd.BROKEN)
    assert sorted(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_journal_that_somebody_uses_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    running = opened(path)
    running.confirmed([A])
    other = opened(None, others=[path])
    assert not other.follows_killed_run
    other.close(RunEnd.WHOLE)
    assert path.exists()
    other = opened(None, others=[path])
    killed(running)  # in the middle of the other: what it left may have been published again
    other.close(RunEnd.PARTLY)
    following = opened(path)
    assert following.follows_killed_run
    assert not following.recognise(A)
    following.close(RunEnd.WHOLE)


def test_a_journal_that_was_replaced_while_its_lock_was_awaited_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    left_behind(path, A)
    flock, seen = fcntl.flock, list[int]()

    def slow(file: int, how: int) -> None:
        if not seen:
            seen.append(file)
            opened(path).close(RunEnd.WHOLE)  # another run came and ended in between
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    following = opened(path)
    assert not following.follows_killed_run
    assert not following.recognise(A)
    following.close(RunEnd.WHOLE)


# --- files elsewhere ----------------------------------------------------------------------------------------------


def test_a_journal_elsewhere_is_found_from_the_usual_place(tmp_path: Path) -> None:
    usual, elsewhere = tmp_path / "state" / "q.journal", tmp_path / "elsewhere.journal"
    journal = opened(elsewhere, usual=usual)
    journal.confirmed([A])
    killed(journal)
    following = opened(usual, usual=usual)
    assert following.follows_killed_run
    assert following.recognise(A)
    following.close(RunEnd.WHOLE)
    assert not elsewhere.exists()
    assert not list(usual.parent.iterdir())


def test_a_journal_elsewhere_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    usual, elsewhere = tmp_path / "state" / "q.journal", tmp_path / "elsewhere.journal"
    killed(opened(elsewhere, usual=usual))
    elsewhere.unlink()
    following = opened(usual, usual=usual)
    assert not following.follows_killed_run
    following.close(RunEnd.BROKEN)
    assert not list(usual.parent.iterdir())


def test_a_usual_place_that_cannot_be_written_does_not_matter_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = opened(tmp_path / "j", usual=tmp_path / "file" / "q.journal")
    journal.confirmed([A])
    journal.close(RunEnd.WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_run_may_have_sent_twice_is_told_until_somebody_has_told_it(tmp_path: Path) -> None:
    usual, other = tmp_path / "usual", tmp_path / "other"
    for path, count in ((usual, 3), (other, 4)):
        killed = opened(path, usual=usual)
        killed.doubt(count)
        killed.close(RunEnd.BROKEN)
    # That of the second is the sum: it knew of the first.
    assert _doubted(usual) == 3 + 7
    killed = opened(usual, usual=usual)
    killed.doubt(5)
    killed.acking([bytes(16)])
    killed.close(RunEnd.BROKEN)
    told = opened(usual, usual=usual)
    assert told.doubted_count >= 3 + 4 + 5
    told.close(RunEnd.PARTLY)
    assert _doubted(usual) == 0


def _doubted(usual: Path) -> int:
    journal = opened(None, usual=usual)
    count = journal.doubted_count
    journal.close(RunEnd.BROKEN)
    return count
