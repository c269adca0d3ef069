"""The steps by which an installation got its data, each in a process of its own: `python -m tests.upgrade.scenes NAME`.

Run by `make_fixtures` with the Python of the commit whose formats are kept, never by a test. What a step notes, it
prints as one line of JSON. Some are ended by SIGKILL at a crash point, or by their own hand.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from datetime import datetime
from typing import Any

import msgspec

import holdfast
from holdfast import NewItem, Queues, RetryItem
from tests.support.eventually import eventually
from tests.upgrade import story


async def queues(url: str) -> dict[str, Any]:
    """Every kind of queue and item, but those that only a kill leaves."""
    async with holdfast.open(url) as queues:
        await _create(queues)
        await _deaths(queues, [b"captured 1", b"captured 2", b"captured 3"])
        await queues.queue_produce(
            story.ORDERS,
            [
                NewItem(payload=bytes(range(256)), kind="order.created", encoding="octets", reference="r-1"),
                NewItem(utf8="größer", kind="order.changed", dedupe_key="key-1"),
                NewItem(payload=b"keyed", reference="r-2", dedupe_key="key-2"),
                NewItem(payload=b"", kind="empty"),
            ],
        )
        far = datetime.fromisoformat(story.FAR)
        await queues.queue_produce(story.LATER, [NewItem(payload=b"far", enqueue_at=far, dedupe_key="far", kind="k")])
        await queues.queue_produce(story.LATER, [b"retried for later"])
        leased = await queues.queue_lease(story.LATER)
        await queues.queue_retry(story.LATER, [RetryItem(id=leased.items[0].id, retry_at=far)])
        await queues.queue_produce(story.PAUSED, [b"waits"])
        await queues.queue_pause(story.PAUSED)
        for name in ("gone", "emptied"):
            await queues.queues_create(name)
            await queues.queue_produce(name, [b"1", b"2"])
        await queues.queues_delete("gone", force=True)
        await queues.queue_clear("emptied", queue=True)
        return {}


async def more_deaths(url: str) -> dict[str, Any]:
    """Items that stay in the dead queue, after others were captured; and leases that last."""
    async with holdfast.open(url) as queues:
        await _deaths(queues, [b"dead 1", b"dead 2"])
        await _tired(queues)
        held = await queues.queue_lease(story.ORDERS, batch_size=1)
        return {"held": {"partition": held.partition, "items": msgspec.to_builtins(held.items)}}


async def collect(url: str) -> dict[str, Any]:
    """One transaction that is completed, with a contradiction that was parked, and one that was abandoned."""
    async with holdfast.open(url) as queues:
        for name in (story.PRODUCER, story.NOTIFY):
            await queues.queues_create(name, lease_timeout="1h", expire_timeout=story.LONG)
        async with _collector(url, queues) as collector:
            for name in (story.DONE, story.DROPPED):
                await collector.start(
                    b"everything", producer=story.PRODUCER, notify=story.NOTIFY, transaction_id=name, series=["rows"]
                )
                await _answered(queues)
            again = NewItem(payload=b"other bytes", reference=story.payload_reference(story.DONE, "rows", 0))
            await _send(queues, story.DONE, "rows", range(story.SERIES["rows"]))
            await _stored(collector, story.DONE, "rows", story.SERIES["rows"])
            await queues.queue_produce(_queue(story.DONE, "payload"), [again])
            await eventually(lambda: _has_parked(queues))
            await _send_header(queues, story.DONE, "rows")
            await collector.wait(story.DONE, timeout_s=30)
            await _send(queues, story.DROPPED, "rows", range(2))
            await _stored(collector, story.DROPPED, "rows", 2)
            await collector.abandon(story.DROPPED, reason="nobody wants it")
            for name in (story.DONE, story.DROPPED):
                await collector.service.wait_clean(name, timeout_s=30)
    return {}


async def collect_open(url: str) -> dict[str, Any]:
    """A transaction that is killed: some payloads are stored, some are not acked, some were never sent."""
    async with holdfast.open(url) as queues, _collector(url, queues) as collector:
        await collector.start(
            b"everything",
            producer=story.PRODUCER,
            notify=story.NOTIFY,
            transaction_id=story.OPEN,
            series=list(story.SERIES),
        )
        await _answered(queues)
        await _send_header(queues, story.OPEN, "rows")
        sent = [payload(story.OPEN, series, number) for series, count in story.SENT.items() for number in range(count)]
        await queues.queue_produce(_queue(story.OPEN, "payload"), sent)  # at once: the kill may come at any moment
        await asyncio.sleep(60)
    raise RuntimeError("it was to be killed")


async def die(url: str) -> dict[str, Any]:
    """A lease that nobody gives back, and deaths on their way: killed with all of that."""
    async with holdfast.open(url) as queues:
        for number in range(4):
            await queues.queue_produce(story.QUICK, [f"quick {number}".encode()])
        leased = [await queues.queue_lease(story.QUICK, batch_size=1) for _ in range(3)]
        print(json.dumps({"left": leased[2].items[0].id}), flush=True)  # noqa: T201
        dying = [
            queues.queue_retry(
                story.QUICK,
                [RetryItem(id=one.items[0].id, dead=True, reason=f"on its way {number}")],
                partition=one.partition,
            )
            for number, one in enumerate(leased[:2])
        ]
        await asyncio.gather(*dying)
        if "HOLDFAST_CRASH_AT" in os.environ:
            await asyncio.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("it was to be killed")


async def failed_import(url: str) -> dict[str, Any]:
    """What could not become a letter: no message does that by itself in a fixture of this size."""
    custody, wiring = importlib.import_module("holdfast.wiring_custody"), importlib.import_module("holdfast.wiring")
    settings, ledger = importlib.import_module("holdfast.settings"), importlib.import_module("holdfast.core.ledger")
    act = ledger.Act(actor="fixture", action="capture", origin="capture")
    async with custody.open_vault(settings.load_settings(serving=False), url, clock=wiring.SystemClock()) as vault:
        await vault.letters.put_failed(
            story.DLQ, body=b"\xff too large", properties=b"\0\0", reason="it is too large", act=act
        )
    return {}


async def listed(url: str) -> dict[str, Any]:
    """All queues with all their items, as the listings tell it."""
    async with holdfast.open(url) as queues:
        found = await queues.queues_list()
        items: dict[str, Any] = {}
        scheduled: dict[str, Any] = {}
        for queue in found:
            for place in queue.partitions:
                name = f"{queue.queue_name}/{place.partition}"
                some = await queues.storage_items_list(queue.queue_name, partition=place.partition)
                items[name] = msgspec.to_builtins(some)
                later = await queues.storage_scheduled_list(queue.queue_name, partition=place.partition)
                scheduled[name] = msgspec.to_builtins(later)
        return {"queues": msgspec.to_builtins(found), "items": items, "scheduled": scheduled}


# --- pieces -------------------------------------------------------------------------------------------------------


async def _create(queues: Queues) -> None:
    long: dict[str, Any] = {"lease_timeout": story.LONG, "expire_timeout": story.LONG}
    await queues.queues_create(story.DEAD, requested_partitions=2, **long)
    await queues.queues_create(story.ATTIC, dead_retention=story.LONG, **long)
    await queues.queues_create(
        story.ORDERS, max_attempts=9, dead_queue=story.DEAD, reference="all of it", requested_partitions=2, **long
    )
    await queues.queues_create(story.SHOP, max_attempts=3, dead_queue=story.DEAD, **long)
    await queues.queues_create(
        story.QUICK, lease_timeout="2s", expire_timeout=story.LONG, dead_queue=story.ATTIC, requested_partitions=2
    )
    for name in (story.PAUSED, story.LATER):
        await queues.queues_create(name, **long)
    await queues.queues_update(story.LATER, reference="changed", max_attempts=7)


async def _deaths(queues: Queues, bodies: list[bytes]) -> None:
    """Items that are refused by their handler, and have arrived in the dead queue."""
    for number, body in enumerate(bodies):
        item = NewItem(payload=body, kind="order.created", encoding="text", reference=f"d-{number}")
        before = await _count(queues, story.DEAD)
        await queues.queue_produce(story.SHOP, [item])
        leased = await queues.queue_lease(story.SHOP)
        dead = RetryItem(id=leased.items[0].id, dead=True, reason="permanent; ValueError: no")
        await queues.queue_retry(story.SHOP, [dead], partition=leased.partition)
        await _arrived(queues, before + 1)


async def _tired(queues: Queues) -> None:
    """An item that has used up its attempts."""
    before = await _count(queues, story.DEAD)
    await queues.queue_produce(story.SHOP, [NewItem(payload=b"tired", kind="tired", dedupe_key="tired")])
    for _ in range(3):
        leased = await queues.queue_lease(story.SHOP)
        await queues.queue_retry(story.SHOP, [leased.items[0].id], partition=leased.partition)
    await _arrived(queues, before + 1)


async def _arrived(queues: Queues, count: int) -> None:
    async def is_there() -> bool:
        return await _count(queues, story.DEAD) == count

    await eventually(is_there)


async def _count(queues: Queues, name: str) -> int:
    (logical,) = (await queues.queue_stats(name)).logical_queues
    return sum(place.total for place in logical.partitions)


def _collector(url: str, queues: Queues) -> holdfast.Collector:
    blobs = os.environ.get("FIXTURE_BLOBS")
    return holdfast.Collector(url, blobs=blobs, queues=queues, uploads_max=2, lease_timeout="2s")


def _queue(transaction: str, kind: str) -> str:
    return f"transaction-{transaction}-{kind}"


async def _answered(queues: Queues) -> None:
    """The producer takes the request: from then on the queues of the transaction are there."""
    reply = await queues.queue_lease(story.PRODUCER, request_timeout="10s")
    await queues.queue_complete(story.PRODUCER, [reply.items[0].id], partition=reply.partition)


async def _send(queues: Queues, transaction: str, series: str, ordinals: Any) -> None:
    items = [payload(transaction, series, number) for number in ordinals]
    await queues.queue_produce(_queue(transaction, "payload"), items)


def payload(transaction: str, series: str, ordinal: int) -> NewItem:
    """A payload message."""
    reference = story.payload_reference(transaction, series, ordinal)
    return NewItem(payload=story.part(series, ordinal), reference=reference)


async def _send_header(queues: Queues, transaction: str, series: str) -> None:
    item = NewItem(reference=story.header_reference(transaction, series))
    await queues.queue_produce(_queue(transaction, "header"), [item])


async def _stored(collector: holdfast.Collector, transaction: str, series: str, count: int) -> None:
    async def is_stored() -> bool:
        return any(one.series == series and one.stored_count == count for one in await collector.progress(transaction))

    await eventually(is_stored)


async def _has_parked(queues: Queues) -> bool:
    return bool(await queues.storage_items_list("collector.dlq"))


if __name__ == "__main__":
    scenes = {one.__name__: one for one in (queues, more_deaths, collect, collect_open, die, failed_import, listed)}
    print(json.dumps(asyncio.run(scenes[sys.argv[1]](sys.argv[2]))))  # noqa: T201
