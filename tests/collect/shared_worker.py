"""A collector on PostgreSQL, RabbitMQ and S3 as a process of its own; it ends when nothing is left to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import holdfast
from tests.collect.producing import NOTIFY, PRODUCER
from tests.collect.worker import LEASE_TIMEOUT, SHAPE, TRANSACTION, noting_uploads


async def play(env: Mapping[str, str]) -> None:
    """One life of the process."""
    transaction = env.get("TEST_TRANSACTION", TRANSACTION)
    collector = holdfast.Collector(
        env["TEST_URL"],
        blobs=env["TEST_BLOBS"],
        broker=env["TEST_BROKER"],
        uploads_max=4,
        lease_timeout=LEASE_TIMEOUT,
    )
    with noting_uploads(Path(env["TEST_FOLDER"])):
        async with collector:
            await collector.start(
                b"all of it", producer=PRODUCER, notify=NOTIFY, transaction_id=transaction, series=list(SHAPE)
            )
            await collector.service.wait_clean(transaction, timeout_s=60)


if __name__ == "__main__":
    asyncio.run(play(os.environ))
