"""Several servers on the module's database, each a storage of its own, on the database's clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import TypeVar

import pytest

from holdfast.core.item import LeasedItem, NewItem, PartitionInfo, QueueRecord
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.errors import QueueMissing
from holdfast.ports.queue_store import (
    DeathRules,
    LeaseItems,
    MoveTarget,
    Operation,
    Produce,
    QueueStore,
    RelatedQueues,
    Result,
)

R = TypeVar("R", bound=Result)
SECOND = 1_000_000
HOUR = 3_600 * SECOND
LEASE = 30 * SECOND
LIVES = DeathRules()
STORAGE = "shared"
_numbers = count()


def new_name() -> str:
    """A queue's name that no other test has."""
    return f"queue-{next(_numbers)}"


async def make_queue(
    storage: PostgresStorage, name: str = "", *, dead_queue: str = "", dead_retention_us: int = 0
) -> QueueRecord:
    """A queue, made anew under a name or under a new one."""
    record = QueueRecord(
        name=name or new_name(),
        lease_timeout_us=LEASE,
        expire_timeout_us=HOUR,
        dead_queue=dead_queue,
        dead_retention_us=dead_retention_us,
        partitions=(PartitionInfo(0, STORAGE),),
    )
    return await storage.catalog().change(record.name, dead_queue=dead_queue, decide=lambda _, now: record)


async def delete_queue(storage: PostgresStorage, name: str) -> QueueRecord:
    """Delete whatever queue has the name; raises QueueMissing."""

    def decide(neighbours: RelatedQueues) -> QueueRecord:
        if neighbours.current is None:
            raise QueueMissing(name)
        return neighbours.current

    return await storage.catalog().delete(name, decide=decide, count=0)


async def one(store: QueueStore, operation: Operation, kind: type[R]) -> R:
    """The result of a batch of one."""
    result = (await store.commit([operation])).results[0]
    assert isinstance(result, kind), result
    return result


async def produce(store: QueueStore, *payloads: bytes, dedupe_key: str = "", partition: int = 0) -> list[str]:
    """Store items."""
    items = [NewItem(payload=payload, dedupe_key=dedupe_key) for payload in payloads]
    return list(await one(store, Produce(partition, items, HOUR), list))


async def lease(
    store: QueueStore, count_max: int = 10, *, timeout_us: int = LEASE, rules: DeathRules = LIVES, partition: int = 0
) -> list[LeasedItem]:
    """Lease items."""
    return list(await one(store, LeaseItems(partition, count_max, timeout_us, rules), list))


def target(record: QueueRecord, storage: str = STORAGE) -> MoveTarget:
    """What dies goes to this queue."""
    return MoveTarget(
        queue_name=record.name,
        generation=record.generation,
        partition=0,
        storage=storage,
        expire_timeout_us=2 * HOUR,
    )


def ids(leased: Sequence[LeasedItem]) -> list[str]:
    """Their ids."""
    return [item.id for item in leased]


async def opened(postgres_url: str) -> AsyncIterator[PostgresStorage]:
    """One server's storage."""
    storage = PostgresStorage(postgres_url, name=STORAGE)
    await storage.open()
    storage.catalog()
    yield storage
    await storage.close()


storage = pytest.fixture(opened)
other = pytest.fixture(opened)
