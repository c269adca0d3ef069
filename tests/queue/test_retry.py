"""queue.retry: a leased item goes back at once, later, or to the dead queue."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast import NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("dead", lease_timeout="1m", expire_timeout="1h")
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h", dead_queue="dead")


async def leased_id(queues: Queues, *payloads: bytes) -> str:
    """Produce, lease the first."""
    await queues.queue_produce("orders", list(payloads))
    return (await queues.queue_lease("orders")).items[0].id


@pytest.mark.parametrize("ahead_s", [None, -60.0, 0.0, 0.099])
async def test_without_a_moment_to_wait_for_it_goes_to_the_tail_with_a_new_id(
    installation: Installation, queues: Queues, ahead_s: float | None
) -> None:
    old = await leased_id(queues, b"a", b"b")
    at = None if ahead_s is None else moment(installation.clock.now_us()) + timedelta(seconds=ahead_s)
    await queues.queue_retry("orders", [RetryItem(id=old, retry_at=at)])
    first, second = await installation.items("orders")
    assert (first.payload, second.payload) == (b"b", b"a")
    assert (second.attempts, second.is_leased, second.lease_deadline) == (1, False, None)
    assert old not in (first.id, second.id)
    with refused(f"invalid storage id; '{old}' does not exist", ids=[old]):
        await queues.queue_complete("orders", [old])


async def test_with_a_moment_it_is_scheduled(installation: Installation, queues: Queues) -> None:
    old = await leased_id(queues, b"a")
    at = moment(installation.clock.now_us()) + timedelta(milliseconds=100)
    await queues.queue_retry("orders", [RetryItem(id=old, retry_at=at)])
    assert await installation.items("orders") == []
    (scheduled,) = await queues.storage_scheduled_list("orders")
    assert (scheduled.payload, scheduled.enqueue_at, scheduled.attempts) == (b"a", at, 1)
    assert scheduled.id != old
    await installation.gives_nothing("orders")
    await installation.advance(0.09)
    again = (await queues.queue_lease("orders")).items[0]
    assert (again.payload, again.attempts) == (b"a", 2)


async def test_a_retried_item_keeps_its_expiry_and_its_attributes(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [NewItem(payload=b"a", kind="k", encoding="e", reference="r")])
    (before,) = await installation.items("orders")
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(5)
    await queues.queue_retry("orders", [leased.id])
    (after,) = await installation.items("orders")
    assert (after.kind, after.encoding, after.reference) == ("k", "e", "r")
    assert (after.created_at, after.expire_deadline) == (before.created_at, before.expire_deadline)


async def test_dead_moves_it_to_the_dead_queue_with_the_given_reason(
    installation: Installation, queues: Queues
) -> None:
    old = await leased_id(queues, b"a")
    await queues.queue_retry("orders", [RetryItem(id=old, dead=True, reason="no such customer")])
    await installation.rest()
    assert await installation.items("orders") == []
    (letter,) = await installation.items("dead")
    assert (letter.payload, letter.source_id, letter.source_queue) == (b"a", old, "orders")
    assert (letter.death_reason, letter.death_attempts) == ("no such customer", 1)


async def test_dead_without_a_reason_is_rejected(installation: Installation, queues: Queues) -> None:
    old = await leased_id(queues, b"a")
    await queues.queue_retry("orders", [RetryItem(id=old, dead=True)])
    await installation.rest()
    assert (await installation.items("dead"))[0].death_reason == "rejected"


@pytest.mark.parametrize("later", [False, True])
async def test_a_retry_at_the_last_attempt_goes_to_the_dead_queue(
    installation: Installation, queues: Queues, later: bool
) -> None:
    await queues.queues_update("orders", max_attempts=1)
    old = await leased_id(queues, b"a")
    at = moment(installation.clock.now_us()) + timedelta(minutes=5) if later else None
    await queues.queue_retry("orders", [RetryItem(id=old, retry_at=at)])
    await installation.rest()
    assert await installation.items("orders") == []
    assert await queues.storage_scheduled_list("orders") == []
    (letter,) = await installation.items("dead")
    assert (letter.death_reason, letter.source_id) == ("max_attempts", old)


async def test_one_request_may_do_all_three(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"back", b"later", b"dead"])
    back, later, dead = (item.id for item in (await queues.queue_lease("orders", batch_size=3)).items)
    at = moment(installation.clock.now_us()) + timedelta(minutes=5)
    items = [RetryItem(id=back), RetryItem(id=later, retry_at=at), RetryItem(id=dead, dead=True)]
    await queues.queue_retry("orders", items)
    await installation.rest()
    assert await installation.payloads("orders") == [b"back"]
    assert [item.payload for item in await queues.storage_scheduled_list("orders")] == [b"later"]
    assert await installation.payloads("dead") == [b"dead"]


async def test_an_item_that_is_not_leased_cannot_be_retried(installation: Installation, queues: Queues) -> None:
    placed = (await queues.queue_produce("orders", [b"a"])).items[0]
    with refused(f"item(s) cannot be retried; '{placed.id}' is not marked as leased", ids=[placed.id]):
        await queues.queue_retry("orders", [placed.id])
    assert [item.id for item in await installation.items("orders")] == [placed.id]


async def test_an_unknown_id_cannot_be_retried(queues: Queues) -> None:
    with refused("invalid storage id; 'x' does not exist", ids=["x"]):
        await queues.queue_retry("orders", ["x"])


async def test_one_bad_id_retries_none_and_every_bad_id_is_named(installation: Installation, queues: Queues) -> None:
    good = await leased_id(queues, b"a", b"b")
    queued = (await installation.items("orders"))[1].id
    with refused("invalid storage id; 'x' does not exist", ids=["x", queued]):
        await queues.queue_retry("orders", [RetryItem(id=good, dead=True), queued, "x"])
    await installation.rest()
    assert [item.id for item in await installation.items("orders")] == [good, queued]
    assert await installation.items("dead") == []


async def test_an_id_named_twice_is_retried_once(installation: Installation, queues: Queues) -> None:
    old = await leased_id(queues, b"a")
    await queues.queue_retry("orders", [old, old])
    assert await installation.payloads("orders") == [b"a"]
    assert (await installation.stats("orders")).total_leased == 0


async def test_no_items_are_refused(queues: Queues) -> None:
    with refused("items is invalid; list of items cannot be empty"):
        await queues.queue_retry("orders", [])


async def test_a_thousand_are_retried_and_one_more_is_refused(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"] * 1000)
    ids = [item.id for item in (await queues.queue_lease("orders", batch_size=1000)).items]
    with refused("items is invalid; max_retry_batch_size is 1000 but received 1001"):
        await queues.queue_retry("orders", [*ids, "x"])
    await queues.queue_retry("orders", ids)
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased) == (1000, 0)


async def test_a_partition_that_is_not_there_is_refused(queues: Queues) -> None:
    with refused("partition is invalid; '1' is not a valid partition"):
        await queues.queue_retry("orders", ["x"], partition=1)


async def test_a_reason_of_more_than_2000_characters_is_refused(installation: Installation, queues: Queues) -> None:
    old = await leased_id(queues, b"a")
    with refused("reason field is invalid; cannot be greater than '2000' characters"):
        await queues.queue_retry("orders", [RetryItem(id=old, dead=True, reason="x" * 2001)])
    assert (await installation.stats("orders")).total_leased == 1
