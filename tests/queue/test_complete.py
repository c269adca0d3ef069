"""queue.complete: a leased item leaves for good; all ids of a request, or none."""

from __future__ import annotations

import pytest

from holdfast import NewItem, Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


async def test_a_completed_item_is_gone(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    leased = (await queues.queue_lease("orders", batch_size=2)).items
    await queues.queue_complete("orders", [leased[0].id])
    assert await installation.payloads("orders") == [b"b"]
    await installation.advance(60)
    assert await installation.payloads("orders") == [b"b"]


async def test_any_holder_of_the_id_may_complete(installation: Installation, queues: Queues) -> None:
    placed = (await queues.queue_produce("orders", [b"a"])).items[0]
    await queues.queue_lease("orders", client_id="another")
    await queues.queue_complete("orders", [placed.id])
    assert await installation.items("orders") == []


async def test_a_completed_item_cannot_be_completed_again(queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_complete("orders", [leased.id])
    with refused(f"invalid storage id; '{leased.id}' does not exist", ids=[leased.id]):
        await queues.queue_complete("orders", [leased.id])


async def test_an_item_that_is_not_leased_cannot_be_completed(installation: Installation, queues: Queues) -> None:
    placed = (await queues.queue_produce("orders", [b"a"])).items[0]
    with refused(f"item(s) cannot be completed; '{placed.id}' is not marked as leased", ids=[placed.id]):
        await queues.queue_complete("orders", [placed.id])
    assert await installation.payloads("orders") == [b"a"]


async def test_a_stale_id_does_not_exist(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    stale = (await queues.queue_lease("orders")).items[0]
    await installation.advance(60)
    with refused(f"invalid storage id; '{stale.id}' does not exist", ids=[stale.id]):
        await queues.queue_complete("orders", [stale.id])
    assert await installation.payloads("orders") == [b"a"]


async def test_an_id_that_never_was_one_does_not_exist(queues: Queues) -> None:
    for text in ("x", "", "-1", "../../etc/passwd", "𝟘" * 14 + "-1-0", "a" * 5000):
        with refused(f"invalid storage id; '{text}' does not exist", ids=[text]):
            await queues.queue_complete("orders", [text])


async def test_one_bad_id_completes_none_and_every_bad_id_is_named(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b", b"c"])
    leased = (await queues.queue_lease("orders", batch_size=2)).items
    queued = (await installation.items("orders"))[2]
    good = [item.id for item in leased]
    with refused("invalid storage id; 'x' does not exist", ids=["x", "y", queued.id]):
        await queues.queue_complete("orders", [good[0], "x", queued.id, "y", good[1]])
    assert [item.is_leased for item in await installation.items("orders")] == [True, True, False]
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased) == (3, 2)
    await queues.queue_complete("orders", good)
    assert await installation.payloads("orders") == [b"c"]


async def test_an_id_named_twice_is_completed_once(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_complete("orders", [leased.id, leased.id])
    assert await installation.payloads("orders") == [b"b"]
    assert (await installation.stats("orders")).total_leased == 0


async def test_a_thousand_ids_are_completed_together(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"] * 1000)
    leased = (await queues.queue_lease("orders", batch_size=1000)).items
    await queues.queue_complete("orders", [item.id for item in leased])
    assert await installation.items("orders") == []


async def test_a_thousand_and_one_ids_are_refused(queues: Queues) -> None:
    with refused("ids is invalid; max_complete_batch_size is 1000 but received 1001"):
        await queues.queue_complete("orders", ["x"] * 1001)


async def test_no_ids_are_refused(queues: Queues) -> None:
    with refused("ids is invalid; list of ids cannot be empty"):
        await queues.queue_complete("orders", [])


async def test_a_partition_that_is_not_there_is_refused(queues: Queues) -> None:
    with refused("partition is invalid; '65234' is not a valid partition"):
        await queues.queue_complete("orders", ["x"], partition=65234)


async def test_an_id_of_another_queue_does_not_exist(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("others")
    await queues.queue_produce("others", [b"theirs"])
    theirs = (await queues.queue_lease("others")).items[0]
    await queues.queue_produce("orders", [b"ours"])
    await queues.queue_lease("orders")
    with refused(f"invalid storage id; '{theirs.id}' does not exist", ids=[theirs.id]):
        await queues.queue_complete("orders", [theirs.id])
    assert await installation.payloads("others") == [b"theirs"]
    assert await installation.payloads("orders") == [b"ours"]


async def test_a_scheduled_item_cannot_be_completed(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us() + 60_000_000)
    placed = (await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])).items[0]
    with pytest.raises(Exception, match=placed.id):
        await queues.queue_complete("orders", [placed.id])
    assert len(await queues.storage_scheduled_list("orders")) == 1
