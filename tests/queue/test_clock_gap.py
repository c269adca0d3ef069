"""After more than six hours without a write the clock may have jumped: what is deleted by time waits ten minutes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast import NewItem, Queues, RetryItem
from holdfast.core.moments import SECOND_US
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.service import QueueService
from holdfast.testing import FrozenClock
from tests.faults.serving import Serving
from tests.support.eventually import eventually

HOUR_S = 3600.0


@asynccontextmanager
async def opened(folder: Path, clock: FrozenClock, *, doubts_clock: bool = True) -> AsyncIterator[Queues]:
    """Queues in a folder; at the end its files are as old as the clock says."""
    manager = QueueManager({"default": SqliteStorage(folder, clock=clock)}, clock=clock)
    folder.mkdir(exist_ok=True)
    await manager.open(doubts_clock=doubts_clock)
    try:
        yield Queues(QueueService(manager, affinities={"default": 1.0}))
    finally:
        await manager.close()
    for path in folder.rglob("*.db*"):
        os.utime(path, (clock.now_us() / SECOND_US,) * 2)


async def counts(queues: Queues) -> list[int]:
    return [len(await queues.storage_items_list(name)) for name in ("orders", "dead")]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
async def clock(folder: Path) -> FrozenClock:
    """Of a folder with two items that are deleted after an hour: by their expiry, and as dead ones."""
    made = FrozenClock()
    async with opened(folder, made) as queues:
        await queues.queues_create("orders", expire_timeout="1h")
        await queues.queues_create("dead", dead_retention="1h")
        await queues.queues_create("other", lease_timeout="1m", dead_queue="dead")
        await queues.queue_produce("orders", [NewItem(payload=b"late")])
        await queues.queue_produce("other", [NewItem(payload=b"dead")])
        leased = await queues.queue_lease("other")
        await queues.queue_retry("other", [RetryItem(id=leased.items[0].id, dead=True, reason="no")])

        async def are_there() -> bool:
            return await counts(queues) == [1, 1]

        await eventually(are_there)
    return made


async def test_deletions_by_time_wait_and_are_counted(
    folder: Path, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    await clock.advance(7 * HOUR_S)
    async with opened(folder, clock) as queues:
        await eventually(lambda: caplog.text.count("is the clock right?") == 2)
        assert "up to 1 items of queue 'orders' are past their time" in caplog.text
        assert await counts(queues) == [1, 1]
        await queues.queue_produce("other", [b"served at once"])
        await clock.advance(300)
        assert await counts(queues) == [1, 1]
    async with opened(folder, clock) as queues:  # it has written since, and still waits
        await clock.advance(299)
        assert await counts(queues) == [1, 1]
        await clock.advance(2)

        async def gone() -> bool:
            return await counts(queues) == [0, 0]

        await eventually(gone, timeout_s=20)


@pytest.mark.parametrize(("hours", "doubts_clock"), [(5, True), (7, False)])
async def test_without_a_gap_or_with_a_clock_that_is_accepted_they_do_not_wait(
    folder: Path, clock: FrozenClock, hours: int, *, doubts_clock: bool
) -> None:
    await clock.advance(hours * HOUR_S)
    async with opened(folder, clock, doubts_clock=doubts_clock) as queues:

        async def gone() -> bool:
            return await counts(queues) == [0, 0]

        await eventually(gone, timeout_s=20)


@pytest.mark.slow
async def test_a_server_waits_unless_it_accepts_the_clock(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server:
        await server.start()
        async with server.client() as client:
            await client.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
            await client.queue_produce("orders", [b"late"])
        await server.start(HOLDFAST_CLOCK_OFFSET_S="30000")
        async with server.client() as client:
            assert len(await client.storage_items_list("orders")) == 1
            await eventually(lambda: "up to 1 items of queue 'orders'" in server.child.stderr.tail)
        await server.start(HOLDFAST_CLOCK_OFFSET_S="30000", HOLDFAST_ACCEPT_CLOCK="true")
        async with server.client() as client:

            async def gone() -> bool:
                return not await client.storage_items_list("orders")

            await eventually(gone, timeout_s=20)
