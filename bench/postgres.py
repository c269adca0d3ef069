"""How fast the PostgreSQL storage is: produce + lease + complete at the port, batch 100, payload 512 B, fsync on.

Rounds are interleaved, so that a slow minute of the machine hits every kind alike; ratios are of the same round.
`one`: one consumer. `eight`: eight at once, each on its own connection, as eight servers would be. `joined`: eight
whose requests one server joins into one commit each.

    .venv/bin/python -m bench.postgres [--rounds 5] [--seconds 3] [--depth 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from holdfast.core.item import NewItem
from holdfast.core.queue import PartitionPlace, QueueRecord
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.ports.queues import Complete, Lease, Leased, Mortality, Operation, Produce, Shelves
from tests.support.postgres import running_cluster

BATCH = 100
PAYLOAD_BYTES = 512
CONSUMERS = 8
HOUR_US = 3_600_000_000
LEASE_US = 60_000_000
RULES = Mortality(max_attempts=3)
ITEMS = [NewItem(payload=os.urandom(PAYLOAD_BYTES), kind="bench") for _ in range(BATCH)]


async def cycle(shelves: Shelves, *, joined: int = 1) -> int:
    """Three commits; returns how many items went all the way."""
    produces: list[Operation] = [Produce(0, ITEMS * joined, HOUR_US)]
    await shelves.commit(produces)
    leased = (await shelves.commit([Lease(0, BATCH * joined, LEASE_US, RULES)])).results[0]
    assert isinstance(leased, Leased)
    ids = [item.id for item in leased.items]
    await shelves.commit([Complete(0, ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)])
    return len(ids)


async def rate(run: Callable[[], Awaitable[int]], *, workers: int, seconds: float) -> float:
    """Items a second with so many at once."""
    began = time.perf_counter()
    done = 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            count = await run()
            done += count

    await asyncio.gather(*(work() for _ in range(workers)))
    return done / (time.perf_counter() - began)


async def measure(url: str, *, rounds: int, seconds: float, depth: int) -> dict[str, list[float]]:
    """The rates of every kind, round by round."""
    storage = PostgresStorage(url, name="bench")
    await storage.open()
    record = QueueRecord(
        name="bench", lease_timeout_us=LEASE_US, expire_timeout_us=HOUR_US, partitions=(PartitionPlace(0, "bench"),)
    )
    record = await storage.catalog().change("bench", dead_queue="", decide=lambda _, now: record)
    shelves = storage.shelves(record, [0])
    await shelves.load()
    for _ in range(depth // 10_000):
        await shelves.commit([Produce(0, ITEMS * 100, HOUR_US)])
    kinds: dict[str, Callable[[], Awaitable[float]]] = {
        "one": lambda: rate(lambda: cycle(shelves), workers=1, seconds=seconds),
        "eight": lambda: rate(lambda: cycle(shelves), workers=CONSUMERS, seconds=seconds),
        "joined": lambda: rate(lambda: cycle(shelves, joined=CONSUMERS), workers=1, seconds=seconds),
    }
    await rate(lambda: cycle(shelves), workers=1, seconds=1.0)
    results: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, run in kinds.items():
            results[name].append(await run())
    await storage.close()
    return results


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--depth", type=int, default=0, help="items that are queued all the time")
    arguments = parser.parse_args()
    with running_cluster() as cluster:
        url = cluster.create_database("bench")
        results = uvloop.run(measure(url, rounds=arguments.rounds, seconds=arguments.seconds, depth=arguments.depth))
    summary: dict[str, object] = {"bench": "postgres", "batch": BATCH, "depth": arguments.depth}
    print(f"{'kind':8} {'items/s':>9} {'lowest':>9} {'highest':>9} {'x one':>6}")
    for name, rates in results.items():
        ratios = [one / other for one, other in zip(rates, results["one"], strict=True)]
        median, ratio = statistics.median(rates), statistics.median(ratios)
        print(f"{name:8} {median:9.0f} {min(rates):9.0f} {max(rates):9.0f} {ratio:6.2f}")
        summary[name] = {"items_per_s": round(median), "x_one": round(ratio, 2)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
