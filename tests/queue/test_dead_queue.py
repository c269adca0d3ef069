"""Dead queues: how a letter arrives, why nothing dies there by itself, and how it leaves."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from holdfast import ImportedItem, NewItem, Queues, RetryItem
from holdfast.core.moments import moment
from holdfast.telemetry.events import counts
from tests.queue.installation import Installation


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("dead", lease_timeout="1m", expire_timeout="3h")
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h", dead_queue="dead")


async def kill(installation: Installation, *payloads: bytes, reason: str = "") -> list[str]:
    """Produce, lease, reject; returns the ids that died."""
    await installation.queues.queue_produce("orders", list(payloads))
    ids = [item.id for item in (await installation.queues.queue_lease("orders", batch_size=len(payloads))).items]
    await installation.queues.queue_retry(
        "orders", [RetryItem(id=item_id, dead=True, reason=reason) for item_id in ids]
    )
    await installation.rest()
    return ids


async def test_a_letter_is_a_new_item_with_the_story_of_its_death(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [NewItem(payload=b"\xff", kind="k", encoding="e", reference="r")])
    await queues.queue_retry("orders", [(await queues.queue_lease("orders")).items[0].id])
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(5)
    await queues.queue_retry("orders", [RetryItem(id=leased.id, dead=True, reason="poison")])
    await installation.rest()
    (letter,) = await installation.items("dead")
    now = moment(installation.clock.now_us())
    assert letter.id != leased.id
    assert (letter.source_id, letter.source_queue) == (leased.id, "orders")
    assert (letter.death_reason, letter.death_attempts, letter.died_at) == ("poison", 2, now)
    assert (letter.attempts, letter.is_leased, letter.lease_deadline) == (0, False, None)
    assert (letter.payload, letter.kind, letter.encoding, letter.reference) == (b"\xff", "k", "e", "r")
    assert (letter.created_at, letter.expire_deadline) == (now, now + timedelta(hours=3))
    assert await installation.items("orders") == []
    assert (await installation.stats("orders")).dying == 0


async def test_every_death_is_in_the_ledger(installation: Installation) -> None:
    ids = await kill(installation, b"a", b"b", reason="poison")
    entries = await installation.ledger("orders")
    assert [(e.action, e.item_id, e.reason, e.detail, e.queue_name) for e in entries] == [
        ("dead_lettered", item_id, "poison", "dead", "orders") for item_id in ids
    ]
    assert {e.at_us for e in entries} == {installation.clock.now_us()}


async def test_letters_arrive_in_the_order_of_their_deaths(installation: Installation) -> None:
    await kill(installation, b"a")
    await kill(installation, b"b", b"c")
    assert await installation.payloads("dead") == [b"a", b"b", b"c"]


async def test_the_dead_of_two_queues_share_a_dead_queue(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("others", dead_queue="dead", max_attempts=1)
    await kill(installation, b"a")
    await queues.queue_produce("others", [b"b"])
    await queues.queue_retry("others", [(await queues.queue_lease("others")).items[0].id])
    await installation.rest()
    assert [(i.payload, i.source_queue) for i in await installation.items("dead")] == [
        (b"a", "orders"),
        (b"b", "others"),
    ]


async def test_an_expired_letter_stays_can_be_leased_and_is_overdue(installation: Installation, queues: Queues) -> None:
    await kill(installation, b"a")
    await installation.advance(3 * 3600 + 1)
    assert await installation.payloads("dead") == [b"a"]
    assert (await installation.stats("dead")).overdue == 1
    leased = (await queues.queue_lease("dead")).items[0]
    assert leased.payload == b"a"
    await queues.queue_complete("dead", [leased.id])
    assert (await installation.stats("dead")).overdue == 0


async def test_a_letter_whose_attempts_are_used_up_stays_and_is_overdue(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_update("dead", max_attempts=1)
    await kill(installation, b"a")
    for attempt in (1, 2, 3):
        leased = (await queues.queue_lease("dead")).items[0]
        assert leased.attempts == attempt
        await queues.queue_retry("dead", [leased.id])
    assert (await installation.stats("dead")).overdue == 1
    leased = (await queues.queue_lease("dead")).items[0]
    await installation.advance(60)
    assert await installation.payloads("dead") == [b"a"]


async def test_dead_in_a_dead_queue_puts_the_letter_back_and_keeps_its_story(
    installation: Installation, queues: Queues
) -> None:
    await kill(installation, b"a", b"b", reason="poison")
    before = (await installation.items("dead"))[0]
    leased = (await queues.queue_lease("dead")).items[0]
    await queues.queue_retry("dead", [RetryItem(id=leased.id, dead=True, reason="still poison")])
    await installation.rest()
    first, second = await installation.items("dead")
    assert (first.payload, second.payload) == (b"b", b"a")
    assert second.id != before.id
    assert second.attempts == 1
    for name in ("source_id", "source_queue", "death_reason", "death_attempts", "died_at", "expire_deadline"):
        assert getattr(second, name) == getattr(before, name)


async def test_a_retried_letter_keeps_its_story(installation: Installation, queues: Queues) -> None:
    (old,) = await kill(installation, b"a", reason="poison")
    leased = (await queues.queue_lease("dead")).items[0]
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    await queues.queue_retry("dead", [RetryItem(id=leased.id, retry_at=at)])
    (scheduled,) = await queues.storage_scheduled_list("dead")
    assert (scheduled.source_id, scheduled.death_reason) == (old, "poison")
    await installation.advance(60)
    (letter,) = await installation.items("dead")
    assert (letter.source_id, letter.death_reason) == (old, "poison")


async def test_an_item_produced_into_a_dead_queue_does_not_die_either(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("dead", [b"a"])
    await installation.advance(4 * 3600)
    assert await installation.payloads("dead") == [b"a"]
    assert (await installation.stats("dead")).overdue == 1


async def test_a_queue_that_is_no_dead_queue_any_more_lets_its_items_die(
    installation: Installation, queues: Queues
) -> None:
    await kill(installation, b"a")
    await installation.advance(3 * 3600)
    assert await installation.payloads("dead") == [b"a"]
    await queues.queues_update("orders", dead_queue="")
    await installation.advance(0.001)
    assert await installation.items("dead") == []


async def test_a_queue_that_becomes_a_dead_queue_keeps_its_items(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("other", lease_timeout="1m", expire_timeout="1h")
    await queues.queue_produce("other", [b"a"])
    await queues.queues_update("orders", dead_queue="other")
    await installation.advance(3600)
    assert await installation.payloads("other") == [b"a"]
    assert (await installation.stats("other")).overdue == 1


# --- retention ------------------------------------------------------------------------------------------------


async def test_a_letter_leaves_after_the_dead_retention_and_that_is_told(
    installation: Installation, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    await queues.queues_update("dead", dead_retention="24h")
    counted = counts["item.retention", "dead"]
    await kill(installation, b"a")
    (letter,) = await installation.items("dead")
    await installation.advance(24 * 3600 - 1)
    assert await installation.payloads("dead") == [b"a"]
    await installation.advance(1)
    assert await installation.items("dead") == []
    assert await installation.noted("dead") == [("deleted", letter.id, "retention", 1)]
    assert counts["item.retention", "dead"] == counted + 1
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [f"item '{letter.id}' is past the dead_retention of 'dead', deleting"]


async def test_retention_takes_no_valid_lease_away(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("dead", dead_retention="1h")
    await kill(installation, b"a", b"b")
    await installation.advance(3590)
    leased = (await queues.queue_lease("dead", batch_size=2)).items
    await installation.advance(30)
    await queues.queue_complete("dead", [leased[0].id])
    assert (await installation.stats("dead")).total_leased == 1
    await installation.advance(30)
    assert await installation.items("dead") == []


async def test_retention_applies_to_letters_that_are_there(installation: Installation, queues: Queues) -> None:
    await kill(installation, b"a")
    await installation.advance(7200)
    await queues.queues_update("dead", dead_retention="1h")
    await installation.rest()
    assert await installation.items("dead") == []


async def test_retention_leaves_items_that_never_died(installation: Installation, queues: Queues) -> None:
    await queues.queues_update("dead", dead_retention="1h")
    await queues.queue_produce("dead", [b"a"])
    await kill(installation, b"b")
    await installation.advance(7200)
    assert await installation.payloads("dead") == [b"a"]


# --- source ids -----------------------------------------------------------------------------------------------


async def test_an_import_with_a_source_id_that_is_there_is_ignored(installation: Installation, queues: Queues) -> None:
    (first,) = await queues.storage_items_import("dead", [ImportedItem(payload=b"a", source_id="abc")])
    assert first.source_id == "abc"
    again = [ImportedItem(payload=b"b", source_id="abc"), ImportedItem(payload=b"c", source_id="def")]
    assert [item.payload for item in await queues.storage_items_import("dead", again)] == [b"c"]
    assert [(i.payload, i.source_id) for i in await installation.items("dead")] == [(b"a", "abc"), (b"c", "def")]


async def test_one_import_with_a_source_id_twice_stores_one(installation: Installation, queues: Queues) -> None:
    twins = [ImportedItem(payload=b"a", source_id="abc"), ImportedItem(payload=b"b", source_id="abc")]
    assert len(await queues.storage_items_import("dead", twins)) == 1
    assert await installation.payloads("dead") == [b"a"]


async def test_an_import_of_a_letter_that_arrived_is_ignored(installation: Installation, queues: Queues) -> None:
    (old,) = await kill(installation, b"a")
    assert await queues.storage_items_import("dead", [ImportedItem(payload=b"b", source_id=old)]) == []
    assert await installation.payloads("dead") == [b"a"]


@pytest.mark.parametrize("end", ["completed", "deleted", "cleared", "cleared while leased", "expired away"])
async def test_a_source_id_is_free_again_once_its_item_has_left(
    installation: Installation, queues: Queues, end: str
) -> None:
    await queues.queues_create("plain", expire_timeout="1h")
    await queues.storage_items_import("plain", [ImportedItem(payload=b"a", source_id="abc")])
    (item,) = await installation.items("plain")
    match end:
        case "completed":
            await queues.queue_lease("plain")
            await queues.queue_complete("plain", [item.id])
        case "deleted":
            await queues.storage_items_delete("plain", [item.id])
        case "cleared":
            await queues.queue_clear("plain", queue=True)
        case "cleared while leased":
            await queues.queue_lease("plain")
            await queues.queue_clear("plain", queue=True, destructive=True)
        case "expired away":
            await installation.advance(3600)
    assert await installation.items("plain") == []
    assert len(await queues.storage_items_import("plain", [ImportedItem(payload=b"b", source_id="abc")])) == 1


async def test_a_source_id_is_held_while_its_item_is_scheduled_or_leased(
    installation: Installation, queues: Queues
) -> None:
    await queues.storage_items_import("dead", [ImportedItem(payload=b"a", source_id="abc")])
    leased = (await queues.queue_lease("dead")).items[0]
    again = [ImportedItem(payload=b"b", source_id="abc")]
    assert await queues.storage_items_import("dead", again) == []
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    await queues.queue_retry("dead", [RetryItem(id=leased.id, retry_at=at)])
    assert await queues.storage_items_import("dead", again) == []
    await installation.advance(60)
    assert [(i.payload, i.source_id) for i in await installation.items("dead")] == [(b"a", "abc")]


async def test_an_ordinary_item_has_no_source_id(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    assert (await installation.items("orders"))[0].source_id == ""


async def test_a_letter_can_die_twice_and_is_known_by_its_last_life(installation: Installation, queues: Queues) -> None:
    await kill(installation, b"a", reason="first")
    letter = (await queues.queue_lease("dead")).items[0]
    (listed,) = await installation.items("dead")
    back = ImportedItem(payload=listed.payload, kind=listed.kind)
    await queues.storage_items_import("orders", [back])
    await queues.queue_complete("dead", [letter.id])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_retry("orders", [RetryItem(id=leased.id, dead=True, reason="second")])
    await installation.rest()
    assert [(i.source_id, i.death_reason) for i in await installation.items("dead")] == [(leased.id, "second")]
