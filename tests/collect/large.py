"""A large result in a process of its own, produced while it is collected; prints its peak of memory in MiB."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import holdfast
from holdfast.proof.process import child_process, python_argv
from tests.collect.producing import NOTIFY, PRODUCER, header, make_queues, payload, produce, take_request
from tests.support.eventually import eventually
from tests.support.forking import ROOT, memory_peak_mib

PART_BYTES = 2**20
BUDGET_BYTES = 8 * PART_BYTES
BATCH_COUNT = 4
AHEAD_COUNT = 64
#: An idle process has about 40 MiB, the budget is 8 MiB, and producing and reading hold a few parts each.
CEILING_MIB = 95


def body_of(ordinal: int) -> bytes:
    return ordinal.to_bytes(8, "big") * (PART_BYTES // 8)


async def collect(folder: Path, count: int) -> None:
    """The producer is never far ahead, so that the disk has to hold the result once."""
    url = f"sqlite:///{folder}/data"
    expected, found = hashlib.sha256(), hashlib.sha256()
    async with (
        holdfast.open(url) as queues,
        holdfast.Collector(url, queues=queues, uploads_bytes_max=BUDGET_BYTES) as collector,
    ):
        await make_queues(queues)
        await collector.start(b"", producer=PRODUCER, notify=NOTIFY, transaction_id="large", series=["a"])
        await take_request(queues)

        async def is_near(start: int) -> bool:
            return start - sum(each.stored_count for each in await collector.progress("large")) < AHEAD_COUNT

        for start in range(0, count, BATCH_COUNT):
            items = [payload("large", "a", n, body_of(n)) for n in range(start, min(count, start + BATCH_COUNT))]
            for item in items:
                expected.update(item.payload)
            await produce(queues, "large", "payload", items)
            await eventually(partial(is_near, start))
        await produce(queues, "large", "header", [header("large", "a", count)])
        await collector.wait("large", timeout_s=600)
        async for part in collector.parts("large", "a"):
            found.update(part.body)
    assert found.digest() == expected.digest(), "the result is not what was sent"


async def peak_mib(folder: Path, count: int) -> dict[str, float]:
    """Collect so many parts of 1 MiB in a child; what it says of itself."""
    argv = python_argv("tests.collect.large", str(folder), str(count))
    async with child_process(argv, env={"HOLDFAST_CRASH_AT": ""}, cwd=ROOT) as child:
        assert await child.wait(timeout_s=900) == 0, child.stderr.tail
        told: dict[str, float] = json.loads(child.stdout.lines[-1])
        return told


if __name__ == "__main__":
    began = time.monotonic()
    asyncio.run(collect(Path(sys.argv[1]), int(sys.argv[2])))
    print(json.dumps({"peak_mib": memory_peak_mib(os.getpid()), "took_s": round(time.monotonic() - began, 1)}))  # noqa: T201
