"""Move messages on RabbitMQ: consume → publish with confirm and mandatory → ack, against RabbitMQ's shovel and clients.

Persistent messages with a body of 512 B and the headers of a dead letter, moved to and fro between two queues: direct
exchange, one target queue. Each client runs in a process of its own. A shovel's time is from the first to the last
message that is seen in the target; a client's from before it connects until it has closed its connections. That
favours the shovel a little. The slow clients get fewer messages: rates are compared, not times.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pamqp import commands as amqp

from bench.movers import EXCHANGE
from bench.rounds import Target, report, run
from holdfast.core.message import Outgoing
from holdfast.engines.rabbitmq.connection import Channel, Connection, Listener
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from tests.support.rabbitmq import Node

VHOST = "bench"
MOVE_TIMEOUT_S = 600.0
SEEN_STEP_S = 0.01
ROLL_OVER = "ra_log_wal:force_roll_over(ra_log_wal), ra_log_segment_writer:await(ra_log_segment_writer)."
CPU_US_MUST, CPU_US_AIM = 15.0, 8.0
PEAK_MB_MUST, PEAK_MB_AIM = 48.0, 32.0

TARGETS = {
    "classic": [
        ("shovel in the broker", 0.95, 1.1),
        ("shovel over TCP", 1.2, 1.4),
        ("aio-pika", 3.5, 4.0),
        ("pika", 1.3, 1.5),
    ],
    "quorum": [
        ("shovel in the broker", 0.75, 1.0),
        ("shovel over TCP", 1.2, 1.4),
        ("aio-pika", 8.0, 10.0),
        ("pika", 2.0, 2.3),
    ],
}


@dataclass
class Pair:
    """Two queues, one of them full."""

    kind: str
    count: int
    full: str
    empty: str

    def turn(self) -> None:
        """They have changed roles."""
        self.full, self.empty = self.empty, self.full


@dataclass
class Cost:
    """What one client took, run by run."""

    cpu_us: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)


def letter(number: int) -> bytes:
    """The properties of a dead letter, about 390 bytes."""
    death = {
        "count": 1,
        "reason": "rejected",
        "queue": "orders.validate",
        "exchange": "orders",
        "routing-keys": ["orders.created"],
    }
    headers: Any = {"MessageType": "order.created", "x-death": [death], "x-first-death-queue": "orders.validate"}
    return properties.encode(
        {
            "content_type": "application/json",
            "headers": headers,
            "delivery_mode": 2,
            "correlation_id": f"{number:032x}",
            "message_id": f"{number:032x}",
        }
    )


class Bench:
    """A broker with filled queues."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.url = node.url(VHOST)
        self.costs: dict[str, Cost] = {}

    def fill(self, kind: str, count: int, name: str) -> Pair:
        """Two queues, the first of them with `count` messages."""
        pair = Pair(kind, count, f"{kind}.{name}.a", f"{kind}.{name}.b")
        asyncio.run(self._fill(pair))
        return pair

    async def _fill(self, pair: Pair) -> None:
        address = BrokerUrl.parse(self.url)
        async with await Connection.open(address) as connection:
            channel = await connection.channel(Listener())
            await channel.call(methods.ExchangeDeclare(exchange=EXCHANGE, exchange_type="direct", durable=True))
            for queue in (pair.full, pair.empty):
                arguments: Any = {"x-queue-type": pair.kind}
                await channel.call(methods.QueueDeclare(queue=queue, durable=True, arguments=arguments))
                await channel.call(methods.QueueBind(queue=queue, exchange=EXCHANGE, routing_key=queue))
        body = os.urandom(512)
        async with RabbitPublisher(address) as publisher:
            for start in range(0, pair.count, 5000):
                numbers = range(start, min(start + 5000, pair.count))
                outcomes = await publisher.publish([Outgoing("", pair.full, letter(n), body) for n in numbers])
                assert all(outcome.stored for outcome in outcomes)

    def settle(self) -> None:
        """Let the broker finish what the run before left to do.

        Its log of quorum queues is written out when it has 512 MB: about one run in three would pay for all.
        """
        self.node.ctl("eval", ROLL_OVER)

    def client(self, name: str, pair: Pair) -> float:
        """Move with a client; messages a second."""
        self.settle()
        command = [sys.executable, "-m", "bench.movers", name, self.url, pair.full, pair.empty, str(pair.count)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MOVE_TIMEOUT_S, check=False, cwd=Path(__file__).parents[1]
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name} failed\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout)
        assert result["count"] == pair.count
        cost = self.costs.setdefault(f"{pair.kind} {name} {pair.count}", Cost())
        cost.cpu_us.append(result["cpu_s"] / pair.count * 1e6)
        cost.peak_mb.append(result["peak_mb"])
        pair.turn()
        return float(pair.count / result["wall_s"])

    def shovel(self, pair: Pair, *, uri: str) -> float:
        """Move with a shovel (on-confirm, default prefetch); messages a second."""
        self.settle()
        rate = asyncio.run(self._shovel(pair, uri))
        pair.turn()
        return rate

    async def _shovel(self, pair: Pair, uri: str) -> float:
        settings = {
            "src-uri": uri,
            "src-queue": pair.full,
            "src-delete-after": "queue-length",
            "dest-uri": uri,
            "dest-exchange": EXCHANGE,
            "dest-exchange-key": pair.empty,
            "ack-mode": "on-confirm",
        }
        async with await Connection.open(BrokerUrl.parse(self.url)) as connection:
            channel = await connection.channel(Listener())
            self.node.api("PUT", f"/parameters/shovel/{VHOST}/move", {"value": settings})
            started_s = await _reached(channel, pair.empty, 1)
            ended_s = await _reached(channel, pair.empty, pair.count)
            return pair.count / (ended_s - started_s)


async def count_in(channel: Channel, queue: str) -> int:
    """How many messages are ready in it."""
    answer = await channel.call(methods.QueueDeclare(queue=queue, passive=True))
    assert isinstance(answer, amqp.Queue.DeclareOk)
    return answer.message_count or 0


async def _reached(channel: Channel, queue: str, count: int) -> float:
    """When so many messages were seen in it."""
    async with asyncio.timeout(MOVE_TIMEOUT_S):
        while await count_in(channel, queue) < count:  # noqa: ASYNC110  a broker has to be asked
            await asyncio.sleep(SEEN_STEP_S)
    return time.perf_counter()


def measure(bench: Bench, kind: str, *, rounds: int, count: int) -> bool:
    """All movers on one kind of queue, interleaved; returns whether every must is met."""
    large = bench.fill(kind, count, "large")
    middle = bench.fill(kind, count // 2, "middle")
    small = bench.fill(kind, count // 6, "small")
    inside, outside = f"amqp:///{VHOST}", bench.url
    rates = run(
        f"move {kind}",
        {
            "holdfast": lambda: bench.client("holdfast", large),
            "holdfast, a sixth": lambda: bench.client("holdfast", small),
            "shovel in the broker": lambda: bench.shovel(large, uri=inside),
            "shovel over TCP": lambda: bench.shovel(large, uri=outside),
            "pika": lambda: bench.client("pika", middle),
            "aio-pika": lambda: bench.client("aio-pika", small),
        },
        rounds=rounds,
    )
    targets = [Target("holdfast", base, must, aim) for base, must, aim in TARGETS[kind]]
    return report(f"move, {kind} queues, {count:,} messages", rates, targets)


def costs(bench: Bench) -> bool:
    """CPU and memory of the clients; returns whether ours are within their limits."""
    met = True
    print("\nclient CPU a message and peak memory")
    for name, cost in sorted(bench.costs.items()):
        cpu_us, peak_mb = statistics.median(cost.cpu_us), statistics.median(cost.peak_mb)
        print(f"  {name:32} {cpu_us:8.1f} µs {peak_mb:8.1f} MB")
        print(json.dumps({"bench": "move", "client": name, "cpu_us": round(cpu_us, 2), "peak_mb": round(peak_mb, 1)}))
        if " holdfast " in name:
            met = met and cpu_us <= CPU_US_MUST and peak_mb <= PEAK_MB_MUST
    print(f"  must {CPU_US_MUST:g} µs and {PEAK_MB_MUST:g} MB, aim {CPU_US_AIM:g} µs and {PEAK_MB_AIM:g} MB")
    return met


def main(*, rounds: int, quick: bool) -> bool:
    """Classic and quorum queues; returns whether every must is met."""
    count = 24_000 if quick else 120_000
    with Node(plugins=("rabbitmq_shovel",)) as node:
        node.create_vhost(VHOST)
        bench = Bench(node)
        met = [measure(bench, kind, rounds=rounds, count=count) for kind in ("classic", "quorum")]
        return costs(bench) and all(met)
