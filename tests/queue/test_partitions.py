"""Partitions: a produce request goes whole to the emptiest, a lease takes from the fullest."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from holdfast import ImportedItem, Queues
from tests.queue.installation import Installation, answered, refused


async def test_a_queue_has_one_partition_unless_more_are_asked_for(queues: Queues) -> None:
    await queues.queues_create("one", requested_partitions=0)
    info = await queues.queues_info("one")
    assert (info.requested_partitions, [place.partition for place in info.partitions]) == (1, [0])


async def test_a_request_goes_whole_to_the_partition_with_the_fewest_items(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("wide", requested_partitions=3)
    chosen = []
    for size in (5, 3, 4, 1, 1, 1):
        reply = await queues.queue_produce("wide", [b"a"] * size)
        (partition,) = {item.partition for item in reply.items}
        chosen.append(partition)
    assert chosen == [0, 1, 2, 1, 1, 0] or [
        (await installation.stats("wide", partition)).total for partition in range(3)
    ] == [
        5,
        5,
        5,
    ]
    assert chosen[:4] == [0, 1, 2, 1]


async def test_leased_items_do_not_count_as_load(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    await queues.queue_produce("wide", [b"a"] * 3)
    await queues.queue_produce("wide", [b"b"])
    await queues.queue_lease("wide", batch_size=3)
    reply = await queues.queue_produce("wide", [b"c"])
    assert reply.items[0].partition == 0


async def test_a_lease_comes_from_one_partition_the_one_with_the_most_items(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    await queues.storage_items_import("wide", [ImportedItem(payload=b"few")] * 2, partition=0)
    await queues.storage_items_import("wide", [ImportedItem(payload=b"many")] * 3, partition=1)
    reply = await queues.queue_lease("wide", batch_size=10)
    assert (reply.partition, [item.payload for item in reply.items]) == (1, [b"many"] * 3)
    reply = await queues.queue_lease("wide", batch_size=10)
    assert (reply.partition, [item.payload for item in reply.items]) == (0, [b"few"] * 2)


async def test_waiters_spread_over_the_partitions(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    tasks = [asyncio.create_task(queues.queue_lease("wide", batch_size=10, request_timeout="1m")) for _ in range(2)]
    await installation.waiting_leases("wide", 2)
    await asyncio.gather(*(queues.queue_produce("wide", [b"a"] * 5) for _ in range(4)))
    replies = [await answered(task) for task in tasks]
    assert all(reply.items for reply in replies)
    assert len(await installation.items("wide")) == 20


async def test_an_id_belongs_to_its_partition(queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    await queues.queue_produce("wide", [b"a"])
    leased = await queues.queue_lease("wide")
    item = leased.items[0].id
    with refused(f"invalid storage id; '{item}' does not exist", ids=[item]):
        await queues.queue_complete("wide", [item], partition=1 - leased.partition)
    await queues.queue_complete("wide", [item], partition=leased.partition)


async def test_each_partition_is_first_in_first_out(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=3)
    for number in range(30):
        await queues.queue_produce("wide", [b"%02d" % number])
    got: dict[int, list[bytes]] = {}
    for _ in range(30):
        reply = await queues.queue_lease("wide")
        got.setdefault(reply.partition, []).append(reply.items[0].payload)
    assert all(payloads == sorted(payloads) for payloads in got.values())
    assert Counter(map(len, got.values())) == {10: 3}


async def test_a_retried_item_stays_in_its_partition(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    await queues.queue_produce("wide", [b"a"])
    await queues.queue_produce("wide", [b"b"])
    reply = await queues.queue_lease("wide")
    await queues.queue_retry("wide", [reply.items[0].id], partition=reply.partition)
    listed = await queues.storage_items_list("wide", partition=reply.partition)
    assert [item.payload for item in listed] == [reply.items[0].payload]


async def test_letters_go_to_the_emptiest_partition_of_the_dead_queue(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("dead", requested_partitions=2)
    await queues.queues_create("orders", dead_queue="dead", max_attempts=1)
    await queues.storage_items_import("dead", [ImportedItem(payload=b"x")], partition=0)
    await queues.queue_produce("orders", [b"a"])
    await queues.queue_retry("orders", [(await queues.queue_lease("orders")).items[0].id])
    await installation.rest()
    assert [item.payload for item in await queues.storage_items_list("dead", partition=1)] == [b"a"]


async def test_an_update_adds_partitions_that_can_be_used_at_once(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide")
    await queues.queue_produce("wide", [b"a"])
    await queues.queues_update("wide", requested_partitions=3)
    reply = await queues.queue_produce("wide", [b"b"])
    assert reply.items[0].partition == 1
    assert await queues.storage_items_list("wide", partition=2) == []
    info = await queues.queues_info("wide")
    assert [place.partition for place in info.partitions] == [0, 1, 2]
    assert sorted(await installation.payloads("wide")) == [b"a", b"b"]


async def test_partitions_added_while_requests_wait_serve_them(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide")
    async with installation.waiting("wide") as lease:
        await queues.queues_update("wide", requested_partitions=2)
        await queues.storage_items_import("wide", [ImportedItem(payload=b"a")], partition=1)
        reply = await answered(lease)
        assert (reply.partition, reply.items[0].payload) == (1, b"a")


async def test_partitions_are_added_without_turning_a_request_away(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide")

    async def produce() -> None:
        for _ in range(20):
            await queues.queue_produce("wide", [b"a"])

    async def widen() -> None:
        for count in range(2, 8):
            await queues.queues_update("wide", requested_partitions=count)

    await asyncio.gather(produce(), produce(), widen())
    assert len(await installation.items("wide")) == 40


async def test_an_update_never_takes_partitions_away(queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=3)
    with refused("partitions is invalid; the queue has 3, partitions cannot be removed"):
        await queues.queues_update("wide", requested_partitions=2)
    await queues.queues_update("wide", requested_partitions=0)
    await queues.queues_update("wide", requested_partitions=3)
    assert (await queues.queues_info("wide")).requested_partitions == 3


async def test_a_thousand_partitions_are_allowed_and_one_more_is_refused(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("wide", requested_partitions=1000)
    reply = await queues.queue_produce("wide", [b"a"])
    assert reply.items[0].partition == 0
    await queues.storage_items_import("wide", [ImportedItem(payload=b"a")], partition=999)
    with refused("partition is invalid; '1000' is not a valid partition"):
        await queues.storage_items_list("wide", partition=1000)
    with refused("partitions is invalid; cannot be greater than 1000"):
        await queues.queues_create("wider", requested_partitions=1001)


@pytest.mark.parametrize("count", [-1, -1000])
async def test_fewer_than_no_partitions_are_refused(queues: Queues, count: int) -> None:
    with refused("partitions is invalid; cannot be less than 1"):
        await queues.queues_create("wide", requested_partitions=count)
