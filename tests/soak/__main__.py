"""`make soak`: many random kills per store and long runs of the state machines; one JSON line per scenario.

`make soak ARGS="--kills 200 --only sqlite-kills --seed 7"`. Ends with 1 when anything was lost, altered, duplicated or
came from nowhere, or when a machine found a contradiction; the reason goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import seed as seeded
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

from holdfast.proof.conservation import ConservationReport
from tests.collect import kills as collect
from tests.collect.large import CEILING_MIB, peak_mib
from tests.collect.shared import running_bucket
from tests.faults.consuming import random_faults
from tests.faults.load import random_kills
from tests.model.installation import Backend, settings_for
from tests.model.test_moves import MemoryMoves, SqliteMoves
from tests.model.test_service import MemoryMachine, PostgresMachine, SqliteMachine
from tests.recover.soak import Recoveries
from tests.support.amqp import Admin
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node
from tests.support.rabbitmq_cluster import RabbitCluster
from tests.vault import soak as custody
from tests.vault.test_model import MemoryVault, PostgresVault, SqliteVault

KILLS_DEFAULT = 60
EXAMPLES_DEFAULT = 1_000
LARGE_COUNT = 2_048
MANY_KILLS = 200

MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "memory-model": MemoryMachine,
    "memory-moves": MemoryMoves,
    "sqlite-model": SqliteMachine,
    "sqlite-moves": SqliteMoves,
    "custody-memory-model": MemoryVault,
    "custody-sqlite-model": SqliteVault,
}

#: Scenario, the kind of its queue, and how many kills or cuts it has to bear.
RECOVERIES: dict[str, tuple[Callable[[Recoveries], Coroutine[Any, Any, None]], str, int]] = {
    "recover-kills-classic": (Recoveries.kills, "classic", 100),
    "recover-kills-quorum": (Recoveries.kills, "quorum", 100),
    "recover-broker-classic": (Recoveries.broker_kills, "classic", 20),
    "recover-broker-quorum": (Recoveries.broker_kills, "quorum", 20),
    "recover-cuts": (Recoveries.cuts, "quorum", 30),
    "recover-cluster": (Recoveries.cluster, "quorum", 1),
    "recover-embedded": (Recoveries.embedded, "embedded", 100),
    "recover-story": (Recoveries.story, "classic", 0),
    "recover-large": (Recoveries.large, "classic", 0),
}
COUNTED = ("kills", "messages", "lost", "duplicates", "possible_duplicates", "altered", "unexpected")


class Soak:
    """One run; `ok` as long as nothing went wrong."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._kills_count, self._examples, self._seed = options.kills, options.examples, options.seed
        self._stack = stack
        self._name, self._began_s = "", 0.0
        self.ok = True
        self.scenarios: dict[str, Callable[[], None]] = {
            "sqlite-kills": lambda: self._kills(f"sqlite:///{self._folder()}/data"),
            "postgres-kills": lambda: self._kills(self._database("soak")),
            "rabbitmq-cluster": self._rabbitmq_cluster,
            **{name: partial(self._machine, machine) for name, machine in MACHINES.items()},
            "postgres-model": lambda: self._machine(PostgresMachine, Backend),
            **{name: partial(self._recover, *scenario) for name, scenario in RECOVERIES.items()},
            "custody-sqlite": lambda: self._custody(""),
            "custody-postgres": lambda: self._custody(self._database("custody")),
            "custody-postgres-model": lambda: self._machine(PostgresVault, PostgresVault),
            "collect-embedded": lambda: self._collect(collect.random_kills),
            "collect-shared": self._collect_shared,
            "collect-large": self._collect_large,
        }

    def run(self, name: str) -> None:
        """One scenario. Whatever goes wrong is told, and the others are run all the same."""
        self._name, self._began_s = name, time.monotonic()
        try:
            self.scenarios[name]()
        except Exception:  # noqa: BLE001 - the whole traceback is told, and the end is not 0
            self.ok = False
            traceback.print_exc()
            print(json.dumps({"scenario": name, "failed": True}), flush=True)

    def _tell(self, numbers: Mapping[str, Any]) -> None:
        """The line of the scenario."""
        took_s = round(time.monotonic() - self._began_s, 1)
        print(json.dumps({"scenario": self._name, **numbers} | {"took_s": numbers.get("took_s", took_s)}), flush=True)

    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-soak-")))

    def _database(self, name: str) -> str:
        return self._stack.enter_context(Cluster()).create_database(name)

    def _tell_report(self, report: ConservationReport, *, duplicates_max: int | None = 0, **numbers: int) -> None:
        self._tell(json.loads(report.line(self._name, **numbers, seed=self._seed)))
        report.check(duplicates_max=duplicates_max)

    def _rabbitmq_cluster(self) -> None:
        """Each fault costs a node's restart: a tenth of the kills takes as long."""
        faults = max(1, (self._kills_count or KILLS_DEFAULT) // 10)
        cluster = self._stack.enter_context(RabbitCluster())
        report = asyncio.run(random_faults(cluster, faults=faults, seed=self._seed))
        self._tell_report(report, kills=faults, duplicates_max=None)

    def _kills(self, url: str) -> None:
        kills = self._kills_count or KILLS_DEFAULT
        report = asyncio.run(random_kills(url, self._folder(), kills=kills, seed=self._seed, partitions=2))
        self._tell_report(report, kills=kills, items=report.put_count)

    def _collect(self, scenario: Callable[[int, int], Coroutine[Any, Any, Mapping[str, int]]]) -> None:
        tally = asyncio.run(scenario(self._kills_count or MANY_KILLS, self._seed))
        self._tell({**tally, "seed": self._seed})

    def _collect_shared(self) -> None:
        node, url = self._stack.enter_context(Node()), self._database("collect")
        self._stack.enter_context(running_bucket())

        async def run(kills: int, seed: int) -> Mapping[str, int]:
            async with Admin.open(node, "soak") as admin:
                return await collect.random_kills(kills, seed, url=url, admin=admin)

        self._collect(run)

    def _collect_large(self) -> None:
        """2 GiB in parts of 1 MiB: the memory stays what it is for 100 of them."""
        told = asyncio.run(peak_mib(self._folder(), LARGE_COUNT))
        self.ok = self.ok and told["peak_mib"] < CEILING_MIB
        self._tell({"parts": LARGE_COUNT, **told, "ceiling_mib": CEILING_MIB})

    def _recover(self, scenario: Callable[[Recoveries], Coroutine[Any, Any, None]], kind: str, least: int) -> None:
        tally = Counter(dict.fromkeys(COUNTED, 0))
        version = "4.0" if scenario is Recoveries.cuts else "3.10"  # where a quorum queue has a limit by default
        with closing(Node(version)) as node:
            recoveries = Recoveries(node, kind, self._kills_count or least, random.Random(self._seed), tally)
            asyncio.run(scenario(recoveries))
        self._tell(tally)

    def _custody(self, vault: str) -> None:
        kills = self._kills_count or MANY_KILLS
        found = asyncio.run(custody.random_kills(kills=kills, seed=self._seed, vault=vault))
        self._tell({**found, "seed": self._seed})
        self.ok = self.ok and not found["lost"] and found["balanced"] and found["chain"] == "holds"

    def _machine(
        self, machine: type[RuleBasedStateMachine], place: type[Backend | PostgresVault] | None = None
    ) -> None:
        """`place` is told its database. There a look is a dozen round trips: a tenth of the examples takes as long."""
        if place is not None:
            place.url = self._database("model")
        examples = max(1, self._examples // (10 if place else 1))
        profile = settings(settings_for(examples=examples, steps=60), database=None)
        test = get_state_machine_test(machine, settings=profile)
        seeded(self._seed)(test)()
        self._tell({"kills": 0, "examples": examples, "lost": 0, "duplicates": 0, "seed": self._seed})


def main() -> int:
    """Run what was asked for."""
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # the faults are on purpose
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, help="kills per scenario, each of which has its own default")
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
