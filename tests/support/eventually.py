"""Wait for a fact instead of sleeping: as fast as the program, and it says what was still missing.

HOLDFAST_TEST_EVENTUALLY_LOG=FILE writes down how near each came to its limit, one line each: the test, the fact, how
long it took and the limit, in seconds, with tabs between. A limit is wide enough when a busy machine stays far from it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar, overload

T = TypeVar("T")

LOG = "HOLDFAST_TEST_EVENTUALLY_LOG"
#: A fact that comes costs no more than it takes, however busy the machine is: only one that never comes costs this.
LIMIT_S = 60.0
STEP_S = 0.005
STEP_S_MAX = 0.1


@overload
async def eventually(fact: Callable[[], Awaitable[T]], *, timeout_s: float = LIMIT_S) -> T: ...


@overload
async def eventually(fact: Callable[[], T], *, timeout_s: float = LIMIT_S) -> T: ...


async def eventually(fact: Callable[[], T | Awaitable[T]], *, timeout_s: float = LIMIT_S) -> T:
    """Call `fact` (a function or a coroutine function) until it answers something true, and return that.

    An AssertionError, OSError or LookupError that it raises counts as "not yet". When the time is up, raises
    AssertionError with the last answer or the last failure. A fact that hangs is ended by the same limit.
    """
    began_s = time.monotonic()
    deadline = began_s + timeout_s
    step_s = STEP_S
    last = "the fact was never answered"
    while True:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
                answer = fact()
                result = await answer if isawaitable(answer) else answer
            if result:
                _log(fact, time.monotonic() - began_s, timeout_s)
                return result
            last = f"the last answer was {result!r}"
        except (AssertionError, OSError, LookupError, TimeoutError) as error:
            failure = error
            last = f"the last failure was {type(error).__name__}: {error}"
        if time.monotonic() + step_s > deadline:
            _log(fact, time.monotonic() - began_s, timeout_s)
            raise AssertionError(f"not true after {timeout_s} s; {last}") from failure
        await asyncio.sleep(step_s)
        step_s = min(step_s * 1.5, STEP_S_MAX)


def _log(fact: Callable[[], object], took_s: float, limit_s: float) -> None:
    if file := os.environ.get(LOG):
        code = getattr(fact, "__code__", None)
        what = f"{code.co_qualname} line {code.co_firstlineno}" if code else repr(fact)
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        with open(file, "a", encoding="utf-8") as log:
            log.write(f"{test}\t{what}\t{took_s:.3f}\t{limit_s:g}\n")
