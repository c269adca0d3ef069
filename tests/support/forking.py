"""A Python that has read the program already, and makes a process for each command by a fork.

Reading it takes longer than most commands do. What a fork gives is a process like any other: its own signals, files,
folder, environment and end. Run as a module this is the parent of those; it ends when whoever started it does.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 256 * 2**10
#: What the program reads when it is needed first: a third of a second.
READ_LATER = ("holdfast.wiring", "holdfast.engines.sqlite.database", "pydantic.main")
START_TIMEOUT_S = 60.0
FILES_COUNT = 4  # stdin, stdout, stderr, and where to say the process id and, at the end, the exit code


class Parent:
    """Makes processes. Any thread may ask, and they run side by side."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: what the program sees while it is read."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
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
        request = json.dumps({"argv": list(argv), "folder": str(folder), "environment": dict(environment)})
        mine, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, mine:
            given.write(stdin)
            given.seek(0)
            with theirs, self._lock:
                files = [given.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
                socket.send_fds(self._control, [request.encode()], files)
            mine.settimeout(START_TIMEOUT_S)  # at first it may still read the program
            with mine.makefile("r") as said:
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


def serve(control: socket.socket) -> int:
    """Fork for each request; returns in the parent at the end, and in each process with its exit code."""
    del sys.path[0]  # where this module was found; an installed program has no such place
    from holdfast.faces.cli import TREE, load, main

    for name in READ_LATER:
        importlib.import_module(name)
    for name in TREE:
        load(name)
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
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[:] = request["argv"]
        return main()


def _tell_end(pid: int, answer: int) -> None:
    """In the process between: wait for the command, and say how it ended."""
    os.write(answer, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        ended = serve(asked)
    sys.exit(ended)
