"""queue.produce: what is answered 200 is stored, whole, in one partition, in order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Invalid, NewItem, Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


async def test_an_item_is_listed_as_it_was_produced(installation: Installation, queues: Queues) -> None:
    item = NewItem(payload=b"\x00\xff{", encoding="application/json", kind="order", reference="customer 7")
    reply = await queues.queue_produce("orders", [item])
    (listed,) = await queues.storage_items_list("orders")
    assert listed.id == reply.items[0].id
    assert (listed.payload, listed.encoding, listed.kind, listed.reference) == (
        b"\x00\xff{",
        "application/json",
        "order",
        "customer 7",
    )
    assert listed.created_at == moment(installation.clock.now_us())
    assert listed.expire_deadline == moment(installation.clock.now_us()) + timedelta(hours=1)
    assert (listed.attempts, listed.is_leased, listed.lease_deadline) == (0, False, None)
    assert (listed.source_id, listed.source_queue, listed.death_reason, listed.died_at) == ("", "", "", None)


async def test_utf8_is_a_payload_as_text(queues: Queues) -> None:
    await queues.queue_produce("orders", [NewItem(utf8="Grüße")])
    (listed,) = await queues.storage_items_list("orders")
    assert listed.payload == "Grüße".encode()


async def test_an_empty_payload_is_a_payload(queues: Queues) -> None:
    await queues.queue_produce("orders", [b""])
    reply = await queues.queue_lease("orders")
    assert reply.items[0].payload == b""


async def test_bytes_and_utf8_together_are_refused(queues: Queues) -> None:
    with refused("item is invalid; 'bytes' and 'utf8' cannot both be given"):
        await queues.queue_produce("orders", [NewItem(payload=b"a", utf8="a")])
    assert await queues.storage_items_list("orders") == []


async def test_the_reply_names_every_item_in_order(queues: Queues) -> None:
    reply = await queues.queue_produce("orders", [b"a", b"b", b"c"])
    assert reply.code == 200
    listed = await queues.storage_items_list("orders")
    assert [(item.id, item.payload) for item in listed] == list(
        zip([item.id for item in reply.items], [b"a", b"b", b"c"], strict=True)
    )
    assert {item.partition for item in reply.items} == {0}


async def test_ids_sort_in_the_order_of_arrival_and_are_unique(installation: Installation, queues: Queues) -> None:
    ids = [item.id for item in (await queues.queue_produce("orders", [b"a"] * 50)).items]
    await installation.advance(1)
    ids += [item.id for item in (await queues.queue_produce("orders", [b"a"] * 50)).items]
    assert ids == sorted(set(ids))


async def test_a_thousand_items_are_allowed(queues: Queues) -> None:
    reply = await queues.queue_produce("orders", [b"a"] * 1000)
    assert len(reply.items) == 1000


async def test_a_thousand_and_one_items_are_refused(queues: Queues) -> None:
    with refused("items is invalid; max_produce_batch_size is 1000 but received 1001"):
        await queues.queue_produce("orders", [b"a"] * 1001)
    assert await queues.storage_items_list("orders") == []


async def test_no_items_are_refused(queues: Queues) -> None:
    with refused("items cannot be empty; at least one item is required"):
        await queues.queue_produce("orders", [])


async def test_a_reference_of_2000_characters_is_allowed(queues: Queues) -> None:
    await queues.queue_produce("orders", [NewItem(payload=b"a", reference="é" * 2000)])
    (listed,) = await queues.storage_items_list("orders")
    assert listed.reference == "é" * 2000


@pytest.mark.parametrize("field", ["reference", "kind", "encoding"])
async def test_a_field_of_2001_characters_is_refused_and_nothing_is_stored(queues: Queues, field: str) -> None:
    with refused(f"{field} field is invalid; cannot be greater than '2000' characters"):
        await queues.queue_produce(
            "orders", [NewItem(payload=b"a"), replace(NewItem(payload=b"b"), **{field: "x" * 2001})]
        )
    assert await queues.storage_items_list("orders") == []


@pytest.mark.parametrize("field", ["reference", "kind", "encoding", "dedupe_key"])
async def test_a_nul_in_a_field_is_refused_and_nothing_is_stored(queues: Queues, field: str) -> None:
    with refused(f"{field} field is invalid; cannot contain a NUL character"):
        await queues.queue_produce("orders", [replace(NewItem(payload=b"b"), **{field: "a\x00b"})])
    assert await queues.storage_items_list("orders") == []


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 0.099])
async def test_a_schedule_in_the_past_or_less_than_100_ms_ahead_means_now(
    installation: Installation, queues: Queues, ahead_s: float
) -> None:
    at = moment(installation.clock.now_us()) + timedelta(seconds=ahead_s)
    await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])
    assert await queues.storage_scheduled_list("orders") == []
    reply = await queues.queue_lease("orders")
    assert reply.items[0].payload == b"a"


async def test_a_schedule_100_ms_ahead_is_waited_for(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(seconds=0.1)
    reply = await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])
    (scheduled,) = await queues.storage_scheduled_list("orders")
    assert (scheduled.id, scheduled.enqueue_at) == (reply.items[0].id, at)
    assert await queues.storage_items_list("orders") == []
    await installation.advance(0.1)
    (listed,) = await queues.storage_items_list("orders")
    assert (listed.payload, listed.enqueue_at) == (b"a", None)
    assert await queues.storage_scheduled_list("orders") == []


async def test_a_scheduled_item_gets_a_new_id_at_the_tail_when_it_is_due(
    installation: Installation, queues: Queues
) -> None:
    at = moment(installation.clock.now_us()) + timedelta(seconds=10)
    reply = await queues.queue_produce("orders", [NewItem(payload=b"later", enqueue_at=at), NewItem(payload=b"now")])
    await installation.advance(10)
    assert await installation.payloads("orders") == [b"now", b"later"]
    assert reply.items[0].id not in [item.id for item in await installation.items("orders")]


async def test_a_mixed_request_keeps_its_order(installation: Installation, queues: Queues) -> None:
    later = moment(installation.clock.now_us()) + timedelta(minutes=1)
    items = [
        NewItem(payload=b"1"),
        NewItem(payload=b"2", dedupe_key="two"),
        NewItem(payload=b"3"),
        NewItem(payload=b"4", enqueue_at=later),
        NewItem(payload=b"5"),
    ]
    reply = await queues.queue_produce("orders", items)
    ids = [item.id for item in reply.items]
    assert ids == sorted(ids)
    assert await installation.payloads("orders") == [b"1", b"2", b"3", b"5"]


async def test_the_expiry_is_fixed_at_produce(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    (before,) = await installation.items("orders")
    await queues.queues_update("orders", expire_timeout="2h")
    (after,) = await installation.items("orders")
    assert after.expire_deadline == before.expire_deadline
    await queues.queue_produce("orders", [b"b"])
    assert (await installation.items("orders"))[1].expire_deadline == moment(installation.clock.now_us()) + timedelta(
        hours=2
    )


@pytest.mark.parametrize("kinds", [("",), ("", "order", "")], ids=["plain", "mixed"])
async def test_items_of_a_large_request_keep_their_order_and_their_fields(
    queues: Queues, kinds: tuple[str, ...]
) -> None:
    items = [
        NewItem(payload=b"%d" % n, kind=kinds[n % len(kinds)], reference=kinds[n % len(kinds)]) for n in range(889)
    ]
    reply = await queues.queue_produce("orders", items)
    listed = await queues.storage_items_list("orders")
    assert [placed.id for placed in reply.items] == [item.id for item in listed] == sorted(item.id for item in listed)
    assert [(item.payload, item.kind, item.reference) for item in listed] == [
        (item.payload, item.kind, item.reference) for item in items
    ]


async def test_one_item_needs_no_list(installation: Installation, queues: Queues) -> None:
    for one in ("hello", b"x", bytearray(b"y"), NewItem(payload=b"z")):
        assert len((await queues.queue_produce("orders", one)).items) == 1  # type: ignore[arg-type]
    await queues.queue_produce("orders", (text for text in ("a", "b")))
    assert await installation.payloads("orders") == [b"hello", b"x", b"y", b"z", b"a", b"b"]


@pytest.mark.parametrize("items", [{"bytes": "x"}, [{"bytes": "x"}], None, 5, [b"a", None], [["a"]]])
async def test_what_is_no_item_is_named(installation: Installation, queues: Queues, items: Any) -> None:
    with pytest.raises(Invalid, match=r"argument is invalid; it holds a \w+, use NewItem, str, bytes"):
        await queues.queue_produce("orders", items)
    with pytest.raises(Invalid, match=r"argument is invalid; it holds a \w+, use RetryItem, str$"):
        await queues.queue_retry("orders", items)
    with pytest.raises(Invalid, match=r"argument is invalid; it holds a \w+, use Item$"):
        await queues.storage_items_import("orders", items)
    for verb in (queues.queue_complete, queues.queue_extend, queues.storage_items_delete):
        with pytest.raises(Invalid, match=r"argument is invalid; it holds a \w+, use str$"):
            await verb("orders", items)
    assert await installation.items("orders") == []


async def test_one_id_needs_no_list(installation: Installation, queues: Queues) -> None:
    ids = [item.id for item in (await queues.queue_produce("orders", ["a", "b", "c"])).items]
    await queues.queue_lease("orders", batch_size=2)
    await queues.queue_extend("orders", ids[0])
    await queues.queue_complete("orders", ids[0])
    await queues.queue_retry("orders", ids[1])
    await queues.storage_items_delete("orders", ids[2])
    assert await installation.payloads("orders") == [b"b"]
