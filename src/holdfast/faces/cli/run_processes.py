"""Several processes of one app: starts them, passes signals on, and starts again what was killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from holdfast.telemetry.events import emit

BACKOFF_S_FIRST = 0.5
BACKOFF_S_MAX = 30.0
#: A process that lived this long has earned a fresh start.
STEADY_S = 60.0


async def run_processes(arguments: Sequence[Sequence[str]], *, announce: Callable[[str], None]) -> int:
    """Run `holdfast` with each of these arguments until SIGTERM or SIGINT; returns the worst exit code.

    A process that a signal ended is started again. One that gave up by itself has said why, and ends all of them.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(_keep(own, stop, announce)) for own in arguments]
    codes = await asyncio.gather(*tasks)
    return max(codes)


async def _keep(arguments: Sequence[str], stop: asyncio.Event, announce: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        began_s = loop.time()
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "holdfast", *arguments)
        announce(f"process {process.pid} runs")
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if stop.is_set():
            if process.returncode is None:
                process.terminate()
            return max(0, await ended)
        code = await ended
        if code >= 0:
            stop.set()
            return code
        failures = 1 if loop.time() - began_s > STEADY_S else failures + 1
        emit("process.killed", pid=str(process.pid), signal=str(-code))
        try:
            async with asyncio.timeout(min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(failures - 1, 8))):
                await stop.wait()
                return 0
        except TimeoutError:
            continue
