"""`holdfast run`: a process that consumes, is asked how it is, and stops when told."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.faces.app import page
from holdfast.faces.cli.run import load_app
from holdfast.proof.process import child_process, python_argv
from holdfast.services.consume.worker import Health
from tests.support.command import Command
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

APP = """
import holdfast
app = holdfast.App("memory://", stop_timeout="5s")
number = 3

@app.consumer("work", retry=holdfast.Retry(attempts=2, delay="100ms"))
async def handle(message):
    raise ValueError("no")

@app.consumer("other")
async def produce(message): ...
"""
#: Sends a message to itself at the start: a queue in memory can be reached from nowhere else.
SENDER = (
    APP
    + """
import asyncio
original = app._at_work

def at_work(workers):
    asyncio.get_running_loop().create_task(app.queues.queue_produce("work", [
        holdfast.NewItem(payload=b"secret body", kind="order", reference="ref-1")]))
    return original(workers)

app._at_work = at_work
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "sender.py").write_text(SENDER)
    (tmp_path / "broken.py").write_text("1 / 0")
    return tmp_path


async def test_it_is_well_and_ends_well(folder: Path) -> None:
    argv = python_argv("holdfast", "run", "shop:app", "--declare", "--health", "127.0.0.1:0", "--only", "work")
    async with child_process(argv, cwd=folder) as child:
        found = await child.wait_line(r"Health on (http://\S+/health)")
        await child.wait_http(found[1])
        await child.wait_http(found[1].replace("/health", "/metrics"))
        await child.wait_line("Consuming work$")
        assert await child.terminate() == 0, child.stderr.tail


async def test_failures_retries_and_parkings_are_json_lines(folder: Path) -> None:
    async with child_process(python_argv("holdfast", "run", "sender:app", "--declare"), cwd=folder) as child:
        await eventually(lambda: any("message.parked" in line for line in child.stderr.lines))
        assert await child.terminate() == 0
        lines = [json.loads(line) for line in child.stderr.lines]
    told = [line for line in lines if line["event"].startswith("message.")]
    assert [line["event"] for line in told] == ["message.failed", "message.retried", "message.failed", "message.parked"]
    assert [line["attempt"] for line in told] == [1, 1, 2, 2]
    for line in told:
        assert line["correlationId"] == "ref-1"
        assert (line["queue"], line["routingKey"], line["messageType"]) == ("work", "work", "order")
        assert line["attempts_max"] == 2
    assert told[-1]["reason"] == "attempts"
    assert not any("secret body" in line for line in child.stderr.lines)


async def test_a_process_that_is_killed_comes_back(folder: Path) -> None:
    argv = python_argv("holdfast", "run", "shop:app", "--declare", "--processes", "2")
    async with child_process(argv, cwd=folder) as child:
        first = await child.wait_line(r"process (\d+) runs")
        await eventually(lambda: sum("Consuming" in line for line in child.stdout.lines) == 2)
        os.kill(int(first[1]), signal.SIGKILL)
        await eventually(lambda: sum("Consuming" in line for line in child.stdout.lines) == 3)
        assert await child.terminate() == 0, child.stderr.tail


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop", "is not MODULE:NAME"),
        ("nowhere:app", "No module named 'nowhere'"),
        ("broken:app", r"ZeroDivisionError: .+, in .+/broken\.py line 1: .*1 / 0"),
        ("shop:missing", "is not there"),
        ("shop:number", "is a int, not a holdfast.App"),
    ],
)
def test_what_cannot_be_run_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(HoldfastError, match=said):
        load_app(target)
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


def test_a_queue_that_is_missing_is_said_before_anything_runs(folder: Path) -> None:
    ended = Command(folder, "memory://")("run", "shop:app")
    assert ended.code == 1
    assert "queue 'work' does not exist, create it or use --declare" in ended.stderr
    assert "queue 'other' does not exist" in ended.stderr
    assert ended.text == "", "nothing is consumed"


def test_health_is_red_in_trouble_and_while_nobody_consumes() -> None:
    def status(*consumers: Health) -> int:
        return page("/health", list(consumers))[0].value

    assert status() == 503
    assert status(Health(queue="q", state="consuming", running=0)) == 200
    assert status(Health(queue="q", state="stopping", running=0)) == 503
    assert status(Health(queue="q", state="consuming", running=1, trouble="no dead queue")) == 503
    assert page("/", [])[0].value == 404
