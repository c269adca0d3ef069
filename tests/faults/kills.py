"""Random kills of the real server under load: the short form is a test, the long one `make soak`."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import holdfast
from holdfast.proof.conservation import ConservationReport
from tests.faults.load import Load, create_queues
from tests.faults.serving import serving
from tests.support.eventually import eventually

ANSWERS_COUNT_MAX = 60  # between two kills


async def random_kills(url: str, folder: Path, *, kills: int, seed: int, partitions: int = 1) -> ConservationReport:
    """Kill the server so many times, each after a random number of answers; then drain and count."""
    chance = random.Random(seed)
    async with holdfast.open(url) as queues:
        await create_queues(queues, partitions=partitions)
    async with serving(url, folder) as server, server.client() as client:
        load = Load([client], seed=seed)
        child = await server.start()
        working = asyncio.create_task(load.run())
        try:
            for _ in range(kills):
                wanted = load.answered_count + chance.randint(0, ANSWERS_COUNT_MAX)
                await eventually(partial(is_reached, load, working, wanted))
                if working.done():
                    break  # a promise was broken; the task says which
                assert await child.kill() == -9
                child = await server.start()
        finally:
            load.stop()
            await working
        return await load.drain(client)


def is_reached(load: Load, working: asyncio.Task[None], wanted: int) -> bool:
    """So many answers came, or the load has ended because a promise was broken."""
    return load.answered_count >= wanted or working.done()
