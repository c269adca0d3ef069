"""Which stores the vault's suite runs over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from holdfast.engines.postgres.database import SCHEMA, PostgresDatabase
from holdfast.engines.sqlite.database import SqliteDatabase
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock

STORES = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
KEY = b"k" * 32


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture(params=STORES)
async def vault(request: pytest.FixtureRequest, tmp_path: Path, clock: FrozenClock) -> AsyncIterator[Vault]:
    """An empty vault on each store in turn."""
    match request.param:
        case "memory":
            made = Vault(SqliteDatabase(None, kind="vault", clock=clock), key=KEY, clock=clock)
        case "sqlite":
            made = Vault(SqliteDatabase(tmp_path / "vault.db", kind="vault", clock=clock), key=KEY, clock=clock)
        case _:
            url = request.getfixturevalue("postgres_url")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            made = Vault(PostgresDatabase(url, kind="vault", serial=True), key=KEY, clock=clock)
    await made.open()
    yield made
    await made.close()
