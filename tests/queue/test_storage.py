"""storage/items.list, scheduled.list, import, delete: looking into a queue, and putting things there by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from holdfast import ImportedItem, NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation, answered, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


# --- listing --------------------------------------------------------------------------------------------------


async def test_the_pivot_is_included(queues: Queues) -> None:
    ids = [item.id for item in (await queues.queue_produce("orders", [b"a"] * 5)).items]
    page = await queues.storage_items_list("orders", pivot=ids[1], limit=3)
    assert [item.id for item in page] == ids[1:4]


async def test_a_pivot_that_is_gone_gives_the_next(queues: Queues) -> None:
    ids = [item.id for item in (await queues.queue_produce("orders", [b"a"] * 3)).items]
    await queues.storage_items_delete("orders", [ids[1]])
    assert [item.id for item in await queues.storage_items_list("orders", pivot=ids[1])] == [ids[2]]


async def test_leased_and_queued_items_are_listed_together_by_id(queues: Queues) -> None:
    ids = [item.id for item in (await queues.queue_produce("orders", [b"a"] * 4)).items]
    await queues.queue_lease("orders", batch_size=2)
    assert [item.id for item in await queues.storage_items_list("orders")] == ids
    assert [item.id for item in await queues.storage_items_list("orders", limit=3)] == ids[:3]


async def test_a_listing_shows_a_thousand_unless_more_are_asked_for(queues: Queues) -> None:
    for _ in range(2):
        await queues.queue_produce("orders", [b"a"] * 600)
    assert len(await queues.storage_items_list("orders")) == 1000
    assert len(await queues.storage_items_list("orders", limit=65_536)) == 1200


async def test_the_limits_of_a_page(queues: Queues) -> None:
    for listing in (queues.storage_items_list, queues.storage_scheduled_list):
        with refused("limit is invalid; cannot be greater than 65536"):
            await listing("orders", limit=65_537)
        with refused("limit is invalid; limit cannot be negative"):
            await listing("orders", limit=-1)


async def test_scheduled_items_are_listed_by_themselves(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    items = [NewItem(payload=b"now"), *[NewItem(payload=b"%d" % n, enqueue_at=at) for n in range(3)]]
    ids = [item.id for item in (await queues.queue_produce("orders", items)).items]
    assert [item.payload for item in await queues.storage_items_list("orders")] == [b"now"]
    scheduled = await queues.storage_scheduled_list("orders")
    assert [item.id for item in scheduled] == ids[1:]
    assert {(item.enqueue_at, item.is_leased) for item in scheduled} == {(at, False)}
    page = await queues.storage_scheduled_list("orders", pivot=ids[2], limit=1)
    assert [item.payload for item in page] == [b"1"]


async def test_a_pivot_that_never_was_an_id_is_refused(queues: Queues) -> None:
    with refused("invalid storage id; 'x' is not an id of this partition"):
        await queues.storage_items_list("orders", pivot="x")


async def test_a_partition_that_is_not_there_cannot_be_listed(queues: Queues) -> None:
    for listing in (queues.storage_items_list, queues.storage_scheduled_list):
        with refused("partition is invalid; '-1' is not a valid partition"):
            await listing("orders", partition=-1)


# --- import ---------------------------------------------------------------------------------------------------


async def test_an_imported_item_keeps_its_story_and_gets_a_new_id(installation: Installation, queues: Queues) -> None:
    now = moment(installation.clock.now_us())
    item = ImportedItem(
        id="ignored",
        source_id="s",
        attempts=3,
        created_at=now - timedelta(days=1),
        lease_deadline=now + timedelta(days=1),
        expire_deadline=now + timedelta(days=2),
        updated_at=now,
        dead_deadline=now - timedelta(days=9),
        is_leased=True,
        max_attempts=1,
        reference="r",
        encoding="e",
        kind="k",
        payload=b"\x00\xff",
        source_queue="elsewhere",
        death_reason="poison",
        death_attempts=7,
        died_at=now - timedelta(hours=5),
    )
    (stored,) = await queues.storage_items_import("orders", [item])
    (listed,) = await queues.storage_items_list("orders")
    assert stored == listed
    assert listed.id not in ("", "ignored")
    assert listed.enqueue_at is None
    for name in ("source_id", "attempts", "created_at", "expire_deadline", "is_leased", "lease_deadline"):
        assert getattr(listed, name) == getattr(item, name), name
    for name in ("reference", "encoding", "kind", "payload"):
        assert getattr(listed, name) == getattr(item, name), name
    for name in ("source_queue", "death_reason", "death_attempts", "died_at"):
        assert getattr(listed, name) == getattr(item, name), name
    await queues.queues_update("orders", expire_timeout="72h")
    await installation.advance(86_400)
    assert (await queues.queue_lease("orders")).items[0].attempts == 4


async def test_an_imported_lease_lasts_until_its_deadline_under_the_new_id(
    installation: Installation, queues: Queues
) -> None:
    now = moment(installation.clock.now_us())
    soon, later = now + timedelta(seconds=30), now + timedelta(minutes=5)
    items = [
        ImportedItem(payload=b"1", is_leased=True, lease_deadline=soon, attempts=2),
        ImportedItem(payload=b"2", is_leased=True, lease_deadline=soon, enqueue_at=later),
        ImportedItem(payload=b"3", is_leased=True, lease_deadline=now),
        ImportedItem(payload=b"4", is_leased=True),
        ImportedItem(payload=b"5", lease_deadline=soon),
        ImportedItem(payload=b"6", enqueue_at=later),
    ]
    stored = await queues.storage_items_import("orders", items)
    leases = [(True, soon)] * 2 + [(False, None)] * 4
    assert [(item.is_leased, item.lease_deadline) for item in stored] == leases
    assert [(i.is_leased, i.lease_deadline) for i in await queues.storage_items_list("orders")] == leases[:5]
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased, stats.scheduled) == (5, 2, 1)
    leased = await queues.queue_lease("orders", batch_size=10)
    assert [(item.payload, item.attempts) for item in leased.items] == [(b"3", 1), (b"4", 1), (b"5", 1)]
    await queues.queue_complete("orders", [stored[1].id])
    async with installation.waiting("orders") as lease:
        await installation.advance(29)
        assert not lease.done()
        await installation.advance(1)
        (again,) = (await answered(lease)).items
    assert (again.payload, again.attempts) == (b"1", 3)


async def test_a_moment_that_go_did_not_set_is_none(installation: Installation, queues: Queues) -> None:
    zero, now = datetime(1, 1, 1, tzinfo=UTC), moment(installation.clock.now_us())
    moments = (
        "created_at",
        "enqueue_at",
        "lease_deadline",
        "expire_deadline",
        "died_at",
        "updated_at",
        "dead_deadline",
    )
    item = replace(ImportedItem(payload=b"a", is_leased=True), **dict.fromkeys(moments, zero))
    (stored,) = await queues.storage_items_import("orders", [item])
    assert (stored.created_at, stored.expire_deadline) == (now, now + timedelta(hours=1))
    assert (stored.enqueue_at, stored.lease_deadline, stored.died_at, stored.is_leased) == (None, None, None, False)
    assert [stored] == await queues.storage_items_list("orders")
    await queues.queue_produce("orders", [NewItem(payload=b"b", enqueue_at=zero)])
    leased = await queues.queue_lease("orders", batch_size=2)
    assert [item.payload for item in leased.items] == [b"a", b"b"]
    await queues.queue_retry("orders", [RetryItem(id=leased.items[0].id, retry_at=zero)])
    assert (await queues.queue_lease("orders")).items[0].payload == b"a"


async def test_what_an_import_leaves_out_is_now(installation: Installation, queues: Queues) -> None:
    (stored,) = await queues.storage_items_import("orders", [ImportedItem(payload=b"a")])
    now = moment(installation.clock.now_us())
    assert (stored.created_at, stored.expire_deadline) == (now, now + timedelta(hours=1))


async def test_imported_items_go_to_the_tail_in_their_order(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"0"])
    await queues.storage_items_import("orders", [ImportedItem(payload=b"1"), ImportedItem(payload=b"2")])
    assert await installation.payloads("orders") == [b"0", b"1", b"2"]


async def test_an_import_may_be_scheduled(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    past = moment(installation.clock.now_us()) - timedelta(minutes=1)
    items = [ImportedItem(payload=b"later", enqueue_at=at), ImportedItem(payload=b"now", enqueue_at=past)]
    stored = await queues.storage_items_import("orders", items)
    assert [item.enqueue_at for item in stored] == [at, None]
    assert await installation.payloads("orders") == [b"now"]
    assert [item.payload for item in await queues.storage_scheduled_list("orders")] == [b"later"]


async def test_an_export_can_be_sent_back(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("other")
    await queues.queue_produce("orders", [NewItem(payload=b"a", kind="k", reference="r"), b"b"])
    await queues.queue_lease("orders")
    exported = await queues.storage_items_list("orders")
    fields = ImportedItem.__struct_fields__
    items = [ImportedItem(**{name: getattr(i, name) for name in fields if hasattr(i, name)}) for i in exported]
    stored = await queues.storage_items_import("other", items)
    assert [(i.payload, i.kind, i.reference, i.attempts, i.created_at) for i in stored] == [
        (i.payload, i.kind, i.reference, i.attempts, i.created_at) for i in exported
    ]


async def test_an_imported_dedupe_key_that_is_there_is_ignored(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [NewItem(payload=b"a", dedupe_key="k")])
    assert await queues.storage_items_import("orders", [ImportedItem(payload=b"b", dedupe_key="k")]) == []
    (stored,) = await queues.storage_items_import("orders", [ImportedItem(payload=b"c", dedupe_key="l")])
    assert stored.dedupe_key == "l"
    again = await queues.queue_produce("orders", [NewItem(payload=b"d", dedupe_key="l")])
    assert again.items[0].id == stored.id
    assert await installation.payloads("orders") == [b"a", b"c"]


@pytest.mark.parametrize(
    "moment_text",
    ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999-12:00", "1970-01-01T00:00:00Z"],
)
async def test_a_moment_at_the_edge_of_time_can_be_imported_and_listed(queues: Queues, moment_text: str) -> None:
    at = datetime.fromisoformat(moment_text)
    item = ImportedItem(payload=b"a", created_at=at, died_at=at, expire_deadline=datetime(9999, 1, 1, tzinfo=UTC))
    await queues.storage_items_import("orders", [item])
    (listed,) = await queues.storage_items_list("orders")
    assert listed.payload == b"a"
    await queues.queue_stats("orders")
    assert (await queues.queue_lease("orders")).items[0].payload == b"a"


async def test_a_far_schedule_can_be_produced_and_listed(queues: Queues) -> None:
    at = datetime.fromisoformat("9999-12-31T23:59:59-12:00")
    await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])
    assert len(await queues.storage_scheduled_list("orders")) == 1


async def test_a_thousand_are_imported_and_one_more_is_refused(installation: Installation, queues: Queues) -> None:
    items = [ImportedItem(payload=b"a")] * 1000
    with refused("items is invalid; max_import_batch_size is 1000 but received 1001"):
        await queues.storage_items_import("orders", [*items, items[0]])
    assert len(await queues.storage_items_import("orders", items)) == 1000
    assert (await installation.stats("orders")).total == 1000


async def test_no_items_are_refused(queues: Queues) -> None:
    with refused("items is invalid; cannot be empty"):
        await queues.storage_items_import("orders", [])


@pytest.mark.parametrize("field", ["attempts", "death_attempts"])
@pytest.mark.parametrize("count", [-1, 65_537])
async def test_attempts_out_of_range_are_refused(queues: Queues, field: str, count: int) -> None:
    with refused(f"{field} is invalid; must be between 0 and 65536"):
        await queues.storage_items_import("orders", [replace(ImportedItem(payload=b"a"), **{field: count})])
    await queues.storage_items_import("orders", [replace(ImportedItem(payload=b"a"), **{field: 65_536})])


async def test_a_partition_that_is_not_there_takes_no_import(queues: Queues) -> None:
    with refused("partition is invalid; '1' is not a valid partition"):
        await queues.storage_items_import("orders", [ImportedItem(payload=b"a")], partition=1)


# --- delete ---------------------------------------------------------------------------------------------------


async def test_items_are_deleted_wherever_they_are_and_unknown_ids_are_skipped(
    installation: Installation, queues: Queues
) -> None:
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    produced = await queues.queue_produce("orders", [b"leased", b"queued", b"stays"])
    leased, queued, stays = (item.id for item in produced.items)
    await queues.queue_lease("orders")
    scheduled = (await queues.queue_produce("orders", [NewItem(payload=b"s", enqueue_at=at)])).items[0].id
    await queues.storage_items_delete("orders", ["x", leased, scheduled, "y", queued, queued])
    assert [item.id for item in await installation.items("orders")] == [stays]
    assert await queues.storage_scheduled_list("orders") == []
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased, stats.scheduled) == (1, 0, 0)
    assert sorted(await installation.noted("orders")) == sorted(
        ("deleted", item, "items.delete", 1) for item in (leased, queued, scheduled)
    )
    with refused(f"invalid storage id; '{leased}' does not exist", ids=[leased]):
        await queues.queue_complete("orders", [leased])


async def test_the_limits_of_a_deletion(queues: Queues) -> None:
    await queues.storage_items_delete("orders", ["x"] * 1000)
    with refused("ids is invalid; max_complete_batch_size is 1000 but received 1001"):
        await queues.storage_items_delete("orders", ["x"] * 1001)
    with refused("ids is invalid; cannot be empty"):
        await queues.storage_items_delete("orders", [])
    with refused("partition is invalid; '1' is not a valid partition"):
        await queues.storage_items_delete("orders", ["x"], partition=1)


async def test_ids_of_another_queue_delete_nothing(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("other")
    theirs = (await queues.queue_produce("other", [b"a"])).items[0].id
    await queues.queue_produce("orders", [b"b"])
    await queues.storage_items_delete("orders", [theirs])
    assert (await installation.payloads("orders"), await installation.payloads("other")) == ([b"b"], [b"a"])
