"""The PostgreSQL storage: produce + lease + complete at the port, batch 100, payload 512 B, on a cluster with fsync on.

`bare` is the least that a durable queue in PostgreSQL can do, through psycopg: one table, unnest, SKIP LOCKED, no
generation to check, no expiry, no counts. It tells a slow machine from a slow storage.

    python -m bench.postgres          or, with the others, make bench
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import cast

import psycopg
import uvloop

from bench.rounds import ROUNDS_MIN, Target, report, run
from holdfast.core.item import LeasedItem, NewItem, PartitionInfo, QueueRecord
from holdfast.engines.postgres.storage import PostgresStorage
from holdfast.ports.queue_store import Complete, DeathRules, LeaseItems, Produce, QueueStore
from tests.support.postgres import Cluster

BATCH = 100
CONSUMERS = 8
PAYLOAD = os.urandom(512)
ITEMS = [NewItem(payload=PAYLOAD, kind="bench") for _ in range(BATCH)]
HOUR_US = 3_600_000_000
LEASE_US = 60_000_000
RULES = DeathRules(max_attempts=3)
RATE_MUST, RATE_AIM = 20_000, 30_000

BARE = (
    "CREATE TABLE bare (id bigserial PRIMARY KEY, deadline bigint NOT NULL DEFAULT 0, payload bytea NOT NULL)",
    "CREATE INDEX bare_ready ON bare (id) WHERE deadline = 0",
)
BARE_PRODUCE = "INSERT INTO bare (payload) SELECT unnest(%s::bytea[])"
BARE_LEASE = (
    "UPDATE bare SET deadline = 1 WHERE id IN (SELECT id FROM bare WHERE deadline = 0 ORDER BY id LIMIT %s "
    "FOR UPDATE SKIP LOCKED) RETURNING id, payload"
)
BARE_COMPLETE = "DELETE FROM bare WHERE id = ANY (%s)"


async def cycle(store: QueueStore, *, joined: int = 1) -> int:
    """Three commits; returns how many items went all the way. `joined` consumers are served by the same commits."""
    await store.commit([Produce(0, ITEMS * joined, HOUR_US)])
    leased = cast(list[LeasedItem], (await store.commit([LeaseItems(0, BATCH * joined, LEASE_US, RULES)])).results[0])
    ids = [item.id for item in leased]
    await store.commit([Complete(0, ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)])
    return len(ids)


async def rate(store: QueueStore, *, seconds: float, workers: int = 1, joined: int = 1) -> float:
    """Items a second with so many at once."""
    began_s = time.perf_counter()
    done = 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - began_s < seconds:
            count = await cycle(store, joined=joined)
            done += count

    await asyncio.gather(*(work() for _ in range(workers)))
    return done / (time.perf_counter() - began_s)


def bare_rate(connection: psycopg.Connection[tuple[object, ...]], *, seconds: float) -> float:
    """Items a second of the bare loop."""
    began_s = time.perf_counter()
    done = 0
    with connection.cursor(binary=True) as cursor:
        while time.perf_counter() - began_s < seconds:
            cursor.execute(BARE_PRODUCE, ([PAYLOAD] * BATCH,))
            ids = [row[0] for row in cursor.execute(BARE_LEASE, (BATCH,)).fetchall()]
            cursor.execute(BARE_COMPLETE, (ids,))
            done += len(ids)
    return done / (time.perf_counter() - began_s)


async def open_queue(storage: PostgresStorage) -> QueueStore:
    """A queue on the storage."""
    await storage.open()
    record = QueueRecord(
        name="bench", lease_timeout_us=LEASE_US, expire_timeout_us=HOUR_US, partitions=(PartitionInfo(0, "bench"),)
    )
    record = await storage.catalog().change("bench", dead_queue="", decide=lambda _, now: record)
    store = storage.queue_store(record, [0])
    await store.load()
    return store


def main(*, rounds: int, quick: bool) -> bool:
    """Every kind in turn; returns whether every must is met."""
    seconds = 1.0 if quick else 3.0
    with Cluster() as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        url = cluster.create_database("bench")
        storage = PostgresStorage(url, name="bench")
        store = runner.run(open_queue(storage))
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in BARE:
                connection.execute(statement.encode())

            def measured(**options: int) -> Callable[[], float]:
                return lambda: runner.run(rate(store, seconds=seconds, **options))

            rates = run(
                "postgres",
                {
                    "bare": lambda: bare_rate(connection, seconds=seconds),
                    "one": measured(),
                    "eight": measured(workers=CONSUMERS),
                    "eight joined": measured(joined=CONSUMERS),
                },
                rounds=rounds,
            )
        runner.run(storage.close())
    targets = [Target("one", "bare", 0.5, 0.8), Target("eight", "one", 1.5, 1.5)]
    met = report("PostgreSQL, produce + lease + complete in batches of 100", rates, targets)
    median = statistics.median(rates["one"])
    verdict = "aim met" if median >= RATE_AIM else "must met" if median >= RATE_MUST else "MISSED"
    print(f"  one: {median:,.0f} items/s  must {RATE_MUST:,}, aim {RATE_AIM:,}: {verdict}")
    print(json.dumps({"bench": "postgres", "items_per_s": round(median), "must": RATE_MUST, "aim": RATE_AIM}))
    return met and median >= RATE_MUST


if __name__ == "__main__":
    main(rounds=ROUNDS_MIN, quick=False)
