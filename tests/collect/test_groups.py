"""Payloads go in groups, and what goes wrong with one is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

import holdfast
from holdfast.core.states import TransactionState
from holdfast.engines.folder import FolderBlobs
from holdfast.errors import HoldfastError
from holdfast.ports.blobs import Blob, BlobContent
from holdfast.services.collect.transaction import UploadSlots
from tests.collect.producing import PRODUCER, body_of, header, make_queues, payload, produce, take_request
from tests.support.eventually import eventually


async def test_a_blob_that_is_refused_for_a_while_holds_up_no_neighbour(tmp_path: Path) -> None:
    url, count, refuses = f"sqlite:///{tmp_path}/data", 24, True
    refused = 0
    real = FolderBlobs.put_all

    async def put_all(self: FolderBlobs, blobs: Sequence[BlobContent]) -> Sequence[Blob | HoldfastError]:
        nonlocal refused
        outcomes = list(await real(self, [blob for blob in blobs if not (refuses and "/a/3-" in blob.path)]))
        for place, blob in enumerate(blobs):
            if refuses and "/a/3-" in blob.path:
                refused += 1
                outcomes.insert(place, holdfast.StorageFailed("blob storage failed; the disk is full"))
        return outcomes

    with patch.object(FolderBlobs, "put_all", put_all):
        async with holdfast.open(url) as queues, holdfast.Collector(url, queues=queues) as collector:
            await make_queues(queues)
            await collector.start(b"", producer=PRODUCER, transaction_id="t", series=["a"])
            await take_request(queues)
            await produce(queues, "t", "payload", [payload("t", "a", number) for number in range(count)])
            await produce(queues, "t", "header", [header("t", "a", count)])

            async def are_stored() -> bool:
                return [each.stored_count for each in await collector.progress("t")] == [count - 1]

            await eventually(are_stored)
            await eventually(lambda: refused > 2)
            (gap,) = await collector.gaps("t")
            assert list(gap.missing) == [(3, 3)]
            refuses = False
            assert (await collector.wait("t", timeout_s=60)).state is TransactionState.COMPLETED
            assert [part.body async for part in collector.parts("t", "a")] == [body_of("a", n) for n in range(count)]


async def test_slots_are_given_in_turn_and_come_back_from_whoever_is_cancelled() -> None:
    slots, order = UploadSlots(4), []
    leave = {name: asyncio.Event() for name in "abcd"}

    async def work(name: str, count: int) -> None:
        async with slots.take(count):
            order.append(name)
            await leave[name].wait()

    first = asyncio.create_task(work("a", 3))
    await eventually(lambda: order == ["a"])
    large = asyncio.create_task(work("b", 4))
    small = asyncio.create_task(work("c", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a"], "one fits, and waits for its turn all the same"
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await eventually(lambda: order == ["a", "c"])
    last = asyncio.create_task(work("d", 4))
    leave["a"].set()
    await first
    leave["c"].set()
    await small
    await eventually(lambda: order == ["a", "c", "d"])
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    async with asyncio.timeout(60), slots.take(4):
        pass
