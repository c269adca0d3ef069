"""One measurement inside a process, by the public names alone: `python -P bench/measured.py ROW '{"folder": …}'`.

Run by `bench.pairs` with the Python of either checkout, as a file: nothing of a checkout's own bench is imported.
Prints one line of JSON: units a second, processor time a unit, and the memory at its highest.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

import holdfast
from holdfast import NewItem, Queues

PAYLOAD = os.urandom(512)
BATCH = 100
PRODUCERS = 64
CONSUMERS = 4
HELD = 100
DEPTH_QUEUES = 10
PART_BYTES = 16 * 1024


class Stopwatch:
    """Wall and processor time from `begin` on."""

    def begin(self) -> None:
        self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.wall_s

    def figures(self, units: int) -> dict[str, float]:
        """What so many units took."""
        cpu_s, wall_s = time.process_time() - self.cpu_s, self.elapsed_s
        return {"rate": units / wall_s, "cpu_us": cpu_s / units * 1e6}


def peak_mb() -> float:
    """Of this program: what getrusage says includes the process that started it."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


async def _repeated(seconds: float, once: Callable[[], Awaitable[int]], workers: int = 1) -> dict[str, float]:
    """So many at once, again and again, until the time is up."""
    watch = Stopwatch()
    await once()  # what is made at the first time is not counted
    watch.begin()
    done = 0

    async def work() -> None:
        nonlocal done
        while watch.elapsed_s < seconds:
            count = await once()
            done += count

    await asyncio.gather(*(work() for _ in range(workers)))
    return watch.figures(done)


async def _cycle(queues: Queues, name: str, items: list[NewItem]) -> int:
    await queues.queue_produce(name, items)
    reply = await queues.queue_lease(name, batch_size=len(items))
    await queues.queue_complete(name, [item.id for item in reply.items], partition=reply.partition)
    return len(reply.items)


async def _cycles(url: str, seconds: float, *, batch: int, workers: int = 1) -> dict[str, float]:
    items = [NewItem(payload=PAYLOAD)] * batch
    async with holdfast.open(url) as queues:
        await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        return await _repeated(seconds, lambda: _cycle(queues, "orders", items), workers)


async def cycle_single(folder: str, seconds: float) -> dict[str, float]:
    """Produce, lease, complete, one item at a time, one client."""
    return await _cycles(f"sqlite:///{folder}/q", seconds, batch=1)


async def cycle_batch(folder: str, seconds: float) -> dict[str, float]:
    """The same in batches of a hundred."""
    return await _cycles(f"sqlite:///{folder}/q", seconds, batch=BATCH)


async def memory_batch(seconds: float) -> dict[str, float]:
    """The same in memory."""
    return await _cycles("memory://", seconds, batch=BATCH)


async def postgres(url: str, seconds: float) -> dict[str, float]:
    """The same in PostgreSQL, four clients at once."""
    return await _cycles(url, seconds, batch=BATCH, workers=CONSUMERS)


async def producers(folder: str, seconds: float) -> dict[str, float]:
    """Sixty-four clients, each with one item at a time."""
    async with holdfast.open(f"sqlite:///{folder}/q") as queues:
        await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        item = [NewItem(payload=PAYLOAD)]

        async def once() -> int:
            return len((await queues.queue_produce("orders", item)).items)

        return await _repeated(seconds, once, PRODUCERS)


async def fill_depth(folder: str, count: int) -> dict[str, float]:
    """Ten queues with items that stay; not a measurement."""
    items = [NewItem(payload=PAYLOAD)] * 1000
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        for number in range(DEPTH_QUEUES):
            await queues.queues_create(f"queue-{number}", lease_timeout="10m", expire_timeout="10000h")
            for _ in range(count // DEPTH_QUEUES // 1000):
                await queues.queue_produce(f"queue-{number}", items)
    return {}


async def depth(folder: str, seconds: float) -> dict[str, float]:
    """Cycles in batches while many items wait, ten queues in turn."""
    items = [NewItem(payload=PAYLOAD)] * BATCH
    number = 0
    async with holdfast.open(f"sqlite:///{folder}") as queues:

        async def once() -> int:
            nonlocal number
            number += 1
            return await _cycle(queues, f"queue-{number % DEPTH_QUEUES}", items)

        return {**await _repeated(seconds, once), "peak_mb": peak_mb()}


async def declare(url: str, queue: str) -> dict[str, float]:
    """The queues of a consumer; not a measurement."""
    app = holdfast.App(url)
    app.consumer(queue, concurrency=HELD)(print)
    async with app.running(declare=True):
        return {}


async def consumers(url: str, queue: str, count: int) -> dict[str, float]:
    """An empty handler, from the first message to the last."""
    app = holdfast.App(url)
    watch, seen, found = Stopwatch(), 0, dict[str, float]()

    @app.consumer(queue, concurrency=HELD)
    async def handle(message: holdfast.Message) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            watch.begin()
        if seen == count:
            found.update(watch.figures(count - 1))
            app.stop()

    await app.run()
    return {**found, "peak_mb": peak_mb()}


async def collect(folder: str, count: int, url: str = "") -> dict[str, float]:
    """All payloads wait in their queue: from there to the notice. `url` is where the collector keeps its state."""
    queues_url = f"sqlite:///{folder}/q"
    url, blobs = url or queues_url, f"{folder}/blobs"
    about = {"transaction-id": "t", "series": "a"}
    async with holdfast.open(queues_url) as queues:
        await queues.queues_create("producer")
        async with holdfast.Collector(url, blobs=blobs, queues=queues) as collector:
            await collector.start(b"", producer="producer", transaction_id="t", series=["a"])
            reply = await queues.queue_lease("producer", request_timeout="10s")
            await queues.queue_complete("producer", [reply.items[0].id])
        for start in range(0, count, BATCH):
            items = [
                NewItem(
                    payload=ordinal.to_bytes(8, "big") + bytes(PART_BYTES - 8),
                    reference=json.dumps({**about, "ordinal": ordinal}),
                )
                for ordinal in range(start, min(count, start + BATCH))
            ]
            await queues.queue_produce("transaction-t-payload", items)
        header = NewItem(reference=json.dumps({**about, "count": count}))
        await queues.queue_produce("transaction-t-header", [header])
        watch = Stopwatch()
        watch.begin()
        async with holdfast.Collector(url, blobs=blobs, queues=queues) as collector:
            await collector.wait("t")
            return {**watch.figures(count), "peak_mb": peak_mb()}


ROWS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, float]]]] = {
    one.__name__: one
    for one in (
        cycle_single, cycle_batch, memory_batch, producers, postgres, fill_depth, depth, declare, consumers, collect
    )
}  # fmt: skip


def main(name: str, given: dict[str, Any]) -> None:
    """On uvloop, as the commands do it."""
    print(json.dumps(uvloop.run(ROWS[name](**given))))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
