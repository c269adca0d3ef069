"""`holdfast recover` on RabbitMQ, with journal, header edits and return checks, against shovels and one at a time.

Persistent letters with a body of 512 B and the headers of a dead letter. Every mover is timed from the first to
the last letter that is seen in the target, so that its start does not count. The slow ones get fewer letters.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.move import VHOST, Bench, Pair, _reached
from bench.movers import EXCHANGE
from bench.rounds import Target, report, run
from holdfast.engines.rabbitmq.connection import Connection, Listener
from holdfast.engines.rabbitmq.url import BrokerUrl
from tests.support.rabbitmq import Node

HOLDFAST = Path(sys.executable).with_name("holdfast")
TIMEOUT_S = 900.0
CPU_US_MUST, CPU_US_AIM = 25.0, 15.0
PEAK_MB_MUST = 80.0
FLAT_MUST = 0.85
TARGETS = {
    "classic": [
        ("shovel in the broker", 0.9, 1.05),
        ("shovel over TCP", 1.1, 1.3),
        ("one at a time", 7.0, 9.0),
        ("aio-pika, one at a time", 12.0, 15.0),
    ],
    "quorum": [
        ("shovel in the broker", 0.7, 1.0),
        ("shovel over TCP", 1.1, 1.3),
        ("one at a time", 18.0, 25.0),
        ("aio-pika, one at a time", 35.0, 45.0),
    ],
}
ONE_AT_A_TIME = """
import asyncio, sys
import aio_pika
async def main(url, source, target, count):
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    await channel.set_qos(prefetch_count=1)
    queue = await channel.get_queue(source, ensure=False)
    exchange = await channel.get_exchange("move", ensure=False)
    moved = 0
    async with queue.iterator() as messages:
        async for message in messages:
            known = {"headers": message.headers, "message_id": message.message_id}
            copy = aio_pika.Message(message.body, delivery_mode=2, **known)
            await exchange.publish(copy, target, mandatory=True)
            await message.ack()
            moved += 1
            if moved >= count:
                break
    await channel.close()
    await connection.close()
asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
"""


class Recoveries(Bench):
    """The same queues as those of the movers."""

    last_cpu_s = 0.0

    def recover(self, pair: Pair, *more: str) -> float:
        """Letters a second, from the first to the last arrival."""
        with tempfile.TemporaryDirectory() as folder:
            address = f"exchange={EXCHANGE},key={pair.empty}"
            command = [str(HOLDFAST), "recover", self.url, pair.full, "--to", address, "--json", *more]
            rate, output = self._timed(pair, command, folder)
        told = json.loads(output.splitlines()[-1])
        assert told["recovered"] == pair.count, told
        return rate

    def aio_pika(self, pair: Pair) -> float:
        """The seed's loop with the usual client."""
        command = [sys.executable, "-c", ONE_AT_A_TIME, self.url, pair.full, pair.empty, str(pair.count)]
        return self._timed(pair, command, "/")[0]

    def _timed(self, pair: Pair, command: list[str], folder: str) -> tuple[float, bytes]:
        self.settle()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        rate, output = asyncio.run(self._arrivals(pair, command, folder))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.last_cpu_s = cpu_s
        pair.turn()
        return rate, output

    async def _arrivals(self, pair: Pair, command: list[str], folder: str) -> tuple[float, bytes]:
        async with await Connection.open(BrokerUrl.parse(self.url)) as connection:
            channel = await connection.channel(Listener())
            with (
                tempfile.TemporaryFile() as errors,  # not a pipe: the lines of a million letters would fill it
                subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors) as process,  # noqa: ASYNC220
            ):
                started_s = await _reached(channel, pair.empty, 1)
                ended_s = await _reached(channel, pair.empty, pair.count)
                output, _ = await asyncio.to_thread(process.communicate, timeout=TIMEOUT_S)
                errors.seek(0)
                told = errors.read().decode()
            if process.returncode != 0:
                raise RuntimeError(f"{command[:3]} failed\n{told[-2000:]}")
            return pair.count / (ended_s - started_s), output


def measure(bench: Recoveries, kind: str, *, rounds: int, count: int) -> bool:
    """All of them on one kind of queue, interleaved."""
    large = bench.fill(kind, count, "large")
    slow = bench.fill(kind, count // 20, "slow")
    slower = bench.fill(kind, count // 40, "slower")
    rates = run(
        f"recover {kind}",
        {
            "holdfast recover": lambda: bench.recover(large),
            "shovel in the broker": lambda: bench.shovel(large, uri=f"amqp:///{VHOST}"),
            "shovel over TCP": lambda: bench.shovel(large, uri=bench.url),
            "one at a time": lambda: bench.recover(slow, "--one-at-a-time"),
            "aio-pika, one at a time": lambda: bench.aio_pika(slower),
        },
        rounds=rounds,
    )
    targets = [Target("holdfast recover", base, must, aim) for base, must, aim in TARGETS[kind]]
    return report(f"recover, {kind} queues, {count:,} letters", rates, targets)


def flat(*, rounds: int, sizes: tuple[int, ...]) -> bool:
    """Rate, client CPU and peak memory by the number of letters; the broker's own shovel shows how flat *it* is.

    On a broker of its own: with more than 5 GB of letters it writes all of them to its disk, the small queues' too.
    The first size is shown, but not judged: it fits into one window, and is over before there is a rate to speak of.
    """
    with Node(plugins=("rabbitmq_shovel",)) as node:
        node.create_vhost(VHOST)
        bench = Recoveries(node)
        variants: dict[str, Callable[[], float]] = {}
        cpu: dict[str, list[float]] = {}
        pairs = {size: bench.fill("classic", size, f"flat{size}") for size in sizes}
        for size, pair in pairs.items():
            name = f"{size:,} letters"

            def once(pair: Pair = pair, name: str = name) -> float:
                rate = bench.recover(pair)
                cpu.setdefault(name, []).append(bench.last_cpu_s)
                return rate

            variants[name] = once
            variants[f"{name}, shovel"] = lambda pair=pair: bench.shovel(pair, uri=f"amqp:///{VHOST}")  # type: ignore[misc]
        rates = run("recover flat", variants, rounds=rounds)
        first, second, *_, last = (f"{size:,} letters" for size in sizes)
        met = report("recover, flat in the number of letters", rates, [Target(last, second, FLAT_MUST, 1.0)])
        cpu_us = (min(cpu[last]) - min(cpu[first])) / (sizes[-1] - sizes[0]) * 1e6
        peak_mb = _peak_mb(bench, pairs[sizes[-1]])
    print(f"  client CPU a letter beyond the start: {cpu_us:.1f} µs, peak memory {peak_mb:.1f} MB")
    print(json.dumps({"bench": "recover", "cpu_us": round(cpu_us, 1), "peak_mb": peak_mb, "letters": sizes[-1]}))
    return met and cpu_us <= CPU_US_MUST and peak_mb <= PEAK_MB_MUST


def _peak_mb(bench: Recoveries, pair: Pair) -> float:
    """Of one run that is the only child of a process of its own."""
    program = (
        "import json, resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        address = f"exchange={EXCHANGE},key={pair.empty}"
        command: list[Any] = [sys.executable, "-c", program, HOLDFAST, "recover", bench.url, pair.full, "--to", address]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, timeout=TIMEOUT_S)
    return round(int(done.stdout) / 1024, 1)


def main(*, rounds: int, quick: bool) -> bool:
    """Classic and quorum queues, then flatness; returns whether every must is met."""
    count = 24_000 if quick else 120_000
    began_s = time.monotonic()
    with Node(plugins=("rabbitmq_shovel",)) as node:
        node.create_vhost(VHOST)
        bench = Recoveries(node)
        met = [measure(bench, kind, rounds=rounds, count=count) for kind in ("classic", "quorum")]
    met.append(flat(rounds=min(rounds, 3), sizes=(1_000, 30_000, 100_000) if quick else (1_000, 30_000, 1_000_000)))
    print(f"took {time.monotonic() - began_s:.0f} s")
    return all(met)
