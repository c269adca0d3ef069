"""PostgreSQL gone and back: clear errors without the password, nothing half done, and the next call goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from holdfast.engines.postgres import connection as link_module
from holdfast.engines.postgres import connection as schema
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.errors import CannotStart, StorageFailed
from holdfast.ports.queue_store import Complete, Counted
from tests.engines.postgres.conftest import LIVES, STORAGE, ids, lease, make_queue, one, produce
from tests.support.eventually import eventually
from tests.support.postgres import Cluster

pytestmark = pytest.mark.postgres
SECRET = "s3cret-word"


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    """A server that the tests of this module may stop and kill."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
async def on_own(own_cluster: Cluster) -> AsyncIterator[PostgresStorage]:
    """A storage on the server that may be stopped."""
    own_cluster.start()
    storage = PostgresStorage(own_cluster.url(), name=STORAGE)
    await storage.open()
    storage.catalog()
    yield storage
    own_cluster.start()
    await storage.close()


def cut_off(url: str) -> int:
    """End every other connection to the database; returns how many there were."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        ).fetchone()
        assert row is not None
        return int(row[0])


async def test_a_connection_that_was_cut_is_replaced(storage: PostgresStorage, postgres_url: str) -> None:
    store = storage.queue_store(await make_queue(storage), [0])
    made = await produce(store, b"a")
    assert cut_off(postgres_url) >= 1
    made += await produce(store, b"b")
    assert ids(await lease(store)) == made


async def test_a_connection_cut_in_the_middle_fails_and_the_next_call_goes_on(
    storage: PostgresStorage, other: PostgresStorage, postgres_url: str
) -> None:
    record = await make_queue(storage)
    store = storage.queue_store(record, [0])
    await produce(store, b"a")
    (held,) = ids(await lease(store))
    with psycopg.connect(postgres_url) as blocker:
        blocker.execute("SELECT 1 FROM holdfast.leases FOR UPDATE")
        waiting = asyncio.create_task(one(store, Complete(0, [held]), Counted))
        await wait_blocked(postgres_url)
        blocker.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        with pytest.raises(StorageFailed, match=r"storage failed; PostgreSQL at 127\.0\.0\.1"):
            await waiting
    assert (await store.load()).states[0].leased == 1
    assert await one(store, Complete(0, [held]), Counted) == Counted(1)


async def wait_blocked(url: str) -> None:
    """Until somebody waits for a lock."""
    with psycopg.connect(url, autocommit=True) as connection:
        await eventually(lambda: is_found(connection, "wait_event_type = 'Lock'"))


def is_found(connection: psycopg.Connection[tuple[object, ...]], condition: str) -> bool:
    """Whether a connection to the database is in this state."""
    query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND "
    return connection.execute((query + condition).encode()).fetchone() is not None


async def test_a_cancelled_commit_leaves_no_broken_connection(storage: PostgresStorage, postgres_url: str) -> None:
    store = storage.queue_store(await make_queue(storage), [0])
    await produce(store, b"a")
    (held,) = ids(await lease(store))
    with psycopg.connect(postgres_url) as blocker:
        blocker.execute("SELECT 1 FROM holdfast.leases FOR UPDATE")
        waiting = asyncio.create_task(one(store, Complete(0, [held]), Counted))
        await wait_blocked(postgres_url)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    for _ in range(10):
        assert (tally := await store.tally(0, rules=LIVES)).total == tally.total_leased


async def test_a_server_that_does_not_answer_is_given_up(
    on_own: PostgresStorage, own_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_own.queue_store(await make_queue(on_own), [0])
    await produce(store, b"a")
    monkeypatch.setattr(link_module, "ANSWER_TIMEOUT_S", 0.2)
    own_cluster.pause()
    try:
        with pytest.raises(StorageFailed, match="has not answered for"):
            await produce(store, b"b")
    finally:
        own_cluster.resume()
    monkeypatch.undo()
    await store.load()
    assert len(await lease(store)) >= 1


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_restart_is_survived(on_own: PostgresStorage, own_cluster: Cluster, how: str) -> None:
    store = on_own.queue_store(await make_queue(on_own), [0])
    made = await produce(store, b"a", b"b")
    # In a thread: a server that shuts down waits for whoever has just connected to say who it is.
    await asyncio.to_thread(getattr(own_cluster, how))
    for _ in range(3):
        with pytest.raises(StorageFailed, match=r"storage failed; PostgreSQL at 127\.0\.0\.1") as error:
            await produce(store, b"c")
        assert "try again" in error.value.message
        with pytest.raises(StorageFailed):
            await on_own.catalog().version()
    await asyncio.to_thread(own_cluster.start)
    committed = await store.load()
    assert committed.states[0].queued == 2
    assert ids(await lease(store)) == made


async def test_watching_ends_with_an_error_when_the_server_goes(on_own: PostgresStorage, own_cluster: Cluster) -> None:
    watching = asyncio.create_task(on_own.watch(lambda _: None))
    with psycopg.connect(own_cluster.url(), autocommit=True) as connection:
        await eventually(lambda: is_found(connection, "query LIKE 'LISTEN%'"))
    await asyncio.to_thread(own_cluster.stop)
    with pytest.raises(StorageFailed, match=r"PostgreSQL at 127\.0\.0\.1"):
        await asyncio.wait_for(watching, 60.0)


async def test_a_server_that_cannot_be_reached_is_named_without_the_password(own_cluster: Cluster) -> None:
    url = f"postgresql://someone:{SECRET}@127.0.0.1:1/somewhere"
    with pytest.raises(CannotStart) as error:
        await PostgresStorage(url, name=STORAGE).open()
    for part in ("127.0.0.1:1", "somewhere", "someone"):
        assert part in error.value.message
    assert SECRET not in error.value.message


@pytest.mark.parametrize("url", ["postgresql://[", "postgresql://u:s3cret-word@h:port/d", "postgresql://u@h/d?x=y"])
async def test_a_url_that_is_none_is_a_clear_error(url: str) -> None:
    with pytest.raises(CannotStart) as error:
        await PostgresStorage(url, name=STORAGE).open()
    assert SECRET not in error.value.message


async def test_a_database_that_is_not_there_is_a_clear_error(postgres: Cluster) -> None:
    with pytest.raises(CannotStart, match="database 'nowhere'"):
        await PostgresStorage(postgres.url("nowhere"), name=STORAGE).open()


async def test_a_schema_from_the_future_is_refused(postgres: Cluster) -> None:
    url = postgres.create_database("from_the_future")
    await PostgresStorage(url, name=STORAGE).open()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE holdfast.schema_version SET version = 99")
    with pytest.raises(
        CannotStart, match=r"schema is too new; .* has version 99 and this program knows [0-9]+, use a newer Holdfast"
    ):
        await PostgresStorage(url, name=STORAGE).open()


async def test_servers_that_start_at_once_make_one_schema(postgres: Cluster) -> None:
    url = postgres.create_database("started_at_once")
    await asyncio.gather(*(schema.migrate(url) for _ in range(6)))
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SELECT count(*), max(version) FROM holdfast.schema_version").fetchone() == (
            1,
            max(schema.MIGRATIONS["queue"]),
        )


async def test_a_user_without_rights_is_told_so(postgres: Cluster) -> None:
    url = postgres.create_database("without_rights")
    with postgres.connect() as connection:
        connection.execute("DROP ROLE IF EXISTS nobody_much")
        connection.execute("CREATE ROLE nobody_much LOGIN")
    with pytest.raises(CannotStart, match="let the user create a schema"):
        await PostgresStorage(url.replace("holdfast@", "nobody_much@"), name=STORAGE).open()
