"""What happens by itself: leases run out, items expire, attempts are used up. A valid lease is never taken away."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from holdfast import ImportedItem, NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("dead", lease_timeout="1m", expire_timeout="3h")
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h", dead_queue="dead")
    await queues.queues_create("alone", lease_timeout="1m", expire_timeout="1h")


async def test_max_attempts_two_means_two_leases(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("orders", max_attempts=2)
    await queues.queue_produce("orders", [b"a"])
    for attempt in (1, 2):
        leased = (await queues.queue_lease("orders")).items[0]
        assert leased.attempts == attempt
        await queues.queue_retry("orders", [leased.id])
    await installation.gives_nothing("orders")
    (letter,) = await installation.items("dead")
    assert (letter.death_reason, letter.death_attempts, letter.attempts) == ("max_attempts", 2, 0)


async def test_a_lease_that_runs_out_at_the_last_attempt_kills(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("orders", max_attempts=1)
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(60)
    assert await installation.items("orders") == []
    (letter,) = await installation.items("dead")
    assert (letter.source_id, letter.death_reason) == (leased.id, "max_attempts")


async def test_without_a_limit_an_item_may_be_leased_for_ever(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    for attempt in range(1, 21):
        leased = (await queues.queue_lease("orders")).items[0]
        assert leased.attempts == attempt
        await queues.queue_retry("orders", [leased.id])
    assert await installation.items("dead") == []


async def test_a_lease_past_its_deadline_goes_to_the_tail_with_a_new_id(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    old = (await queues.queue_lease("orders")).items[0].id
    await installation.advance(60)
    first, second = await installation.items("orders")
    assert (first.payload, second.payload) == (b"b", b"a")
    assert second.id != old
    assert (second.attempts, second.is_leased) == (1, False)


async def test_a_queued_item_past_its_expiry_dies(installation: Installation, queues: Queues) -> None:
    placed = (await queues.queue_produce("orders", [b"a"])).items[0]
    await installation.advance(3599)
    assert len(await installation.items("orders")) == 1
    await installation.advance(1)
    assert await installation.items("orders") == []
    (letter,) = await installation.items("dead")
    assert (letter.source_id, letter.death_reason, letter.death_attempts) == (placed.id, "expired", 0)
    assert letter.died_at == moment(installation.clock.now_us())
    assert letter.expire_deadline == moment(installation.clock.now_us()) + timedelta(hours=3)


async def test_every_expiry_is_carried_out_however_many_there_are(installation: Installation, queues: Queues) -> None:
    for _ in range(3):
        await queues.queue_produce("orders", [b"a"] * 900)
    await installation.advance(3600)
    assert await installation.items("orders") == []
    assert (await installation.stats("dead")).total == 2700


async def test_a_scheduled_item_expires_only_once_it_is_queued(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(hours=2)
    await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])
    await installation.advance(3601)
    assert len(await queues.storage_scheduled_list("orders")) == 1
    assert await installation.items("dead") == []
    await installation.advance(3599)
    assert await queues.storage_scheduled_list("orders") == []
    assert await installation.items("orders") == []
    assert [letter.death_reason for letter in await installation.items("dead")] == ["expired"]


async def test_a_valid_lease_is_not_taken_away_at_expiry(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    await installation.advance(3590)
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(30)
    assert (await installation.stats("orders")).total_leased == 1
    await queues.queue_extend("orders", [leased.id])
    await installation.advance(59)
    await queues.queue_complete("orders", [leased.id])
    assert await installation.items("dead") == []


async def test_a_lease_that_runs_out_after_the_expiry_ends_in_the_dead_queue(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a"])
    await installation.advance(3590)
    await queues.queue_lease("orders")
    await installation.advance(60)
    assert await installation.items("orders") == []
    assert [letter.death_reason for letter in await installation.items("dead")] == ["expired"]


async def test_a_retry_after_the_expiry_ends_in_the_dead_queue(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    await installation.advance(3590)
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(20)
    await queues.queue_retry("orders", [leased.id])
    await installation.gives_nothing("orders")
    assert [letter.death_reason for letter in await installation.items("dead")] == ["expired"]


async def test_a_valid_lease_is_not_taken_away_on_the_last_attempt(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("orders", max_attempts=1)
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(59)
    assert (await installation.stats("orders")).total_leased == 1
    await queues.queue_complete("orders", [leased.id])
    await installation.advance(60)
    assert await installation.items("dead") == []


# --- without a dead queue -------------------------------------------------------------------------------------


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_without_a_dead_queue_used_up_items_are_deleted_and_told(
    installation: Installation, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    await queues.queues_update("alone", max_attempts=1)
    await queues.queue_produce("alone", [b"a", b"b"])
    retried, late = (item.id for item in (await queues.queue_lease("alone", batch_size=2)).items)
    await queues.queue_retry("alone", [retried])
    await installation.advance(60)
    assert await installation.items("alone") == []
    assert texts(caplog) == [
        f"item '{retried}' exceeded max_attempts, deleting (no dead_queue configured)",
        f"item '{late}' exceeded max_attempts, deleting (no dead_queue configured)",
    ]
    assert await installation.noted("alone") == [
        ("deleted", retried, "max_attempts", 1),
        ("deleted", late, "max_attempts", 1),
    ]


async def test_without_a_dead_queue_expired_items_are_deleted_and_told(
    installation: Installation, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    placed = (await queues.queue_produce("alone", [b"a"])).items[0]
    await installation.advance(3600)
    assert await installation.items("alone") == []
    assert texts(caplog) == [f"item '{placed.id}' expired, deleting (no dead_queue configured)"]
    assert await installation.noted("alone") == [("deleted", placed.id, "expired", 1)]


async def test_without_a_dead_queue_rejected_items_are_deleted_and_told(
    installation: Installation, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    await queues.queue_produce("alone", [b"a"])
    leased = (await queues.queue_lease("alone")).items[0]
    await queues.queue_retry("alone", [RetryItem(id=leased.id, dead=True, reason="poison")])
    assert await installation.items("alone") == []
    assert texts(caplog) == [f"item '{leased.id}' was rejected, deleting (no dead_queue configured)"]
    assert await installation.noted("alone") == [("deleted", leased.id, "poison", 1)]


# --- stories that come from outside ---------------------------------------------------------------------------


async def test_an_imported_item_whose_attempts_are_used_up_dies(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("orders", max_attempts=2)
    await queues.storage_items_import("orders", [ImportedItem(payload=b"a", attempts=2)])
    await installation.rest()
    assert await installation.items("orders") == []
    assert [letter.death_reason for letter in await installation.items("dead")] == ["max_attempts"]


@pytest.mark.parametrize("year", [2, 1969, 1970, 2029])
async def test_an_imported_item_that_has_expired_dies(installation: Installation, queues: Queues, year: int) -> None:
    deadline = moment(installation.clock.now_us()).replace(year=year, month=1, day=1, hour=0)
    await queues.storage_items_import("orders", [ImportedItem(payload=b"a", expire_deadline=deadline)])
    await installation.rest()
    assert await installation.items("orders") == []
    assert [letter.death_reason for letter in await installation.items("dead")] == ["expired"]


# --- settings that change -------------------------------------------------------------------------------------


async def test_a_lowered_limit_kills_what_is_queued_at_once(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    for _ in range(2):
        leased = (await queues.queue_lease("orders")).items[0]
        await queues.queue_retry("orders", [leased.id])
        await queues.queue_produce("orders", [b"x"])
    await queues.queues_update("orders", max_attempts=1)
    await installation.rest()
    assert sorted(await installation.payloads("dead")) == [b"a", b"b"]
    assert await installation.payloads("orders") == [b"x", b"x"]


async def test_a_lowered_limit_kills_what_is_leased_at_the_end_of_its_lease(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    leased = (await queues.queue_lease("orders", batch_size=2)).items
    await queues.queues_update("orders", max_attempts=1)
    await installation.rest()
    assert (await installation.stats("orders")).total_leased == 2
    await queues.queue_complete("orders", [leased[0].id])
    await installation.advance(60)
    assert await installation.items("orders") == []
    assert await installation.payloads("dead") == [b"b"]


async def test_a_lowered_limit_kills_what_is_scheduled_once_it_is_queued(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    at = moment(installation.clock.now_us()) + timedelta(minutes=5)
    await queues.queue_retry("orders", [RetryItem(id=leased.id, retry_at=at)])
    await queues.queues_update("orders", max_attempts=1)
    await installation.rest()
    assert len(await queues.storage_scheduled_list("orders")) == 1
    await installation.advance(300)
    assert await installation.payloads("dead") == [b"a"]


async def test_a_raised_limit_lets_an_item_be_leased_again(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("orders", max_attempts=1)
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queues_update("orders", max_attempts=2)
    await queues.queue_retry("orders", [leased.id])
    assert (await queues.queue_lease("orders")).items[0].attempts == 2


async def test_a_new_dead_queue_applies_to_items_that_are_there(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("alone", [b"a"])
    await queues.queues_update("alone", dead_queue="dead")
    await installation.advance(3600)
    assert await installation.payloads("dead") == [b"a"]


async def test_new_timeouts_apply_to_new_leases_only(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    old = (await queues.queue_lease("orders")).items[0]
    await queues.queues_update("orders", lease_timeout="5m")
    new = (await queues.queue_lease("orders")).items[0]
    assert new.lease_deadline == moment(installation.clock.now_us()) + timedelta(minutes=5)
    listed = await installation.items("orders")
    assert [item.lease_deadline for item in listed] == [old.lease_deadline, new.lease_deadline]
