"""procrastinate on PostgreSQL: defer, fetch, finish, one at a time, against our queue in batches of 100 on SQLite."""

from __future__ import annotations

import asyncio
import time

import procrastinate

from bench.cycle import in_folder, whole
from bench.rounds import Target, report, run
from tests.support.postgres import Cluster


async def _nothing(payload: str) -> None:
    """The work is nothing: only the queue is measured."""


async def _cycle(url: str, *, count: int) -> float:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    task = app.task(name="nothing", queue="orders")(_nothing)
    async with app.open_async():
        started_s = time.perf_counter()
        for _ in range(count):
            await task.defer_async(payload="x" * 512)
        await app.run_worker_async(queues=["orders"], wait=False, install_signal_handlers=False, delete_jobs="always")
        return count / (time.perf_counter() - started_s)


async def _schema(url: str) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


def main(*, rounds: int, quick: bool) -> bool:
    """Returns whether the must is met."""
    count = 200 if quick else 600
    with Cluster() as cluster:
        url = cluster.create_database("procrastinate")
        asyncio.run(_schema(url))
        rates = run(
            "procrastinate",
            {
                "holdfast": in_folder(lambda f: whole(f, batch=100, cycles=200)),
                "procrastinate": lambda: asyncio.run(_cycle(url, count=count)),
            },
            rounds=rounds,
        )
    return report("against procrastinate", rates, [Target("holdfast", "procrastinate", 100, 100)])
