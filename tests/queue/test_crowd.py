"""A crowd at a quick store: its commits are made on the event loop's thread, few of them, and each for many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import holdfast
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.ports.queue_store import Committed, Operation, Produce
from holdfast.services.queue.storage_share import INLINE_COMMIT_US_MAX, StorageShare
from holdfast.testing import FrozenClock

QUICK_US, SLOW_US = INLINE_COMMIT_US_MAX // 10, INLINE_COMMIT_US_MAX * 10


async def test_requests_that_come_within_a_few_turns_of_the_loop_share_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    commit = StorageShare.commit

    async def counted(share: StorageShare, operations: Sequence[Operation], *, alone: bool) -> Committed:
        committed = await commit(share, operations, alone=alone)
        counts.extend(len(operation.items) for operation in operations if isinstance(operation, Produce))
        return committed

    async with holdfast.open("memory://") as queues:
        await queues.queues_create("orders")
        monkeypatch.setattr(StorageShare, "commit", counted)
        # A commit that took long, on a busy machine, would send the next to a thread.
        monkeypatch.setattr(StorageShare, "commits_inline", lambda share: True)

        async def client(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await queues.queue_produce("orders", [b"a"])

        await asyncio.gather(*(client(number // 8) for number in range(24)))
        assert counts == [24]


class TimedStore:
    """Takes as long as it is told, and notes on which thread it was asked to work."""

    def __init__(self) -> None:
        self.took_us = QUICK_US
        self.inline: list[bool] = []

    def can_commit_inline(self) -> bool:
        return True

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        self.inline.append(inline)
        return Committed([], {}, 0, self.took_us)


async def test_a_slow_commit_sends_the_next_to_a_thread_and_a_quick_one_there_brings_them_back() -> None:
    clock, store = FrozenClock(), TimedStore()
    abilities = SqliteStorage(None, clock=clock).abilities
    share = StorageShare(storage="s", partitions=[0], store=store, abilities=abilities, clock=clock)  # type: ignore[arg-type]
    for took_us in (QUICK_US, SLOW_US, SLOW_US, SLOW_US, QUICK_US, QUICK_US):
        store.took_us = took_us
        await share.commit((), alone=True)
    assert store.inline == [True, True, False, False, False, True]
