"""The garbage collector of a process that works for long is told to look seldom; that of a user's process is let be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.proof.process import child_process
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

TELL = "import atexit, gc; atexit.register(lambda: print('gc', gc.get_threshold(), gc.get_freeze_count() > 10_000));"
COMMAND = TELL + "import sys; from holdfast.faces.cli import main; sys.argv[0] = 'holdfast'; main()"
APP = """
import holdfast
app = holdfast.App("memory://")
@app.consumer("work")
async def handle(message: holdfast.Message) -> None: ...
"""
SELDOM = "gc (50000, 20, 100) True"
USUAL = "gc (700, 10, 10) False"


@pytest.mark.parametrize(
    ("arguments", "ready"),
    [
        (("serve", "--url", "memory://", "--listen", "127.0.0.1:0"), "serves on"),
        (("run", "garbage_app:app", "--declare"), "consum"),
    ],
    ids=["serve", "run"],
)
async def test_a_process_that_serves_collects_seldom(tmp_path: Path, arguments: tuple[str, ...], ready: str) -> None:
    (tmp_path / "garbage_app.py").write_text(APP)
    async with child_process([sys.executable, "-c", COMMAND, *arguments], cwd=tmp_path) as child:
        await eventually(lambda: ready in child.stdout.tail + child.stderr.tail)
        await child.terminate()
        assert SELDOM in child.stdout.tail, child.stderr.tail


@pytest.mark.parametrize(
    ("program", "arguments", "told"),
    [
        (COMMAND, ("recover", "memory://", "orders.dead", "--to-source"), SELDOM),
        (COMMAND, ("queue", "list", "--url", "memory://"), USUAL),
        (TELL + "import asyncio, holdfast\nasync def main():\n async with holdfast.open('memory://') as queues:"
         " await queues.queues_create('orders')\nasyncio.run(main())", (), USUAL),
    ],
    ids=["recover", "a short command", "a program of a user"],
)  # fmt: skip
def test_others_collect_as_they_did_except_a_recovery(
    tmp_path: Path, program: str, arguments: tuple[str, ...], told: str
) -> None:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)
    assert told in done.stdout, done
