"""File work in a thread that is waited for even when the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Threads that mostly wait for the disk: more than processors, and not those that others wait for.
THREADS_COUNT_MAX = 32
_threads = ThreadPoolExecutor(THREADS_COUNT_MAX, thread_name_prefix="folder")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like asyncio.to_thread, but a cancellation goes out only after the thread is done.

    A thread cannot be stopped. If the caller went on at once, it would close a descriptor under the thread,
    and the thread's next write could go to whichever file got that number.
    """
    running = asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # the first one is raised below
        if not running.cancelled():
            running.exception()  # seen: the cancellation is what the caller gets
        raise
