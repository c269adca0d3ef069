"""Many results at a time over one RabbitMQ, with the collector's process killed in the middle.

`python -m tests.collect.many PLACE COUNT` is the collector: it starts every transaction, so many at a time, and ends
when nothing is left to do for any. Started again at the same place it goes on where it was.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import msgspec

import holdfast
from holdfast.core.states import TransactionState
from holdfast.proof.process import python_argv
from tests.collect.producing import NOTIFY, PRODUCER, cleaned
from tests.collect.shared import producing, rows_of
from tests.collect.worker import SHAPE, TOTAL, Place
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.forking import forked_process

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


async def many_results(folder: Path, admin: Admin, *, count: int, kills: int) -> Counter[str]:
    """Kill it so many times on its way, and look at everything in the end; what was counted."""
    place = Place(f"sqlite:///{folder}/data", f"{folder}/data/blobs", str(folder), admin.url)
    argv = python_argv("tests.collect.many", msgspec.json.encode(place).decode(), str(count))
    async with producing(admin):
        for kill in range(kills):
            async with forked_process(argv) as child:
                wanted = count * TOTAL * (kill + 1) // (kills + 1)
                await eventually(lambda wanted=wanted: parts_count(place) >= wanted, timeout_s=600)  # type: ignore[misc]
                await child.kill()
        async with forked_process(argv) as child:
            assert await child.wait(timeout_s=900) == 0, child.stderr.tail
    left = queues_left(admin)
    assert not left, f"{len(left)} queues of {count} transactions are left: {left[:5]}"
    assert await admin.count("collector.dlq") == 0
    notices = [delivery.body for delivery in await admin.drain(NOTIFY, await admin.count(NOTIFY))]
    told = Counter(msgspec.json.decode(body)["transaction-id"] for body in notices)
    assert set(told) == {f"{PREFIX}{number}" for number in range(count)}
    assert len(set(notices)) == count, "notices of one transaction differ"
    async with holdfast.Collector(place.url, blobs=place.blobs, broker=place.broker) as collector:
        for name in told:
            assert (await collector.find(name)).state is TransactionState.COMPLETED
            assert rows_of(place.url, name) == TOTAL
    return Counter(kills=kills, results=count, duplicate_notices=len(notices) - count)


def queues_left(admin: Admin) -> list[str]:
    """The queues of transactions that are there."""
    names = [queue["name"] for queue in admin.node.api("GET", f"/queues/{admin.vhost}").json()]
    return [name for name in names if name.startswith("transaction-")]


def parts_count(place: Place) -> int:
    """How many parts are stored, of all."""
    return sum(1 for file in Path(place.blobs).glob(f"{PREFIX}*/*/*"))


if __name__ == "__main__":
    asyncio.run(collect(msgspec.json.decode(sys.argv[1], type=Place), int(sys.argv[2])))
