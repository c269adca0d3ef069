"""A process that forks workers which can be killed: `python -m tests.vault.forks`, one request per line.

It has imported everything, so that a worker is at work at once; its crash point is armed after the fork, in every
module that passes one. A worker is an OS process like any other, and a kill is SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback

import holdfast.engines.postgres.database
import holdfast.engines.rabbitmq.broker  # noqa: F401 - both are imported by who needs them, which takes long
from holdfast import proof
from tests.vault import worker

STEP_S = 0.002
RUN_S_MAX = 60.0


def arm(at: str) -> None:
    """In a worker: what `HOLDFAST_CRASH_AT` does to a process that imports us with it."""
    trap, off = proof.Trap.parse(at), proof.crash_point
    armed = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast.") and getattr(module, "crash_point", None) is off:
            vars(module)["crash_point"] = trap
            armed += 1
    assert armed > 1, "nothing passes a crash point"


def main() -> None:
    """Fork a worker for each line; answer with its end."""
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if not child:
            work(wanted["kind"], wanted["env"])
        print(json.dumps({"code": end_of(child, wanted["kill_after_s"])}), flush=True)  # noqa: T201


def work(kind: str, env: dict[str, str]) -> None:
    """In the worker: never returns."""
    code = 1
    try:
        os.environ.update(env)
        if env.get(proof.VARIABLE):
            arm(env[proof.VARIABLE])
        asyncio.run(worker.main(kind))
        code = 0
    except BaseException:  # noqa: BLE001 - it is told, and the code is not 0
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_of(child: int, kill_after_s: float) -> int:
    """How the worker ended, by itself or by our signal."""
    began = time.monotonic()
    limit_s = kill_after_s or RUN_S_MAX
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > limit_s:
            os.kill(child, signal.SIGKILL)
            limit_s = RUN_S_MAX
        time.sleep(STEP_S)


class Forks:
    """The other side: asks for workers."""

    async def __aenter__(self) -> Forks:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.vault.forks",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *ended: object) -> None:
        self._process.kill()
        await self._process.wait()

    async def work(self, kind: str, env: dict[str, str], *, kill_after_s: float = 0.0) -> int:
        """Run one worker to its end. Raises AssertionError when it ended by anything but itself or SIGKILL."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"kind": kind, "env": env, "kill_after_s": kill_after_s}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if "code" in answer:
                assert answer["code"] in (0, -9), f"{kind} ended with {answer['code']}, its traceback is on stderr"
                return int(answer["code"])
        raise AssertionError("the process that forks workers is gone")


if __name__ == "__main__":
    main()
