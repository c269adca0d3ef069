"""The long runs of the recovery: many random kills of the run and of its broker, cuts, a cluster, and large letters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.message import Outgoing
from holdfast.proof.conservation import ConservationReport
from holdfast.proof.proxy import Proxy
from tests.recover.dead_letter_queue import TARGETS, DeadLetterQueue, header, letter, peak_mb, summary
from tests.support.amqp import Admin, message_id_of
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node
from tests.support.rabbitmq_cluster import running_rabbitmq_cluster

LETTERS = 4_000
KILLS_A_ROUND = 10
RUNS_MAX = 60
LONG_TIMEOUT_S = 1_200.0
QUORUM_AGE_S = 3.0
#: Of the letters of a round that go to one target: when so many are there, the run is in its middle.
UNDER_WAY = 1_500


@dataclass
class Tally:
    """All rounds of a scenario together."""

    kills: int = 0
    messages: int = 0
    lost: int = 0
    duplicates: int = 0
    possible_duplicates: int = 0
    altered: int = 0
    unexpected: int = 0
    more: dict[str, float] = field(default_factory=dict)

    def add(self, report: ConservationReport, possible: int) -> None:
        """One round; a duplicate that no summary counted ends the scenario."""
        self.messages += report.put_count
        self.lost += len(report.lost)
        self.duplicates += report.duplicates_count
        self.possible_duplicates += possible
        self.altered += len(report.altered)
        self.unexpected += len(report.unexpected)
        report.check(duplicates_max=possible)


async def kills(kind: str, *, count: int, seed: int) -> Tally:
    """SIGKILL of the recovery at random moments."""
    chance = random.Random(seed)
    tally = Tally()
    with Node() as node:
        while tally.kills < count:
            async with _dlq(node, kind, f"kills-{tally.kills}") as dlq:
                await dlq.fill(_letters(LETTERS))
                possible = 0
                for _ in range(KILLS_A_ROUND):
                    process = dlq.start("--window", str(chance.choice((1, 50, 500, 4000))), "--rate", "1500/s")
                    await _begun(dlq.admin, process)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        await asyncio.to_thread(process.wait, chance.random() * 0.5)
                    tally.kills += process.poll() is None
                    process.kill()
                    out, _ = process.communicate()
                    if out:  # it was through before
                        possible += json.loads(out.splitlines()[-1])["possible_duplicates"]
                await _finish(dlq, tally, possible)
    return tally


async def broker_kills(kind: str, *, count: int, seed: int) -> Tally:
    """`kill -9` of the broker in the middle of a run, which goes on when it is back."""
    chance = random.Random(seed)
    tally = Tally()
    with Node() as node:
        while tally.kills < count:
            vhost = f"broker-{tally.kills}"
            with tempfile.TemporaryDirectory() as folder:
                async with Admin.open(node, vhost, keep=True) as admin:
                    dlq = await DeadLetterQueue(admin, Path(folder), kind=kind).make()
                    await dlq.fill(_letters(LETTERS))
                    await asyncio.sleep(QUORUM_AGE_S if kind == "quorum" else 0)
                    process = dlq.start("--rate", "1500/s", "--window", "1000")
                    await _arrived(admin, chance.randrange(1, UNDER_WAY))
                    node.kill()
                    tally.kills += 1
                await asyncio.to_thread(node.start)
                possible = (await _ended(process, 0, 3))["possible_duplicates"]
                async with Admin.open(node, vhost) as admin:
                    dlq.admin = admin
                    await _finish(dlq, tally, possible)
    return tally


async def cuts(*, count: int, seed: int) -> Tally:
    """Connections cut on 4.0, a quorum queue with its default delivery limit; runs end rather than lose a letter."""
    chance = random.Random(seed)
    tally = Tally()
    with Node("4.0") as node:
        async with _dlq(node, "quorum", "cuts") as dlq, Proxy("127.0.0.1", node.port) as proxy:
            await dlq.fill(_letters(3 * LETTERS))
            possible = 0
            url = node.url(dlq.admin.vhost, port=proxy.port)
            while tally.kills < count:
                process = dlq.start("--rate", "400/s", "--window", "200", url=url)
                await _arrived(dlq.admin, await dlq.admin.count("collection.scan") + 1)
                while process.poll() is None and tally.kills < count:
                    await asyncio.sleep(0.5 + chance.random())
                    tally.kills += 1 if await proxy.cut() else 0
                process.terminate()
                possible += (await _ended(process, 0, 3))["possible_duplicates"]
            await _finish(dlq, tally, possible)
    return tally


async def seed_shape() -> Tally:
    """The queue of the story: most are good, a thousand are refused, some are unknown."""
    tally = Tally()
    good, refused, unknown = 118_500, 1_000, 262
    with Node() as node:
        async with _dlq(node, "classic", "story") as dlq:
            await dlq.fill([letter(10**6, kind="Refused", key="refusing.queue")], counted=False)
            kinds = ["CollectionScan"] * good + ["Refused"] * refused + ["Strange"] * unknown
            random.Random(len(kinds)).shuffle(kinds)
            await dlq.fill(letter(number, kind=kind) for number, kind in enumerate(kinds))
            told = await _ended(dlq.start(), 3, timeout_s=LONG_TIMEOUT_S)
            assert (told["recovered"], told["failed"], told["skipped"]) == (good, refused, unknown), told
            assert told["remaining"] == refused + unknown, told
            await dlq.admin.drain("refusing.queue", 1)
            seen = await dlq.found()
            kept = [message_id_of(one) for one in seen[dlq.name]]
            assert kept == sorted(kept), "those that were kept are in order"
            tally.add(dlq.books.report(), 0)
            tally.more = {"rate_per_s": told["rate_per_s"]}
    return tally


async def large() -> Tally:
    """Large letters in little memory."""
    tally, count, size_bytes = Tally(), 1_000, 4 * 2**20
    with Node() as node:
        async with _dlq(node, "classic", "large") as dlq:
            for start in range(0, count, 20):
                await dlq.fill(
                    [
                        Outgoing("", "", letter(n).properties, n.to_bytes(8, "big") + bytes(size_bytes - 8))
                        for n in range(start, min(start + 20, count))
                    ]
                )
            process = dlq.start()
            peaking = asyncio.create_task(peak_mb(process))
            told = await _ended(process, 0, timeout_s=LONG_TIMEOUT_S)
            peak = await peaking
            assert told["recovered"] == count, told
            await _count_by_hand(dlq, count)
            tally.messages, tally.more = count, {"peak_mb": peak}
            assert 20 < peak < 200, peak
    return tally


async def cluster() -> Tally:
    """Three nodes; the one that leads the dead-letter queue is killed in the middle."""
    tally = Tally()
    with running_rabbitmq_cluster() as nodes, tempfile.TemporaryDirectory() as folder:
        nodes.create_vhost("recovery")
        async with Admin.open(nodes.nodes[0], "recovery", keep=True) as admin:
            dlq = await DeadLetterQueue(admin, Path(folder), kind="quorum").make()
            for target in ("collection.scan", "cache.generation", "library_scan_queue"):
                await admin.delete(target)
                await admin.quorum_queue(target)
                await admin.bind(target, "imageviewer", target)
            await dlq.fill(_letters(LETTERS))
            await asyncio.sleep(QUORUM_AGE_S)
            leader = nodes.leader_of("recovery", dlq.name)
            survivor = nodes.others(leader)[0]
            # Not by the node that dies: RabbitMQ 3.10 would go on counting letters to a connection that died with it.
            url = nodes.url("recovery", first=nodes.nodes.index(survivor))
            process = dlq.start("--rate", "1500/s", url=url)
            await _arrived(admin, UNDER_WAY // 2)
            leader.kill()
            tally.kills = 1
        possible = (await _ended(process, 0, 3))["possible_duplicates"]
        nodes.heal()
        async with Admin.open(survivor, "recovery", keep=True) as admin:
            dlq.admin = admin
            await _arrived(admin, LETTERS, dlq.name, *TARGETS)
            await _finish(dlq, tally, possible)
    return tally


async def _ended(process: subprocess.Popen[bytes], *codes: int, timeout_s: float = 180.0) -> dict[str, Any]:
    """What a run told at its end, which must be one of these."""
    out, err = await asyncio.to_thread(process.communicate, timeout=timeout_s)
    assert process.returncode in codes, err
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


async def _begun(admin: Admin, process: subprocess.Popen[bytes]) -> None:
    """It has published something, or is over: killed earlier, it would have had nothing to lose."""
    before = await admin.count("collection.scan")

    async def has_begun() -> bool:
        return process.poll() is not None or await admin.count("collection.scan") > before

    await eventually(has_begun)


async def _arrived(admin: Admin, count: int, *places: str) -> None:
    """So many are there. A run that has only begun to connect would be told that there is no broker, and rightly end; a
    quorum queue says 0 while it has no leader, and what is asked too early would look lost."""

    async def are_there() -> bool:
        return sum([await admin.count(place) for place in places or ("collection.scan",)]) >= count

    await eventually(are_there, timeout_s=90.0)


async def _finish(dlq: DeadLetterQueue, tally: Tally, possible: int = 0) -> None:
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
    tally.add(dlq.books.report(), possible)


async def _count_by_hand(dlq: DeadLetterQueue, count: int) -> None:
    """Too large to hold all of them: each number once."""
    seen: set[int] = set()
    for _ in range(0, count, 10):
        for one in await dlq.admin.drain("collection.scan", 10):
            seen.add(int.from_bytes(one.body[:8], "big"))
    assert len(seen) == count


def _letters(count: int) -> Iterator[Outgoing]:
    """Two types that are known, and one in forty that is not."""
    kinds = ["CollectionScan"] * 20 + ["CacheGeneration"] * 19 + ["Strange"]
    return (letter(n, kind=kinds[n % 40]) for n in range(count))


@asynccontextmanager
async def _dlq(node: Node, kind: str, vhost: str) -> AsyncIterator[DeadLetterQueue]:
    with tempfile.TemporaryDirectory() as folder:
        async with Admin.open(node, vhost) as admin:
            yield await DeadLetterQueue(admin, Path(folder), kind=kind).make()
