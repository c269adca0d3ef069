"""Processes made by a fork from a Python that has read the program already, since that takes longer than most commands.

What a fork gives is a process like any other: its own session, signals, files, folder, environment and end. The Python
that forks is multiprocessing's fork server, one for each run of the tests.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import warnings
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

from holdfast import proof
from holdfast.faces.cli import TREE, main
from holdfast.proof.process import Child, ChildFailed

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
CONTEXT = multiprocessing.get_context("forkserver")
#: What the program reads when it is needed first: a third of a second, and more for a server.
CONTEXT.set_forkserver_preload(
    [
        "holdfast.wiring",
        "holdfast.engines.sqlite.database",
        "pydantic.main",
        "holdfast.faces.api.server",
        "holdfast.engines.objects",
        *(f"holdfast.faces.cli.{module}" for entry in TREE.values() for module in entry.modules.split()),
    ]
)
#: Whoever starts a process also asks how others have ended, and an end is told once.
_asking = threading.Lock()


def fork(
    argv: Sequence[str], *, files: Sequence[int], folder: Path, environment: Mapping[str, str]
) -> ForkServerProcess:
    """Start a command over stdin, stdout and stderr. When this returns it leads its own group."""
    begun, theirs = CONTEXT.Pipe(duplex=False)
    given = [*(Connection(os.dup(file)) for file in files), theirs]
    process = CONTEXT.Process(target=_run, args=(list(argv), str(folder), dict(environment), given))
    with _asking:
        process.start()
    for file in given:
        file.close()
    with begun:
        assert begun.poll(START_TIMEOUT_S), f"{argv} was not started"
    return process


def run_forked(
    argv: Sequence[str], *, stdin: bytes, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Run a command to its end: its exit code, stdout and stderr. Raises TimeoutExpired, as subprocess does."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        files = (given.fileno(), out.fileno(), err.fileno())
        process = fork(argv, files=files, folder=folder, environment=environment)
        if not wait([process.sentinel], timeout_s):
            process.kill()
            raise subprocess.TimeoutExpired(list(argv), timeout_s)
        out.seek(0)
        err.seek(0)
        return _code(process), out.read(), err.read()


def _code(process: ForkServerProcess) -> int:
    with _asking:
        assert process.exitcode is not None
        return process.exitcode


class _Forked:
    """What a `Child` needs of a process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.pid = process.pid
        self.returncode: int | None = None
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._process = process
        self._end = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.returncode = _code(self._process)
        self._end.set()

    async def wait(self) -> int | None:
        await self._end.wait()
        return self.returncode


async def start_forked(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Child:
    """As `Child.start` does, of what `python_argv` gives."""
    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    files = (os.open(os.devnull, os.O_RDONLY), out, err)
    environment = {**os.environ, **(env or {})}
    process = _Forked(await asyncio.to_thread(fork, argv, files=files, folder=cwd, environment=environment))
    for file in files:
        os.close(file)
    for stream, pipe in ((process.stdout, read_out), (process.stderr, read_err)):
        protocol = partial(asyncio.StreamReaderProtocol, stream)
        await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(pipe, "rb", 0))
    return Child(cast(Process, process), argv)


@asynccontextmanager
async def forked_process(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> AsyncIterator[Child]:
    """As `child_process` is, of what `python_argv` gives."""
    child = await start_forked(argv, env=env, cwd=cwd)
    try:
        yield child
    finally:
        await child.close()


async def ended_or_killed(child: Child, life_s: float) -> int:
    """How it ended: by itself, or by SIGKILL after so long."""
    try:
        return await child.wait(timeout_s=life_s)
    except ChildFailed:
        return await child.kill()


def note(file: str | Path, line: bytes) -> None:
    """One write a line: what a process did is there, whatever ends it."""
    with open(file, "ab", buffering=0) as lines:
        lines.write(line + b"\n")


def memory_peak_mib(pid: int) -> float:
    """Of a process alone: what `getrusage` says of one begins with that of the process that started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def _run(argv: list[str], folder: str, environment: Mapping[str, str], files: Sequence[Connection]) -> None:
    """The `holdfast` command, or `python -m module`, in its own process."""
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file.fileno(), number)
    for file in files:
        file.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # What Python and the program read of their environment at their start.
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    if setting := os.environ.get(proof.VARIABLE):
        trap = proof.Trap.parse(setting)
        for names in map(vars, list(sys.modules.values())):
            if "crash_point" in names:
                names["crash_point"] = trap
    sys.path.remove(str(ROOT))  # an installed program has no such place
    if argv[1:2] != ["-m"]:
        sys.argv[:] = argv
        sys.exit(main())
    sys.argv[:] = argv[2:]
    sys.path.insert(0, folder)
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
