"""A Python that has read the program already, and makes a process for each command by a fork.

Reading it takes longer than most commands do. What a fork gives is a process like any other: its own signals, files,
folder, environment and end. Run as a module this is the parent of those; it ends when whoever started it does.

`forked_process` is for a program that has to read itself, because it is told at its start where to crash: it finds
read what is not its own, which takes four fifths of the time.
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
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from holdfast.proof.process import Child

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 256 * 2**10
#: What the program reads when it is needed first: a third of a second.
READ_LATER = ("holdfast.wiring", "holdfast.engines.sqlite.database", "pydantic.main")
READ_BY_SERVERS = (
    "holdfast.faces.api.server",
    "holdfast.engines.objects.blobs",
    "uvicorn.protocols.http.httptools_impl",
)
OWN = frozenset({"__main__", "holdfast", "tests"})
START_TIMEOUT_S = 60.0
FILES_COUNT = 4  # stdin, stdout, stderr, and where to say the process id and, at the end, the exit code


class Parent:
    """Makes processes. Any thread may ask, and they run side by side."""

    def __init__(self, environment: Mapping[str, str], *, reads_program: bool = True) -> None:
        """`environment`: what the program sees while it is read. Or each process reads it for itself."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno()), str(int(reads_program))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=dict(environment),
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
def _reading_parent() -> Parent:
    """One for the run, whose processes read the program."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return Parent(clean, reads_program=False)


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


async def start_forked(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path) -> Child:
    """As `Child.start` does, of what `python_argv` gives."""
    from holdfast.proof.process import Child

    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    files = (os.open(os.devnull, os.O_RDONLY), out, err)
    mine = _reading_parent().ask(argv, files=files, folder=cwd, environment={**os.environ, **(env or {})})
    for file in files:
        os.close(file)
    said, writer = await asyncio.open_connection(sock=mine)
    async with asyncio.timeout(START_TIMEOUT_S):
        process = _Forked(int(await said.readline()), said, writer)
    await _connect(process.stdout, read_out)
    await _connect(process.stderr, read_err)
    return Child(cast(Process, process), argv)


async def _connect(stream: asyncio.StreamReader, pipe: int) -> None:
    protocol = asyncio.StreamReaderProtocol(stream)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb", 0))


@asynccontextmanager
async def forked_process(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path
) -> AsyncIterator[Child]:
    """As `child_process` is, of what `python_argv` gives."""
    child = await start_forked(argv, env=env, cwd=cwd)
    try:
        yield child
    finally:
        await child.close()


def _read_program() -> None:
    from holdfast.faces.cli import TREE, load

    for name in READ_LATER:
        importlib.import_module(name)
    for name in TREE:
        load(name)


def _read_what_it_stands_on() -> None:
    """All that the program reads and that is not its own: a process that reads everything finds out what that is."""
    names_in, names_out = os.pipe()
    if not os.fork():
        _read_program()
        for name in READ_BY_SERVERS:
            importlib.import_module(name)
        with open(names_out, "w", encoding="utf-8") as file:
            file.write("\n".join(name for name in sys.modules if name.partition(".")[0] not in OWN))
        os._exit(0)
    os.close(names_out)
    with open(names_in, encoding="utf-8") as file:
        for name in file.read().split():
            with suppress(ImportError):
                importlib.import_module(name)
    os.wait()


def serve(control: socket.socket, *, reads_program: bool) -> int:
    """Fork for each request; returns in the parent at the end, and in each process with its exit code."""
    del sys.path[0]  # where this module was found; an installed program has no such place
    if reads_program:
        _read_program()
    else:
        _read_what_it_stands_on()
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
    if argv[1:2] != ["-m"]:
        from holdfast.faces.cli import main

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
        ended = serve(asked, reads_program=sys.argv[2] == "1")
    sys.exit(ended)
