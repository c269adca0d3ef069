"""The bar of `holdfast recover` on a terminal: of how many, when fewer are wanted than there are."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from holdfast.core.recovery import Summary, progress_of
from tests.support.command import PROGRAM, TIMEOUT_S, Command, all_of, fill_dead_queue

pytestmark = pytest.mark.slow

COUNT = 60


def _on_terminal(folder: Path, *arguments: str, columns: int = 120) -> str:
    ours, theirs = pty.openpty()
    environment = Command(folder, "memory://").environment(TERM="xterm", COLUMNS=str(columns), NO_COLOR="1")
    with subprocess.Popen(
        [PROGRAM, "recover", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs, cwd=folder, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = all_of(ours)
        os.close(ours)
        assert process.wait(TIMEOUT_S) in (0, 3)
    return shown


@pytest.mark.parametrize(("more", "shown"), [((), "60/60"), (("--limit", "20"), "20/20"), (("--dry-run",), "60/60")])
def test_the_bar_ends_where_the_run_ends(tmp_path: Path, more: tuple[str, ...], shown: str) -> None:
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(fill_dead_queue(url, COUNT))
    assert re.findall(r"\d+/\d+", _on_terminal(tmp_path, url, "dead", *more))[-1] == shown


def test_a_sentence_is_not_broken_where_the_terminal_ends(tmp_path: Path) -> None:
    """It may have a command in it, to be copied."""
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(fill_dead_queue(url, COUNT))
    assert f"Found {COUNT} messages in DLQ. Starting recovery..." in _on_terminal(tmp_path, url, "dead", columns=30)


@pytest.mark.parametrize(
    ("summary", "limit", "progress"),
    [
        (Summary(found=0), None, (0, None)),
        (Summary(found=0), 10, (0, None)),
        (Summary(found=30, recovered=5, failed=2), None, (7, 30)),
        (Summary(found=30, recovered=5, failed=2), 10, (7, 10)),
        (Summary(found=30, recovered=5), 100, (5, 30)),
        (Summary(found=30, recovered=5, filtered=20), 10, (5, 10)),
        (Summary(found=30, recovered=5, filtered=20), None, (25, 30)),
        (Summary(found=30, planned={"a": Counter(x=3), "b": Counter(x=1, y=2)}), 10, (6, 10)),
    ],
)
def test_how_far_it_is(summary: Summary, limit: int | None, progress: tuple[int, int | None]) -> None:
    assert progress_of(summary, limit) == progress
