"""The long runs of the recovery: many random kills of the run and of its broker, cuts, a cluster, and large letters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import holdfast
from holdfast.core.item import RetryItem
from holdfast.core.message import Outgoing
from holdfast.proof.conservation import ConservationReport
from holdfast.proof.proxy import Proxy
from holdfast.services.queue.queues import Queues
from tests.recover import dead_letter_queue as letters
from tests.recover.dead_letter_queue import DeadLetterQueue, ended, header, letter, peak_mb, summary
from tests.recover.test_embedded import items, opened, recover, settled
from tests.support.amqp import Admin, message_id_of
from tests.support.command import Command
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node
from tests.support.rabbitmq_cluster import RabbitCluster

LETTERS = 4_000
ITEMS = 1_000
KILLS_A_ROUND = 10
RUNS_MAX = 60
LONG_TIMEOUT_S = 1_200.0
#: Of the letters of a round that go to one target: when so many are there, the run is in its middle.
UNDER_WAY = 1_500


@dataclass
class Recoveries:
    """Rounds of one scenario, until there were so many kills; all of them together are the tally."""

    node: Node
    kind: str
    count: int
    chance: random.Random
    tally: Counter[str]

    async def kills(self) -> None:
        """SIGKILL of the recovery at random moments."""
        while self.tally["kills"] < self.count:
            async with self._dlq() as dlq:
                await dlq.fill(_letters(LETTERS))
                possible = 0
                for _ in range(KILLS_A_ROUND):
                    window = self.chance.choice((1, 50, 500, 4000))
                    process = dlq.start("--window", str(window), "--rate", "1500/s")
                    # Killed before it has published anything, it would have nothing to lose.
                    await dlq.arrived(await dlq.admin.count("collection.scan") + 1, unless_ended=process)
                    out = await killed(process, self.chance.random() * 0.5, self.tally)
                    if out:  # it was through before
                        possible += json.loads(out.splitlines()[-1])["possible_duplicates"]
                await self._finish(dlq, possible)

    async def broker_kills(self) -> None:
        """`kill -9` of the broker in the middle of a run, which goes on when it is back."""
        while self.tally["kills"] < self.count:
            async with self._dlq() as dlq:
                await dlq.fill(_letters(LETTERS))
                await asyncio.sleep(letters.QUORUM_AGE_S if self.kind == "quorum" else 0)
                process = dlq.start("--rate", "1500/s", "--window", "1000")
                await dlq.arrived(self.chance.randrange(1, UNDER_WAY))
                self.node.kill()
                self.tally["kills"] += 1
                await asyncio.to_thread(self.node.start)
                possible = (await ended(process))["possible_duplicates"]
                async with Admin.open(self.node, dlq.admin.vhost, keep=True) as dlq.admin:
                    await self._finish(dlq, possible)

    async def cuts(self) -> None:
        """Connections cut on a queue with its default delivery limit; runs end rather than lose a letter."""
        async with self._dlq() as dlq, Proxy("127.0.0.1", self.node.port) as proxy:
            await dlq.fill(_letters(3 * LETTERS))
            possible = 0
            url = self.node.url(dlq.admin.vhost, port=proxy.port)
            while self.tally["kills"] < self.count:
                process = dlq.start("--rate", "400/s", "--window", "200", url=url)
                await dlq.arrived(await dlq.admin.count("collection.scan") + 1)
                while process.poll() is None and self.tally["kills"] < self.count:
                    await asyncio.sleep(0.5 + self.chance.random())
                    self.tally["kills"] += 1 if await proxy.cut() else 0
                process.terminate()
                possible += (await ended(process))["possible_duplicates"]
            await self._finish(dlq, possible)

    async def story(self) -> None:
        """The queue of the story: most are good, a thousand are refused, some are unknown."""
        good, refused, unknown = 118_500, 1_000, 262
        async with self._dlq() as dlq:
            await dlq.fill([letter(10**6, kind="Refused", key="refusing.queue")], counted=False)
            kinds = ["CollectionScan"] * good + ["Refused"] * refused + ["Strange"] * unknown
            random.Random(len(kinds)).shuffle(kinds)
            await dlq.fill(letter(number, kind=kind) for number, kind in enumerate(kinds))
            told = await ended(dlq.start(), 3, timeout_s=LONG_TIMEOUT_S)
            assert (told["recovered"], told["failed"], told["skipped"]) == (good, refused, unknown), told
            assert told["remaining"] == refused + unknown, told
            await dlq.admin.drain("refusing.queue", 1)
            seen = await dlq.found()
            kept = [message_id_of(one) for one in seen[dlq.name]]
            assert kept == sorted(kept), "those that were kept are in order"
            self._add(dlq.books.report(), 0)
            self.tally["rate_per_s"] = told["rate_per_s"]

    async def large(self) -> None:
        """Large letters in little memory."""
        count, size_bytes = 1_000, 4 * 2**20
        async with self._dlq() as dlq:
            for start in range(0, count, 20):
                bodies = {n: n.to_bytes(8, "big") + bytes(size_bytes - 8) for n in range(start, start + 20)}
                await dlq.fill([Outgoing("", "", letter(n).properties, body) for n, body in bodies.items()])
            process = dlq.start()
            peaking = asyncio.create_task(peak_mb(process))
            told = await ended(process, 0, timeout_s=LONG_TIMEOUT_S)
            peak = await peaking
            assert told["recovered"] == count, told
            # Too large to hold all of them: each number once.
            seen: set[int] = set()
            for _ in range(0, count, 10):
                seen |= {int.from_bytes(one.body[:8], "big") for one in await dlq.admin.drain("collection.scan", 10)}
            assert len(seen) == count
            self.tally.update(messages=count, peak_mb=peak)  # type: ignore[call-overload]
            assert 20 < peak < 200, peak

    async def cluster(self) -> None:
        """Three nodes; the one that leads the dead-letter queue is killed in the middle."""
        with RabbitCluster() as nodes, tempfile.TemporaryDirectory() as folder:
            nodes.create_vhost("recovery")
            async with Admin.open(nodes.nodes[0], "recovery", keep=True) as admin:
                dlq = await DeadLetterQueue(admin, Path(folder), kind="quorum").make(target_kind="quorum")
                await dlq.fill(_letters(LETTERS))
                await asyncio.sleep(letters.QUORUM_AGE_S)
                leader = nodes.leader_of("recovery", dlq.name)
                survivor = next(node for node in nodes.nodes if node is not leader)
                # Not by the node that dies: RabbitMQ 3.10 would go on counting letters to a connection that died too.
                url = nodes.url("recovery", first=nodes.nodes.index(survivor))
                process = dlq.start("--rate", "1500/s", url=url)
                await dlq.arrived(UNDER_WAY // 2)
                leader.kill()
                self.tally["kills"] = 1
            possible = (await ended(process))["possible_duplicates"]
            nodes.heal()
            async with Admin.open(survivor, "recovery", keep=True) as dlq.admin:
                await dlq.arrived(LETTERS, dlq.name, *letters.TARGETS)
                await self._finish(dlq, possible)

    async def embedded(self) -> None:
        """Of an embedded queue: every item is finished exactly once, however often its recovery was killed."""
        while self.tally["kills"] < self.count:
            with tempfile.TemporaryDirectory() as folder:
                await self._embedded_round(Path(folder), f"sqlite:///{folder}/work")

    async def _embedded_round(self, folder: Path, url: str) -> None:
        done: Counter[bytes] = Counter()
        expected = Counter(b"%d" % number for number in range(ITEMS))
        async with opened(url) as queues:
            await queues.queue_produce("orders", list(expected))
            await self._work(queues, done, finish=0.0)
        for _ in range(KILLS_A_ROUND):
            rate = f"{self.chance.choice((300, 3000))}/s"
            process = Command(folder, "memory://").start("recover", url, "dead", "--rate", rate)
            await killed(process, 0.9 + self.chance.random() * 1.2, self.tally)
            async with holdfast.open(url) as queues:
                await eventually(partial(settled, queues, "dead"))
                self.tally["midway"] += bool(await items(queues, "orders") and await items(queues, "dead"))
                await self._work(queues, done, finish=0.1)
        async with holdfast.open(url) as queues:
            summary = await recover(queues)
            assert summary.is_complete, summary
            await self._work(queues, done, finish=1.0)
            left = [*await items(queues, "orders"), *await items(queues, "dead")]
        found = done + Counter(item.payload for item in left)
        lost, twice = expected - found, found - expected
        self.tally.update(messages=ITEMS, lost=lost.total(), duplicates=twice.total())
        assert found == expected, (lost, twice)

    async def _work(self, queues: Queues, done: Counter[bytes], *, finish: float) -> None:
        """Finish some of what is in the queue; the others die."""
        while found := await items(queues, "orders"):
            leased = await queues.queue_lease("orders", batch_size=min(1_000, len(found)))
            finished = [item for item in leased.items if self.chance.random() < finish]
            if finished:
                await queues.queue_complete("orders", [item.id for item in finished], partition=leased.partition)
                done.update(item.payload for item in finished)
            dead = [RetryItem(id=item.id, dead=True) for item in leased.items if item not in finished]
            if dead:
                await queues.queue_retry("orders", dead, partition=leased.partition)
        await eventually(partial(settled, queues, "orders"))

    @asynccontextmanager
    async def _dlq(self) -> AsyncIterator[DeadLetterQueue]:
        await asyncio.to_thread(self.node.start)
        with tempfile.TemporaryDirectory() as folder:
            async with Admin.open(self.node, f"recover-{self.tally['kills']}") as admin:
                yield await DeadLetterQueue(admin, Path(folder), kind=self.kind).make()

    async def _finish(self, dlq: DeadLetterQueue, possible: int) -> None:
        """Run until nothing but the unknown is left, then count."""
        for _ in range(RUNS_MAX):
            told = summary(await dlq.recover("--empty-timeout", "1s", "--idle-timeout", "3s"))
            possible += told["possible_duplicates"]
            if told["remaining"] == told["skipped"]:
                break
        seen = await dlq.found()
        redrives: dict[str, set[object]] = {}
        for one in (one for place, found in seen.items() if place != dlq.name for one in found):
            redrives.setdefault(dlq.name_of(one), set()).add(header(one, "x-redrive-id"))
        assert all(len(ids) == 1 for ids in redrives.values()), "copies of one letter have one redrive id"
        self._add(dlq.books.report(), possible)

    def _add(self, report: ConservationReport, possible: int) -> None:
        """One round; a duplicate that no summary counted ends the scenario."""
        counts = json.loads(report.line("", kills=0))
        self.tally.update({name: counts[name] for name in ("messages", "lost", "duplicates", "altered", "unexpected")})
        self.tally["possible_duplicates"] += possible
        report.check(duplicates_max=possible)


async def killed(process: subprocess.Popen[bytes], life_s: float, tally: Counter[str]) -> bytes:
    """SIGKILL after so long, which counts if it still ran; what it had said."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, life_s)
    tally["kills"] += process.poll() is None
    process.kill()
    return process.communicate()[0]


def _letters(count: int) -> Iterator[Outgoing]:
    """Two types that are known, and one in forty that is not."""
    kinds = ["CollectionScan"] * 20 + ["CacheGeneration"] * 19 + ["Strange"]
    return (letter(n, kind=kinds[n % 40]) for n in range(count))
