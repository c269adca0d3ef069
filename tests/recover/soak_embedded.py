"""The long run of embedded recoveries: SIGKILL at random moments, while what came back is finished or dies again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import holdfast
from holdfast.core.item import RetryItem
from holdfast.services.queue.queues import Queues
from tests.recover.soak import Tally
from tests.recover.test_embedded import items, opened, recover, settled
from tests.support.command import Command
from tests.support.eventually import eventually

ITEMS = 1_000
KILLS_A_ROUND = 10


async def kills(*, count: int, seed: int) -> Tally:
    """Every item is finished exactly once, however often its recovery was killed."""
    chance = random.Random(seed)
    tally = Tally()
    while tally.kills < count:
        with tempfile.TemporaryDirectory() as folder:
            await _round(Path(folder), chance, tally)
    return tally


async def _round(folder: Path, chance: random.Random, tally: Tally) -> None:
    url = f"sqlite:///{folder}/work"
    done: Counter[bytes] = Counter()
    expected = Counter(b"%d" % number for number in range(ITEMS))
    async with opened(url) as queues:
        await queues.queue_produce("orders", list(expected))
        await _work(queues, done, finish=0.0, chance=chance)
    for _ in range(KILLS_A_ROUND):
        process = Command(folder, "memory://").start(
            "recover", url, "dead", "--rate", f"{chance.choice((300, 3000))}/s"
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 0.9 + chance.random() * 1.2)
        tally.kills += process.poll() is None
        process.kill()
        process.communicate()
        async with holdfast.open(url) as queues:
            await eventually(lambda queues=queues: settled(queues, "dead"))  # type: ignore[misc]
            midway = bool(await items(queues, "orders") and await items(queues, "dead"))
            tally.more["midway"] = tally.more.get("midway", 0) + midway
            await _work(queues, done, finish=0.1, chance=chance)
    async with holdfast.open(url) as queues:
        summary = await recover(queues)
        assert summary.is_complete, summary
        await _work(queues, done, finish=1.0, chance=chance)
        left = [*await items(queues, "orders"), *await items(queues, "dead")]
    tally.messages += ITEMS
    found = done + Counter(item.payload for item in left)
    tally.lost += sum((expected - found).values())
    tally.duplicates += sum((found - expected).values())
    assert found == expected, (expected - found, found - expected)


async def _work(queues: Queues, done: Counter[bytes], *, finish: float, chance: random.Random) -> None:
    """Finish some of what is in the queue; the others die."""
    while found := await items(queues, "orders"):
        leased = await queues.queue_lease("orders", batch_size=min(1_000, len(found)))
        finished = [item for item in leased.items if chance.random() < finish]
        if finished:
            await queues.queue_complete("orders", [item.id for item in finished], partition=leased.partition)
            done.update(item.payload for item in finished)
        dead = [RetryItem(id=item.id, dead=True) for item in leased.items if item not in finished]
        if dead:
            await queues.queue_retry("orders", dead, partition=leased.partition)
    await eventually(lambda: settled(queues, "orders"))
