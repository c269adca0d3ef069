"""`holdfast.App`: handlers on queues, in your own program.

```python
app = holdfast.App("sqlite:///work")

@app.consumer("orders", retry=holdfast.Retry(attempts=3, delay="15s"))
async def handle(message: holdfast.Message) -> None: ...
```

`await app.run()` consumes until `app.stop()`; `holdfast run module:app` does the same from a shell. While it runs, or
in `async with app.sending():`, `await app.publish("orders", {"id": 1})` returns when the message is durable.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from copy import copy
from http import HTTPStatus
from pathlib import Path
from secrets import token_hex
from typing import Literal, TypeVar, Unpack, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.core.bodies import Body
from holdfast.core.message import Message, Published
from holdfast.core.policy import RetryPolicy, delay_us
from holdfast.core.topology.layouts import TopologyFile, design, parse_file
from holdfast.core.topology.model import Version
from holdfast.errors import CannotStart, Invalid, NotStored, OutcomeUnknown, Unreachable
from holdfast.faces.publishing import MessageOptions, PublishOptions, read_order
from holdfast.ports.broker import Broker, Layout
from holdfast.ports.clock import Clock
from holdfast.services.consume.worker import CONCURRENCY_MAX, ConsumerPlan, Handler, Health, Worker, check_all
from holdfast.services.publish import Publishing
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.queues import Queues
from holdfast.settings import ListenAddress
from holdfast.telemetry.prometheus import QueueGauge, Requests, render
from holdfast.wiring import Location, SystemClock, open_queues, open_rabbit_broker

REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 8 * 1024

Page = tuple[HTTPStatus, str, bytes]
STOP_TIMEOUT = "30s"
#: So much longer than its own time limit a thread waits for the event loop to answer.
ANSWER_TIMEOUT_S = 10.0
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
        self._publishing: Publishing | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._alone = threading.Lock()  # of threads that publish while it is not open

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
        """The queues, while this app runs, or sends, on an embedded queue or a server of ours."""
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
        file = self._file()
        plans = [_with_delays(plan, file) if file else plan for plan in self._chosen(only)]
        async with AsyncExitStack() as stack:
            self._take(stack)
            self._ends = asyncio.Event()
            if await self._start(stack, file, plans, declare=declare):
                await stack.enter_async_context(self._at_work(self._workers))
            yield self

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[App]:
        """Publish while the block runs, and consume nothing. An app that runs can publish without it."""
        file = self._file()
        async with AsyncExitStack() as stack:
            self._take(stack)
            await self._connect(stack, file)
            yield self

    async def publish(
        self, queue: str = "", body: Body | UnsetType = UNSET, **options: Unpack[PublishOptions]
    ) -> Published:
        """Publish to a queue, or to `exchange` with `routing_key`; returns when the message is durable. While the app
        runs, or in `sending()`.

        A body of bytes stays as it is, a str is UTF-8; dict, list, dataclass and msgspec.Struct are JSON. Options:
        `id` (one is made), `correlation_id`, `type`, `headers`, `priority`, `content_type`, `reply_to`; `in_="15s"` or
        `at=moment` for later, on embedded queues; `timeout="30s"` for all of it, and `repeat=False` to send once.

        Raises Invalid before anything is sent; NotStored: no queue has it; OutcomeUnknown: it may be stored. When this
        is cancelled, that is unknown too.
        """
        order = read_order(queue, options, now_us=self._clock.now_us())
        message = order.message(body, options.get("id", ""))
        (published,) = await self._opened().publish(
            [message], order.to, at_us=order.at_us, timeout_s=order.timeout_s, repeats=order.repeats
        )
        return published

    async def publish_many(
        self,
        queue: str = "",
        bodies: Iterable[Body] = (),
        *,
        ids: Sequence[str] = (),
        **options: Unpack[MessageOptions],
    ) -> list[Published]:
        """As `publish`, for many messages alike, in their order; `ids` are theirs. Each has an outcome of its own: what
        is raised has the errors of those that are not stored by their places (`errors`), the others are."""
        order = read_order(queue, cast(PublishOptions, options), now_us=self._clock.now_us())
        if isinstance(bodies, str | bytes | bytearray | memoryview | dict):
            raise Invalid("bodies are invalid; give a list of them, or use publish")
        given = list(bodies)
        if isinstance(ids, str) or "" in ids:
            raise Invalid("ids are invalid; give a list of them, none empty")
        if ids and not len(ids) == len(given) == len(set(ids)):
            raise Invalid(f"ids are invalid; {len(set(ids))} different ones for {len(given)} bodies, give one for each")
        messages = [order.message(body, one) for body, one in zip(given, ids or [""] * len(given), strict=True)]
        return await self._opened().publish(
            messages, order.to, at_us=order.at_us, timeout_s=order.timeout_s, repeats=order.repeats
        )

    def publish_sync(
        self, queue: str = "", body: Body | UnsetType = UNSET, **options: Unpack[PublishOptions]
    ) -> Published:
        """As `publish`, for code without an event loop: a thread beside this app's, or a program that has none. Where
        the app is not open, it is opened for this one message. Raises what `publish` does."""
        order = read_order(queue, options, now_us=self._clock.now_us())
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise Invalid("publish_sync is not possible here; it would stop the event loop, use await app.publish")
        options["id"] = options.get("id") or token_hex(16)
        if not self._is_open or self._loop is None:
            return self._publish_alone(queue, body, options, order.timeout_s)
        asked = asyncio.run_coroutine_threadsafe(self.publish(queue, body, **options), self._loop)
        try:
            return asked.result(order.timeout_s + ANSWER_TIMEOUT_S)
        except (concurrent.futures.CancelledError, TimeoutError) as error:
            text = (
                f"message may be stored or not; the app of '{options['id']}' ended, publish it again with the same id"
            )
            raise OutcomeUnknown(text, ids=[options["id"]], sent_count=1) from error
        finally:
            asked.cancel()

    def _publish_alone(
        self, queue: str, body: Body | UnsetType, options: PublishOptions, timeout_s: float
    ) -> Published:
        """One thread after the other: a storage folder cannot be open twice."""

        async def publish() -> Published:
            alone = copy(self)  # whoever opens this app meanwhile may do so
            alone._forget()  # noqa: SLF001 - it is one of these
            async with AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(alone.sending())
                except Unreachable as error:
                    text = f"message is not stored; nothing was sent: {error.message}"
                    raise NotStored(text, ids=[options["id"]]) from error
                return await alone.publish(queue, body, **options)

        if not self._alone.acquire(timeout=timeout_s):
            text = "message is not stored; nothing was sent, other threads publish one by one, open the app for them"
            raise NotStored(text, ids=[options["id"]])
        try:
            return asyncio.run(publish())
        finally:
            self._alone.release()

    def _opened(self) -> Publishing:
        if self._publishing is None:
            raise Invalid("app is not open; publish while it runs, or in `async with app.sending():`")
        return self._publishing

    def _file(self) -> TopologyFile | None:
        path = self._topology
        return parse_file(path.read_bytes(), source=str(path)) if path else None

    def _take(self, stack: AsyncExitStack) -> None:
        """From now on it is open, until the stack ends."""
        if self._is_open:
            raise Invalid("app runs already; one at a time")
        self._is_open = True
        stack.callback(self._forget)

    async def _connect(self, stack: AsyncExitStack, file: TopologyFile | None) -> Broker:
        self._broker = broker = await stack.enter_async_context(self._open(file))
        self._publishing = publishing = Publishing(broker)
        stack.callback(publishing.close)
        self._loop = asyncio.get_running_loop()
        return broker

    async def _start(
        self, stack: AsyncExitStack, file: TopologyFile | None, plans: Sequence[ConsumerPlan], *, declare: bool
    ) -> bool:
        """Open and check everything; False when it was stopped before. Raises CannotStart."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._starting = limit
                broker = await self._connect(stack, file)
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
        self._publishing, self._loop, self._is_open = None, None, False

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
