"""queue.stats: every count is right after every transition."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from holdfast import ImportedItem, Invalid, NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation

STEPS_COUNT = 40


async def test_an_empty_queue_counts_nothing(queues: Queues) -> None:
    await queues.queues_create("orders", requested_partitions=2)
    reply = await queues.queue_stats("orders")
    assert reply.queue_name == "orders"
    (logical,) = reply.logical_queues
    assert (logical.produce_waiting, logical.lease_waiting, logical.complete_waiting, logical.in_flight) == (0, 0, 0, 0)
    assert [partition.partition for partition in logical.partitions] == [0, 1]
    for stats in logical.partitions:
        assert (stats.total, stats.total_leased, stats.failures, stats.scheduled, stats.dying, stats.overdue) == (
            (0,) * 6
        )
        assert (stats.average_age, stats.average_leased_age) == ("0s", "0s")


async def test_ages_are_since_produce_and_since_the_lease(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="10m")
    await queues.queue_produce("orders", [b"a", b"b"])
    await installation.advance(60)
    await queues.queue_produce("orders", [b"c"])
    await queues.queue_lease("orders")
    await installation.advance(20)
    await queues.queue_lease("orders")
    await installation.advance(10)
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased) == (3, 2)
    assert stats.average_age == "1m10s"  # 90, 90 and 30 seconds
    assert stats.average_leased_age == "20s"  # 30 and 10 seconds


async def test_a_lease_that_waits_is_counted(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    async with installation.waiting("orders"), installation.waiting("orders"):
        (logical,) = (await queues.queue_stats("orders")).logical_queues
        assert logical.lease_waiting == 2
    await installation.waiting_leases("orders", 0)


class Steps:
    """Random requests against a queue with a dead queue."""

    def __init__(self, installation: Installation, seed: int) -> None:
        self.installation = installation
        self.random = random.Random(seed)
        self.leased: list[tuple[int, str]] = []

    async def step(self) -> None:
        name = self.random.choice(
            ["produce", "produce", "lease", "lease", "complete", "retry", "extend", "later", "dead", "delete", "time"]
        )
        try:
            await getattr(self, name)()
        except Invalid:
            return  # a lease that ran out meanwhile

    def some(self) -> tuple[int, list[str]]:
        partition = self.random.randrange(2)
        ids = [item for place, item in self.leased if place == partition]
        chosen = self.random.sample(ids, min(len(ids), self.random.randint(1, 3))) or ["x"]
        self.leased = [(place, item) for place, item in self.leased if item not in chosen]
        return partition, chosen

    async def produce(self) -> None:
        ahead = timedelta(seconds=self.random.choice([0, 0, 5, 60]))
        at = moment(self.installation.clock.now_us()) + ahead
        keys = [self.random.choice(["", "", "k", "l"]) for _ in range(self.random.randint(1, 4))]
        await self.installation.queues.queue_produce(
            "orders", [NewItem(payload=b"a", enqueue_at=at, dedupe_key=key) for key in keys]
        )

    async def lease(self) -> None:
        stats = [await self.installation.stats("orders", partition) for partition in range(2)]
        if any(one.total > one.total_leased for one in stats):
            reply = await self.installation.queues.queue_lease("orders", batch_size=self.random.randint(1, 4))
            self.leased += [(reply.partition, item.id) for item in reply.items]

    async def complete(self) -> None:
        partition, ids = self.some()
        await self.installation.queues.queue_complete("orders", ids, partition=partition)

    async def retry(self) -> None:
        partition, ids = self.some()
        await self.installation.queues.queue_retry("orders", ids, partition=partition)

    async def later(self) -> None:
        partition, ids = self.some()
        at = moment(self.installation.clock.now_us()) + timedelta(seconds=30)
        await self.installation.queues.queue_retry(
            "orders", [RetryItem(id=item, retry_at=at) for item in ids], partition=partition
        )

    async def dead(self) -> None:
        partition, ids = self.some()
        await self.installation.queues.queue_retry(
            "orders", [RetryItem(id=item, dead=True) for item in ids], partition=partition
        )

    async def extend(self) -> None:
        partition, ids = self.some()
        await self.installation.queues.queue_extend("orders", ids, partition=partition)

    async def delete(self) -> None:
        partition = self.random.randrange(2)
        listed = await self.installation.queues.storage_items_list("orders", partition=partition)
        if listed:
            chosen = self.random.choice(listed)
            await self.installation.queues.storage_items_delete("orders", [chosen.id], partition=partition)
            await self.installation.queues.storage_items_import(
                "orders", [ImportedItem(payload=b"i", attempts=self.random.randint(0, 3))], partition=partition
            )

    async def time(self) -> None:
        await self.installation.advance(self.random.choice([1, 20, 60]))


async def counted(installation: Installation, queue_name: str) -> list[tuple[int, int, int, int]]:
    """What the statistics say."""
    (logical,) = (await installation.queues.queue_stats(queue_name)).logical_queues
    return [(stats.total, stats.total_leased, stats.scheduled, stats.dying) for stats in logical.partitions]


async def listed(installation: Installation, queue_name: str) -> list[tuple[int, int, int, int]]:
    """What the listings say."""
    found = []
    for place in (await installation.queues.queues_info(queue_name)).partitions:
        items = await installation.queues.storage_items_list(queue_name, partition=place.partition)
        scheduled = await installation.queues.storage_scheduled_list(queue_name, partition=place.partition)
        found.append((len(items), sum(item.is_leased for item in items), len(scheduled), 0))
    return found


async def shaped(installation: Installation, queue_name: str) -> list[tuple[int, int, int, int]]:
    """What the queue itself goes by."""
    shares = installation.service.manager.get(queue_name).shares
    states = sorted((number, state) for share in shares for number, state in share.states.items())
    return [(s.queued + s.leased, s.leased, s.scheduled, s.dying) for _, s in states]


@pytest.mark.parametrize("seed", range(2))
async def test_statistics_and_listings_agree_after_any_sequence(
    installation: Installation, queues: Queues, seed: int
) -> None:
    await queues.queues_create("dead", requested_partitions=2)
    await queues.queues_create(
        "orders", lease_timeout="30s", expire_timeout="5m", max_attempts=3, dead_queue="dead", requested_partitions=2
    )
    steps = Steps(installation, seed)
    for _ in range(STEPS_COUNT):
        await steps.step()
        await installation.rest()
        for name in ("orders", "dead"):
            assert (
                await counted(installation, name)
                == await listed(installation, name)
                == await shaped(installation, name)
            )
    await installation.restart()
    for name in ("orders", "dead"):
        assert await counted(installation, name) == await listed(installation, name) == await shaped(installation, name)
