"""Every command has a help text with an example, and stands in docs/cli.md as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.cli_reference import every_command, renewed
from tests.support.command import Inside

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
COMMANDS = every_command()


def test_there_are_commands() -> None:
    assert {"holdfast serve", "holdfast queue produce", "holdfast queue items export"} <= set(COMMANDS)


@pytest.mark.parametrize(("path", "command"), COMMANDS.items(), ids=list(COMMANDS))
def test_a_command_explains_itself(path: str, command: Any) -> None:
    assert command.help.strip()
    assert f"$ {path}" in command.epilog
    assert all(param.help for param in command.params), [param.name for param in command.params if not param.help]
    assert f"### {path}\n" in PAGE.read_text("utf-8")
    if path != "holdfast serve":
        assert "--json" in {option for param in command.params for option in param.opts}


def test_the_page_is_what_the_commands_say() -> None:
    page = PAGE.read_text("utf-8")
    assert renewed(page) == page, "renew it: .venv/bin/python -m scripts.cli_reference docs/cli.md"


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_80_columns_and_speaks_no_python(path: str, tmp_path: Path) -> None:
    shown = Inside(tmp_path, "memory://").done(*path.split()[1:], "--help", COLUMNS="80").text
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"<(bool|str|int|float|Path|list)|\\\[|\[\[|\{[A-Z]", shown)
    assert min(_description_columns(shown)) >= 28, "the description is what people read"


def _description_columns(shown: str) -> list[int]:
    """How wide the last column of each panel with options is: from where `--json` and `--help` are explained."""
    lines = [line for line in shown.splitlines() if " JSON on stdout" in line or " Show this message" in line]
    return [78 - max(line.find("JSON on stdout"), line.find("Show this message")) for line in lines]


def test_help_does_not_wait_for_what_it_does_not_need() -> None:
    program = "import sys, holdfast.faces.cli; sys.exit(bool({'httpx2', 'starlette', 'psycopg'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_brackets_in_a_text_are_no_markup(tmp_path: Path) -> None:
    shown = Inside(tmp_path, "memory://").done("run", "--help", COLUMNS="200").text
    assert "what [recover] of holdfast.toml says" in shown


def test_help_shows_usage_options_and_example(tmp_path: Path) -> None:
    shown = Inside(tmp_path, "memory://").done("queue", "create", "--help", COLUMNS="100").text
    assert "Usage: holdfast queue create" in shown
    assert "--dead-queue" in shown
    assert "$ holdfast queue create orders" in shown
