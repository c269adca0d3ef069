"""A client that is alone is served without a task; whatever else runs in the process gets its turn all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import holdfast
from holdfast.services.queue.logical_queue import LONE_COUNT_SURE, LONE_COUNT_YIELD


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_lone_client_lets_others_run(tmp_path: Path, store: str) -> None:
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await queues.queues_create("orders")
        for _ in range(LONE_COUNT_SURE):
            await queues.queue_produce("orders", [b"first"])
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        running = asyncio.create_task(other())
        for _ in range(10 * LONE_COUNT_YIELD):
            await queues.queue_produce("orders", [b"more"])
        running.cancel()
        assert turns >= 9


async def test_clients_that_come_together_share_their_commits_after_a_lone_one(tmp_path: Path) -> None:
    async with holdfast.open(f"sqlite:///{tmp_path}/data") as queues:
        await queues.queues_create("orders")
        for _ in range(2 * LONE_COUNT_SURE):
            await queues.queue_produce("orders", [b"alone"])
        replies = await asyncio.gather(*(queues.queue_produce("orders", [b"crowd"]) for _ in range(200)))
        assert len({reply.items[0].id for reply in replies}) == 200
        leased = await queues.queue_lease("orders", batch_size=1000)
        assert len(leased.items) == 2 * LONE_COUNT_SURE + 200
