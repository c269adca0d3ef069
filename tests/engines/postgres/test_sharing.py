"""Two servers on one database: no double lease, one order, one owner of a key, no write into a queue that is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg
import pytest

from holdfast.core.item import NewItem, QueueRecord, RetryItem
from holdfast.core.moments import moment
from holdfast.core.requests.queue import ImportedItem
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.errors import Invalid, QueueMissing
from holdfast.ports.queue_store import (
    Complete,
    Counted,
    DeathRules,
    Due,
    Ended,
    Extend,
    IdsRefused,
    Import,
    LeaseItems,
    Produce,
    RelatedQueues,
    Release,
    RetryItems,
)
from tests.engines.postgres.conftest import (
    HOUR,
    LIVES,
    SECOND,
    delete_queue,
    ids,
    lease,
    make_queue,
    new_name,
    one,
    produce,
    target,
)
from tests.support.eventually import eventually

pytestmark = pytest.mark.postgres


async def test_no_item_is_leased_twice(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    store = [server.queue_store(record, [0]) for server in (storage, other)]
    made = await produce(store[0], *[b"x"] * 1_000)
    made += await produce(store[1], *[b"x"] * 1_000)
    given: list[str] = []

    async def consume(number: int) -> None:
        while leased := await lease(store[number % 2], 7):
            given.extend(ids(leased))
            assert await one(store[number % 2], Complete(0, ids(leased)), Counted) == Counted(len(leased))

    await asyncio.gather(*(consume(number) for number in range(8)))
    assert sorted(given) == sorted(made)
    assert len(set(given)) == len(given)


async def test_ids_are_one_order_over_servers(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    store = [server.queue_store(record, [0]) for server in (storage, other)]
    made = [(await produce(store[number % 2], b"x"))[0] for number in range(20)]
    assert made == sorted(made)
    assert ids(await lease(store[0], 20)) == made


async def test_a_dedupe_key_from_two_servers_is_one_item(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    store = [server.queue_store(record, [0]) for server in (storage, other)]
    for number in range(20):
        keys = [f"{number}-{letter}" for letter in "abc"]

        async def add(server: int, wanted: list[str]) -> list[str]:
            items = [NewItem(payload=b"x", dedupe_key=key) for key in wanted]
            return await one(store[server], Produce(0, items, HOUR), list)

        here, there = await asyncio.gather(add(0, keys), add(1, keys[::-1]))
        assert here == there[::-1]
    tally = await store[0].tally(0, rules=LIVES)
    assert tally.total - tally.total_leased == 60


async def test_an_import_from_two_servers_is_one_item(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    letters = [ImportedItem(payload=b"x", source_id=f"s{number}") for number in range(10)]
    stored = await asyncio.gather(
        *(one(server.queue_store(record, [0]), Import(0, letters, HOUR), list) for server in (storage, other) * 3)
    )
    assert sum(map(len, stored)) == 10


async def test_a_lease_of_one_server_is_settled_by_another(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    here, there = storage.queue_store(record, [0]), other.queue_store(record, [0])
    await produce(here, b"a", b"b")
    first, second = ids(await lease(here))
    await one(there, Extend(0, [second], HOUR), list)
    assert await one(there, Complete(0, [first]), Counted) == Counted(1)
    refused = await one(here, Complete(0, [first, second]), IdsRefused)
    assert refused.missing == [first]
    assert await one(here, Complete(0, [second]), Counted) == Counted(1)


async def test_requests_that_cross_do_not_wait_for_each_other_for_ever(
    storage: PostgresStorage, other: PostgresStorage
) -> None:
    record = await make_queue(storage)
    here, there = storage.queue_store(record, [0]), other.queue_store(record, [0])
    await produce(here, *[b"x"] * 200)
    held = ids(await lease(here, 200))
    low, high = held[:100], held[100:]
    for _ in range(20):
        extends = [Extend(0, low, HOUR), Extend(0, high, HOUR)]
        await asyncio.gather(here.commit(extends), there.commit(extends[::-1]))


async def test_one_server_gives_back_what_another_left(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    here, there = storage.queue_store(record, [0]), other.queue_store(record, [0])
    await produce(here, *[b"x"] * 50)
    assert len(await lease(here, 50, timeout_us=1)) == 50
    ends = await asyncio.gather(*(one(store, Due(0, 100, LIVES), Ended) for store in (here, there)))
    assert sum(ended.requeued for ended in ends) == 50
    assert len(await lease(there, 100)) == 50


async def test_counts_that_went_wrong_are_put_right(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    here, there = storage.queue_store(record, [0]), other.queue_store(record, [0])
    await here.load()
    await produce(here, *[b"x"] * 30)
    await one(there, Complete(0, ids(await lease(there, 30))), Counted)
    committed = await here.commit([LeaseItems(0, 10, SECOND, LIVES)])
    assert committed.states[0].queued == 0


async def test_a_release_by_another_server_is_leased_soon(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    here, there = storage.queue_store(record, [0]), other.queue_store(record, [0])
    await here.load()
    await produce(here, *[b"x"] * 2_000)
    first = ids(await lease(here, 10))
    await lease(here, 10)
    assert await one(there, Release(0, first), Counted) == Counted(10)

    async def is_leased_again() -> bool:
        return first[0] in ids(await lease(here, 10))

    await eventually(is_leased_again)


# --- queues that come and go ----------------------------------------------------------------------------------------


async def test_a_write_into_a_queue_that_is_gone_or_anew_fails(
    storage: PostgresStorage, other: PostgresStorage
) -> None:
    record = await make_queue(storage)
    store = other.queue_store(record, [0])
    await produce(store, b"x")
    await delete_queue(storage, record.name)
    with pytest.raises(QueueMissing, match=record.name):
        await produce(store, b"y")
    await make_queue(storage, record.name)
    with pytest.raises(QueueMissing, match=record.name):
        await produce(store, b"y")
    with pytest.raises(QueueMissing, match=record.name):
        await store.load()


async def test_produce_racing_delete_and_create_is_there_or_refused(
    storage: PostgresStorage, other: PostgresStorage
) -> None:
    """200 only for what is there: every produce that succeeded after the last delete is found, and nothing else."""
    name = new_name()
    record = await make_queue(storage, name)
    acknowledged: dict[int, set[str]] = {}
    current = record
    done = False

    async def producer(server: PostgresStorage) -> None:
        while not done:
            mine = current
            with contextlib.suppress(QueueMissing):
                made = await produce(server.queue_store(mine, [0]), b"x")
                acknowledged.setdefault(mine.generation, set()).update(made)
            await asyncio.sleep(0)

    async def churn() -> None:
        nonlocal current, done
        for _ in range(15):
            await asyncio.sleep(0.01)
            gone = await delete_queue(other, name)
            await other.drop(gone)
            current = await make_queue(storage, name)
        await asyncio.sleep(0.02)
        done = True

    await asyncio.gather(churn(), *(producer(server) for server in (storage, other) * 2))
    left = await storage.queue_store(current, [0]).list_items(0, pivot="", count_max=65_536, scheduled=False)
    assert {item.id for item in left} == acknowledged.get(current.generation, set())
    assert any(acknowledged.values())


async def test_two_servers_cannot_both_create(storage: PostgresStorage, other: PostgresStorage) -> None:
    name = new_name()

    def decide(neighbours: RelatedQueues, now_us: int) -> QueueRecord:
        if neighbours.current is not None:
            raise Invalid("there already")
        return QueueRecord(name=name, lease_timeout_us=1, expire_timeout_us=1)

    answers = await asyncio.gather(
        *(server.catalog().change(name, dead_queue="", decide=decide) for server in (storage, other) * 4),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, QueueRecord) for answer in answers) == 1
    assert sum(isinstance(answer, Invalid) for answer in answers) == 7


async def test_a_delete_counts_under_its_lock_and_leaves_nothing(storage: PostgresStorage) -> None:
    record = await make_queue(storage)
    store = storage.queue_store(record, [0])
    await produce(store, *[b"x"] * 12)
    await lease(store, 2)
    seen: list[int | None] = []

    def decide(neighbours: RelatedQueues) -> QueueRecord:
        seen.append(neighbours.item_count)
        return record

    await storage.catalog().delete(record.name, decide=decide, count=0)
    await storage.drop(record)
    await storage.drop(record)
    assert seen == [12]
    (entry,) = [e for e in await storage.catalog().ledger(after=0, count_max=1_000) if e.queue_name == record.name]
    assert (entry.action, entry.count) == ("queue_deleted", 12)


# --- death in one commit ----------------------------------------------------------------------------------------------


async def test_a_death_in_the_same_database_is_one_commit(storage: PostgresStorage) -> None:
    dead = await make_queue(storage)
    source = await make_queue(storage, dead_queue=dead.name)
    here, there = storage.queue_store(source, [0]), storage.queue_store(dead, [0])
    rules = DeathRules(max_attempts=1, target=target(dead))
    await produce(here, b"a", dedupe_key="k")
    (held,) = await lease(here)
    ended = await one(here, RetryItems(0, [RetryItem(id=held.id, dead=True, reason="why")], rules), Ended)
    assert (ended.moved, ended.dying, list(ended.deleted)) == (1, 0, [])
    assert await here.list_items(0, pivot="", count_max=10, scheduled=False) == []
    assert await here.dying_items(0, count_max=10) == []
    (letter,) = await there.list_items(0, pivot="", count_max=10, scheduled=False)
    assert (letter.payload, letter.source_id, letter.source_queue) == (b"a", held.id, source.name)
    assert (letter.death_reason, letter.death_attempts, letter.attempts) == ("why", 1, 0)
    assert letter.dedupe_key == ""
    (entry,) = await here.ledger(after=0, count_max=10)
    assert (entry.action, entry.item_id, entry.detail) == ("dead_lettered", held.id, dead.name)
    committed = await there.commit([Due(0, 10, DeathRules(immortal=True))])
    assert committed.states[0].queued == 1
    assert committed.states[0].oldest_death_us > 0
    await produce(here, b"b", dedupe_key="k")


async def test_a_letter_that_was_imported_before_does_not_come_twice(storage: PostgresStorage) -> None:
    dead, source = await make_queue(storage), await make_queue(storage)
    here, there = storage.queue_store(source, [0]), storage.queue_store(dead, [0])
    await produce(here, b"a", b"b")
    first, second = await lease(here)
    await one(there, Import(0, [ImportedItem(payload=b"a", source_id=first.id)], HOUR), list)
    rules = DeathRules(target=target(dead))
    retried = [RetryItem(id=item.id, dead=True) for item in (first, second)]
    await one(here, RetryItems(0, retried, rules), Ended)
    letters = await there.list_items(0, pivot="", count_max=10, scheduled=False)
    assert [letter.source_id for letter in letters] == [first.id, second.id]
    tally = await here.tally(0, rules=rules)
    assert (tally.total, tally.total_leased, tally.dying) == (0, 0, 0)


async def test_a_dead_queue_that_is_gone_leaves_the_item_dying(storage: PostgresStorage) -> None:
    dead, source = await make_queue(storage), await make_queue(storage)
    here = storage.queue_store(source, [0])
    await produce(here, b"a")
    (held,) = await lease(here)
    await delete_queue(storage, dead.name)
    rules = DeathRules(target=target(dead))
    ended = await one(here, RetryItems(0, [RetryItem(id=held.id, dead=True)], rules), Ended)
    assert (ended.moved, ended.dying) == (0, 1)
    (dying_item,) = await here.dying_items(0, count_max=10)
    assert dying_item.target == target(dead)


async def test_the_ledger_is_append_only(storage: PostgresStorage, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for statement in (
            "DELETE FROM holdfast.ledger",
            "UPDATE holdfast.ledger SET count = 0",
            "TRUNCATE holdfast.ledger",
        ):
            with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
                connection.execute(statement)


# --- hints ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def watching(storage: PostgresStorage, heard: list[str]) -> AsyncIterator[None]:
    """What a storage hears while this is open."""
    task = asyncio.create_task(storage.watch(heard.append))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_others_are_told_of_new_items_and_changes(storage: PostgresStorage, other: PostgresStorage) -> None:
    record = await make_queue(storage)
    heard: list[str] = []
    own: list[str] = []
    async with watching(other, heard), watching(storage, own):

        async def is_heard() -> bool:
            await produce(storage.queue_store(record, [0]), b"x")
            return record.name in heard

        await eventually(is_heard)
        made = await make_queue(storage)
        await eventually(lambda: made.name in heard)
    assert record.name not in own


async def test_deadlines_of_any_server_are_hinted(storage: PostgresStorage, other: PostgresStorage) -> None:
    dead = await make_queue(storage, dead_retention_us=1)
    leased, expired, scheduled = [await make_queue(storage, dead_queue=dead.name) for _ in range(3)]
    fresh = await make_queue(storage)
    await produce(storage.queue_store(leased, [0]), b"x")
    await lease(storage.queue_store(leased, [0]), timeout_us=1)
    await one(storage.queue_store(expired, [0]), Produce(0, [NewItem(payload=b"x")], 1), list)
    await produce(storage.queue_store(fresh, [0]), b"x")
    committed = await storage.queue_store(scheduled, [0]).load()
    soon = NewItem(payload=b"x", enqueue_at=moment(committed.now_us + 300_000))
    await one(storage.queue_store(scheduled, [0]), Produce(0, [soon], HOUR), list)
    letter = ImportedItem(payload=b"x", died_at=moment(committed.now_us), expire_deadline=moment(1))
    await one(storage.queue_store(dead, [0]), Import(0, [letter], HOUR), list)
    await storage.close()  # what it has to tell of new items is told: from now on only deadlines speak
    heard: list[str] = []
    async with watching(other, heard):
        await eventually(lambda: {leased.name, expired.name, scheduled.name, dead.name} <= set(heard))
    assert fresh.name not in heard


# --- beside another catalog -------------------------------------------------------------------------------------------


async def test_a_queue_of_another_catalog_is_adopted_until_it_is_dropped(postgres_url: str) -> None:
    storage = PostgresStorage(postgres_url, name="second")
    await storage.open()
    records = [
        QueueRecord(name="adopted", generation=generation, lease_timeout_us=1, expire_timeout_us=1)
        for generation in (1_000_001, 1_000_002)
    ]
    first, second = (storage.queue_store(record, [0]) for record in records)
    await first.load()
    await produce(first, b"x")
    await second.load()  # deleted and made anew in its catalog, before it was dropped here
    with pytest.raises(QueueMissing, match="adopted"):
        await produce(first, b"y")
    await produce(second, b"z")
    await storage.drop(records[1])
    with pytest.raises(QueueMissing, match="adopted"):
        await produce(second, b"y")
    await storage.close()


async def test_what_a_server_left_of_a_deleted_queue_is_removed_by_another(
    storage: PostgresStorage, other: PostgresStorage, postgres_url: str
) -> None:
    record = await make_queue(storage)
    await produce(storage.queue_store(record, [0]), *[b"x"] * 10)
    await delete_queue(storage, record.name)
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def left() -> list[tuple[object, ...]]:
            return connection.execute(
                "SELECT 1 FROM holdfast.items WHERE queue = %s UNION ALL SELECT 2 FROM holdfast.ready WHERE queue = %s",
                (record.generation, record.generation),
            ).fetchall()

        assert len(left()) == 20
        async with watching(other, []):
            await eventually(lambda: not left())
