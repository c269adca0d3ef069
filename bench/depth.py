"""Flat in depth: the cycle at a thousand and at a million queued items, ten queues in use, and a full drain.

Each depth is a folder that is filled once; then both are measured in turn, within one process each, so that memory is
that of a server with so many items.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

import holdfast
from bench.cycle import PAYLOAD
from bench.rounds import Target, report
from holdfast import NewItem, Queues

QUEUES = 10


async def _fill(queues: Queues, name: str, count: int) -> None:
    items = [NewItem(payload=PAYLOAD) for _ in range(1000)]
    for _ in range(count // 1000):
        await queues.queue_produce(name, items)


async def _open_and_measure(folder: Path, *, depth: int, cycles: int) -> dict[str, float]:
    started_s = time.perf_counter()
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        start_s = time.perf_counter() - started_s
        items = [NewItem(payload=PAYLOAD) for _ in range(100)]
        leases_ms = []
        started_s = time.perf_counter()
        for number in range(cycles):
            name = f"queue-{number % QUEUES}"
            await queues.queue_produce(name, items)
            leased_s = time.perf_counter()
            reply = await queues.queue_lease(name, batch_size=100)
            leases_ms.append((time.perf_counter() - leased_s) * 1000)
            await queues.queue_complete(name, [item.id for item in reply.items])
        rate = cycles * 100 / (time.perf_counter() - started_s)
    return {
        "depth": depth,
        "rate": rate,
        "start_s": start_s,
        "lease_p99_ms": statistics.quantiles(leases_ms, n=100)[98],
        "rss_mb": psutil.Process().memory_info().rss / 1e6,
    }


async def _drain(folder: Path) -> list[float]:
    """Lease and complete everything, from all queues in turn; the rate of each tenth."""
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        left = {}
        for number in range(QUEUES):
            stats = await queues.queue_stats(f"queue-{number}")
            partition = stats.logical_queues[0].partitions[0]
            left[f"queue-{number}"] = partition.total - partition.total_leased
        total = sum(left.values())
        rates, done, tenth_s, tenth = [], 0, time.perf_counter(), 0
        while left:
            for name in list(left):
                reply = await queues.queue_lease(name, batch_size=100)
                await queues.queue_complete(name, [item.id for item in reply.items])
                done += len(reply.items)
                left[name] -= len(reply.items)
                if not left[name]:
                    del left[name]
            if done * 10 // total > tenth:
                tenth = done * 10 // total
                rates.append(total / 10 / (time.perf_counter() - tenth_s))
                tenth_s = time.perf_counter()
        return rates


async def _be_killed(folder: Path) -> None:
    """Work on every queue, so that no file has exact counts, and end as a killed server does."""
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        for number in range(QUEUES):
            await queues.queue_produce(f"queue-{number}", [NewItem(payload=PAYLOAD)])
            await queues.queue_lease(f"queue-{number}", batch_size=1)
        os.kill(os.getpid(), signal.SIGKILL)


async def _start(folder: Path) -> dict[str, float]:
    """How long a start takes until the first item is leased."""
    started_s = time.perf_counter()
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        await queues.queue_lease("queue-0", batch_size=1)
        return {"start_s": time.perf_counter() - started_s}


def _start_after_a_kill(folder: Path) -> float:
    command = [sys.executable, "-m", "bench.depth", "killed", str(folder)]
    ended = subprocess.run(command, check=False)
    assert ended.returncode == -signal.SIGKILL
    return _child("start", str(folder))["start_s"]


async def _make(folder: Path, depth: int) -> None:
    async with holdfast.open(f"sqlite:///{folder}") as queues:
        for number in range(QUEUES):
            await queues.queues_create(f"queue-{number}", lease_timeout="10m", expire_timeout="24h")
            await _fill(queues, f"queue-{number}", depth // QUEUES if depth >= 10_000 else 1000)


def _child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.depth", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer: dict[str, float] = json.loads(output)
    return answer


def main(*, rounds: int, quick: bool) -> bool:
    """Both depths in turn; returns whether every must is met."""
    deep = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        shallow_folder, deep_folder = Path(folder, "shallow"), Path(folder, "deep")
        asyncio.run(_make(shallow_folder, 1000))
        asyncio.run(_make(deep_folder, deep))
        rates: dict[str, list[float]] = {"shallow": [], "deep": []}
        last: dict[str, float] = {}
        for _ in range(rounds):
            rates["shallow"].append(_child("measure", str(shallow_folder), "1000")["rate"])
            last = _child("measure", str(deep_folder), str(deep))
            rates["deep"].append(last["rate"])
        met = report(f"cycle with {deep:,} queued in ten queues", rates, [Target("deep", "shallow", 0.75, 0.9)])
        killed_s = statistics.median(_start_after_a_kill(deep_folder) for _ in range(rounds))
        drained = asyncio.run(_drain(deep_folder))
        # Tenths run one after another, not interleaved: halves say more than the luckiest and the unluckiest tenth.
        flat = statistics.median(drained[5:]) / statistics.median(drained[:5])
        print(
            f"  full drain, rate by tenth: {[round(rate) for rate in drained]}, "
            f"second half/first {flat:.2f} (must 0.75)"
        )
        print(
            f"  at {deep:,}: lease p99 {last['lease_p99_ms']:.1f} ms (must 20), start {last['start_s']:.2f} s, "
            f"after a kill {killed_s:.2f} s (must 2), memory {last['rss_mb']:.0f} MB (must 120, aim 90)"
        )
        figures = {"drain_second_over_first": round(flat, 3), "start_after_kill_s": round(killed_s, 3), **last}
        print(json.dumps({"bench": "depth", "deep": deep, **figures}))
    start_s = max(last["start_s"], killed_s)
    return met and flat >= 0.75 and last["lease_p99_ms"] < 20 and start_s < 2 and last["rss_mb"] <= 120


def _in_child(what: str, folder: Path, arguments: list[str]) -> dict[str, float]:
    if what == "killed":
        asyncio.run(_be_killed(folder))
    if what == "start":
        return asyncio.run(_start(folder))
    return asyncio.run(_open_and_measure(folder, depth=int(arguments[0]), cycles=300))


if __name__ == "__main__":
    print(json.dumps(_in_child(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
