"""Produce, lease, complete in process on SQLite: the whole queue against its bare store, persist-queue, procrastinate.

The bare store is a loop over the same statements and the same schema, with no service above it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import persistqueue

import holdfast
from bench.rounds import Target, report, run
from holdfast import NewItem
from holdfast.engines.sqlite.connection import SQL, json_list, open_writer, transaction

PAYLOAD = os.urandom(512)
HOUR_US = 3_600_000_000
NEVER = 1 << 62


def bare(folder: Path, *, batch: int, cycles: int) -> float:
    """The bare store loop: items a second."""
    database = open_writer(folder / "bare.db", kind="queue", create=True)
    with transaction(database):
        database.execute(SQL["insert_partition"], (0,))
    started_s = time.perf_counter()
    sequence = 0
    for _ in range(cycles):
        sequence = _bare_cycle(database, batch, sequence)
    rate = cycles * batch / (time.perf_counter() - started_s)
    database.close()
    return rate


def _bare_cycle(database: apsw.Connection, batch: int, sequence: int) -> int:
    now_us = time.time_ns() // 1000
    first = max(sequence + 1, now_us)
    last = first + batch - 1
    with transaction(database):
        database.executemany(SQL["insert_item"], [(first + n, "", "", "", PAYLOAD) for n in range(batch)])
        database.execute(SQL["insert_ready_range"], (first, last, now_us, now_us + HOUR_US))
    with transaction(database):
        rows = database.execute(SQL["select_ready"], (0, last, -1, NEVER, batch)).fetchall()
        span = (rows[0][0], rows[-1][0], -1, NEVER)
        database.execute(SQL["lease_ready"], (*span, now_us, now_us + HOUR_US))
        database.execute(SQL["delete_leased_from_ready"], span)
    with transaction(database):
        ids = json_list([row[0] for row in rows])  # type: ignore[misc]
        database.execute(SQL["delete_leases"], (ids,))
        database.execute(SQL["delete_items"], (ids,))
    return last


async def _whole(folder: Path, *, batch: int, cycles: int) -> float:
    async with holdfast.open(f"sqlite:///{folder}/queue") as queues:
        await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        items = [NewItem(payload=PAYLOAD) for _ in range(batch)]
        started_s = time.perf_counter()
        for _ in range(cycles):
            await queues.queue_produce("orders", items)
            reply = await queues.queue_lease("orders", batch_size=batch)
            await queues.queue_complete("orders", [item.id for item in reply.items])
        return cycles * batch / (time.perf_counter() - started_s)


def whole(folder: Path, *, batch: int, cycles: int) -> float:
    """The whole queue: items a second."""
    return asyncio.run(_whole(folder, batch=batch, cycles=cycles))


async def _producers(folder: Path, *, clients: int, each: int) -> float:
    async with holdfast.open(f"sqlite:///{folder}/queue") as queues:
        await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        item = [NewItem(payload=PAYLOAD)]

        async def client() -> None:
            for _ in range(each):
                await queues.queue_produce("orders", item)

        started_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return clients * each / (time.perf_counter() - started_s)


def producers(folder: Path, *, clients: int, each: int) -> float:
    """Clients that produce one item at a time, at once."""
    return asyncio.run(_producers(folder, clients=clients, each=each))


def commit_each(folder: Path, *, count: int) -> float:
    """One commit for each item, on the bare store."""
    database = open_writer(folder / "each.db", kind="queue", create=True)
    started_s = time.perf_counter()
    for number in range(count):
        now_us = time.time_ns() // 1000
        with transaction(database):
            database.execute(SQL["insert_item"], (number + 1, "", "", "", PAYLOAD))
            database.execute(SQL["insert_ready"], (number + 1, now_us, now_us + HOUR_US, 0))
    rate = count / (time.perf_counter() - started_s)
    database.close()
    return rate


def persist_single(folder: Path, *, cycles: int) -> float:
    """persist-queue's SQLiteAckQueue: put, get, ack, one at a time."""
    queue = persistqueue.SQLiteAckQueue(str(folder / "persist"), auto_commit=True)
    started_s = time.perf_counter()
    for _ in range(cycles):
        queue.put(PAYLOAD)
        queue.ack(queue.get())
    rate = cycles / (time.perf_counter() - started_s)
    queue.close()
    return rate


def persist_threads(folder: Path, *, clients: int, each: int) -> float:
    """persist-queue with as many threads as we have clients."""
    queue = persistqueue.SQLiteAckQueue(str(folder / "persist"), auto_commit=True, multithreading=True)

    def client() -> None:
        for _ in range(each):
            queue.put(PAYLOAD)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = clients * each / (time.perf_counter() - started_s)
    queue.close()
    return rate


def in_folder(measure: Callable[[Path], float]) -> Callable[[], float]:
    """The measurement in a new folder of its own."""

    def fresh() -> float:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            return measure(Path(folder))

    return fresh


def main(*, rounds: int, quick: bool) -> bool:
    """Everything in process; returns whether every must is met."""
    size = 1 if quick else 3
    batches = run(
        "batches of 100",
        {
            "bare store": in_folder(lambda f: bare(f, batch=100, cycles=200 * size)),
            "holdfast": in_folder(lambda f: whole(f, batch=100, cycles=200 * size)),
            "persist-queue, single": in_folder(lambda f: persist_single(f, cycles=300 * size)),
        },
        rounds=rounds,
    )
    met = report(
        "batches of 100, produce + lease + complete",
        batches,
        [
            Target("holdfast", "bare store", 0.5, 0.7),
            Target("holdfast", "persist-queue, single", 25, 45),
        ],
    )
    single = run(
        "one at a time",
        {
            "holdfast": in_folder(lambda f: whole(f, batch=1, cycles=500 * size)),
            "persist-queue": in_folder(lambda f: persist_single(f, cycles=500 * size)),
        },
        rounds=rounds,
    )
    met &= report("one item at a time, one client", single, [Target("holdfast", "persist-queue", 0.9, 1.1)])
    crowd = run(
        "64 producers",
        {
            "holdfast": in_folder(lambda f: producers(f, clients=64, each=100 * size)),
            "persist-queue, 64 threads": in_folder(lambda f: persist_threads(f, clients=64, each=8 * size)),
            "one commit each": in_folder(lambda f: commit_each(f, count=800 * size)),
        },
        rounds=rounds,
    )
    return met & report(
        "64 single-item producers at once",
        crowd,
        [
            Target("holdfast", "persist-queue, 64 threads", 10, 16),
            Target("holdfast", "one commit each", 10, 10),
        ],
    )
