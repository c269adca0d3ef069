"""`once`: marks are written with success, never before, and nothing is matched that has no lasting id."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast import Message, SqlMarks, once
from holdfast.errors import Invalid
from holdfast.services.consume.once import MemoryMarks
from holdfast.services.consume.worker import run_async, run_in_thread


def message(identity: str = "m1", *, lasting: bool = True) -> Message:
    return Message(body=b"x", id=identity, has_lasting_id=lasting, queue="q")


@pytest.fixture
def marks(tmp_path: Path) -> SqlMarks:
    made = SqlMarks(lambda: sqlite3.connect(tmp_path / "marks.db"))
    made.create()
    made.create()
    return made


async def test_a_message_without_a_lasting_id_is_always_run() -> None:
    runs = []

    @once(MemoryMarks())
    async def handle(message: Message) -> None:
        runs.append(message.id)

    for identity, lasting in [("item", False), ("item", False), ("", True), ("", True)]:
        assert await run_async(handle, message(identity, lasting=lasting), timeout_s=1) is None
    assert len(runs) == 4


async def test_a_handler_that_fails_leaves_no_mark(marks: SqlMarks) -> None:
    runs = 0

    @once(marks)
    async def handle(message: Message) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError

    assert isinstance(await run_async(handle, message(), timeout_s=5), ValueError)
    assert await run_async(handle, message(), timeout_s=5) is None
    assert await run_async(handle, message(), timeout_s=5) is None
    assert runs == 2
    assert await marks.has("q", "m1")
    assert not await marks.has("another", "m1")


async def test_a_handler_in_a_thread_is_marked_too(marks: SqlMarks) -> None:
    runs = 0

    @once(marks)
    def handle(message: Message) -> None:
        nonlocal runs
        runs += 1

    for _ in range(2):
        assert await run_in_thread(handle, message(), timeout_s=None, on_overdue=lambda: None) is None
    assert runs == 1


async def test_work_and_mark_can_be_one_transaction(tmp_path: Path, marks: SqlMarks) -> None:
    with sqlite3.connect(tmp_path / "marks.db") as connection:
        connection.execute("CREATE TABLE work (body BLOB)")

    def work(message: Message, *, crash: bool) -> bool:
        connection = sqlite3.connect(tmp_path / "marks.db")
        connection.execute("INSERT INTO work VALUES (?)", (message.body,))
        first = marks.mark_in(connection, message)
        if first and not crash:
            connection.commit()
        connection.close()
        return first

    assert work(message(), crash=True)
    assert not await marks.has("q", "m1")
    assert work(message(), crash=False)
    assert not work(message(), crash=False)
    connection = sqlite3.connect(tmp_path / "marks.db")
    assert connection.execute("SELECT count(*) FROM work").fetchone() == (1,)
    connection.close()


async def test_old_marks_can_be_forgotten(marks: SqlMarks) -> None:
    await marks.put("q", "m1")
    assert marks.forget(older_than_s=3600) == 0
    assert marks.forget(older_than_s=-1) == 1
    assert not await marks.has("q", "m1")


def test_a_table_has_a_plain_name() -> None:
    with pytest.raises(Invalid):
        SqlMarks(lambda: None, table="marks; DROP TABLE work")
    with pytest.raises(Invalid):
        SqlMarks(lambda: None, placeholder=":1")
