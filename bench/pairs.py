"""Two checkouts, row by row in pairs: `python -m bench.pairs --old /path/to/old/checkout --rounds 10 [row …]`.

Every round measures every row in both, one right after the other, old first in one round and new first in the next; a
ratio is taken within a round, so that what the machine does meanwhile meets both. Each measurement takes a few seconds.
Only our own rates, no peers, and only the public face of either checkout: `holdfast.open`, `App`, `Collector`, the
commands, HTTP. Processor time a unit says more than a rate where others use the machine too.

Prints a table with the median of the ratios new/old and where it is with 95 % probability; with --json one line each.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.served import EXCHANGE, Broker, Server, Side, http_rate, recovered, write_letters
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node

VHOST = "pairs"
SMALL = 500
RESAMPLES = 4_000
#: Figures of which less is better.
LESS = ("cpu_us", "peak_mb", "p99_ms")
#: A quorum queue's log is written out when it has 512 MB: one run in a few would pay for all.
ROLL_OVER = "ra_log_wal:force_roll_over(ra_log_wal), ra_log_segment_writer:await(ra_log_segment_writer)."

Figures = dict[str, float]


class Bench:
    """The servers, started when a row first needs them, and what was made for the rows."""

    def __init__(self, stack: ExitStack, sides: tuple[Side, Side], *, scale: float) -> None:
        self._stack = stack
        self.old, self.new = sides
        self.scale = scale
        self.base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-pairs-")))
        self._node: Node | None = None
        self._cluster: Cluster | None = None
        self._brokers: list[Broker] = []
        self._pairs: dict[str, list[str]] = {}
        self._folders: dict[tuple[str, str], Path] = {}
        self.starts_s: dict[str, list[float]] = {}

    @property
    def seconds(self) -> float:
        """How long a row that goes by time is measured."""
        return 2.0 * self.scale

    def count(self, full: int) -> int:
        """How many units a row that goes by number has."""
        return max(SMALL * 2, round(full * self.scale))

    def fresh(self) -> Path:
        """A folder of its own for a measurement."""
        return Path(tempfile.mkdtemp(dir=self.base))

    @property
    def node(self) -> Node:
        """RabbitMQ."""
        if self._node is None:
            self._node = self._stack.enter_context(Node())
            self._node.create_vhost(VHOST)
        return self._node

    @property
    def url(self) -> str:
        """Its address."""
        return self.node.url(VHOST)

    @property
    def broker(self) -> Broker:
        """A connection to it."""
        if not self._brokers:
            self._brokers.append(Broker(self.node.port, VHOST))
            self._stack.callback(self._brokers[0].close)
        return self._brokers[0]

    @property
    def cluster(self) -> Cluster:
        """PostgreSQL."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(Cluster())
        return self._cluster

    def pair(self, kind: str, count: int) -> list[str]:
        """Two queues, the first of them full: they change roles with every measurement."""
        name = f"{kind}.{count}"
        if name not in self._pairs:
            pair = [f"{name}.a.dlq", f"{name}.b.dlq"]
            for queue in pair:
                self.broker.queue(queue, kind)
            self.fill(pair[0], count)
            # The first time costs half as much again: letters have no headers of a redrive yet.
            recovered(self.old, self.broker, self.url, pair, count, self.fresh())
            self._pairs[name] = pair[::-1]
        return self._pairs[name]

    def fill(self, queue: str, count: int) -> None:
        """Letters into a queue, by the old program for both."""
        file = self.base / f"letters-{count}.jsonl"
        if not file.exists():
            write_letters(file, count)
        argv = [str(self.old.program), "recover", self.url, "--from-backup", str(file), "--to", queue, "--json"]
        self.old.run(argv, self.fresh())

    def kept(self, side: Side, name: str, make: Callable[[Path], object]) -> Path:
        """A folder that a row goes on with: made once by the old program, and copied for each side."""
        if (name, side.name) not in self._folders:
            origin = self.base / name
            if not origin.exists():
                origin.mkdir()
                make(origin)
            self._folders[name, side.name] = Path(shutil.copytree(origin, self.base / f"{name}-{side.name}"))
        return self._folders[name, side.name]


# --- the rows: one measurement of one side each --------------------------------------------------------------------


def recover_classic(bench: Bench, side: Side) -> Figures:
    """`holdfast recover` from one classic queue to another; processor time without that of the start."""
    count = bench.count(24_000)
    return _recover(bench, side, "classic", count, start_cpu_s=_recover_start(bench, side))


def recover_quorum(bench: Bench, side: Side) -> Figures:
    """The same with quorum queues."""
    bench.pair("quorum", bench.count(20_000))
    bench.node.ctl("eval", ROLL_OVER)
    return {"rate": _recover(bench, side, "quorum", bench.count(20_000))["rate"]}


def _recover(bench: Bench, side: Side, kind: str, count: int, start_cpu_s: float = 0.0) -> Figures:
    pair = bench.pair(kind, count)
    run = recovered(side, bench.broker, bench.url, pair, count, bench.fresh())
    pair.reverse()
    rate = count / (run.ended_s - run.started_s)
    return {"rate": rate, "cpu_us": (run.cpu_s - start_cpu_s) / (count - SMALL) * 1e6, "peak_mb": run.peak_mb}


def _recover_start(bench: Bench, side: Side) -> float:
    """Processor time of a run with a few letters: the median of all that were seen, because it varies more than
    the letters do."""
    pair = bench.pair("classic", SMALL)
    run = recovered(side, bench.broker, bench.url, pair, SMALL, bench.fresh())
    pair.reverse()
    bench.starts_s.setdefault(side.name, []).append(run.cpu_s)
    return statistics.median(bench.starts_s[side.name])


def consumers(bench: Bench, side: Side) -> Figures:
    """An empty handler on a classic queue."""
    count = bench.count(20_000)
    side.measured("declare", bench.fresh(), url=bench.url, queue="work")
    bench.fill("work", count)
    return side.measured("consumers", bench.fresh(), url=bench.url, queue="work", count=count)


def _inside(row: str) -> Callable[[Bench, Side], Figures]:
    def measure(bench: Bench, side: Side) -> Figures:
        folder = bench.fresh()
        return side.measured(row, folder, folder=str(folder), seconds=bench.seconds)

    return measure


def memory_batch(bench: Bench, side: Side) -> Figures:
    """Cycles in batches of a hundred, in memory."""
    return side.measured("memory_batch", bench.fresh(), seconds=bench.seconds)


def depth(bench: Bench, side: Side) -> Figures:
    """Cycles while a hundred thousand items wait."""

    def make(folder: Path) -> object:
        return bench.old.measured("fill_depth", folder, folder=str(folder / "q"), count=100_000)

    folder = bench.kept(side, "depth", make)
    return side.measured("depth", folder, folder=str(folder / "q"), seconds=bench.seconds)


def postgres(bench: Bench, side: Side) -> Figures:
    """Cycles in batches of a hundred, four clients."""
    with _database(bench) as url:
        return side.measured("postgres", bench.fresh(), url=url, seconds=bench.seconds)


@contextmanager
def _database(bench: Bench) -> Iterator[str]:
    try:
        yield bench.cluster.create_database("pairs")
    finally:
        bench.cluster.drop_database("pairs")


def _http(batch: int, connections: int = 64) -> Callable[[Bench, Side], Figures]:
    def measure(bench: Bench, side: Side) -> Figures:
        folder = bench.fresh()
        with side.serving(f"sqlite:///{folder}/q", folder) as server:
            return _produced(server, bench.seconds, batch, connections)

    return measure


def _produced(server: Server, seconds: float, batch: int, connections: int) -> Figures:
    server.ask("POST", "/v1/queues.create", _queue("orders"))
    items = [{"bytes": base64.b64encode(os.urandom(512)).decode()}] * batch
    body = {"queue_name": "orders", "request_timeout": "1m", "items": items}
    return http_rate(server, "/v1/queue.produce", body, seconds, batch, connections)


def http_storing(bench: Bench, side: Side) -> Figures:
    """Batches of 100: how many of the same server's that answers without storing are stored, in percent."""
    rates = {}
    for mode in ("store", "blank"):
        folder = bench.fresh()
        with side.bare(f"sqlite:///{folder}/q", folder, mode) as server:
            rates[mode] = _produced(server, bench.seconds, 100, 64)["rate"]
    return {"storing_percent": 100 * rates["store"] / rates["blank"]}


def _queue(name: str) -> dict[str, str]:
    return {"queue_name": name, "lease_timeout": "1m", "expire_timeout": "1h"}


def custody(bench: Bench, side: Side) -> Figures:
    """Capture into the vault, then redrive out of it."""
    count = bench.count(10_000)
    source, target = pair = bench.pair("classic", count)
    folder = bench.fresh()
    with side.serving(f"sqlite:///{folder}/q", folder, HOLDFAST_BROKER=bench.url) as server:
        took_s, cpu_s = _captured(server, source, count)
        address = {"kind": "address", "exchange": EXCHANGE, "routing_key": target}
        wish = {"selection": {"queue": source}, "target": address, "force": True}  # they go to and fro
        plan = server.ask("POST", "/admin/plans", wish)
        before_s, began_s = server.cpu_s, time.perf_counter()
        task = server.ask("POST", "/admin/redrives", {"plan": plan["hash"]})
        while task["state"] == "running":
            time.sleep(0.02)
            task = server.ask("GET", f"/admin/redrives/{task['id']}")
        redrive_s, redrive_cpu_s = time.perf_counter() - began_s, server.cpu_s - before_s
    if task["redriven"] != count:
        raise RuntimeError(f"{task['redriven']} of {count} letters were redriven")
    pair.reverse()
    return {
        "capture rate": count / took_s,
        "capture cpu_us": cpu_s / count * 1e6,
        "redrive rate": count / redrive_s,
        "redrive cpu_us": redrive_cpu_s / count * 1e6,
    }


def _captured(server: Server, queue: str, count: int) -> tuple[float, float]:
    before_s, began_s = server.cpu_s, time.perf_counter()
    report = server.ask("POST", "/admin/captures", {"queue": queue, "limit": count})
    if report["captured"] != count:
        raise RuntimeError(f"{report['captured']} of {count} letters were captured")
    return time.perf_counter() - began_s, server.cpu_s - before_s


def vault(bench: Bench, side: Side) -> Figures:
    """Pages and counts of the letters in a vault, over HTTP."""
    count = bench.count(10_000)

    def make(folder: Path) -> None:
        bench.broker.queue("vault.dlq", "classic")
        bench.fill("vault.dlq", count)
        with bench.old.serving(f"sqlite:///{folder}/q", folder, HOLDFAST_BROKER=bench.url) as server:
            _captured(server, "vault.dlq", count)

    folder = bench.kept(side, "vault", make)
    asked = (
        {"state": "captured"},
        {"queue": "vault.dlq", "state": "captured"},
        {"type": "order.created"},
        {"error": "nothing like it"},
        {"header": "MessageType", "header_value": "order.created"},
    )
    with side.serving(f"sqlite:///{folder}/q", folder) as server:
        before_s, began_s, done = server.cpu_s, time.perf_counter(), 0
        while time.perf_counter() - began_s < bench.seconds:
            for query in asked:
                server.ask("GET", "/admin/letters", **query)
                done += 1
        took_s, cpu_s = time.perf_counter() - began_s, server.cpu_s - before_s
    return {"rate": done / took_s, "cpu_us": cpu_s / done * 1e6}


def collect(bench: Bench, side: Side) -> Figures:
    """Payloads of 16 KiB from their queue into files, index and notice."""
    folder = bench.fresh()
    return side.measured("collect", folder, folder=str(folder), count=bench.count(2_000))


def collect_postgres(bench: Bench, side: Side) -> Figures:
    """The same with the index in PostgreSQL; the queues stay in files."""
    folder = bench.fresh()
    with _database(bench) as url:
        return side.measured("collect", folder, folder=str(folder), count=bench.count(2_000), url=url)


ROWS: dict[str, Callable[[Bench, Side], Figures]] = {
    "recover-classic": recover_classic,
    "recover-quorum": recover_quorum,
    "consumers": consumers,
    "cycle-single": _inside("cycle_single"),
    "cycle-batch": _inside("cycle_batch"),
    "memory-batch": memory_batch,
    "producers-64": _inside("producers"),
    "http-single": _http(1),
    "http-batch": _http(100),
    "http-lone": _http(1, connections=1),
    "http-storing": http_storing,
    "depth": depth,
    "postgres": postgres,
    "vault": vault,
    "custody": custody,
    "collect": collect,
    "collect-postgres": collect_postgres,
}


# --- rounds and what they say ---------------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float] | None:
    """Where the median is, by drawing anew from what was measured; None when there is too little of it."""
    if len(ratios) < 3:
        return None
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[round(RESAMPLES * 0.025)], medians[round(RESAMPLES * 0.975) - 1]


def measured(bench: Bench, rows: list[str], rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Row and figure → old and new of each round."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds):
        sides = (bench.old, bench.new) if number % 2 == 0 else (bench.new, bench.old)
        for row in rows:
            began_s = time.monotonic()
            figures = {side.name: ROWS[row](bench, side) for side in sides}
            for name, old in figures["old"].items():
                found.setdefault((row, name), []).append((old, figures["new"][name]))
            ratios = ", ".join(f"{name} {figures['new'][name] / old:.3f}" for name, old in figures["old"].items())
            took_s = time.monotonic() - began_s
            print(f"  round {number + 1}/{rounds} {row}: {ratios} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    return found


def report(found: dict[tuple[str, str], list[tuple[float, float]]], *, as_json: bool) -> None:
    """A table, or one line of JSON each."""
    if not as_json:
        print(f"{'row':18} {'figure':16} {'old':>12} {'new':>12}   new/old")
    for (row, name), pairs in found.items():
        ratios = [new / old for old, new in pairs]
        middle, around = statistics.median(ratios), interval(ratios)
        old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
        if as_json:
            line = {
                "row": row,
                "figure": name,
                "old": round(old, 2),
                "new": round(new, 2),
                "ratio": round(middle, 4),
                "interval": [round(one, 4) for one in around] if around else None,
                "less_is_better": is_cost(name),
                "rounds": len(ratios),
                "ratios": [round(one, 4) for one in ratios],
            }
            print(json.dumps(line))
            continue
        span = f" [{around[0]:.3f} .. {around[1]:.3f}]" if around else ""
        print(f"{row:18} {name:16} {old:>12,.1f} {new:>12,.1f}   {middle:.3f}{span}{verdict(name, around)}")


def is_cost(name: str) -> bool:
    """Whether less of it is better."""
    return name.endswith(LESS)


def verdict(name: str, around: tuple[float, float] | None) -> str:
    """In a word, where the interval says something."""
    if around is None or around[0] <= 1 <= around[1]:
        return ""
    is_less = around[1] < 1
    return "  better" if is_less == is_cost(name) else "  WORSE"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pairs", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="which ones; all by default")
    parser.add_argument("--old", type=Path, required=True, help="a checkout with its .venv")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1], help="another; this one by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="times as much of everything")
    parser.add_argument("--json", action="store_true", dest="as_json", help="one line of JSON for each figure")
    given = parser.parse_args()
    began_s = time.monotonic()
    with ExitStack() as stack:
        sides = (Side("old", given.old), Side("new", given.new))
        bench = Bench(stack, sides, scale=given.scale)
        for side in sides:
            side.run([str(side.program), "--version"], bench.fresh())  # compiled, and read from the disk
        found = measured(bench, given.rows or list(ROWS), given.rounds)
    report(found, as_json=given.as_json)
    print(f"took {time.monotonic() - began_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
