"""`holdfast demo`: an incident in a folder of its own, which nothing else is mistaken for."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.requests.results import ReadGaps
from holdfast.core.requests.vault import ListGroups, ListRedrives, ReadBalance, ReadOverview, SearchLetters
from holdfast.faces.client import Client
from holdfast.proof.process import Child, child_process
from tests.support.command import PROGRAM, Inside
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

FOLDER = "holdfast-demo"


@asynccontextmanager
async def demo(folder: Path, **variables: str) -> AsyncIterator[tuple[Child, Client]]:
    """A demo on a free port, and who looks at it."""
    environment = dict.fromkeys((name for name in os.environ if name.startswith("HOLDFAST_")), "") | variables
    async with child_process([str(PROGRAM), "demo"], cwd=folder, env=environment) as child:
        address = (await child.wait_line(r"(http://127\.0\.0\.1:\d+)"))[1]
        token = (folder / FOLDER / "admin-token").read_text().strip()
        async with Client(address, token) as client:
            yield child, client


async def test_a_demo_shows_an_incident_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('listen = "nonsense"')  # of the user's, and none of the demo's
    async with demo(tmp_path, HOLDFAST_URL="sqlite:///elsewhere") as (child, client):
        states = {one.queue: one.states for one in (await client.call(ReadOverview())).queues}
        assert states["invoices.dlq"]["came_back"] > 10
        assert states["mailings.dlq"]["captured"] > 500
        assert states["orders.dlq"]["captured"] > 5
        assert states["payments.dlq"]["captured"] > 50
        letters = await client.call(SearchLetters(queue="orders.dlq", limit=1))
        assert "in _check_address" in letters.letters[0].error_stack
        groups = (await client.call(ListGroups())).groups
        causes = {one.title.split(" ")[0].rpartition(".")[2] for one in groups}
        assert [one.status.value for one in groups if "LookupError" in one.title] == ["regressed"]
        assert causes == {"ConnectionRefusedError", "LookupError", "TimeoutError", "ValueError"}
        assert (max(one.last_at for one in groups) - min(one.first_at for one in groups)).total_seconds() > 20 * 3600
        gaps = (await client.call(ReadGaps(id="report-of-the-day"))).items
        assert {one.series: list(one.missing) for one in gaps}["rows"] == [(57, 63), (120, 121), (200, 200)]

        async def redriving() -> bool:
            tasks = (await client.call(ListRedrives())).redrives
            return any(one.state.value == "running" and one.redriven for one in tasks)

        await eventually(redriving)
        assert all(one.agrees for one in await client.call(ReadBalance()))
        assert await child.terminate() == 0
    async with demo(tmp_path) as (child, client):
        assert len((await client.call(ListRedrives())).redrives) == 2, "it is the same day"
        again = Inside(tmp_path, "")("demo", "--remove")
        assert again.code == 1
        assert again.stderr.startswith("error: demo is served; "), again.stderr
        assert await child.terminate() == 0
    assert sorted(one.name for one in tmp_path.iterdir() if one.name not in {"state", "stdin"}) == [
        "holdfast-demo",
        "holdfast.toml",
    ]
    removed = Inside(tmp_path, "")("demo", "--remove")
    assert (removed.code, (tmp_path / FOLDER).exists()) == (0, False)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    precious = tmp_path / FOLDER / "letters.db"
    sqlite3.connect(precious).close()
    for arguments in (["demo"], ["demo", "--remove"]):
        refused = Inside(tmp_path, "")(*arguments)
        assert (refused.code, refused.stderr.startswith("error: folder is not a demo's; ")) == (1, True), refused
    assert precious.exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / FOLDER).rename(tmp_path / "kept")
    (elsewhere / "made-by-holdfast-demo").touch()
    (tmp_path / FOLDER).symlink_to(elsewhere)
    assert Inside(tmp_path, "")("demo", "--remove").code == 1
    assert elsewhere.exists()


def test_what_is_not_there_is_not_removed(tmp_path: Path) -> None:
    told: Any = Inside(tmp_path, "")("demo", "--remove", "--json")
    assert (told.code, told.error["message"]) == (1, "demo is not there; no folder 'holdfast-demo' here")
