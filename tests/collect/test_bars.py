"""Whoever waits in front of a terminal sees a bar for each series."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
from pathlib import Path

import pytest

import holdfast
from tests.collect.producing import PRODUCER, answer, make_queues, take_request
from tests.support.command import PROGRAM, Command

pytestmark = pytest.mark.slow

SHAPE = {"rows": 40, "lines": 3}


def on_a_terminal(command: Command, *arguments: str) -> tuple[int, str]:
    """Run it with stderr on a terminal; its exit code and what the terminal got."""
    ours, theirs = pty.openpty()
    argv = [str(PROGRAM), *arguments]
    env = command.environment(TERM="xterm", COLUMNS="120")
    with subprocess.Popen(argv, cwd=command.folder, env=env, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65_536):
                seen += piece
        except OSError:
            pass  # the last one who had the terminal has gone
        finally:
            os.close(ours)
        return process.wait(timeout=60), seen.decode()


@pytest.mark.parametrize("verb", ["start", "show"])
async def test_a_bar_for_each_series_while_one_waits(tmp_path: Path, verb: str) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await make_queues(queues)
        async with holdfast.Collector(url, queues=queues) as collector:
            await collector.start(b"May", producer=PRODUCER, transaction_id="t", series=list(SHAPE))
            await take_request(queues)
        await answer(queues, "t", SHAPE)
    arguments = ["--producer", PRODUCER, "--id", "t"] if verb == "start" else ["t"]
    code, seen = await asyncio.to_thread(on_a_terminal, Command(tmp_path, url), "results", verb, *arguments, "--wait")
    assert code == 0, seen
    assert "rows" in seen
    assert "40 of 40" in seen
    assert "lines" in seen
    assert "3 of 3" in seen
