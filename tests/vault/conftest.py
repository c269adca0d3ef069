"""Which stores the vault's suite runs over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.engines.postgres.database import PostgresDatabase
from holdfast.engines.sqlite.database import SqliteDatabase
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.support.amqp import Admin
from tests.support.postgres import emptied
from tests.vault.letters import DLQ, MAIN

STORES = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
KEY = b"k" * 32


def vault_on(store: str, folder: Path, url: str, clock: FrozenClock) -> Vault:
    """A vault in this memory, folder or database."""
    database: SqliteDatabase | PostgresDatabase
    if store == "postgres":
        database = PostgresDatabase(url, kind="vault", serial=True)
    else:
        database = SqliteDatabase(folder / "vault.db" if store == "sqlite" else None, kind="vault", clock=clock)
    return Vault(database, key=KEY, clock=clock)


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
async def admin(admin: Admin) -> Admin:
    """A virtual host with a queue and its dead-letter queue."""
    await admin.queue(DLQ)
    await admin.queue(MAIN)
    return admin


@pytest.fixture(params=STORES)
async def vault(request: pytest.FixtureRequest, tmp_path: Path, clock: FrozenClock) -> AsyncIterator[Vault]:
    """An empty vault on each store in turn."""
    url = emptied(request.getfixturevalue("postgres_url")) if request.param == "postgres" else ""
    made = vault_on(request.param, tmp_path, url, clock)
    await made.open()
    yield made
    await made.close()
