"""Which stores and which faces the suite runs over, and the installation that a test lives in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from holdfast import Queues
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.testing import FrozenClock
from tests.queue.installation import Installation, MakeStorage
from tests.support.flaky import LastingMemory
from tests.support.postgres import Cluster

STORES = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
FACES = ["in process", "http"]
TABLES = (
    "SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast' AND tablename NOT IN ('schema_version', 'catalog')"
)


@pytest.fixture(scope="module")
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Databases by name, for the tests of one module."""
    with ExitStack() as stack:
        yield Databases(request.getfixturevalue, request.module.__name__.rpartition(".")[2], stack)


@pytest.fixture(params=STORES)
def make_storage(request: pytest.FixtureRequest, tmp_path: Path, databases: Databases) -> MakeStorage:
    """A storage by its name; opened again, the same name has the same data."""
    match request.param:
        case "memory":
            return cache(lambda name, clock: LastingMemory(clock))
        case "sqlite":
            return lambda name, clock: SqliteStorage(tmp_path / name, clock=clock)
        case _:
            databases.empty()
            return lambda name, clock: PostgresStorage(databases.url(name), name=name, clock=clock)


class Databases:
    """PostgreSQL databases of one test module, made when first asked for and emptied before every test."""

    def __init__(self, fixture: Callable[[str], Any], module: str, stack: ExitStack) -> None:
        self._fixture = fixture
        self._module = module
        self._stack = stack
        self._connections: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}

    def url(self, storage: str) -> str:
        """The address of the database of this storage."""
        cluster: Cluster = self._fixture("postgres")
        name = f"{self._module}_{storage}"
        if name not in self._connections:
            cluster.create_database(name)
            self._stack.callback(cluster.drop_database, name)
            self._connections[name] = connection = self._stack.enter_context(cluster.connect(name))
            # Nobody kills this server: what a commit means is at stake here, not the disk.
            connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(name)))
            # The ledger refuses to be emptied, as it should; nobody asks it here.
            connection.execute("SET session_replication_role = replica")
        return cluster.url(name)

    def empty(self) -> None:
        """Delete everything but the schema."""
        for connection in self._connections.values():
            with connection.transaction():
                for (table,) in connection.execute(TABLES).fetchall():
                    connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier("holdfast", table)))


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make_installation(make_storage: MakeStorage, face: str) -> AsyncIterator[Callable[..., object]]:
    """Makes installations, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def make(*storages: str) -> Installation:
            installation = Installation(make_storage, face, storages=storages or ("default",))
            stack.push_async_callback(installation.close)
            await installation.open()
            return installation

        yield make


@pytest.fixture
async def installation(make_installation: Callable[..., object]) -> Installation:
    """A service with one storage."""
    return await make_installation()  # type: ignore[misc,no-any-return]


@pytest.fixture
def queues(installation: Installation) -> Queues:
    """The queues, through the face."""
    return installation.queues


@pytest.fixture
def clock(installation: Installation) -> FrozenClock:
    """The clock of the installation."""
    return installation.clock
