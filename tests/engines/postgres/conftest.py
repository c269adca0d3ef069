"""Storages on the module's database; each is a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast.engines.postgres.storage import PostgresStorage
from tests.engines.postgres.queues import STORAGE


async def opened(postgres_url: str) -> AsyncIterator[PostgresStorage]:
    """One server's storage."""
    storage = PostgresStorage(postgres_url, name=STORAGE)
    await storage.open()
    storage.catalog()
    yield storage
    await storage.close()


storage = pytest.fixture(opened)
other = pytest.fixture(opened)
