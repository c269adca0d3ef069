"""dedupe_key: one item per key in a queue, answered with the id that it has now."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast import NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h", dead_queue="dead")


async def produced(queues: Queues, payload: bytes = b"again", key: str = "k") -> str:
    return (await queues.queue_produce("orders", [NewItem(payload=payload, dedupe_key=key)])).items[0].id


async def test_a_second_item_with_the_key_is_answered_with_the_first(
    installation: Installation, queues: Queues
) -> None:
    first = await produced(queues, b"a")
    assert await produced(queues) == first
    (listed,) = await installation.items("orders")
    assert (listed.id, listed.payload, listed.dedupe_key) == (first, b"a", "k")


async def test_other_keys_and_no_key_are_other_items(installation: Installation, queues: Queues) -> None:
    ids = {await produced(queues, key=key) for key in ("a", "b", "", "")}
    assert len(ids) == 4
    assert len(await installation.items("orders")) == 4


async def test_a_key_twice_in_one_request_is_one_item(installation: Installation, queues: Queues) -> None:
    items = [NewItem(payload=b"a", dedupe_key="k"), NewItem(payload=b"b"), NewItem(payload=b"c", dedupe_key="k")]
    reply = await queues.queue_produce("orders", items)
    assert reply.items[0] == reply.items[2]
    assert await installation.payloads("orders") == [b"a", b"b"]


async def test_a_leased_item_holds_its_key(queues: Queues) -> None:
    first = await produced(queues)
    await queues.queue_lease("orders")
    assert await produced(queues) == first


async def test_a_scheduled_item_holds_its_key(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(minutes=5)
    reply = await queues.queue_produce("orders", [NewItem(payload=b"a", dedupe_key="k", enqueue_at=at)])
    assert await produced(queues) == reply.items[0].id
    assert await installation.items("orders") == []


async def test_the_answer_is_the_id_that_the_item_has_now(installation: Installation, queues: Queues) -> None:
    first = await produced(queues)
    await queues.queue_lease("orders")
    await queues.queue_retry("orders", [first])
    (listed,) = await installation.items("orders")
    assert listed.id != first
    assert await produced(queues) == listed.id
    await queues.queue_lease("orders")
    await installation.advance(60)
    (listed_again,) = await installation.items("orders")
    assert await produced(queues) == listed_again.id
    assert listed_again.id not in (first, listed.id)


@pytest.mark.parametrize("end", ["completed", "deleted", "cleared", "rejected", "expired"])
async def test_the_key_is_free_once_the_item_has_left(installation: Installation, queues: Queues, end: str) -> None:
    first = await produced(queues, b"a")
    match end:
        case "completed":
            await queues.queue_lease("orders")
            await queues.queue_complete("orders", [first])
        case "deleted":
            await queues.storage_items_delete("orders", [first])
        case "cleared":
            await queues.queue_clear("orders", queue=True)
        case "rejected":
            await queues.queue_lease("orders")
            await queues.queue_retry("orders", [RetryItem(id=first, dead=True)])
        case "expired":
            await installation.advance(3600)
    assert await produced(queues, b"b") != first
    assert await installation.payloads("orders") == [b"b"]


async def test_a_letter_takes_no_key_with_it(installation: Installation, queues: Queues) -> None:
    first = await produced(queues, b"a")
    await queues.queue_lease("orders")
    await queues.queue_retry("orders", [RetryItem(id=first, dead=True)])
    await installation.rest()
    reply = await queues.queue_produce("dead", [NewItem(payload=b"b", dedupe_key="k")])
    assert await installation.payloads("dead") == [b"a", b"b"]
    assert reply.items[0].id == (await installation.items("dead"))[1].id


async def test_a_key_holds_over_all_partitions_and_the_answer_names_the_right_one(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("wide", requested_partitions=2)
    first = (await queues.queue_produce("wide", [NewItem(payload=b"a", dedupe_key="k")])).items[0]
    # The other partition is the emptier one now, so the repeat goes there and is found here.
    again = (await queues.queue_produce("wide", [NewItem(payload=b"b", dedupe_key="k")])).items[0]
    assert again == first
    assert [item.id for item in await queues.storage_items_list("wide", partition=first.partition)] == [first.id]
    assert await queues.storage_items_list("wide", partition=1 - first.partition) == []


async def test_a_key_belongs_to_its_queue(queues: Queues) -> None:
    first = await produced(queues)
    reply = await queues.queue_produce("dead", [NewItem(payload=b"a", dedupe_key="k")])
    assert reply.items[0].id != first


async def test_a_key_of_512_characters_is_allowed_and_one_more_is_refused(queues: Queues) -> None:
    assert await produced(queues, key="k" * 512) == await produced(queues, key="k" * 512)
    with refused("dedupe_key field is invalid; cannot be greater than '512' characters"):
        await produced(queues, key="k" * 513)
