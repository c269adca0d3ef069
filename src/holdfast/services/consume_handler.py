"""Runs one handler once: on the event loop, or in a thread of its own. Whatever it raises is an answer."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeAlias, TypeVar

from holdfast.core.message import Message

T = TypeVar("T")
_loop: ContextVar[asyncio.AbstractEventLoop] = ContextVar("the event loop that started this thread")

Handler: TypeAlias = Callable[[Message], Awaitable[object] | object]


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
        try:
            loop.call_soon_threadsafe(tell, error)
        except RuntimeError:
            pass  # the loop is closed: the process ends, and the message goes back by itself

    threading.Thread(target=run, name=f"handler of {message.queue}", daemon=True).start()
    finished, _ = await asyncio.wait([done], timeout=timeout_s)
    if not finished:
        on_overdue()
    return await done


def call_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await something on the event loop, from the thread of a handler."""
    loop = _loop.get(None)
    return asyncio.run(coroutine) if loop is None else asyncio.run_coroutine_threadsafe(coroutine, loop).result()
