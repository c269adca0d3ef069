"""A few random kills per store; `make soak` does many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.load import random_kills

pytestmark = pytest.mark.slow

KILLS = 4


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_kills_on_sqlite_lose_nothing(seed: int, tmp_path: Path) -> None:
    report = await random_kills(f"sqlite:///{tmp_path}/data", tmp_path, kills=KILLS, seed=seed, partitions=seed)
    report.check()
    assert report.put_count > 0


@pytest.mark.postgres
async def test_random_kills_on_postgresql_lose_nothing(postgres_url: str, tmp_path: Path) -> None:
    report = await random_kills(postgres_url, tmp_path, kills=KILLS, seed=3, partitions=2)
    report.check()
    assert report.put_count > 0
