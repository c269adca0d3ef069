"""Wait for a fact instead of sleeping: as fast as the program, and it says what was still missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar, overload

T = TypeVar("T")

STEP_S = 0.005
STEP_S_MAX = 0.1


@overload
async def eventually(fact: Callable[[], Awaitable[T]], *, timeout_s: float = 10.0) -> T: ...


@overload
async def eventually(fact: Callable[[], T], *, timeout_s: float = 10.0) -> T: ...


async def eventually(fact: Callable[[], T | Awaitable[T]], *, timeout_s: float = 10.0) -> T:
    """Call `fact` (a function or a coroutine function) until it answers something true, and return that.

    An AssertionError, OSError or LookupError that it raises counts as "not yet". When the time is up, raises
    AssertionError with the last answer or the last failure. A fact that hangs is ended by the same limit.
    """
    deadline = time.monotonic() + timeout_s
    step_s = STEP_S
    last = "the fact was never answered"
    while True:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
                answer = fact()
                result = await answer if isawaitable(answer) else answer
            if result:
                return result
            last = f"the last answer was {result!r}"
        except (AssertionError, OSError, LookupError, TimeoutError) as error:
            failure = error
            last = f"the last failure was {type(error).__name__}: {error}"
        if time.monotonic() + step_s > deadline:
            raise AssertionError(f"not true after {timeout_s} s; {last}") from failure
        await asyncio.sleep(step_s)
        step_s = min(step_s * 1.5, STEP_S_MAX)
