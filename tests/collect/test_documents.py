"""The page of the collector says what is true: its diagram is the table, its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from holdfast.core.states import TRANSACTION_MOVES, mermaid

ROOT = Path(__file__).parents[2]


def test_the_diagram_is_drawn_from_the_table() -> None:
    page = (ROOT / "docs/collector.md").read_text("utf-8")
    assert re.findall(r"```mermaid\n(.*?)```", page, flags=re.DOTALL) == [mermaid(TRANSACTION_MOVES) + "\n"]


def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/collector.py"), str(tmp_path / "data")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["report-of-may is completed: 1200 parts, 11980 bytes", "orders 0"]
