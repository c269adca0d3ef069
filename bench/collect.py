"""The collector on the embedded default beside the same bytes written and fsynced with the same concurrency.

Also: the cost per ordinal from 1 000 to 200 000 ordinals in one transaction, and the memory at its highest.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import holdfast
from bench.rounds import Target, report, run
from holdfast.core.collect import queue_names
from holdfast.core.item import NewItem

PART_BYTES = 64 * 1024
PARTS_COUNT = 10_000
UPLOADS_MAX = 16
FLAT_COUNTS = (1_000, 200_000)
FLAT_BYTES = 64
FLAT_MUST = 0.8
BATCH_COUNT = 50


def body_of(ordinal: int, size_bytes: int) -> bytes:
    return ordinal.to_bytes(8, "big") + os.urandom(32) + bytes(size_bytes - 40)


def written(folder: Path, count: int) -> float:
    """Nothing but write and fsync of each file, in as many threads."""
    folder.mkdir()
    template = os.urandom(PART_BYTES)

    def write(ordinal: int) -> None:
        file = os.open(folder / str(ordinal), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, template)
        os.fsync(file)
        os.close(file)

    began = time.perf_counter()
    with ThreadPoolExecutor(UPLOADS_MAX) as threads:
        for _ in threads.map(write, range(count)):
            pass
    return count / (time.perf_counter() - began)


async def collected(folder: Path, count: int, size_bytes: int) -> float:
    """All payloads are in the queue; the time is from there to the last ordinal in the index."""
    url = f"sqlite:///{folder}/data"
    async with holdfast.open(url) as queues:
        await queues.queues_create("producer")
        async with holdfast.Collector(url, queues=queues) as collector:
            await collector.start(b"", producer="producer", transaction_id="t", series=["a"])
            reply = await queues.queue_lease("producer", request_timeout="10s")
            await queues.queue_complete("producer", [item.id for item in reply.items])
        _, payloads = queue_names("t")
        step = max(1, min(BATCH_COUNT * 10, 4_000_000 // size_bytes))
        for start in range(0, count, step):
            items = [
                NewItem(
                    payload=body_of(ordinal, size_bytes),
                    reference=msgspec.json.encode({"transaction-id": "t", "series": "a", "ordinal": ordinal}).decode(),
                )
                for ordinal in range(start, min(count, start + step))
            ]
            await queues.queue_produce(payloads, items)
        header = msgspec.json.encode({"transaction-id": "t", "series": "a", "count": count}).decode()
        await queues.queue_produce(queue_names("t")[0], [NewItem(reference=header)])
        began = time.perf_counter()
        async with holdfast.Collector(url, queues=queues, uploads_max=UPLOADS_MAX) as collector:
            await collector.wait("t")
            rate = count / (time.perf_counter() - began)
    return rate


def alone(count: int, size_bytes: int) -> tuple[float, float, float]:
    """In a process of its own: rate, CPU seconds per ordinal (this is what other load hardly changes), peak MiB."""
    argv = [sys.executable, "-m", "bench.collect", str(count), str(size_bytes)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    rate, cpu_s, peak_mib = json.loads(done.stdout.splitlines()[-1])
    return rate, cpu_s, peak_mib


def main(*, rounds: int, quick: bool) -> bool:
    count = 2_000 if quick else PARTS_COUNT
    base = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        return base / str(number)

    def baseline() -> float:
        folder = fresh()
        rate = written(folder, count)
        shutil.rmtree(folder)
        return rate

    def collector() -> float:
        return alone(count, PART_BYTES)[0]

    try:
        name = f"collect {count} x 64 KiB"
        rates = run(name, {"collector": collector, "write + fsync": baseline}, rounds=rounds)
        met = report(name, rates, [Target("collector", "write + fsync", 0.5, 0.7)])
        return flat(rounds=min(rounds, 3), quick=quick) and met
    finally:
        shutil.rmtree(base, ignore_errors=True)


def flat(*, rounds: int, quick: bool) -> bool:
    """The CPU time per ordinal of a small and of a large transaction, and their peaks of memory."""
    few, many = (1_000, 20_000) if quick else FLAT_COUNTS
    costs: dict[str, list[float]] = {"few": [], "many": []}
    peaks: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(rounds):
        for name, count in (("few", few), ("many", many)):
            _, cpu_s, peak_mib = alone(count, FLAT_BYTES)
            costs[name].append(1 / cpu_s)
            peaks[name].append(peak_mib)
    print(f"  peak memory: {min(peaks['few']):.0f} MiB at {few}, {max(peaks['many']):.0f} MiB at {many} ordinals")
    return report("collect, ordinals per CPU second", costs, [Target("many", "few", FLAT_MUST, 1.0)])


def own_peak_mib() -> float:
    """Of this program: what `getrusage` says includes the process that it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


def _child(count: int, size_bytes: int) -> None:
    folder = tempfile.mkdtemp(prefix="holdfast-bench-")
    try:
        before = time.process_time()
        rate = asyncio.run(collected(Path(folder), count, size_bytes))
        cpu_s = (time.process_time() - before) / count
        # Before the folder is removed: listing its files takes more memory than collecting them.
        peak_mib = own_peak_mib()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps([rate, cpu_s, peak_mib]))


if __name__ == "__main__":
    _child(int(sys.argv[1]), int(sys.argv[2]))
