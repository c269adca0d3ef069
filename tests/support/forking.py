"""A Python that has read the program already, and makes a process for each command by a fork.

Reading it takes longer than most commands do. What a fork gives is a process like any other: its own signals, files,
folder, environment and end. Run as a module this is the parent of those; it ends when whoever started it does.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from holdfast.proof.process import Child

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 256 * 2**10
#: What the program reads when it is needed first: a third of a second, and more for a server.
READ_LATER = (
    "holdfast.wiring",
    "holdfast.engines.sqlite.database",
    "pydantic.main",
    "holdfast.faces.api.server",
    "holdfast.engines.objects.blobs",
    "uvicorn.protocols.http.httptools_impl",
)
START_TIMEOUT_S = 60.0
FILES_COUNT = 4  # stdin, stdout, stderr, and where to say the process id and, at the end, the exit code


class Parent:
    """Makes processes. Any thread may ask, and they run side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End it."""
        self._control.close()
        self._process.wait(10)

    def run(
        self, argv: Sequence[str], *, stdin: bytes, folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command to its end: its exit code, stdout and stderr. Raises TimeoutExpired, as subprocess does."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            files = (given.fileno(), out.fileno(), err.fileno())
            mine = self.ask(argv, files=files, folder=folder, environment=environment)
            mine.settimeout(START_TIMEOUT_S)  # at first it may still read the program
            with mine, mine.makefile("r") as said:
                pid = int(said.readline())
                mine.settimeout(timeout_s)
                try:
                    code = int(said.readline())
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(list(argv), timeout_s) from None
            out.seek(0)
            err.seek(0)
            return code, out.read(), err.read()

    def ask(
        self, argv: Sequence[str], *, files: Sequence[int], folder: Path, environment: Mapping[str, str]
    ) -> socket.socket:
        """Start a command over stdin, stdout and stderr: who says its process id in a line, and its exit code at the
        end."""
        request = json.dumps({"argv": list(argv), "folder": str(folder), "environment": dict(environment)})
        mine, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [request.encode()], [*files, theirs.fileno()])
        return mine


@cache
def parent() -> Parent:
    """One for the run."""
    return Parent()


class _Forked:
    """What a `Child` needs of a process that somebody else waits for."""

    def __init__(self, pid: int, said: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._end = asyncio.create_task(self._ended(said, writer), name=f"end of {pid}")

    async def _ended(self, said: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        self.returncode = int(await said.readline())
        writer.close()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)


async def start_forked(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Child:
    """As `Child.start` does, of what `python_argv` gives."""
    from holdfast.proof.process import Child

    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    files = (os.open(os.devnull, os.O_RDONLY), out, err)
    mine = parent().ask(argv, files=files, folder=cwd, environment={**os.environ, **(env or {})})
    for file in files:
        os.close(file)
    said, writer = await asyncio.open_connection(sock=mine)
    async with asyncio.timeout(START_TIMEOUT_S):
        process = _Forked(int(await said.readline()), said, writer)
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
    from holdfast.proof.process import ChildFailed

    try:
        return await child.wait(timeout_s=life_s)
    except ChildFailed:
        return await child.kill()


def serve(control: socket.socket) -> int:
    """Fork for each request; returns in the parent at the end, and in each process with its exit code."""
    from holdfast.faces.cli import TREE, load

    del sys.path[0]  # where this module was found; an installed program has no such place
    for name in READ_LATER:
        importlib.import_module(name)
    for name in TREE:
        load(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a command are not waited for
    while True:
        message, files, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, FILES_COUNT)
        if not message:
            return 0
        if os.fork():
            for file in files:
                os.close(file)
            continue
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(message)
        if pid := os.fork():
            _tell_end(pid, files[3])
        os.setsid()
        os.write(files[3], b"%d\n" % os.getpid())
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        return _run(request["argv"])


def _run(argv: list[str]) -> int:
    """The `holdfast` command, or `python -m module`."""
    from holdfast import proof
    from holdfast.faces.cli import main

    # What Python and the program read of their environment at their start.
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    if setting := os.environ.get(proof.VARIABLE):
        trap = proof.Trap.parse(setting)
        for names in map(vars, sys.modules.values()):
            if "crash_point" in names:
                names["crash_point"] = trap
    if argv[1:2] != ["-m"]:
        sys.argv[:] = argv
        return main()
    sys.argv[:] = argv[2:]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    return 0


def _tell_end(pid: int, answer: int) -> None:
    """In the process between: wait for the command, and say how it ended."""
    _, status = os.waitpid(pid, 0)
    os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        ended = serve(asked)
    sys.exit(ended)
