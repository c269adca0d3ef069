"""The write-ahead log is folded into its file beside the commits, stays within its limit, and nothing is lost of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import apsw
import pytest

from holdfast.engines.sqlite import connection
from holdfast.engines.sqlite.connection import (
    AHEAD_BYTES,
    AHEAD_BYTES_MAX,
    BESIDE_PAGES_COUNT,
    WITHIN_PAGES_COUNT,
    Checkpoints,
    open_writer,
    transaction,
)
from holdfast.engines.sqlite.partition import SqlitePartition

PAGE_BYTES = 4096


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _write(writer: apsw.Connection, pages_count: int) -> None:
    with transaction(writer):
        writer.execute(
            "INSERT INTO items (kind, encoding, reference, payload) VALUES ('', '', '', zeroblob(?))",
            (pages_count * PAGE_BYTES,),
        )


def _in_file_alone(path: Path) -> int:
    """How many items the file has without its log."""
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    connection = apsw.Connection(str(copy))
    count: int = connection.execute("SELECT count(*) FROM items").get
    connection.close()
    return count


def test_a_full_log_is_folded_beside_its_writer(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    writer = open_writer(tmp_path / "queue.db", kind="queue", create=True)
    writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    folding = Checkpoints(tmp_path / "queue.db", writer, threads)
    _write(writer, BESIDE_PAGES_COUNT)
    assert folding.pages_count >= BESIDE_PAGES_COUNT
    assert _in_file_alone(tmp_path / "queue.db") == 0
    folding.after_commit(alone=False)
    threads.submit(int).result()
    assert _in_file_alone(tmp_path / "queue.db") == 1
    _write(writer, 1)
    assert folding.pages_count < BESIDE_PAGES_COUNT  # the log has started over
    folding.close()
    writer.close()


def test_a_lone_commit_folds_the_log_itself(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    writer = open_writer(tmp_path / "queue.db", kind="queue", create=True)
    folding = Checkpoints(tmp_path / "queue.db", writer, threads)
    _write(writer, BESIDE_PAGES_COUNT)
    folding.after_commit(alone=True)
    assert _in_file_alone(tmp_path / "queue.db") == 1
    folding.close()
    writer.close()


def test_a_log_at_its_limit_is_folded_by_its_writer(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WITHIN_PAGES_COUNT", 2 * BESIDE_PAGES_COUNT)
    assert WITHIN_PAGES_COUNT > BESIDE_PAGES_COUNT
    held = threading.Event()
    threads.submit(held.wait)  # the thread that would do it is busy
    writer = open_writer(tmp_path / "queue.db", kind="queue", create=True)
    folding = Checkpoints(tmp_path / "queue.db", writer, threads)
    try:
        for _ in range(5):
            _write(writer, BESIDE_PAGES_COUNT)
            folding.after_commit(alone=False)
            assert folding.pages_count < 4 * BESIDE_PAGES_COUNT
        assert (tmp_path / "queue.db-wal").stat().st_size < 4 * BESIDE_PAGES_COUNT * (PAGE_BYTES + 24)
    finally:
        held.set()
        folding.close()
        writer.close()


def test_a_folding_that_comes_too_late_touches_nothing(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    held = threading.Event()
    threads.submit(held.wait)
    writer = open_writer(tmp_path / "queue.db", kind="queue", create=True)
    folding = Checkpoints(tmp_path / "queue.db", writer, threads)
    _write(writer, BESIDE_PAGES_COUNT)
    folding.after_commit(alone=False)
    folding.close()
    writer.close()
    for path in tmp_path.iterdir():
        path.unlink()
    held.set()
    threads.submit(int).result()
    assert list(tmp_path.iterdir()) == []


def test_ids_in_a_row_are_the_ids_one_by_one() -> None:
    partition = SqlitePartition(7, (3, 0, 0, 0, 0, 0, 1))
    for sequence, count in ((4090, 1), (4090, 6), (4090, 7), (4095, 9000), (8192, 4096), (1 << 52, 5000)):
        rows = range(partition.first | sequence, (partition.first | sequence) + count)
        assert partition.ids_of(rows) == [partition.id_of(row) for row in rows]


def test_a_young_log_is_longer_than_its_frames_and_is_read_as_if_it_were_not(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    path = tmp_path / "queue.db"
    writer = open_writer(path, kind="queue", create=True)
    folding = Checkpoints(path, writer, threads)
    log = tmp_path / "queue.db-wal"
    lengths = []
    for number in range(1, 400):
        _write(writer, 4)
        lengths.append(log.stat().st_size)
        if number % 50 == 0:  # as after a kill: the file and its log as they lie there
            left = tmp_path / f"left-{number}"
            left.mkdir()
            shutil.copyfile(path, left / "queue.db")
            shutil.copyfile(log, left / "queue.db-wal")
            again = apsw.Connection(str(left / "queue.db"))
            assert again.execute("SELECT count(*) FROM items").fetchone() == (number,)
            assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            again.close()
    assert lengths[0] >= AHEAD_BYTES
    steps = {after - before for before, after in pairwise(lengths) if before < AHEAD_BYTES_MAX}
    assert len(steps - {0}) <= 3, "in few long steps, not commit by commit"
    assert folding.pages_count * PAGE_BYTES > AHEAD_BYTES_MAX, "and it goes on beyond them"
    folding.close()
    writer.close()
