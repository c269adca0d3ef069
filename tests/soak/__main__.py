"""`make soak`: many random kills per store and long runs of the state machines; one JSON line per scenario.

`make soak ARGS="--kills 200 --only sqlite-kills --seed 7"`. Ends with 1 when anything was lost, altered, duplicated or
came from nowhere, or when a machine found a contradiction; the reason goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import seed as seeded
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test
from msgspec import to_builtins

from tests.collect.kills import Tally, embedded_kills, shared_kills
from tests.collect.large import CEILING_MIB, peak_mib
from tests.collect.shared import running_bucket
from tests.faults.consuming import random_faults
from tests.faults.kills import random_kills
from tests.model.installation import PostgresBackend
from tests.model.profile import settings_for
from tests.model.test_moves import MemoryMoves, SqliteMoves
from tests.model.test_service import MemoryMachine, PostgresMachine, SqliteMachine
from tests.recover import soak as recover
from tests.recover import soak_embedded
from tests.support.amqp import Admin
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node
from tests.support.rabbitmq_cluster import running_rabbitmq_cluster
from tests.vault import soak as custody
from tests.vault.test_model import MemoryVault, PostgresVault, SqliteVault

KILLS_DEFAULT = 60
EXAMPLES_DEFAULT = 1_000
LARGE_COUNT = 2_048
COLLECT_KILLS_MIN = 200
CUSTODY_KILLS = 200

MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "memory-model": MemoryMachine,
    "memory-moves": MemoryMoves,
    "sqlite-model": SqliteMachine,
    "sqlite-moves": SqliteMoves,
    "custody-memory-model": MemoryVault,
    "custody-sqlite-model": SqliteVault,
}

#: Scenario, and how many kills or cuts it has to bear.
RECOVERIES: dict[str, tuple[Callable[[int, int], Coroutine[Any, Any, recover.Tally]], int]] = {
    "recover-kills-classic": (lambda count, seed: recover.kills("classic", count=count, seed=seed), 100),
    "recover-kills-quorum": (lambda count, seed: recover.kills("quorum", count=count, seed=seed), 100),
    "recover-broker-classic": (lambda count, seed: recover.broker_kills("classic", count=count, seed=seed), 20),
    "recover-broker-quorum": (lambda count, seed: recover.broker_kills("quorum", count=count, seed=seed), 20),
    "recover-cuts": (lambda count, seed: recover.cuts(count=count, seed=seed), 30),
    "recover-cluster": (lambda count, seed: recover.cluster(running_rabbitmq_cluster), 1),
    "recover-embedded": (lambda count, seed: soak_embedded.kills(count=count, seed=seed), 100),
    "recover-story": (lambda count, seed: recover.seed_shape(), 0),
    "recover-large": (lambda count, seed: recover.large(), 0),
}


class Soak:
    """One run; `ok` as long as nothing went wrong."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._stack = stack
        self.ok = True
        self.scenarios: dict[str, Callable[[str], None]] = {
            "sqlite-kills": self._sqlite_kills,
            "postgres-kills": self._postgres_kills,
            "rabbitmq-cluster": self._rabbitmq_cluster,
            **dict.fromkeys(MACHINES, self._machine),
            "postgres-model": self._postgres_machine,
            **dict.fromkeys(RECOVERIES, self._recover),
            "custody-sqlite": lambda name: self._custody(name, ""),
            "custody-postgres": lambda name: self._custody(name, self._database("custody")),
            "custody-postgres-model": self._postgres_vault,
            "collect-embedded": self._collect_embedded,
            "collect-shared": self._collect_shared,
            "collect-large": self._collect_large,
        }

    def run(self, name: str) -> None:
        """One scenario. Whatever goes wrong is told, and the others are run all the same."""
        try:
            self.scenarios[name](name)
        except Exception:  # noqa: BLE001 - the whole traceback is told, and the end is not 0
            self.ok = False
            traceback.print_exc()
            print(json.dumps({"scenario": name, "failed": True}), flush=True)

    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-soak-")))

    def _sqlite_kills(self, name: str) -> None:
        folder = self._folder()
        self._kills(name, f"sqlite:///{folder}/data", folder)

    def _postgres_kills(self, name: str) -> None:
        cluster = self._stack.enter_context(Cluster())
        self._kills(name, cluster.create_database("soak"), self._folder())

    def _rabbitmq_cluster(self, name: str) -> None:
        """Each fault costs a node's restart: a tenth of the kills takes as long."""
        began, faults = time.monotonic(), max(1, self._options.kills // 10)
        cluster = self._stack.enter_context(running_rabbitmq_cluster())
        report = asyncio.run(random_faults(cluster, faults=faults, seed=self._options.seed))
        took_s = round(time.monotonic() - began, 1)
        print(report.line(name, kills=faults, seed=self._options.seed, took_s=took_s), flush=True)
        report.check(duplicates_max=None)

    def _kills(self, name: str, url: str, folder: Path) -> None:
        began = time.monotonic()
        kills = self._options.kills
        report = asyncio.run(random_kills(url, folder, kills=kills, seed=self._options.seed, partitions=2))
        took_s = round(time.monotonic() - began, 1)
        print(
            report.line(name, kills=kills, items=report.put_count, seed=self._options.seed, took_s=took_s), flush=True
        )
        report.check()

    def _collect_embedded(self, name: str) -> None:
        kills = max(COLLECT_KILLS_MIN, self._options.kills)
        self._collect(name, embedded_kills(kills=kills, seed=self._options.seed))

    def _collect_shared(self, name: str) -> None:
        cluster = self._stack.enter_context(Cluster())
        node = self._stack.enter_context(Node())
        bucket = self._stack.enter_context(running_bucket())
        kills = max(COLLECT_KILLS_MIN, self._options.kills)

        async def run() -> Tally:
            async with Admin.open(node, "soak") as admin:
                url = cluster.create_database("collect")
                return await shared_kills(url, admin, bucket, kills=kills, seed=self._options.seed)

        self._collect(name, run())

    def _collect_large(self, name: str) -> None:
        """2 GiB in parts of 1 MiB: the memory stays what it is for 100 of them."""
        told = asyncio.run(peak_mib(self._folder(), LARGE_COUNT))
        self.ok = self.ok and told["peak_mib"] < CEILING_MIB
        print(json.dumps({"scenario": name, "parts": LARGE_COUNT, **told, "ceiling_mib": CEILING_MIB}), flush=True)

    def _collect(self, name: str, running: Coroutine[Any, Any, Tally]) -> None:
        began = time.monotonic()
        tally = asyncio.run(running)
        took_s = round(time.monotonic() - began, 1)
        line = {"scenario": name, **to_builtins(tally), "seed": self._options.seed, "took_s": took_s}
        print(json.dumps(line), flush=True)

    def _recover(self, name: str) -> None:
        began = time.monotonic()
        scenario, least = RECOVERIES[name]
        given = self._options.kills
        tally = asyncio.run(scenario(least if given == KILLS_DEFAULT else given, self._options.seed))
        numbers = {key: value for key, value in vars(tally).items() if key != "more"}
        took_s = round(time.monotonic() - began, 1)
        print(json.dumps({"scenario": name, **numbers, **tally.more, "took_s": took_s}), flush=True)

    def _database(self, name: str) -> str:
        return self._stack.enter_context(Cluster()).create_database(name)

    def _custody(self, name: str, vault: str) -> None:
        began = time.monotonic()
        kills = CUSTODY_KILLS if self._options.kills == KILLS_DEFAULT else self._options.kills
        found = asyncio.run(custody.random_kills(kills=kills, seed=self._options.seed, vault=vault))
        took_s = round(time.monotonic() - began, 1)
        print(json.dumps({"scenario": name, **found, "seed": self._options.seed, "took_s": took_s}), flush=True)
        self.ok = self.ok and not found["lost"] and found["balanced"] and found["chain"] == "holds"

    def _postgres_machine(self, name: str) -> None:
        cluster = self._stack.enter_context(Cluster())
        PostgresBackend.url = cluster.create_database("model")
        # Each look at the store is a dozen round trips: a tenth of the examples takes as long.
        self._run_machine(name, PostgresMachine, examples=max(1, self._options.examples // 10))

    def _postgres_vault(self, name: str) -> None:
        PostgresVault.url = self._database("vault")
        self._run_machine(name, PostgresVault, examples=max(1, self._options.examples // 10))

    def _machine(self, name: str) -> None:
        self._run_machine(name, MACHINES[name], examples=self._options.examples)

    def _run_machine(self, name: str, machine: type[RuleBasedStateMachine], *, examples: int) -> None:
        began = time.monotonic()
        profile = settings(settings_for(examples=examples, steps=60), database=None)
        test = get_state_machine_test(machine, settings=profile)
        seeded(self._options.seed)(test)()
        numbers = {
            "scenario": name,
            "kills": 0,
            "examples": examples,
            "lost": 0,
            "duplicates": 0,
            "seed": self._options.seed,
            "took_s": round(time.monotonic() - began, 1),
        }
        print(json.dumps(numbers), flush=True)


def main() -> int:
    """Run what was asked for."""
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # the faults are on purpose
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS_DEFAULT, help="kills per store")
    parser.add_argument("--examples", type=int, default=EXAMPLES_DEFAULT, help="examples per state machine")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what chance begins with")
    parser.add_argument("--only", action="append", help="a scenario; may be given more than once")
    options = parser.parse_args()
    with ExitStack() as stack:
        soak = Soak(options, stack)
        unknown = set(options.only or ()) - set(soak.scenarios)
        if unknown:
            parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(soak.scenarios)}")
        for name in options.only or soak.scenarios:
            soak.run(name)
    return 0 if soak.ok else 1


if __name__ == "__main__":
    sys.exit(main())
