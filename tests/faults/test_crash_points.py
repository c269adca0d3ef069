"""SIGKILL of the real server at every named crash point, under load: nothing that was answered is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import holdfast
from holdfast.proof import crash_points
from tests.faults.load import Load, create_queues
from tests.faults.serving import Serving

pytestmark = pytest.mark.slow

POINTS = crash_points()
TESTS = Path(__file__).parent.parent
REACHED_TIMEOUT_S = 60.0
#: At the first pass the server has hardly begun (a new vault takes a dozen commits); at a later one all are at work.
PASSES = (1, 40)


def points_of(*prefixes: str) -> list[str]:
    return sorted(name for name in POINTS if name.startswith(prefixes))


SQLITE = points_of("queue.", "dead.", "sqlite.")
POSTGRES = points_of("queue.", "postgres.")


def test_every_crash_point_is_proved_here_or_names_its_own_test() -> None:
    mine = {*SQLITE, *POSTGRES}
    texts = [file.read_text("utf-8") for file in TESTS.rglob("test_*.py") if "faults" not in file.parts]
    unproved = [name for name in POINTS - mine if not any(name in text for text in texts)]
    assert not unproved


async def crash_and_count(url: str, folder: Path, point: str, passes: int) -> None:
    """Prepare, crash at the point under load, start again, drain, count."""
    async with holdfast.open(url) as queues:
        await create_queues(queues)
    async with Serving(url, folder) as server, server.client() as client:
        load = Load([client])
        child = await server.launch(HOLDFAST_CRASH_AT=f"{point}:{passes}")
        async with load.working():
            assert await child.wait(timeout_s=REACHED_TIMEOUT_S) == -9, child.stderr.tail
        assert passes == 1 or load.answered_count > 0
        await server.start()
        await load.produce(client, 3)
        (await load.drain(client)).check()


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("point", SQLITE)
async def test_a_kill_on_sqlite_loses_nothing(point: str, passes: int, tmp_path: Path) -> None:
    await crash_and_count(f"sqlite:///{tmp_path}/data", tmp_path, point, passes)


@pytest.fixture
async def fresh_database(postgres_url: str) -> AsyncIterator[str]:
    yield postgres_url
    async with holdfast.open(postgres_url) as queues:
        for name in ("work", "dead"):
            await queues.queues_delete(name, force=True)


@pytest.mark.postgres
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("point", POSTGRES)
async def test_a_kill_on_postgresql_loses_nothing(point: str, passes: int, fresh_database: str, tmp_path: Path) -> None:
    await crash_and_count(fresh_database, tmp_path, point, passes)
