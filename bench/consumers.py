"""The consumer runtime with an empty handler beside FastStream and Dramatiq: one broker, persistent messages of 512 B.

Classic queues, at most 100 messages held (Dramatiq: its own default), each in a process of its own, each message acked.
Dramatiq reads only what it has written itself, so its messages are made by it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench.move import count_in
from bench.rounds import Target, report, run
from holdfast.core.message import Outgoing
from holdfast.engines.rabbitmq.connection import Connection, Listener
from holdfast.engines.rabbitmq.publisher import RabbitPublisher
from holdfast.engines.rabbitmq.url import BrokerUrl
from holdfast.engines.rabbitmq.wire import properties
from holdfast.engines.rabbitmq.wire import session as methods
from holdfast.wiring import SystemClock, open_rabbit_broker
from tests.support.rabbitmq import Node

VHOST = "bench"
TIMEOUT_S = 600.0
TARGETS = [Target("holdfast", "faststream", 3.0, 4.0), Target("holdfast", "dramatiq", 2.0, 3.0)]


class Bench:
    """Fills a queue and has it emptied."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.count = count
        self.cpu_us: dict[str, list[float]] = {}

    def consume(self, name: str) -> float:
        """Messages a second."""
        if name == "dramatiq":
            self._process(name, -self.count)
        else:
            asyncio.run(self._fill(name))
        result = json.loads(self._process(name, self.count))
        assert result["count"] == self.count
        if name == "holdfast":
            assert asyncio.run(self._left(name)) == 0, "every message was acked"
        self.cpu_us.setdefault(name, []).append(result["cpu_s"] / self.count * 1e6)
        return float(self.count / result["wall_s"])

    def _process(self, name: str, count: int) -> str:
        command = [sys.executable, "-m", "bench.consumer_peers", name, self.url, name, "--", str(count)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=Path(__file__).parents[1]
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name} failed\n{done.stderr[-2000:]}")
        return done.stdout

    async def _left(self, queue: str) -> int:
        async with await Connection.open(BrokerUrl.parse(self.url)) as connection:
            return await count_in(await connection.channel(Listener()), queue)

    async def _fill(self, queue: str) -> None:
        address = BrokerUrl.parse(self.url)
        if queue == "holdfast":
            import holdfast

            app = holdfast.App(self.url)
            app.consumer(queue)(print)
            async with open_rabbit_broker(self.url, clock=SystemClock(), management=None) as broker:
                await broker.declare(app.consumers[0].subscription)
        else:
            async with await Connection.open(address) as connection:
                channel = await connection.channel(Listener())
                await channel.call(methods.QueueDeclare(queue=queue, durable=True))
        raw, body = properties.encode({"message_id": "m", "type": "t"}), os.urandom(512)
        async with RabbitPublisher(address) as publisher:
            for start in range(0, self.count, 5000):
                size = min(5000, self.count - start)
                outcomes = await publisher.publish([Outgoing("", queue, raw, body) for _ in range(size)])
                assert all(outcome.stored for outcome in outcomes)


def main(*, rounds: int, quick: bool) -> bool:
    """Returns whether every must is met."""
    with Node() as node:
        node.create_vhost(VHOST)
        bench = Bench(node.url(VHOST), 5_000 if quick else 20_000)
        names = ("holdfast", "faststream", "dramatiq")
        rates = run("consumers", {name: partial(bench.consume, name) for name in names}, rounds=rounds)
    print("\nCPU a message")
    for name, values in sorted(bench.cpu_us.items()):
        print(f"  {name:12} {statistics.median(values):8.1f} µs")
        print(json.dumps({"bench": "consumers", "client": name, "cpu_us": round(statistics.median(values), 1)}))
    return report(f"consumers, empty handler, {bench.count:,} messages", rates, TARGETS)
