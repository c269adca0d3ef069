"""queues.delete: the items go with the queue, and nothing of it is known any more."""

from __future__ import annotations

from datetime import timedelta

from holdfast import ImportedItem, NewItem, Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, answered, refused

GONE = "queue does not exist; no such queue named 'orders'"


async def test_a_deleted_queue_does_not_exist(queues: Queues) -> None:
    await queues.queues_create("orders")
    await queues.queues_delete("orders")
    with refused(GONE):
        await queues.queues_info("orders")
    with refused(GONE):
        await queues.queue_produce("orders", [b"a"])
    assert await queues.queues_list() == []
    with refused(GONE):
        await queues.queues_delete("orders")


async def test_a_queue_that_is_not_there_cannot_be_deleted(queues: Queues) -> None:
    with refused(GONE):
        await queues.queues_delete("orders", force=True)


async def test_a_queue_with_items_goes_only_by_force(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    await queues.queue_produce("orders", [b"a"] * 9)
    await queues.queue_lease("orders", batch_size=2)
    await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)] * 3)
    with refused("queue is not empty; 'orders' has 12 items, use force"):
        await queues.queues_delete("orders")
    assert (await installation.stats("orders")).total == 9
    await queues.queues_delete("orders", force=True)
    with refused(GONE):
        await queues.queue_stats("orders")


async def test_a_dead_queue_in_use_stays_also_by_force(queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create("orders", dead_queue="dead")
    for force in (False, True):
        with refused("queue is in use; 'dead' is the dead_queue of 'orders'"):
            await queues.queues_delete("dead", force=force)
    await queues.queues_delete("orders")
    await queues.queues_delete("dead")


async def test_waiting_leases_of_a_deleted_queue_hear_it(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    async with installation.waiting("orders") as lease:
        await queues.queues_delete("orders")
        with refused(GONE):
            await answered(lease)


async def test_created_again_it_is_empty_and_old_ids_are_unknown(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    await queues.queue_produce("orders", [NewItem(payload=b"a", dedupe_key="k")])
    old = (await queues.queue_lease("orders")).items[0].id
    await queues.storage_items_import("orders", [ImportedItem(payload=b"b", source_id="s")])
    await queues.queues_delete("orders", force=True)
    await queues.queues_create("orders")
    assert await installation.items("orders") == []
    assert (await installation.stats("orders")).total == 0
    with refused(f"invalid storage id; '{old}' does not exist", ids=[old]):
        await queues.queue_complete("orders", [old])
    placed = (await queues.queue_produce("orders", [NewItem(payload=b"c", dedupe_key="k")])).items[0]
    assert placed.id != old
    assert len(await queues.storage_items_import("orders", [ImportedItem(payload=b"d", source_id="s")])) == 1


async def test_created_again_it_has_its_own_settings(queues: Queues) -> None:
    await queues.queues_create("orders", max_attempts=3, requested_partitions=2)
    await queues.queue_pause("orders")
    await queues.queues_delete("orders")
    await queues.queues_create("orders")
    info = await queues.queues_info("orders")
    assert (info.max_attempts, info.requested_partitions, info.paused) == (0, 1, False)


async def test_a_deletion_is_in_the_ledger_of_the_catalog(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    await queues.queue_produce("orders", [b"a", b"b"])
    await queues.queues_delete("orders", force=True)
    entries = await installation.service.manager.catalog.ledger(after=0, count_max=100_000)
    assert [(e.action, e.queue_name, e.reason, e.count) for e in entries if e.queue_name == "orders"][-1:] == [
        ("queue_deleted", "orders", "queues.delete", 2)
    ]


async def test_after_its_source_is_deleted_a_dead_queue_is_an_ordinary_one(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("dead", expire_timeout="1h")
    await queues.queues_create("orders", dead_queue="dead")
    await queues.queue_produce("dead", [b"a"])
    await installation.advance(3601)
    assert (await installation.stats("dead")).overdue == 1
    await queues.queues_delete("orders")
    await installation.rest()
    assert await installation.items("dead") == []


async def test_many_queues_come_and_go(installation: Installation, queues: Queues) -> None:
    for number in range(20):
        await queues.queues_create(f"q{number}")
        await queues.queue_produce(f"q{number}", [b"a"])
    for number in range(0, 20, 2):
        await queues.queues_delete(f"q{number}", force=True)
    assert len(await queues.queues_list()) == 10
    assert all([await installation.payloads(f"q{number}") == [b"a"] for number in range(1, 20, 2)])
