"""One consumer with an empty handler, in a process of its own: `python -m bench.consumer_peers NAME URL QUEUE COUNT`.

The time is from the first handler's begin to the last one's, so that starting up does not count; prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time

HELD = 100  # messages that each may hold


class Count:
    """Counts handlers, and knows when the first and the last of them began."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = 0
        self.first_s = self.last_s = self.cpu_s = 0.0
        self.lock = threading.Lock()
        self.done = threading.Event()

    def one(self) -> bool:
        """One more; True for the last."""
        with self.lock:
            self.seen += 1
            if self.seen == 1:
                self.first_s, self.cpu_s = time.perf_counter(), time.process_time()
            if self.seen < self.wanted:
                return False
        self.last_s, self.cpu_s = time.perf_counter(), time.process_time() - self.cpu_s
        self.done.set()
        return True

    def line(self) -> str:
        """What it took, as JSON."""
        return json.dumps({"count": self.seen, "wall_s": self.last_s - self.first_s, "cpu_s": self.cpu_s})


async def _holdfast(url: str, queue: str, count: Count) -> None:
    import holdfast

    app = holdfast.App(url)

    @app.consumer(queue, concurrency=HELD)
    async def handle(message: holdfast.Message) -> None:
        if count.one():
            app.stop()

    await app.run()


async def _faststream(url: str, queue: str, count: Count) -> None:
    from faststream import FastStream
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    broker = RabbitBroker(url, default_channel=Channel(prefetch_count=HELD), logger=None)
    app = FastStream(broker, logger=None)

    @broker.subscriber(RabbitQueue(queue, durable=True))
    async def handle(body: bytes) -> None:
        if count.one():
            app.exit()

    await app.run()


def _dramatiq(url: str, queue: str, count: Count) -> None:
    import dramatiq
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    broker = RabbitmqBroker(url=url)
    dramatiq.set_broker(broker)

    @dramatiq.actor(queue_name=queue)
    def handle(text: str) -> None:
        count.one()

    if count.wanted < 0:  # fill: only its own messages can be read by it
        for _ in range(-count.wanted):
            handle.send("x" * 512)
        return
    worker = dramatiq.Worker(broker, worker_threads=8)  # its default
    worker.start()
    count.done.wait(600)
    worker.stop()
    broker.close()


def main() -> None:
    """Consume, or with dramatiq and a negative count: fill."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["holdfast", "faststream", "dramatiq"])
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    count = Count(options.count)
    if options.name == "holdfast":
        asyncio.run(_holdfast(options.url, options.queue, count))
    elif options.name == "faststream":
        asyncio.run(_faststream(options.url, options.queue, count))
    else:
        _dramatiq(options.url, options.queue, count)
    print(count.line())


if __name__ == "__main__":
    main()
