"""A collector of many results at a time over one RabbitMQ, as a process that can be killed and started again.

`python -m tests.collect.many PLACE COUNT`: it starts every transaction, so many at a time, and ends
when nothing is left to do for any. Started again at the same place it goes on where it was.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

import holdfast
from tests.collect.producing import NOTIFY, PRODUCER, cleaned
from tests.collect.worker import SHAPE, Place

AT_ONCE_COUNT = 20
PREFIX = "many-"


async def collect(place: Place, count: int) -> None:
    """One life of the process."""
    turn = asyncio.Semaphore(AT_ONCE_COUNT)
    async with holdfast.Collector(place.url, blobs=place.blobs, broker=place.broker) as collector:

        async def one(name: str) -> None:
            async with turn:
                await collector.start(
                    b"all of it", producer=PRODUCER, notify=NOTIFY, transaction_id=name, series=list(SHAPE)
                )
                await cleaned(collector, name)

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(one(f"{PREFIX}{number}"))


if __name__ == "__main__":
    asyncio.run(collect(msgspec.json.decode(sys.argv[1], type=Place), int(sys.argv[2])))
