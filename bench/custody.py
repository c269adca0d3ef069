"""Capture into the vault and redrive out of it, against a plain recovery of the same letters in the same round.

Letters with a body of 512 B and the headers of a dead letter. Recovery and redrive are timed from the first to the last
letter that is seen in the target, a capture from its start until the last letter is stored and acked. Each runs in a
process of its own, and its CPU is that of the process without its start.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.move import VHOST, Pair
from bench.movers import EXCHANGE
from bench.recover import Recoveries
from bench.rounds import Target, report, run
from holdfast.core.ledger import LedgerAct
from holdfast.core.plan import PlanOptions, RedriveTask
from holdfast.core.plan import Target as Aim
from holdfast.core.requests.declare import Caller, Role
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.settings import Secret, Settings, StorageSettings
from holdfast.wiring import open_vault_app
from tests.support.rabbitmq import Node

ADMIN = Caller(name="bench", role=Role.ADMIN, origin="bench")
MUST, AIM = 0.5, 0.6
IDLE_S = 10.0
ROOT = Path(__file__).parents[1]


class Custodies(Recoveries):
    """Recoveries, and the two ways of custody beside them."""

    def __init__(self, node: Any, *, profile: str = "") -> None:
        super().__init__(node)
        self._profile = profile
        self.cpu_us: dict[str, list[float]] = {"recovery": [], "capture": [], "redrive": []}

    def recovery(self, pair: Pair) -> float:
        """A plain recovery."""
        rate = self.recover(pair)
        self.cpu_us["recovery"].append(self.last_cpu_s / pair.count * 1e6)
        return rate

    def custody(self, pair: Pair, captures: list[float]) -> float:
        """Capture, then redrive; the rate of the redrive, that of the capture is noted."""
        with tempfile.TemporaryDirectory(prefix="holdfast-custody-") as folder:
            told = self._work("capture", pair, folder)
            captures.append(pair.count / told["wall_s"])
            self.cpu_us["capture"].append(told["cpu_s"] / pair.count * 1e6)
            command = self._command("redrive", pair, folder)
            rate, output = self._timed(pair, command, str(ROOT))
        told = json.loads(output.splitlines()[-1])
        self.cpu_us["redrive"].append(told["cpu_s"] / pair.count * 1e6)
        return rate

    def _command(self, word: str, pair: Pair, folder: str) -> list[str]:
        more = ["--profile", f"{self._profile}/{word}.prof"] if self._profile else []
        return [
            *(sys.executable, "-m", "bench.custody", word, self.url, pair.full, pair.empty, folder, str(pair.count)),
            *more,
        ]

    def _work(self, word: str, pair: Pair, folder: str) -> dict[str, float]:
        done = subprocess.run(
            self._command(word, pair, folder), capture_output=True, text=True, check=False, cwd=ROOT, timeout=600
        )
        if done.returncode != 0:
            raise RuntimeError(f"{word} failed\n{done.stderr[-2000:]}")
        told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        assert told["count"] == pair.count, told
        return told


async def work(word: str, url: str, queue: str, to: str, folder: str, count_max: int) -> dict[str, float]:
    """Capture or redrive everything, in this process."""
    settings = Settings(
        storages=(StorageSettings(name="default", url=f"sqlite:///{folder}"),),
        data_folder=Path(folder),
        broker=Secret(url),
        dead_queues="*",
    )
    async with open_vault_app(settings, None) as office:
        task: RedriveTask | None = None
        if word == "redrive":
            wish = PlanOptions(
                selection=Selection(queue=queue, state=LetterState.CAPTURED),
                target=Aim(kind="address", exchange=EXCHANGE, routing_key=to),
            )
            plan = await office.planner.plan(wish, ADMIN)
            task, _ = await office.planner.execute(plan.hash, ADMIN, LedgerAct(actor="bench", action="redrives.start"))
        before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        if task is None:
            # It ends with the last letter: a broker that is slow for a moment does not end it.
            count = (await office.custody.capture(queue, ADMIN, count_max=count_max, idle_s=IDLE_S)).captured
        else:
            await office.redrives.run(task.id)
            count = (await office.redrives.find(task.id)).redriven
        after, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began_s
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"count": count, "wall_s": wall_s, "cpu_s": cpu_s}


def measure(bench: Custodies, kind: str, *, rounds: int, count: int) -> bool:
    """Rounds on one kind of queue."""
    pair = bench.fill(kind, count, "custody")
    captures: list[float] = []
    variants = {"recovery": lambda: bench.recovery(pair), "redrive": lambda: bench.custody(pair, captures)}
    rates = run(f"custody {kind}", variants, rounds=rounds)
    rates["capture"] = captures
    targets = [Target(name, "recovery", MUST, AIM) for name in ("redrive", "capture")]
    met = report(f"custody, {kind} queues, {count:,} letters", rates, targets)
    cpu = {name: round(statistics.median(values), 1) for name, values in bench.cpu_us.items()}
    print(json.dumps({"bench": "custody", "queues": kind, "cpu_us": cpu}))
    return met


def main(*, rounds: int, quick: bool, profile: str = "") -> bool:
    """Classic and quorum queues; returns whether every must is met."""
    count = 20_000 if quick else 100_000
    with Node() as node:
        node.create_vhost(VHOST)
        bench = Custodies(node, profile=profile)
        met = [measure(bench, kind, rounds=rounds, count=count) for kind in ("classic", "quorum")]
        return all(met)


def _child() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.custody", description=__doc__)
    for name in ("word", "url", "queue", "to", "folder"):
        parser.add_argument(name)
    parser.add_argument("count", type=int)
    parser.add_argument("--profile")
    given = parser.parse_args()
    profiler = cProfile.Profile() if given.profile else None
    if profiler:
        profiler.enable()
    told = asyncio.run(work(given.word, given.url, given.queue, given.to, given.folder, given.count))
    if profiler:
        profiler.disable()
        profiler.dump_stats(given.profile)
    print(json.dumps(told))


if __name__ == "__main__":
    _child()
