"""One move in a process of its own, so that its CPU time and peak memory are its own: `python -m bench.movers …`.

Consume → publish with confirm and mandatory → ack, until `count` messages were moved; prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXCHANGE = "move"
WORKERS = 8
BATCH = 500


class Clock:
    """Wall and CPU time from here on."""

    def __init__(self) -> None:
        self.wall_s = time.perf_counter()
        self.cpu_s = time.process_time()

    def line(self, count: int) -> str:
        """What it took, as JSON."""
        return json.dumps(
            {
                "count": count,
                "wall_s": time.perf_counter() - self.wall_s,
                "cpu_s": time.process_time() - self.cpu_s,
                "peak_mb": _peak_mb(),
            }
        )


def _peak_mb() -> float:
    """Of this program: what getrusage says includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


async def _holdfast(url: str, source: str, target: str, count: int) -> str:
    from holdfast.core.message import Outgoing
    from holdfast.engines.rabbitmq.consumer import ResumingConsumer
    from holdfast.engines.rabbitmq.publisher import RabbitPublisher
    from holdfast.engines.rabbitmq.url import BrokerUrl

    address = BrokerUrl.parse(url)
    moved = 0
    clock = Clock()
    async with RabbitPublisher(address) as publisher, ResumingConsumer(address, source) as consumer:

        async def work() -> None:
            nonlocal moved
            while moved < count:
                batch = await consumer.batch(count_max=BATCH, timeout_s=1.0)
                outcomes = await publisher.publish(
                    [Outgoing(EXCHANGE, target, one.properties, one.body) for one in batch]
                )
                done = [one for one, outcome in zip(batch, outcomes, strict=True) if outcome.stored]
                consumer.ack(done)
                moved += len(done)
                if moved >= count:
                    await consumer.stop()

        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(work())
    return clock.line(moved)


def holdfast(url: str, source: str, target: str, count: int) -> str:
    """Our wire as our commands use it: on uvloop, two connections, batches, acks with `multiple`."""
    import uvloop

    return uvloop.run(_holdfast(url, source, target, count))


async def _aio_pika(url: str, source: str, target: str, count: int) -> str:
    import aio_pika

    clock = Clock()
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    await channel.set_qos(prefetch_count=1000)
    queue = await channel.get_queue(source, ensure=False)
    exchange = await channel.get_exchange(EXCHANGE, ensure=False)
    done = asyncio.Event()
    moved = 0

    async def on_message(message: Any) -> None:
        nonlocal moved
        copy = aio_pika.Message(
            message.body,
            headers=message.headers,
            message_id=message.message_id,
            correlation_id=message.correlation_id,
            content_type=message.content_type,
            delivery_mode=2,
        )
        await exchange.publish(copy, target, mandatory=True)
        await message.ack()
        moved += 1
        if moved >= count:
            done.set()

    await queue.consume(on_message)  # one task per message, as it does by itself: 1000 in flight
    await done.wait()
    await channel.close()  # in order: else acks that it has not sent yet are lost, and their messages come back
    await connection.close()
    return clock.line(moved)


def aio_pika(url: str, source: str, target: str, count: int) -> str:
    """aio-pika, windowed: as many publishes in flight as the prefetch."""
    return asyncio.run(_aio_pika(url, source, target, count))


class PikaMover:
    """pika's SelectConnection with a window of 1000, and acks with `multiple` for the settled prefix."""

    def __init__(self, url: str, source: str, target: str, count: int) -> None:
        import pika

        self._pika = pika
        self._source, self._target, self._count = source, target, count
        self._tags: dict[int, int] = {}
        self._sent = self._moved = 0
        self._settled: set[int] = set()
        self._acked = 0
        self._connection = pika.SelectConnection(
            pika.URLParameters(url), on_open_callback=self._opened, on_close_callback=self._closed
        )
        self._channel: Any = None

    def run(self) -> int:
        """Until all are moved."""
        self._connection.ioloop.start()
        return self._moved

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._ready)

    def _ready(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._confirmed)
        channel.add_on_return_callback(self._returned)
        channel.basic_qos(prefetch_count=1000)
        channel.basic_consume(self._source, self._received)

    def _returned(self, *arguments: Any) -> None:
        raise RuntimeError("a message was returned")

    def _received(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._sent += 1
        self._tags[self._sent] = method.delivery_tag
        channel.basic_publish(EXCHANGE, self._target, body, properties, mandatory=True)

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, self._pika.spec.Basic.Ack):
            raise TypeError("a message was nacked")
        tag = method.delivery_tag
        tags = [one for one in self._tags if one <= tag] if method.multiple else [tag]
        self._settled.update(self._tags.pop(one) for one in tags)
        self._moved += len(tags)
        highest = self._acked
        while highest + 1 in self._settled:
            highest += 1
            self._settled.discard(highest)
        if highest > self._acked:
            self._acked = highest
            self._channel.basic_ack(highest, multiple=True)
        if self._moved >= self._count and self._connection.is_open:
            self._connection.close()

    def _closed(self, connection: Any, reason: Any) -> None:
        """Only now are all acks with the broker."""
        connection.ioloop.stop()


def pika(url: str, source: str, target: str, count: int) -> str:
    """pika, windowed."""
    clock = Clock()
    moved = PikaMover(url, source, target, count).run()
    return clock.line(moved)


MOVERS: dict[str, Callable[[str, str, str, int], str]] = {"holdfast": holdfast, "aio-pika": aio_pika, "pika": pika}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mover", choices=MOVERS)
    parser.add_argument("url")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    print(MOVERS[given.mover](given.url, given.source, given.target, given.count))
