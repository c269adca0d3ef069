"""Ctrl-C and `holdfast recover` on an embedded dead queue: before it has begun, and while it moves items."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path

import pytest

from tests.support.command import TIMEOUT_S, Command, fill_dead_queue

pytestmark = pytest.mark.slow

COUNT = 300


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_silent_is_not_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = Command(tmp_path, "memory://").start("recover", place, "dead", HOLDFAST_TOKEN="t" * 40)
        with process:
            silent.settimeout(TIMEOUT_S)
            with silent.accept()[0]:
                process.send_signal(number)
                _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert err == b"error: recovery was stopped before it began; nothing was taken\n"


def test_a_stop_says_what_it_waits_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(fill_dead_queue(url, COUNT))
    process = Command(tmp_path, "memory://").start("recover", url, "dead", "--json", "--rate", "20/s")
    assert process.stderr is not None
    with process:
        next(line for line in process.stderr if b"recovery.progress" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3
    said = [json.loads(line).get("message") for line in err.splitlines()]
    assert "Stopping: what is marked arrives first; Ctrl-C again ends at once" in said
    told = json.loads(out.splitlines()[-1])
    assert told["stopped_by"] == "signal"
    assert told["recovered"] + told["remaining"] == COUNT
