"""A queue's deadlines: nobody spins while a store is slow, and a slow store is not a store with another clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from holdfast import NothingToLease, Queues
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.ports.clock import Timer
from holdfast.ports.queue_store import Committed, DeathRules, PartitionState, StorageAbilities
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.service import QueueService
from holdfast.services.queue.storage_share import StorageShare
from holdfast.testing import FrozenClock
from tests.support.eventually import eventually
from tests.support.flaky import Faults, FlakyQueueStore, flaky

MINUTE_US = 60_000_000
TURNS_COUNT = 200


class CountingClock(FrozenClock):
    """Counts how often a call was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_count = 0

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        self.asked_count += 1
        return super().call_later(delay_us, callback)


class Gate:
    """Holds up every call to the store while it is shut."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.reached = asyncio.Event()

    async def __call__(self, queue_name: str, operations: Sequence[object]) -> None:
        self.reached.set()
        await self.open.wait()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Shut inside, and open again however it ends."""
        self.reached.clear()
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def faults() -> Faults:
    return Faults(gate=Gate())


@pytest.fixture
async def queues(clock: CountingClock, faults: Faults) -> AsyncIterator[Queues]:
    manager = QueueManager({"default": flaky(SqliteStorage(None, clock=clock), faults)}, clock=clock)
    await manager.open()
    queues = Queues(QueueService(manager, affinities={"default": 1.0}))
    await queues.queues_create("orders", lease_timeout="1m")
    yield queues
    await manager.close()


async def turns(clock: CountingClock) -> int:
    """How often a call is asked for while the event loop turns and the clock stands still."""
    before = clock.asked_count
    for _ in range(TURNS_COUNT):
        await asyncio.sleep(0)
    return clock.asked_count - before


async def test_nobody_spins_while_the_commit_of_a_deadline_runs(
    queues: Queues, clock: CountingClock, faults: Faults
) -> None:
    gate = faults.gate
    assert isinstance(gate, Gate)
    await queues.queue_produce("orders", [b"a"])
    await queues.queue_lease("orders")
    await faults.rest()
    with gate.shut():
        await clock.advance(60)
        await asyncio.wait_for(gate.reached.wait(), 60.0)
        assert await turns(clock) < 5
    await eventually(_is_queued(queues))


async def test_nobody_spins_while_a_failed_storage_is_loaded(
    queues: Queues, clock: CountingClock, faults: Faults
) -> None:
    gate = faults.gate
    assert isinstance(gate, Gate)
    faults.arm("after", "orders")
    with pytest.raises(Exception, match="took effect"):
        await queues.queue_produce("orders", [b"a"])
    with gate.shut():
        await clock.advance(1)
        await asyncio.wait_for(gate.reached.wait(), 60.0)
        assert await turns(clock) < 5
    assert (await queues.queue_lease("orders")).items[0].payload == b"a"


async def test_a_lease_that_got_nothing_in_its_own_turn_ends_when_its_time_is_up(
    queues: Queues, clock: CountingClock, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queues.queue_produce("orders", [b"a"])
    await faults.rest()

    async def gives_nothing(self: object, operations: Sequence[object], *, inline: bool = False) -> Committed:
        return Committed([[]] * len(operations), {}, clock.now_us())

    faults.gate = None  # a gate may suspend a commit, and then no client makes its own
    monkeypatch.setattr(FlakyQueueStore, "commit", gives_nothing)
    lease = asyncio.create_task(queues.queue_lease("orders", request_timeout="10ms"))
    for _ in range(20):
        await asyncio.sleep(0)
    await clock.advance(0.01)
    with pytest.raises(NothingToLease):
        await asyncio.wait_for(lease, 60.0)


def _is_queued(queues: Queues) -> Callable[[], asyncio.Future[bool]]:
    async def queued() -> bool:
        (listed,) = await queues.storage_items_list("orders")
        return not listed.is_leased

    return lambda: asyncio.ensure_future(queued())


class SlowStore:
    """The clock moves on between the store's look at it and the answer."""

    def __init__(self, clock: FrozenClock, took_s: float, ahead_us: int) -> None:
        self._clock = clock
        self._took_s = took_s
        self._ahead_us = ahead_us

    async def load(self) -> Committed:
        now_us = self._clock.now_us() + self._ahead_us
        await self._clock.advance(self._took_s)
        return Committed([], {0: PartitionState(leased=1, next_due_us=now_us + MINUTE_US)}, now_us)


@pytest.mark.parametrize(("took_s", "ahead_us"), [(0, 0), (30, 0), (0, 30_000_000), (0, -30_000_000)])
async def test_a_deadline_is_neither_late_nor_early_however_long_the_answer_took(took_s: float, ahead_us: int) -> None:
    clock = FrozenClock()
    began_us = clock.now_us()
    abilities = StorageAbilities(shared=True, inline=False)
    store = SlowStore(clock, took_s, ahead_us)
    share = StorageShare(storage="s", partitions=[0], store=store, abilities=abilities, clock=clock)  # type: ignore[arg-type]
    await share.load()
    assert share.next_due_us(DeathRules()) == began_us + MINUTE_US
