"""Queues that an older program left: every item is there as it was, and goes on from where it stood."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import BadIds, NewItem, NothingToLease, Queues, RetryItem
from holdfast.core.moments import go_duration, written_duration
from tests.support.eventually import eventually
from tests.upgrade import story
from tests.upgrade.conftest import OldInstallation

#: What is under way there goes on as soon as it is opened; tests of their own look at it.
MOVING = (story.QUICK, story.ATTIC, f"transaction-{story.OPEN}-payload")


async def partitions_of(queues: Queues, name: str) -> list[int]:
    return [place.partition for place in (await queues.queues_info(name)).partitions]


async def payloads(queues: Queues, name: str) -> list[bytes]:
    """What is in a queue, sorted."""
    found = [
        item.payload
        for partition in await partitions_of(queues, name)
        for item in await queues.storage_items_list(name, partition=partition)
    ]
    return sorted(found)


def told_now(queue: dict[str, Any]) -> dict[str, Any]:
    """A queue as it was told then, with its durations as they are written now."""
    times: dict[str, Any] = {
        name: go_duration(written_duration(queue[name]))
        for name in ("lease_timeout", "expire_timeout", "dead_retention")
        if name in queue
    }
    return {**queue, **times, "namespace": "_system"}


async def test_every_queue_and_every_item_is_as_it_was(installation: OldInstallation) -> None:
    told = installation.told
    async with holdfast.open(installation.url) as queues:
        listed = msgspec.to_builtins(await queues.queues_list())
        assert listed == [told_now(one) for one in told["queues"]]
        for place in told["items"]:
            name, _, partition = place.rpartition("/")
            if name in MOVING:
                continue
            items: Any = await queues.storage_items_list(name, partition=int(partition))
            assert msgspec.to_builtins(items) == told["items"][place], place
            items = await queues.storage_scheduled_list(name, partition=int(partition))
            assert msgspec.to_builtins(items) == told["scheduled"][place], place


async def test_a_lease_of_before_is_extended_and_completed(installation: OldInstallation) -> None:
    held = installation.told["held"]
    ids, partition = [item["id"] for item in held["items"]], held["partition"]
    async with holdfast.open(installation.url) as queues:
        before = await payloads(queues, story.ORDERS)
        (extended,) = (await queues.queue_extend(story.ORDERS, ids, partition=partition, lease_timeout="2h")).items
        assert extended.id == ids[0]
        await queues.queue_complete(story.ORDERS, ids, partition=partition)
        assert len(await payloads(queues, story.ORDERS)) == len(before) - 1
        with pytest.raises(BadIds):
            await queues.queue_complete(story.ORDERS, ids, partition=partition)


async def test_items_of_before_come_first_and_are_retried_or_die(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues:
        waiting = await payloads(queues, story.ORDERS)
        held = installation.told["held"]
        await queues.queue_complete(story.ORDERS, [held["items"][0]["id"]], partition=held["partition"])
        await queues.queue_produce(story.ORDERS, [b"new"] * 8)
        seen: list[bytes] = []
        while len(seen) < len(waiting) - 1:
            reply = await queues.queue_lease(story.ORDERS, batch_size=1)
            (item,) = reply.items
            if item.payload != b"new":  # of the other partition
                seen.append(item.payload)
                assert item.attempts == 1
                dead = RetryItem(id=item.id, dead=True, reason="permanent; no")
                await queues.queue_retry(story.ORDERS, [dead], partition=reply.partition)
            else:
                await queues.queue_complete(story.ORDERS, [item.id], partition=reply.partition)

        async def have_died() -> bool:
            return set(seen) <= set(await payloads(queues, story.DEAD))

        await eventually(have_died)
        assert b"new" in await payloads(queues, story.ORDERS)


async def test_what_was_dying_arrives_once_and_what_was_leased_comes_back(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues:

        async def have_arrived() -> bool:
            return await payloads(queues, story.ATTIC) == [b"quick 0", b"quick 1"]

        await eventually(have_arrived)
        story_of = {item.payload: item for item in await queues.storage_items_list(story.ATTIC)}
        assert story_of[b"quick 1"].source_queue == story.QUICK
        assert story_of[b"quick 1"].death_reason.endswith("on its way 1")
        assert await payloads(queues, story.QUICK) == [b"quick 2", b"quick 3"]

        attempts = {}
        for _ in range(2):
            reply = await queues.queue_lease(story.QUICK, request_timeout="10s")
            attempts[reply.items[0].payload] = reply.items[0].attempts
            await queues.queue_complete(story.QUICK, [reply.items[0].id], partition=reply.partition)
        assert attempts == {b"quick 2": 2, b"quick 3": 1}
        assert await payloads(queues, story.ATTIC) == [b"quick 0", b"quick 1"]


async def test_a_key_of_before_still_stands_for_its_item(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues:
        before = await payloads(queues, story.ORDERS)
        await queues.queue_produce(story.ORDERS, [NewItem(payload=b"twin", dedupe_key="key-1")])
        assert await payloads(queues, story.ORDERS) == before
        await queues.queue_produce(story.SHOP, [NewItem(payload=b"free again", dedupe_key="tired")])
        assert await payloads(queues, story.SHOP) == [b"free again"]


async def test_a_paused_queue_is_paused_until_it_is_resumed(installation: OldInstallation) -> None:
    async with holdfast.open(installation.url) as queues:
        with pytest.raises(NothingToLease):
            await queues.queue_lease(story.PAUSED, request_timeout="50ms")
        await queues.queue_resume(story.PAUSED)
        (item,) = (await queues.queue_lease(story.PAUSED)).items
        assert item.payload == b"waits"


async def test_a_name_that_was_deleted_is_free_and_a_dead_queue_in_use_is_not_deleted(
    installation: OldInstallation,
) -> None:
    async with holdfast.open(installation.url) as queues:
        await queues.queues_create("gone")
        assert await payloads(queues, "gone") == []
        with pytest.raises(holdfast.Invalid):
            await queues.queues_delete(story.DEAD, force=True)


def test_dead_items_of_before_are_recovered_from_a_shell(installation: OldInstallation) -> None:
    ended = installation.run("recover", installation.url, story.DEAD, "--json")
    assert (ended.code, ended.document["recovered"], ended.document["by_queue"]) == (0, 3, {story.SHOP: 3}), ended
    lines = installation.run("queue", "items", "list", story.SHOP, "--json").documents
    assert len(lines) == 3
    assert {line["kind"] for line in lines} == {"order.created", "tired"}
