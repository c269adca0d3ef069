"""Servers that the tests start: which of them, where their files are, how they are ended, and that none outlives the
tests.

A missing one fails; only HOLDFAST_TEST_WITHOUT leaves its tests out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import httpx2
import psutil
import psycopg
import pytest

VARIABLE = "HOLDFAST_TEST_WITHOUT"
SERVERS = ("postgres", "rabbitmq", "browser")
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 60.0
STEP_S = 0.02
LOG_CHARS = 4_000
#: For suites in which no plug is pulled: a kill of a process leaves the kernel what was written, on a disk and here
#: alike, so that waiting for a disk would prove nothing more. `tests/faults` stays on the disk.
MEMORY = Path("/dev/shm")
#: Ends a server and removes its folder when this process is gone, also when it was killed. It waits for the end of what
#: we never write to it: nobody else holds our end of that pipe.
GUARD = 'folder=$0; cat; for group in "$@"; do kill -s KILL -- "-$group"; done; sleep 1; rm -rf "$folder"'
FREE_BYTES_MIN = 512 * 2**20  # containers often have 64 MiB


def memory_place() -> Path | None:
    """Where folders in memory can be; None: where all temporary files are, because there is no room."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= FREE_BYTES_MIN else None


def named(variable: str, known: Collection[str], kind: str) -> frozenset[str]:
    """The names in a variable, with commas between them. One that is not known is an error."""
    names = frozenset(name.strip() for name in os.environ.get(variable, "").split(",") if name.strip())
    if unknown := names - frozenset(known):
        raise pytest.UsageError(f"{variable}: no such {kind}: {', '.join(sorted(unknown))}")
    return names


def skip_left_out(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker names a server that was left out; called by conftest."""
    for name in named(VARIABLE, SERVERS, "server"):
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{VARIABLE} names {name}"))


def fail_without(name: str, needed: str, install: str) -> None:
    """Fail the test: a server is missing."""
    pytest.fail(
        f"these tests need a {needed}. Install it:  {install}\nor leave them out:  {VARIABLE}={name}", pytrace=False
    )


def wait_until(fact: Callable[[], object], what: str, *, timeout_s: float, log: Callable[[], str] = str) -> None:
    """Where no event loop is: until it is so. A server that does not answer, or not as it will, is no answer yet."""
    deadline, last = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            if fact():
                return
            last = ""
        except (OSError, LookupError, httpx2.HTTPError, psycopg.OperationalError) as error:
            last = f"; {error}"
        time.sleep(STEP_S)
    raise RuntimeError(f"{what}: not after {timeout_s} s{last}\n{log()}")


class Server:
    """One server with its data. `stop`, `kill`, `pause` and `start` again are for fault tests; `close` is final, as is
    the end of a `with` block."""

    #: What ends it in order.
    STOP = signal.SIGTERM

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None when it is down."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server (again) and wait until it answers. Nothing happens when it runs."""
        if not self.pid:
            self.launch()
            self.wait_ready()

    def launch(self) -> None:
        """Start it without waiting."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Until it answers."""

        def answers() -> bool:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"{self} ended at its start\n{self.log()}")
            return self.is_ready()

        wait_until(answers, f"{self} is ready", timeout_s=READY_TIMEOUT_S, log=self.log)

    def stop(self) -> None:
        """An orderly end that cuts the clients off (what an administrator's restart does)."""
        if self.pid:
            server = psutil.Process(self.pid)
            server.send_signal(self.STOP)
            _tell([server], signal.SIGCONT)
            self._end([server])

    def kill(self) -> None:
        """SIGKILL to the server and all its processes: what a crash does. The data stay, for `start`."""
        processes = self.pause()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        _tell(processes, signal.SIGKILL)
        self._end(processes)

    def pause(self) -> list[psutil.Process]:
        """SIGSTOP to all its processes: it holds its connections and answers nothing, until `resume`."""
        if self.pid is None:
            return []
        # The first one first: a stopped server makes no more processes.
        server = psutil.Process(self.pid)
        server.suspend()
        children = server.children(recursive=True)
        _tell(children, signal.SIGSTOP)
        return [server, *children]

    def resume(self) -> None:
        """SIGCONT."""
        if self.pid is not None:
            server = psutil.Process(self.pid)
            _tell([*server.children(recursive=True), server], signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove the data."""
        self.kill()
        self._dismiss()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The end of its logs, for an error's text."""
        files = [self.folder / "out", *(self.folder / "log").glob("*.log")]
        return "\n".join(file.read_text("utf-8", "replace")[-LOG_CHARS:] for file in files if file.exists())

    def _run(self, argv: Sequence[str | Path], *, beside: Sequence[int] = (), **how: Any) -> None:
        """Start its process; `beside` are processes that end with it, `how` is for Popen."""
        with (self.folder / "out").open("ab") as out:
            self._process = launch(argv, out=out, **how)
        self._dismiss()
        argv = ["sh", "-c", GUARD, self.folder, *map(str, (self._process.pid, *beside))]
        self._guard = launch(argv, stdin=subprocess.PIPE)

    def _dismiss(self) -> None:
        """What it guards has ended in order."""
        if self._guard is not None:
            with self._guard:
                self._guard.kill()

    def _end(self, processes: Sequence[psutil.Process]) -> None:
        """A child that lives on holds what the next start needs: shared memory, ports."""
        if self._process is not None:
            self._process.wait(END_TIMEOUT_S)
            self._process = None
        wait_until(
            lambda: not any(is_alive(process.pid) for process in processes),
            f"the end of {self}",
            timeout_s=END_TIMEOUT_S,
        )


def _tell(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that still are."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_alive(pid: int) -> bool:
    """A zombie does not live: nobody may be there to reap it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def launch(
    argv: Sequence[str | Path],
    *,
    stdin: int = subprocess.DEVNULL,
    out: IO[bytes] | int = subprocess.DEVNULL,
    **how: Any,
) -> subprocess.Popen[bytes]:
    """Start a program in a group of its own; `how` is for Popen."""
    return subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=out, start_new_session=True, **how)


def run_tool(argv: Sequence[str | Path], **how: Any) -> str:
    """Run a program of a server's to its end, which must be a good one: what it printed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, **how)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))} failed with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return str(done.stdout)
