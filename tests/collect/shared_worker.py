"""A collector on PostgreSQL, RabbitMQ and S3 as a process of its own; it ends when nothing is left to do.

With TEST_FOREVER it goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import holdfast
from tests.collect.producing import NOTIFY, PRODUCER
from tests.collect.worker import LEASE_TIMEOUT, SHAPE, TRANSACTION, note_uploads


async def play() -> None:
    """One life of the process."""
    env = os.environ
    folder = Path(env["TEST_FOLDER"])
    transaction = env.get("TEST_TRANSACTION", TRANSACTION)
    note_uploads(folder)
    async with holdfast.Collector(
        env["TEST_URL"],
        blobs=env["TEST_BLOBS"],
        broker=env["TEST_BROKER"],
        uploads_max=4,
        lease_timeout=LEASE_TIMEOUT,
    ) as collector:
        if env.get("TEST_FOREVER"):
            (folder / "ready").touch()
            await asyncio.Event().wait()
        await collector.start(
            b"all of it", producer=PRODUCER, notify=NOTIFY, transaction_id=transaction, series=list(SHAPE)
        )
        await collector.service.wait_clean(transaction, timeout_s=60)


if __name__ == "__main__":
    asyncio.run(play())
