"""Starts a program as a process of its own, waits for a fact about it, and ends it: with SIGKILL, if asked.

Each child leads its own process group, and signals go to the whole group, so that its children do not
outlive it. Leaving the context always kills and reaps. Of its output the newest lines are kept, within a budget,
and never block the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from pwd import getpwnam
from re import Match
from urllib.parse import urlsplit

from holdfast.errors import HoldfastError

KEPT_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 1 << 16
READ_BYTES = 1 << 16
TAIL_LINES = 20
POLL_S = 0.02
HTTP_TIMEOUT_S = 2.0
READY_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0


class ChildFailed(HoldfastError):
    """A child process did not do what was waited for; its last output is in the text."""


def python_argv(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments…`, with the Python that runs this."""
    return [sys.executable, "-m", module, *arguments]


@asynccontextmanager
async def child_process(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: str | None = None,
) -> AsyncIterator[Child]:
    """Start `argv` with our environment and `env` on top; it is killed and reaped at the end of the block."""
    child = await Child.start(argv, env=env, cwd=cwd, user=user)
    try:
        yield child
    finally:
        await child.close()


class Child:
    """A running program. Made by `child_process`, or by `start` when whoever starts it also calls `close`."""

    def __init__(self, process: asyncio.subprocess.Process, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self.stdout = ChildOutput()
        self.stderr = ChildOutput()
        self._process = process
        # Not a TaskGroup: a child may be started in one task (a fixture) and closed in another.
        self._readers = [
            asyncio.create_task(_read(stream, output), name=f"output of {process.pid}")
            for stream, output in ((process.stdout, self.stdout), (process.stderr, self.stderr))
            if stream is not None
        ]

    @classmethod
    async def start(
        cls,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> Child:
        """Start it. Raises ChildFailed when there is no such program."""
        texts = [str(part) for part in argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *texts,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
                user=user,
                # Without these two, root's own groups would go along with the new user.
                group=None if user is None else getpwnam(user).pw_gid,
                extra_groups=None if user is None else [],
            )
        except OSError as error:
            raise ChildFailed(f"could not start; {' '.join(texts)}: {error}") from error
        return cls(process, texts)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._process.returncode

    async def wait(self, *, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait until it has ended by itself and its output is read. Raises ChildFailed if it does not."""
        try:
            async with asyncio.timeout(timeout_s):
                returncode = await self._process.wait()
                await asyncio.wait(self._readers)
        except TimeoutError as error:
            raise self._failed(f"still running after {timeout_s} s") from error
        return returncode

    async def wait_line(self, pattern: str, *, timeout_s: float = READY_TIMEOUT_S) -> Match[str]:
        """The first line on stdout, past or to come, in which the regular expression is found.

        Raises ChildFailed when the time is up or stdout ended without it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.stdout.wait_for(pattern)
        except TimeoutError as error:
            raise self._failed(f"no line with {pattern!r} on stdout after {timeout_s} s") from error
        if found is None:
            raise self._failed(f"its stdout ended without a line with {pattern!r}")
        return found

    async def wait_http(self, url: str, *, status: int = 200, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until a GET of `url` (plain http) gives `status`. Raises ChildFailed when it does not."""
        last: object = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while self.returncode is None:
                    last = await http_status(url)
                    if last == status:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise self._failed(f"{url} gave {last} and not {status} for {timeout_s} s") from error
        await asyncio.wait(self._readers)
        raise self._failed(f"it ended before {url} gave {status}")

    async def kill(self) -> int:
        """SIGKILL to the whole group, and reap. The return code is -9 unless it had ended before."""
        self.signal(signal.SIGKILL)
        return await self.wait()

    async def terminate(self, *, timeout_s: float = END_TIMEOUT_S) -> int:
        """SIGTERM, then wait for it to end by itself. Raises ChildFailed when it does not."""
        self.signal(signal.SIGTERM)
        return await self.wait(timeout_s=timeout_s)

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and locks, and does nothing, until `resume`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group. Nothing happens when all of it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def close(self) -> None:
        """Kill what is left of the group, reap, and let go of the pipes. May be called more than once."""
        self.signal(signal.SIGKILL)
        await self._process.wait()
        # Only a grandchild that left the group can still hold the pipes; it is not waited for.
        _, held = await asyncio.wait(self._readers, timeout=1.0)
        for reader in held:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _failed(self, what: str) -> ChildFailed:
        state = "running" if self.returncode is None else f"ended with {self.returncode}"
        return ChildFailed(
            f"{what}; process {self.pid} ({' '.join(self.argv)}), {state}\n"
            f"stdout:\n{self.stdout.tail}\nstderr:\n{self.stderr.tail}"
        )


class ChildOutput:
    """Bytes in, lines out. Older lines are dropped when the budget is used up, and the drop is counted."""

    def __init__(self, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.ended = False
        self.dropped_count = 0
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._lines: deque[str] = deque()
        self._partial = b""
        self._news = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Take in what was read. A line that is too long is kept in pieces."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._keep(line)
        if len(self._partial) > LINE_BYTES_MAX:
            self._keep(self._partial)
            self._partial = b""
        self._wake()

    def end(self) -> None:
        """There will be no more."""
        if self._partial:
            self._keep(self._partial)
            self._partial = b""
        self.ended = True
        self._wake()

    @property
    def lines(self) -> list[str]:
        """The lines that are kept, oldest first."""
        return list(self._lines)

    @property
    def tail(self) -> str:
        """The last few lines, for an error's text."""
        return "\n".join(self.lines[-TAIL_LINES:])

    async def wait_for(self, pattern: str) -> re.Match[str] | None:
        """The first kept line in which `pattern` is found, waiting for it; None when the output ended.

        Has no limit of its own: the caller gives it one.
        """
        seen = self.dropped_count
        while True:
            news = self._news
            for line in self.lines[max(seen - self.dropped_count, 0) :]:
                if found := re.search(pattern, line):
                    return found
            seen = self.dropped_count + len(self._lines)
            if self.ended:
                return None
            await news.wait()

    def _keep(self, line: bytes) -> None:
        self._lines.append(line.decode("utf-8", "replace").rstrip("\r"))
        self._kept_bytes += len(self._lines[-1]) + 1
        while self._kept_bytes > self._kept_bytes_max:
            self._kept_bytes -= len(self._lines.popleft()) + 1
            self.dropped_count += 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def http_status(url: str) -> int | None:
    """The status that a GET of a plain http address gives, or None when nobody answers properly."""
    parts = urlsplit(url)

    def ask() -> int:
        with contextlib.closing(HTTPConnection(parts.netloc, timeout=HTTP_TIMEOUT_S)) as connection:
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            return connection.getresponse().status

    try:
        return await asyncio.to_thread(ask)
    except (OSError, HTTPException, ValueError):
        return None


async def _read(stream: asyncio.StreamReader, output: ChildOutput) -> None:
    try:
        while data := await stream.read(READ_BYTES):
            output.feed(data)
    finally:
        output.end()
