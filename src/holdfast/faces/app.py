"""`holdfast.App`: handlers on queues, in your own program.

```python
app = holdfast.App("sqlite:///work")

@app.consumer("orders", retry=holdfast.Retry(attempts=3, delay="15s"))
async def handle(message: holdfast.Message) -> None: ...
```

`await app.run()` consumes until `app.stop()`; `holdfast run module:app` does the same from a shell.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.core.message import Message
from holdfast.core.policy import RetryPolicy, delay_us
from holdfast.core.topology.layouts import TopologyFile, design, parse_file
from holdfast.core.topology.model import Version
from holdfast.errors import CannotStart, Invalid
from holdfast.ports.broker import Broker, Layout
from holdfast.ports.clock import Clock
from holdfast.services.consume.worker import CONCURRENCY_MAX, ConsumerPlan, Handler, Health, Worker, check_all
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.queues import Queues
from holdfast.settings import ListenAddress
from holdfast.telemetry.prometheus import QueueGauge, Requests, render
from holdfast.wiring import Location, SystemClock, open_queues, open_rabbit_broker

REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 8 * 1024

Page = tuple[HTTPStatus, str, bytes]
STOP_TIMEOUT = "30s"
PREFETCH_MAX = 65_535

H = TypeVar("H", bound=Handler)


def page(path: str, consumers: list[Health]) -> Page:
    """What is shown. Red when any consumer is in trouble, or when none runs."""
    if path == "/health":
        is_well = bool(consumers) and all(health.is_well and health.state == "consuming" for health in consumers)
        body = msgspec.json.encode({"status": "ok" if is_well else "trouble", "consumers": consumers})
        return HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body
    if path == "/metrics":
        gauges = [QueueGauge(health.queue, "running", health.running) for health in consumers]
        return HTTPStatus.OK, "text/plain; version=0.0.4", render(Requests(), gauges).encode()
    return HTTPStatus.NOT_FOUND, "text/plain", b"there are /health and /metrics\n"


@asynccontextmanager
async def serving_health(address: ListenAddress, consumers: Callable[[], list[Health]]) -> AsyncIterator[ListenAddress]:
    """A small page for whoever watches a consumer process: `GET /health` (200 or 503) and `GET /metrics`.

    Answers until the block ends; gives the address, with the port that was taken. Raises CannotStart.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(b" ", 2)
                path = words[1].decode("ascii", "replace").partition("?")[0] if len(words) == 3 else ""
                status, kind, body = page(path, consumers())
                if status is not HTTPStatus.NOT_FOUND and words[0] not in (b"GET", b"HEAD"):
                    status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain\r\nallow: GET, HEAD", b"use GET\n"
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                    + (b"" if words[0] == b"HEAD" else body)
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or did not speak HTTP
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, address.host, address.port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        raise CannotStart(f"health address cannot be used; {address}: {error.strerror}, choose another") from error
    async with server:
        yield ListenAddress(address.host, server.sockets[0].getsockname()[1])


class App:
    """Consumers on one broker: RabbitMQ (amqp://…), an embedded queue (sqlite:///…, postgresql://…, memory://), or a
    server of ours (http://…, with its `token`). `management` is RabbitMQ's API, for what AMQP cannot tell at the start;
    `topology` a topology file that says how wait queues and dead queues are called and how long the delays are; `store`
    a folder (sqlite:///…) that keeps which messages were begun, for classic queues, which do not count.

    `vault` (sqlite:///… or postgresql://…) is where letters are kept: what was redriven out of it and is done here is
    resolved there.

    `stop_timeout` is how long running handlers may go on after a stop; what is not done then goes back to its queue.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        management: str | None = None,
        topology: str | Path | None = None,
        store: str | None = None,
        vault: str | None = None,
        stop_timeout: str | float = STOP_TIMEOUT,
        clock: Clock | None = None,
    ) -> None:
        self.url = url
        self.vault = vault
        self._token = token
        self._management = management
        self._topology = Path(topology) if topology else None
        self._store = store
        self._clock = clock or SystemClock()
        self._stop_timeout_s = _seconds(stop_timeout, what="stop_timeout")
        self._plans: list[ConsumerPlan] = []
        self._workers: list[Worker] = []
        self._ends = asyncio.Event()
        self._starting: asyncio.Timeout | None = None
        self._broker: Broker | None = None

    @property
    def consumers(self) -> Sequence[ConsumerPlan]:
        """What was registered, in order."""
        return tuple(self._plans)

    @property
    def health(self) -> list[Health]:
        """How each consumer stands; empty while none runs."""
        return [worker.health for worker in self._workers]

    @property
    def queues(self) -> Queues:
        """The queues, while this app runs on an embedded queue or a server of ours."""
        if not isinstance(self._broker, QueueBroker):
            raise Invalid("app has no queues; it does not run, or not on an embedded queue")
        return self._broker.queues

    def consumer(
        self,
        queue: str,
        *,
        retry: RetryPolicy | Literal["publish", "broker"] | None = None,
        concurrency: int = 10,
        timeout: str | float | None = None,
        permanent: Sequence[type[BaseException]] = (),
        name: str = "",
        prefetch: int = 0,
        layout: Layout = "per-consumer",
    ) -> Callable[[H], H]:
        """Register a handler, async or not. It runs at most `concurrency` times at once, each within `timeout`.

        `retry="broker"` is `Retry(by="broker")`: the usual attempts and delay; the broker carries to the wait queue.
        `permanent` names exception types that park at once, as Permanent does. On RabbitMQ, `layout` says how wait
        queues and dead queue are called and made (docs/topology.md), and `prefetch` how many messages are held.
        Raises Invalid.
        """
        if not queue:
            raise Invalid("queue name is invalid; queue name cannot be empty")
        if not 0 <= prefetch <= PREFETCH_MAX:
            raise Invalid(f"prefetch is invalid; {prefetch} is not from 0 to {PREFETCH_MAX}")
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise Invalid(f"concurrency is invalid; {concurrency} is not from 1 to {CONCURRENCY_MAX}")
        policy = RetryPolicy(by=retry) if isinstance(retry, str) else retry or RetryPolicy()
        timeout_s = None if timeout is None else _seconds(timeout, what="timeout")

        def register(handler: H) -> H:
            if any(plan.queue == queue for plan in self._plans):
                raise Invalid(f"queue has a consumer; '{queue}' is consumed by another handler of this app")
            plan = ConsumerPlan(
                queue=queue,
                handler=handler,
                policy=policy,
                concurrency=concurrency,
                timeout_s=timeout_s,
                permanent=tuple(permanent),
                name=name or _default_name(handler),
                prefetch=prefetch,
                layout=layout,
            )
            self._plans.append(plan)
            return handler

        return register

    def stop(self) -> None:
        """Take no more messages; `run` returns when what runs has ended, or its time is up."""
        self._ends.set()
        if self._starting is not None and not self._starting.expired():
            self._starting.reschedule(0.0)  # a start may wait for a broker that is away

    async def run(self, *, declare: bool = False, only: Sequence[str] = ()) -> None:
        """Consume until `stop`. Raises CannotStart, before anything is consumed, saying all that is missing.

        `declare` makes it instead; `only` names the queues to consume, instead of all.
        """
        async with self.running(declare=declare, only=only):
            await self.ended()

    async def ended(self) -> None:
        """Wait for `stop`, or for the end of a consumer."""
        await self._ends.wait()

    @asynccontextmanager
    async def running(self, *, declare: bool = False, only: Sequence[str] = ()) -> AsyncIterator[App]:
        """Consume while the block runs; leaving it is a stop, and raises what ended a consumer before."""
        if self._broker is not None:
            raise Invalid("app runs already; one at a time")
        path = self._topology
        file = parse_file(path.read_bytes(), source=str(path)) if path else None
        plans = [_with_delays(plan, file) if file else plan for plan in self._chosen(only)]
        self._ends = asyncio.Event()
        async with AsyncExitStack() as stack:
            stack.callback(self._forget)
            if await self._start(stack, file, plans, declare=declare):
                await stack.enter_async_context(self._at_work(self._workers))
            yield self

    async def _start(
        self, stack: AsyncExitStack, file: TopologyFile | None, plans: Sequence[ConsumerPlan], *, declare: bool
    ) -> bool:
        """Open and check everything; False when it was stopped before. Raises CannotStart."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._starting = limit
                self._broker = broker = await stack.enter_async_context(self._open(file))
                await check_all(broker, plans, declare=declare)
        except TimeoutError:
            if limit.expired():
                return False
            raise
        finally:
            self._starting = None
        on_done = await stack.enter_async_context(self._reporting())
        self._workers = [Worker(plan, broker, stop_timeout_s=self._stop_timeout_s, on_done=on_done) for plan in plans]
        return True

    @asynccontextmanager
    async def _reporting(self) -> AsyncIterator[Callable[[Message], None] | None]:
        """What to call for every message that is done; it never waits for the vault."""
        if self.vault is None:
            yield None
            return
        from holdfast.wiring import successes

        reports = successes(self.vault, actor=f"consumer@{socket.gethostname()}", clock=self._clock)
        async with reports.at_work():
            yield reports.note

    def _forget(self) -> None:
        self._broker, self._workers = None, []

    @asynccontextmanager
    async def _at_work(self, workers: Sequence[Worker]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(worker.run(), name=f"consumer of {worker.plan.queue}") for worker in workers]
        for task in tasks:
            task.add_done_callback(lambda _: self._ends.set())  # one that ends by itself is the end of all
        try:
            yield
            for worker in workers:
                worker.stop()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:  # done already, unless the block raised or was cancelled
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            task.result()

    def _chosen(self, only: Sequence[str]) -> list[ConsumerPlan]:
        if not self._plans:
            raise CannotStart("app has no consumers; register a handler with @app.consumer(queue)")
        unknown = set(only) - {plan.queue for plan in self._plans}
        if unknown:
            raise CannotStart(f"app has no such consumer; '{min(unknown)}' is none of its queues")
        return [plan for plan in self._plans if not only or plan.queue in only]

    @asynccontextmanager
    async def _open(self, file: TopologyFile | None) -> AsyncIterator[Broker]:
        url, clock = self.url, self._clock
        kind = Location.parse(url).kind
        if kind == "amqp":
            async with open_rabbit_broker(
                url, clock=clock, management=self._management, topology=file, store=self._store
            ) as broker:
                yield broker
            return
        opened: AbstractAsyncContextManager[Queues] = open_queues(url, clock=clock)
        if kind == "http":
            from holdfast.faces.client import Client

            opened = Client(url, self._token)
        async with opened as queues:
            yield QueueBroker(queues, clock=clock)


def _with_delays(plan: ConsumerPlan, file: TopologyFile) -> ConsumerPlan:
    """The plan with the delays that the wait queues of the file have. They are the same on every version."""
    for family in design(file, Version(4, 0)).families:
        if family.queue == plan.queue and family.waits:
            delays = [(wait.delay_ms or 0) / 1000 for wait in family.waits]
            return replace(plan, policy=replace(plan.policy, delay=delays))
    return plan  # the broker says what is missing


def _seconds(duration: str | float, *, what: str) -> float:
    seconds = delay_us(duration, what=what) / 1_000_000
    if not seconds:
        raise Invalid(f"{what} is invalid; it must be more than nothing")
    return seconds


def _default_name(handler: object) -> str:
    """Who parked, for the letter: the handler, and where it ran."""
    return f"{getattr(handler, '__qualname__', type(handler).__name__)}@{socket.gethostname()}:{os.getpid()}"
