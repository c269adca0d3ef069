"""Work in a thread that is waited for, also by whoever is cancelled meanwhile.

A thread cannot be stopped. If the caller went on at once, it would close a connection or a descriptor that the thread
is using; and the thread's next write could go to whichever file got that number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(threads: Executor, work: Callable[[], T]) -> T:
    """Do this in one of these threads; a cancellation goes out only when it is done."""
    running = asyncio.get_running_loop().run_in_executor(threads, work)
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
