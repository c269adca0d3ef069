"""Servers that the tests start: which of them, how they are ended, and that none outlives the tests.

A missing one fails; only HOLDFAST_TEST_WITHOUT leaves its tests out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
import psycopg
import pytest

VARIABLE = "HOLDFAST_TEST_WITHOUT"
KNOWN = frozenset({"postgres", "rabbitmq"})
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 60.0
STEP_S = 0.02
LOG_CHARS = 4_000


def left_out(setting: str | None = None) -> frozenset[str]:
    """The servers named in HOLDFAST_TEST_WITHOUT. A name that is no server is an error."""
    text = os.environ.get(VARIABLE, "") if setting is None else setting
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := names - KNOWN:
        raise pytest.UsageError(f"{VARIABLE}: no such server: {', '.join(sorted(unknown))}")
    return names


def skip_left_out(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker names a server that was left out; called by conftest."""
    for name in left_out():
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
        self._guard: Guard | None = None

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
            with suppress(psutil.NoSuchProcess):
                server.resume()
            self._end([server])

    def kill(self) -> None:
        """SIGKILL to the server and all its processes: what a crash does. The data stay, for `start`."""
        processes = self.pause()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._end(processes)

    def pause(self) -> list[psutil.Process]:
        """SIGSTOP to all its processes: it holds its connections and answers nothing, until `resume`."""
        if self.pid is None:
            return []
        # The first one first: a stopped server makes no more processes.
        server = psutil.Process(self.pid)
        server.suspend()
        children = server.children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.suspend()
        return [server, *children]

    def resume(self) -> None:
        """SIGCONT."""
        if self.pid is not None:
            server = psutil.Process(self.pid)
            for process in (*server.children(recursive=True), server):
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def close(self) -> None:
        """End the server and remove the data."""
        self.kill()
        if self._guard is not None:
            self._guard.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The end of its logs, for an error's text."""
        files = [self.folder / "out", *(self.folder / "log").glob("*.log")]
        return "\n".join(file.read_text("utf-8", "replace")[-LOG_CHARS:] for file in files if file.exists())

    def _run(self, argv: Sequence[str | Path], *, beside: Sequence[int] = (), **how: Any) -> None:
        """Start its process; `beside` are processes that end with it, `how` is for Popen."""
        with (self.folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **how
            )
        if self._guard is not None:
            self._guard.close()
        self._guard = Guard(self.folder, self._process.pid, *beside)

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


def is_alive(pid: int) -> bool:
    """A zombie does not live: nobody may be there to reap it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def run_tool(argv: Sequence[str | Path], **how: Any) -> str:
    """Run a program of a server's to its end, which must be a good one: what it printed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, **how)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))} failed with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return str(done.stdout)


class Guard:
    """Ends a server and removes its folder when this process is gone, also when it was killed; `close` once it ended.

    It waits for the end of what we never write to it: nobody else holds our end of that pipe.
    """

    SCRIPT = 'folder=$0; cat; for group in "$@"; do kill -s KILL -- "-$group"; done; sleep 1; rm -rf "$folder"'

    def __init__(self, folder: Path, *groups: int) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", self.SCRIPT, str(folder), *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """It has ended in order."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
