"""A bug of ours in a queue's loop: it is told loudly, and nobody waits for an answer that never comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import HoldfastError, Queues
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.services.queue import logical_queue
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.service import QueueService
from holdfast.services.queue.storage_share import StorageShare
from holdfast.services.queue.waiting import CommitBatch, WaitingRequests, take
from holdfast.testing import FrozenClock
from tests.support.flaky import flaky


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
async def queues(clock: FrozenClock) -> AsyncIterator[Queues]:
    manager = QueueManager({"default": flaky(SqliteStorage(None, clock=clock))}, clock=clock)
    await manager.open()
    queues = Queues(QueueService(manager, affinities={"default": 1.0}))
    await queues.queues_create("orders")
    await queues.queue_produce("orders", [b"a"])
    yield queues
    await manager.close()


async def codes(queues: Queues, count: int = 3) -> list[int]:
    """Produce so many items at once; what each is answered, 200 when all is well."""
    calls = [queues.queue_produce("orders", [b"%d" % number]) for number in range(count)]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    return [answer.code if isinstance(answer, HoldfastError) else 200 for answer in answers]


async def test_a_bug_while_answering_is_454_and_the_queue_goes_on(
    queues: Queues, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answers_wrongly(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(logical_queue.LogicalQueue, "_answer", answers_wrongly)
        assert await codes(queues) == [454, 454, 454]
    assert "queue 'orders' met a bug; ZeroDivisionError('a bug')" in caplog.messages
    await clock.advance(31)
    assert await codes(queues) == [200, 200, 200]


async def test_a_bug_in_the_loop_itself_is_500_for_everybody(
    clock: FrozenClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = QueueManager({"default": SqliteStorage(None, clock=clock)}, clock=clock)
    await manager.open()
    queues = Queues(QueueService(manager, affinities={"default": 1.0}))
    await queues.queues_create("orders")
    await queues.queues_create("others")

    really_take = take

    def takes_wrongly(waiting: WaitingRequests, share: StorageShare, **rest: Any) -> CommitBatch:
        if rest["record"].name == "orders":
            raise ZeroDivisionError("a bug")
        return really_take(waiting, share, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(logical_queue, "take", takes_wrongly)
        assert await codes(queues) == [500, 500, 500]
    assert await codes(queues) == [500, 500, 500]
    assert any(record.levelno == logging.ERROR and "met a bug" in record.message for record in caplog.records)
    await queues.queue_produce("others", [b"a"])
    with pytest.raises(ZeroDivisionError):  # and again at the end, where a program cannot overlook it
        await manager.close()
