"""queue.clear, pause, resume and reload."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast import NewItem, Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, answered, refused


@pytest.fixture(autouse=True)
async def orders(installation: Installation, queues: Queues) -> None:
    """A queue with two leased, three queued and four scheduled items."""
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
    at = moment(installation.clock.now_us()) + timedelta(minutes=10)
    await queues.queue_produce("orders", [b"a"] * 5)
    await queues.queue_lease("orders", batch_size=2)
    await queues.queue_produce("orders", [NewItem(payload=b"s", enqueue_at=at)] * 4)


async def counts(installation: Installation) -> tuple[int, int, int]:
    stats = await installation.stats("orders")
    return stats.total - stats.total_leased, stats.total_leased, stats.scheduled


@pytest.mark.parametrize(
    ("options", "left", "cleared"),
    [
        ({"queue": True}, (0, 2, 4), 3),
        ({"queue": True, "destructive": True}, (0, 0, 4), 5),
        ({"scheduled": True}, (3, 2, 0), 4),
        ({"queue": True, "scheduled": True}, (0, 2, 0), 7),
        ({"queue": True, "scheduled": True, "destructive": True}, (0, 0, 0), 9),
    ],
)
async def test_a_clear_takes_what_was_asked_for(
    installation: Installation, queues: Queues, options: dict[str, bool], left: tuple[int, int, int], cleared: int
) -> None:
    await queues.queue_clear("orders", **options)
    assert await counts(installation) == left
    listed = await installation.items("orders")
    assert (len([i for i in listed if not i.is_leased]), len([i for i in listed if i.is_leased])) == left[:2]
    assert len(await queues.storage_scheduled_list("orders")) == left[2]
    assert await installation.noted("orders") == [("cleared", "", "queue.clear", cleared)]


async def test_a_clear_of_nothing_is_refused(installation: Installation, queues: Queues) -> None:
    text = "invalid clear request; one of 'queue', 'scheduled' must be true"
    with refused(text):
        await queues.queue_clear("orders")
    with refused(text):
        await queues.queue_clear("orders", destructive=True)
    assert await counts(installation) == (3, 2, 4)


async def test_a_clear_covers_all_partitions(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("wide", requested_partitions=3)
    for _ in range(6):
        await queues.queue_produce("wide", [b"a", b"b"])
    await queues.queue_clear("wide", queue=True)
    assert await installation.items("wide") == []


async def test_a_clear_of_an_empty_queue_is_not_in_the_ledger(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("empty")
    await queues.queue_clear("empty", queue=True, scheduled=True, destructive=True)
    assert await installation.noted("empty") == []


async def test_a_leased_item_survives_a_clear_and_can_be_completed(installation: Installation, queues: Queues) -> None:
    leased = [item.id for item in await installation.items("orders") if item.is_leased]
    await queues.queue_clear("orders", queue=True)
    await queues.queue_complete("orders", leased)
    assert await counts(installation) == (0, 0, 4)


# --- pause ----------------------------------------------------------------------------------------------------


async def test_a_paused_queue_takes_items_in_and_gives_none_out(installation: Installation, queues: Queues) -> None:
    await queues.queue_pause("orders")
    await queues.queue_produce("orders", [b"b"])
    await installation.gives_nothing("orders")
    assert (await queues.queues_info("orders")).paused
    assert await counts(installation) == (4, 2, 4)
    await queues.queue_resume("orders")
    assert not (await queues.queues_info("orders")).paused
    assert len((await queues.queue_lease("orders", batch_size=10)).items) == 4


async def test_what_is_leased_can_be_settled_while_the_queue_is_paused(
    installation: Installation, queues: Queues
) -> None:
    first, second = (item.id for item in await installation.items("orders") if item.is_leased)
    await queues.queue_pause("orders")
    await queues.queue_extend("orders", [first])
    await queues.queue_complete("orders", [first])
    await queues.queue_retry("orders", [second])
    assert await counts(installation) == (4, 0, 4)


async def test_time_goes_on_in_a_paused_queue(installation: Installation, queues: Queues) -> None:
    await queues.queue_pause("orders")
    await installation.advance(60)
    assert await counts(installation) == (5, 0, 4)
    await installation.advance(600)
    assert await counts(installation) == (9, 0, 0)
    await installation.advance(3600)
    assert await counts(installation) == (0, 0, 0)


async def test_a_queue_is_paused_and_resumed_as_often_as_one_likes(installation: Installation, queues: Queues) -> None:
    await queues.queue_pause("orders")
    await queues.queue_pause("orders")
    await queues.queue_resume("orders")
    await queues.queue_resume("orders")
    assert len((await queues.queue_lease("orders")).items) == 1


async def test_a_pause_lasts_across_a_restart(installation: Installation) -> None:
    await installation.queues.queue_pause("orders")
    await installation.restart()
    assert (await installation.queues.queues_info("orders")).paused
    await installation.gives_nothing("orders")
    await installation.queues.queue_resume("orders")
    await installation.restart()
    assert len((await installation.queues.queue_lease("orders")).items) == 1


async def test_an_update_leaves_the_pause_alone(installation: Installation, queues: Queues) -> None:
    await queues.queue_pause("orders")
    await queues.queues_update("orders", reference="r")
    await installation.gives_nothing("orders")


# --- reload ---------------------------------------------------------------------------------------------------


async def test_a_reload_changes_nothing_and_turns_nobody_away(installation: Installation, queues: Queues) -> None:
    before = await installation.items("orders")
    await queues.queue_clear("orders", scheduled=True)
    await queues.queue_reload("orders")
    assert await installation.items("orders") == before
    await queues.queue_lease("orders", batch_size=3)
    async with installation.waiting("orders") as lease:
        await queues.queue_reload("orders")
        await queues.queue_produce("orders", [b"new"])
        assert (await answered(lease)).items[0].payload == b"new"


async def test_after_a_reload_every_deadline_is_armed(installation: Installation, queues: Queues) -> None:
    await queues.queue_reload("orders")
    await installation.advance(60)
    assert await counts(installation) == (5, 0, 4)
    await installation.advance(540)
    assert await counts(installation) == (9, 0, 0)
    await installation.advance(3000)
    assert await counts(installation) == (0, 0, 0)


@pytest.mark.parametrize("verb", ["queue_pause", "queue_resume", "queue_reload", "queue_stats"])
async def test_a_queue_that_is_not_there_is_refused(queues: Queues, verb: str) -> None:
    with refused("queue does not exist; no such queue named 'x'"):
        await getattr(queues, verb)("x")
    with refused("queue does not exist; no such queue named 'x'"):
        await queues.queue_clear("x", queue=True)
