"""A loop whose clock jumps: hours pass at once, in the right order, and a wait without an end is told."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.quick_time import run_quickly


def test_an_hour_of_timers_passes_at_once_and_in_order() -> None:
    woken: list[tuple[int, float]] = []

    async def sleeper(seconds: int) -> None:
        await asyncio.sleep(seconds)
        woken.append((seconds, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (3600, 1, 60)))

    began_s = time.monotonic()
    run_quickly(main())
    assert time.monotonic() - began_s < 60.0
    assert [seconds for seconds, _ in woken] == [1, 60, 3600]
    assert all(seconds <= at_s < seconds + 0.1 for seconds, at_s in woken)


def test_a_limit_ends_a_loop_that_never_sleeps() -> None:
    async def main() -> None:
        async with asyncio.timeout(1.0):
            for _ in range(1_000_000):
                await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        run_quickly(main())


def test_a_wait_for_what_never_comes_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="something that never comes"):
        run_quickly(main())
