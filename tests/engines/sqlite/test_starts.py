"""Starts of messages in a SQLite file: kept over the end of a process, ended with the settle, bounded."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.broker import AttemptLog
from holdfast.engines.sqlite import starts as module
from holdfast.engines.sqlite.starts import SqliteStarts
from holdfast.testing import FrozenClock
from tests.support.amqp import properties

OPENED = """
import sys
from pathlib import Path
from holdfast.engines.sqlite.starts import SqliteStarts
from holdfast.wiring import SystemClock
starts = SqliteStarts(Path(sys.argv[1]), clock=SystemClock())
for _ in range(200):
    starts.begin("q", sys.argv[2].encode())
"""


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


async def test_a_start_is_left_until_it_is_ended(tmp_path: Path, clock: FrozenClock) -> None:
    starts = SqliteStarts(tmp_path / "new" / "folder", clock=clock)
    first, second = starts.begin("q", b"k"), starts.begin("q", b"k")
    other = starts.begin("other", b"k")
    assert list(starts.left("q", b"k")) == [first, second]
    starts.end([first])
    assert list(starts.left("q", b"k")) == [second]
    starts.close()
    again = SqliteStarts(tmp_path / "new" / "folder", clock=clock)
    assert list(again.left("q", b"k")) == [second]
    assert list(again.left("other", b"k")) == [other]
    assert list(again.left("q", b"other")) == []
    again.close()


async def test_what_ends_is_gone_after_a_round_of_the_loop(tmp_path: Path, clock: FrozenClock) -> None:
    starts, reader = (SqliteStarts(tmp_path, clock=clock) for _ in range(2))
    starts.end([starts.begin("q", b"k") for _ in range(3)])
    assert len(reader.left("q", b"k")) == 3
    await asyncio.sleep(0)
    assert list(reader.left("q", b"k")) == []
    starts.close()
    reader.close()


async def test_old_starts_and_too_many_are_forgotten(
    tmp_path: Path, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_COUNT_MAX", 5)
    monkeypatch.setattr(module, "PRUNED_EVERY", 10)
    starts = SqliteStarts(tmp_path, clock=clock)
    numbers = [starts.begin("q", b"k") for _ in range(11)]
    assert list(starts.left("q", b"k")) == numbers[-6:]
    await clock.advance(module.KEPT_US / 1_000_000 + 1)
    starts.close()
    again = SqliteStarts(tmp_path, clock=clock)
    number = again.begin("q", b"k")
    assert list(again.left("q", b"k")) == [number]
    again.close()


async def test_several_processes_may_make_and_share_the_file(tmp_path: Path, clock: FrozenClock) -> None:
    argv = [sys.executable, "-c", OPENED, str(tmp_path / "shared")]
    children = [await asyncio.create_subprocess_exec(*argv, str(number)) for number in range(4)]
    assert [await child.wait() for child in children] == [0, 0, 0, 0]
    starts = SqliteStarts(tmp_path / "shared", clock=clock)
    assert [len(starts.left("q", str(number).encode())) for number in range(4)] == [200] * 4
    starts.close()


def delivery(tag: int, body: bytes = b"twin") -> Delivery:
    return Delivery(1, tag, True, "", "q", "c", properties.encode({"type": "t"}), body)


async def test_of_twins_each_start_is_charged_to_one(tmp_path: Path, clock: FrozenClock) -> None:
    starts = SqliteStarts(tmp_path, clock=clock)
    gone = AttemptLog(starts, "q", holds=lambda _: True)
    for _ in range(2):
        gone.begin(delivery(1))
    book = AttemptLog(starts, "q", holds=lambda found: found.channel == 1)
    one, two, other = delivery(1), delivery(2), delivery(3, b"other")
    assert [book.charge(each) for each in (one, two, other)] == [2, 0, 0]
    book.begin(one)
    assert book.charge(two) == 0, "one is at work, and two is another message"
    one.channel = 0  # its channel has ended: it will come again, and two may be it
    assert book.charge(two) == 3
    book.end(two)
    assert list(starts.left("q", b"")) == []
    assert AttemptLog(starts, "q", holds=lambda _: True).charge(one) == 0
    starts.close()


async def test_what_is_given_back_is_charged_when_it_comes_again(tmp_path: Path, clock: FrozenClock) -> None:
    starts = SqliteStarts(tmp_path, clock=clock)
    book = AttemptLog(starts, "q", holds=lambda _: True)
    one, again, held = delivery(1), delivery(2), delivery(3, b"held")
    book.begin(one)
    book.leave(one)
    book.leave(held)
    assert (book.charge(again), book.charge(held)) == (1, 0)
    starts.close()
