"""As much in a request as it may hold, many of them at once, and a kill: what was answered 200 is there.

A commit takes all that waits; one that were too large for its store would have to be refused, never be half of what was
answered.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.core.checks import BATCH_COUNT_MAX
from holdfast.errors import HoldfastError
from tests.faults.serving import Serving
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

ITEM_BYTES = 1_000
PRODUCERS = 8
BATCHES = 24  # that are answered before the kill, and as many after it
PAGE = 5_000


class Batches:
    """Producers that note which of their batches were answered."""

    def __init__(self, client: holdfast.Client) -> None:
        self.answered: set[int] = set()
        self._client = client
        self._number = 0

    async def produce(self) -> None:
        """One batch after the other, until the server is gone."""
        while True:
            self._number += 1
            number = self._number
            items = [(b"%d %d" % (number, index)).ljust(ITEM_BYTES) for index in range(BATCH_COUNT_MAX)]
            await self._client.queue_produce("work", items)
            self.answered.add(number)

    async def until_killed(self, server: Serving) -> None:
        """Many at once, and a kill in the middle."""
        wanted = len(self.answered) + BATCHES
        tasks = [asyncio.create_task(self.produce()) for _ in range(PRODUCERS)]
        await eventually(lambda: len(self.answered) >= wanted)
        assert await server.child.kill() == -9
        for task in tasks:
            with suppress(HoldfastError):
                await task


async def stored(client: holdfast.Client, partition: int) -> list[bytes]:
    """All payloads of a partition."""
    found, pivot = list[bytes](), ""
    while True:
        page = await client.storage_items_list("work", partition=partition, pivot=pivot, limit=PAGE)
        found += [item.payload for item in page if item.id != pivot]
        if len(page) < PAGE:
            return found
        pivot = page[-1].id


async def lose_nothing(url: str, folder: Path) -> None:
    async with holdfast.open(url) as queues:
        await queues.queues_create("work", requested_partitions=2)
    async with Serving(url, folder) as server, server.client() as client:
        batches = Batches(client)
        for _ in range(2):
            await server.start()
            await batches.until_killed(server)
        await server.start()
        payloads = [await stored(client, partition) for partition in range(2)]
    parts = [payload.split() for payload in payloads[0] + payloads[1]]
    there = {(int(number), int(index)) for number, index in parts}
    assert len(parts) == len(there)
    whole = {number for number, _ in there}
    assert len(there) == len(whole) * BATCH_COUNT_MAX, "a batch is there by half"
    assert batches.answered <= whole, "what was answered is lost"
    assert len(batches.answered) >= 2 * BATCHES


async def test_big_batches_survive_kills_on_sqlite(tmp_path: Path) -> None:
    await lose_nothing(f"sqlite:///{tmp_path}/data", tmp_path)


@pytest.mark.postgres
async def test_big_batches_survive_kills_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    await lose_nothing(postgres_url, tmp_path)
