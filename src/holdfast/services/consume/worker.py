"""Runs consumers: delivery → handler → decide() → settle.

A message is settled once its handler has answered and the broker has what follows from that; until then it is held.
What cannot be settled is tried again with back-off and turns the health red; at a stop it goes back. A handler runs on
the event loop, or in a thread of its own; whatever it raises is an answer.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from holdfast.core.message import Delivery, Message
from holdfast.core.moments import Backoff
from holdfast.core.policy import Ack, Decision, Park, RetryPolicy, Run, Wait, admit, decide, outcome_of
from holdfast.errors import CannotStart, HoldfastError, NotOurs
from holdfast.ports.broker import Broker, Consumer, Layout, Subscription, check_settled
from holdfast.proof import crash_point
from holdfast.telemetry.events import emit
from holdfast.telemetry.prometheus import handler_seconds

T = TypeVar("T")
_loop: ContextVar[asyncio.AbstractEventLoop] = ContextVar("the event loop that started this thread")

Handler: TypeAlias = Callable[[Message], Awaitable[object] | object]
CONCURRENCY_MAX = 1_000
BACKOFF = Backoff(first_s=0.1, delay_s_max=30.0)
GIVE_BACK_TIMEOUT_S = 5.0


class OutOfTime(Exception):
    """A handler did not end within its time limit, and was cancelled."""


def is_async(handler: Handler) -> bool:
    """Whether calling it gives a coroutine."""
    function: Any = handler
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def run_async(handler: Handler, message: Message, *, timeout_s: float | None) -> BaseException | None:
    """Await it. Past its limit it is cancelled. Only a cancellation from outside comes out as an exception."""
    task = asyncio.current_task()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            answer = handler(message)
            if inspect.isawaitable(answer):
                await answer
        return None
    except TimeoutError as error:
        return OutOfTime(f"not done within {timeout_s:g} s") if limit.expired() else error
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        return error  # it cancelled itself: one bad message stops no other
    except (Exception, SystemExit) as error:  # noqa: BLE001 - every exception is an answer
        return error


async def run_in_thread(
    handler: Handler, message: Message, *, timeout_s: float | None, on_overdue: Callable[[], None]
) -> BaseException | None:
    """Run it in a daemon thread. A thread cannot be ended: past its limit it is told of, and its end is waited for.

    A pool would be joined when the interpreter ends, and a handler that hangs would keep the process alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[BaseException | None] = loop.create_future()
    context = copy_context()
    context.run(_loop.set, loop)

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            context.run(handler, message)
        except BaseException as caught:  # noqa: BLE001 - also SystemExit, which ends a thread in silence
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the process ends, and the message goes back by itself
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name=f"handler of {message.queue}", daemon=True).start()
    finished, _ = await asyncio.wait([done], timeout=timeout_s)
    if not finished:
        on_overdue()
    return await done


def call_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await something on the event loop, from the thread of a handler."""
    loop = _loop.get(None)
    return asyncio.run(coroutine) if loop is None else asyncio.run_coroutine_threadsafe(coroutine, loop).result()


class ConsumerPlan(Struct, frozen=True, kw_only=True):
    """One handler on one queue."""

    queue: str
    handler: Handler
    policy: RetryPolicy = RetryPolicy()
    concurrency: int = 10
    prefetch: int = 0  #: 0 is as many as run at a time
    timeout_s: float | None = None
    permanent: tuple[type[BaseException], ...] = ()
    name: str = ""
    layout: Layout = "per-consumer"

    @property
    def subscription(self) -> Subscription:
        prefetch = max(self.prefetch, self.concurrency)
        return Subscription(
            queue=self.queue, policy=self.policy, prefetch=prefetch, consumer=self.name, layout=self.layout
        )


class Health(Struct, frozen=True, kw_only=True):
    """How one consumer stands. `trouble` says what is wrong; without any, all is well."""

    queue: str
    state: str
    running: int
    trouble: str = ""

    @property
    def is_well(self) -> bool:
        return not self.trouble


class _OwnMessage(NamedTuple):
    """A message that is ours until it is settled."""

    consumer: Consumer
    delivery: Delivery
    message: Message


async def check_all(broker: Broker, plans: Sequence[ConsumerPlan], *, declare: bool) -> None:
    """Raise CannotStart, naming everything that is missing for any consumer; make it first if told to."""
    missing = []
    for plan in plans:
        if declare and await broker.missing(plan.subscription):
            await broker.declare(plan.subscription)
        missing += await broker.missing(plan.subscription)
    if missing:
        raise CannotStart(f"consumer cannot start; {'; '.join(missing)}")


class Worker:
    """One consumer at work. `run` until `stop`."""

    def __init__(
        self,
        plan: ConsumerPlan,
        broker: Broker,
        *,
        stop_timeout_s: float,
        chance: Callable[[], float] = random.random,
        on_done: Callable[[Message], None] | None = None,
    ) -> None:
        self.plan = plan
        self._on_done = on_done
        self._broker = broker
        self._stop_timeout_s = stop_timeout_s
        self._chance = chance
        self._is_async = is_async(plan.handler)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._unsettled: dict[int, str] = {}
        self._consumer: Consumer | None = None
        self._state = "starting"

    @property
    def health(self) -> Health:
        """How it stands now."""
        trouble = next(iter(self._unsettled.values()), "") or (self._consumer.trouble if self._consumer else "")
        return Health(queue=self.plan.queue, state=self._state, running=len(self._tasks), trouble=trouble)

    def stop(self) -> None:
        """Take no more messages, let what runs end."""
        self._stopping.set()

    async def run(self) -> None:
        """Consume until `stop`. Raises HoldfastError when consuming ended for good; then nothing is lost."""
        async with self._broker.consumer(self.plan.subscription) as consumer:
            self._consumer = consumer
            self._state = "consuming"
            emit("consumer.started", queue=self.plan.queue)
            stopper = asyncio.create_task(self._stop_consumer(consumer), name=f"stop of {self.plan.queue}")
            try:
                await self._consume(consumer)
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=self._stop_timeout_s)
            finally:
                if self._stopping.is_set():
                    # A broker that was told to stop must have said that it has: the next question is another one.
                    await asyncio.wait([stopper], timeout=GIVE_BACK_TIMEOUT_S)
                await self._cancel_running()
                stopper.cancel()
                await asyncio.gather(stopper, return_exceptions=True)
                self._state = "stopped"
        emit("consumer.stopped", queue=self.plan.queue)

    async def _stop_consumer(self, consumer: Consumer) -> None:
        await self._stopping.wait()
        self._state = "stopping"
        await consumer.stop()

    async def _consume(self, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            free = self.plan.concurrency - len(self._tasks)
            if not free:
                self._freed.clear()
                await self._freed.wait()
                continue
            for delivery in await consumer.take(free):
                task = asyncio.create_task(self._work(consumer, delivery), name=f"message of {self.plan.queue}")
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._freed.set()
        if not task.cancelled() and (bug := task.exception()) is not None:
            # The message stays unsettled and goes back when this consumer ends; its neighbours go on.
            emit("message.bug", traceback=bug, queue=self.plan.queue, error=f"{type(bug).__name__}: {bug}")

    async def _cancel_running(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * GIVE_BACK_TIMEOUT_S)

    # --- one message --------------------------------------------------------------------------------------------

    async def _work(self, consumer: Consumer, delivery: Delivery) -> None:
        message = consumer.message(delivery)
        one = _OwnMessage(consumer, delivery, message)
        admitted = admit(used=message.attempt - 1, policy=self.plan.policy, step_aside=not message.attempt_is_certain)
        if not isinstance(admitted, Run):
            self._emit("message.poison", message)
            await self._settle(one, admitted)
        elif await self._insist(one, lambda: consumer.begin(delivery)):
            await self._settle(one, await self._attempt(one))

    async def _attempt(self, one: _OwnMessage) -> Decision:
        crash_point("consume.before_handler")
        began_s = perf_counter()
        error = await self._handle(one)
        handler_seconds.count(self.plan.queue, perf_counter() - began_s)
        crash_point("consume.after_handler")
        outcome = outcome_of(error, permanent=self.plan.permanent)
        decision = decide(outcome, attempt=one.message.attempt, policy=self.plan.policy, chance=self._chance())
        if not isinstance(decision, Ack):
            self._emit("message.failed", one.message, traceback=error, error=str(decision.failure))
        return decision

    async def _handle(self, one: _OwnMessage) -> BaseException | None:
        plan, message = self.plan, one.message
        if not self._is_async:
            # Cancelled, it is left unsettled: its thread still runs, and nobody else may begin before that has ended.
            return await run_in_thread(
                plan.handler,
                message,
                timeout_s=plan.timeout_s,
                on_overdue=lambda: self._emit("message.overdue", message, error=f"{plan.timeout_s:g} s"),
            )
        try:
            return await run_async(plan.handler, message, timeout_s=plan.timeout_s)
        except asyncio.CancelledError:
            await self._give_back(one, "stopped before its handler had ended")
            raise

    async def _settle(self, one: _OwnMessage, decision: Decision) -> None:
        if await self._insist(one, lambda: self._settle_once(one, decision)):
            self._tell(one.message, decision)

    async def _insist(self, one: _OwnMessage, act: Callable[[], Awaitable[None]]) -> bool:
        """Until it succeeds: a refusal is no reason to let go of a message. False when it is no longer ours."""
        failures = 0
        try:
            while True:
                try:
                    await act()
                    return True
                except NotOurs as error:
                    self._emit("message.not_ours", one.message, error=error.message)
                    return False
                except HoldfastError as error:
                    failures += 1
                    self._unsettled[id(one)] = error.message
                    self._emit("message.unsettled", one.message, error=error.message)
                    if await self._pause(failures):
                        await self._give_back(one, error.message)
                        return False
        except asyncio.CancelledError:
            await self._give_back(one, "stopped before it was settled")
            raise
        finally:
            self._unsettled.pop(id(one), None)

    async def _settle_once(self, one: _OwnMessage, decision: Decision) -> None:
        consumer, delivery, _ = one
        match decision:
            case Ack():
                crash_point("consume.before_ack")
                check_settled(await consumer.ack([delivery]))
                crash_point("consume.after_ack")
            case Wait():
                crash_point("consume.before_wait")
                await consumer.retry(delivery, decision)
                crash_point("consume.after_wait")
            case Park():
                crash_point("consume.before_park")
                await consumer.park(delivery, decision)
                crash_point("consume.after_park")

    async def _pause(self, failures: int) -> bool:
        """Back off; True when there is no more time because the consumer stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BACKOFF.delay_s(failures - 1, spread=self._chance())):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _give_back(self, one: _OwnMessage, why: str) -> None:
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                await one.consumer.give_back(one.delivery)
        except (HoldfastError, TimeoutError) as error:
            why = f"{why}; by itself, because {str(error) or 'it took too long'}"
        self._emit("message.given_back", one.message, error=why)

    def _tell(self, message: Message, decision: Decision) -> None:
        match decision:
            case Ack():
                emit("message.done", queue=self.plan.queue)
                if self._on_done is not None:
                    self._on_done(message)
            case Wait():
                self._emit("message.retried", message, delay=decision.delay, error=str(decision.failure))
            case Park():
                self._emit("message.parked", message, reason=decision.reason, error=str(decision.failure))

    def _emit(self, event: str, message: Message, *, traceback: BaseException | None = None, **fields: str) -> None:
        details: dict[str, Any] = {
            "queue": self.plan.queue,
            "messageId": message.id,
            "correlationId": message.correlation_id or message.id,
            "routingKey": message.routing_key,
            "messageType": message.type,
            "attempt": message.attempt,
            "attempts_max": self.plan.policy.attempts,
            **fields,
        }
        emit(event, traceback=traceback, **details)
