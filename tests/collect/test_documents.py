"""The page of the collector says what is true: its diagram is the table, its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.routes import parse_routes
from holdfast.core.states import TRANSACTION_MOVES, mermaid
from holdfast.core.topology.layouts import design, parse_file
from holdfast.core.topology.model import Version

ROOT = Path(__file__).parents[2]


def test_the_diagram_is_drawn_from_the_table() -> None:
    page = (ROOT / "docs/collector.md").read_text("utf-8")
    assert re.findall(r"```mermaid\n(.*?)```", page, flags=re.DOTALL) == [mermaid(TRANSACTION_MOVES) + "\n"]


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/collector.py"), str(tmp_path / "data")]
    first, again = (
        subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[:2] == ["report-of-may is completed: 1200 parts, 11980 bytes", "orders 0"]
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[:2] == ["report-of-may is completed; its notice was received before", "orders 0"]


def test_the_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/collector.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", example], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert (done.stdout, done.returncode) == ("0 1\n1 1\n2 1\n", 0), done.stderr


def test_the_quick_start_of_the_first_page_runs_and_runs_again(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)[0]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", example], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("b'one'") == 1


def test_the_example_routes_lead_to_what_the_example_topology_makes() -> None:
    routes = parse_routes((ROOT / "examples/routes/imageviewer.toml").read_bytes(), source="imageviewer.toml")
    file = parse_file((ROOT / "examples/topologies/shared-dlq.toml").read_bytes(), source="shared-dlq.toml")
    made = design(file, Version.parse("3.13")).topology
    bound = {(binding.source, binding.key) for binding in made.bindings} | {("", each.name) for each in made.queues}
    assert {(address.exchange, address.routing_key) for address in routes.routes.values()} <= bound
    assert made.queue("imageviewer.dlq") is not None
