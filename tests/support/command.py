"""Runs the `holdfast` command with a clean environment: in a process of its own, or, much faster, in this one.

And what one wrote to a terminal, and a dead queue to run it on.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import holdfast
from holdfast.faces.cli import main
from holdfast.testing import assert_dead
from tests.support.forking import run_forked

PROGRAM = Path(sys.executable).with_name("holdfast")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def document(self) -> Any:
        """stdout as one JSON document."""
        return json.loads(self.stdout)

    @property
    def documents(self) -> list[Any]:
        """stdout as JSON Lines."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def error(self) -> Any:
        """stderr as one JSON document."""
        return json.loads(self.stderr)


@dataclass(frozen=True)
class Command:
    """`holdfast` in a folder, with HOLDFAST_URL set."""

    folder: Path
    url: str

    def environment(self, **variables: str) -> dict[str, str]:
        """What a child sees: nothing of ours but what the test says."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        # Warnings are errors in the child too, as in the tests.
        own = {"HOLDFAST_URL": self.url, "PYTHONWARNINGS": "error", "XDG_STATE_HOME": str(self.folder / "state")}
        return {**clean, **own, **variables}

    def __call__(self, *arguments: str | Path, stdin: bytes = b"", **variables: str) -> Ended:
        """Run it to its end."""
        ended = self.run(*map(str, arguments), stdin=stdin, **variables)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def run(self, *arguments: str, stdin: bytes, **variables: str) -> Ended:
        ended = subprocess.run(
            [str(PROGRAM), *arguments],
            input=stdin,
            capture_output=True,
            cwd=self.folder,
            env=self.environment(**variables),
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr.decode())

    def done(self, *arguments: str | Path, stdin: bytes = b"", **variables: str) -> Ended:
        """Run it to its end, which must be a good one."""
        ended = self(*arguments, stdin=stdin, **variables)
        assert ended.code == 0, ended
        return ended

    def start(self, *arguments: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start it; whoever does so feeds its stdin and ends it."""
        return subprocess.Popen(
            [str(PROGRAM), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.environment(**variables),
        )


class Forked(Command):
    """The same in a process forked from one which has read the program: only the start of Python is left out."""

    def run(self, *arguments: str, stdin: bytes, **variables: str) -> Ended:
        argv, environment = [str(PROGRAM), *arguments], self.environment(**variables)
        code, stdout, stderr = run_forked(
            argv, stdin=stdin, folder=self.folder, environment=environment, timeout_s=TIMEOUT_S
        )
        return Ended(code, stdout, stderr.decode())


class Inside(Command):
    """The same in this process, for tests with many commands: only the start of Python is left out."""

    def run(self, *arguments: str, stdin: bytes, **variables: str) -> Ended:
        logger = logging.getLogger("holdfast")
        handlers, propagate = logger.handlers, logger.propagate
        environment = {**dict.fromkeys(os.environ), **self.environment(**variables)}
        source = self.folder / "stdin"
        source.write_bytes(stdin)
        try:
            with (
                CliRunner().isolation(env=environment) as (out, err, _),
                source.open() as sys.stdin,  # one with a number, as the program wants
                chdir(self.folder),
            ):
                code = main(arguments)
                sys.stdout.flush()
                sys.stderr.flush()
                return Ended(code, out.getvalue(), err.getvalue().decode())
        finally:
            logger.handlers, logger.propagate = handlers, propagate


def all_of(terminal: int) -> str:
    """Everything until the other side is closed."""
    parts = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:  # the other side is closed
        pass
    return b"".join(parts).decode()


async def fill_dead_queue(url: str, count: int) -> None:
    """So many items of `orders` have died, and are in `dead`."""
    async with holdfast.open(url) as queues:
        await queues.queues_create("dead")
        await queues.queues_create("orders", dead_queue="dead")
        await queues.queue_produce("orders", [b"x"] * count)
        leased = await queues.queue_lease("orders", batch_size=count)
        await queues.queue_retry("orders", [holdfast.RetryItem(id=item.id, dead=True) for item in leased.items])
        assert await assert_dead(queues, "dead", source_queue="orders")
