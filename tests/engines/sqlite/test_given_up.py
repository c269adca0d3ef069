"""Whoever gives up a question to a file leaves nothing behind that is in the way of who closes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import holdfast

ITEMS_COUNT = 20_000
OPENINGS_COUNT = 30


async def test_a_file_is_closed_when_a_count_that_was_given_up_is_done(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await queues.queues_create("orders")
        for _ in range(0, ITEMS_COUNT, 1_000):
            await queues.queue_produce("orders", [b"one of many"] * 1_000)
    for turns in range(OPENINGS_COUNT):
        async with holdfast.open(url) as queues:  # closing used a connection that the thread was still busy with
            await queues.storage_items_list("orders", limit=1)
            counting = asyncio.create_task(queues.queue_stats("orders"))
            for _ in range(turns):
                await asyncio.sleep(0)
            counting.cancel()
    async with holdfast.open(url) as queues:
        stats = await queues.queue_stats("orders")
        assert sum(partition.total for partition in stats.partitions) == ITEMS_COUNT
