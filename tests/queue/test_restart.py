"""Stop and start: waiting requests hear 453, nothing accepted is lost, and every deadline is armed again."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast import HoldfastError, ImportedItem, NewItem, Queues, RetryItem
from holdfast.core.item import LeasedItem
from holdfast.core.moments import moment
from holdfast.ports.queue_store import LeaseItems
from tests.queue.installation import Installation, answered, refused

STOPPING = "queue is shutting down; try another server"


async def test_everything_that_was_answered_is_there_after_a_restart(installation: Installation) -> None:
    queues = installation.queues
    await queues.queues_create("dead", dead_retention="48h")
    await queues.queues_create("orders", max_attempts=5, dead_queue="dead", reference="r", requested_partitions=2)
    at = moment(installation.clock.now_us()) + timedelta(hours=1)
    await queues.queue_produce("orders", [NewItem(payload=b"\xff", kind="k", dedupe_key="key"), b"b"])
    await queues.queue_produce("orders", [NewItem(payload=b"s", enqueue_at=at)])
    leased = await queues.queue_lease("orders")
    await queues.storage_items_import("dead", [ImportedItem(payload=b"i", source_id="x", death_reason="d")])
    before = [await installation.items(name) for name in ("orders", "dead")]
    scheduled = await queues.storage_scheduled_list("orders")
    infos = await queues.queues_list()
    await installation.restart()
    queues = installation.queues
    assert [await installation.items(name) for name in ("orders", "dead")] == before
    assert await queues.storage_scheduled_list("orders") == scheduled
    assert await queues.queues_list() == infos
    await queues.queue_complete("orders", [leased.items[0].id], partition=leased.partition)
    assert await queues.storage_items_import("dead", [ImportedItem(payload=b"j", source_id="x")]) == []


async def test_every_deadline_is_armed_after_a_restart(installation: Installation) -> None:
    queues = installation.queues
    await queues.queues_create("dead")
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="10m", dead_queue="dead")
    at = moment(installation.clock.now_us()) + timedelta(minutes=5)
    await queues.queue_produce("orders", [b"leased", b"queued", NewItem(payload=b"scheduled", enqueue_at=at)])
    await queues.queue_lease("orders")
    await installation.restart()
    await installation.advance(60)
    assert await installation.payloads("orders") == [b"queued", b"leased"]
    await installation.advance(240)
    assert await installation.payloads("orders") == [b"queued", b"leased", b"scheduled"]
    await installation.advance(300)
    assert await installation.items("orders") == []
    assert sorted(await installation.payloads("dead")) == [b"leased", b"queued", b"scheduled"]


async def test_what_was_due_while_it_was_down_happens_at_the_start(installation: Installation) -> None:
    await installation.queues.queues_create("orders", lease_timeout="1m", expire_timeout="10m")
    await installation.queues.queue_produce("orders", [b"a"])
    await installation.queues.queue_lease("orders")
    await installation.close()
    await installation.clock.advance(120)
    await installation.open()
    await installation.rest()
    (listed,) = await installation.items("orders")
    assert (listed.is_leased, listed.attempts) == (False, 1)


async def test_an_old_id_stays_stale_and_a_new_one_comes_after_it(installation: Installation) -> None:
    await installation.queues.queues_create("orders")
    old = (await installation.queues.queue_produce("orders", [b"a"] * 100)).items[-1].id
    await installation.restart()
    new = (await installation.queues.queue_produce("orders", [b"a"])).items[0].id
    assert new > old


async def test_waiting_requests_hear_at_once_that_the_service_stops(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    tasks = [asyncio.create_task(queues.queue_lease("orders", request_timeout="15m")) for _ in range(3)]
    await installation.waiting_leases("orders", 3)
    installation.service.manager.stop()
    for task in tasks:
        with refused(STOPPING, code=453):
            await answered(task)


async def test_a_lease_whose_commit_runs_while_the_service_stops_hears_it_too(
    installation: Installation, queues: Queues
) -> None:
    await queues.queues_create("orders")
    await queues.queue_produce("orders", [b"a"])
    await installation.rest()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def gate(queue_name: str, operations: object) -> None:
        reached.set()
        await go_on.wait()

    installation.faults.gate = gate
    installation.faults.arm("before", "orders", LeaseItems)
    lease = asyncio.create_task(queues.queue_lease("orders", request_timeout="15m"))
    await answered(reached.wait())
    installation.service.manager.stop()
    go_on.set()
    with refused(STOPPING, code=453):
        await answered(lease)


VERBS = {
    "queue_produce": ("orders", [b"a"]),
    "queue_lease": ("orders",),
    "queue_complete": ("orders", ["x"]),
    "queue_retry": ("orders", ["x"]),
    "queue_extend": ("orders", ["x"]),
    "queue_stats": ("orders",),
    "queue_pause": ("orders",),
    "queue_resume": ("orders",),
    "queue_reload": ("orders",),
    "queues_create": ("new",),
    "queues_update": ("orders",),
    "queues_list": (),
    "queues_info": ("orders",),
    "queues_delete": ("orders",),
    "storage_items_list": ("orders",),
    "storage_scheduled_list": ("orders",),
    "storage_items_import": ("orders", [ImportedItem()]),
    "storage_items_delete": ("orders", ["x"]),
}


async def test_while_it_stops_every_verb_is_answered_453(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    installation.service.manager.stop()
    for name, arguments in VERBS.items():
        with pytest.raises(HoldfastError) as caught:
            await getattr(queues, name)(*arguments)
        assert (name, caught.value.code, caught.value.message) == (name, 453, STOPPING)


async def test_after_it_stopped_every_verb_is_answered_453(installation: Installation) -> None:
    await installation.queues.queues_create("orders")
    service = installation.service
    await installation.close()
    queues = Queues(service)
    for name, arguments in VERBS.items():
        with pytest.raises(HoldfastError) as caught:
            await getattr(queues, name)(*arguments)
        assert (name, caught.value.code, caught.value.message) == (name, 453, STOPPING)


async def test_a_request_that_was_accepted_is_stored_or_told(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders")
    tasks = [asyncio.create_task(queues.queue_produce("orders", [b"%d" % n])) for n in range(20)]
    await asyncio.sleep(0)
    installation.service.manager.stop()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    stored = {b"%d" % n for n, answer in enumerate(answers) if not isinstance(answer, BaseException)}
    assert {a.code for a in answers if isinstance(a, HoldfastError)} <= {453}
    await installation.restart()
    assert set(await installation.payloads("orders")) == stored


async def test_an_interrupted_death_is_finished_after_the_start(installation: Installation) -> None:
    queues = installation.queues
    await queues.queues_create("dead")
    await queues.queues_create("orders", dead_queue="dead")
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    installation.faults.down.add("dead")
    await queues.queue_retry("orders", [RetryItem(id=leased.id, dead=True, reason="poison")])
    await installation.rest()
    await installation.close()
    installation.faults.down.clear()
    await installation.open()
    await installation.rest()
    assert await installation.items("orders") == []
    assert [(i.payload, i.source_id, i.death_reason) for i in await installation.items("dead")] == [
        (b"a", leased.id, "poison")
    ]


async def test_an_item_tells_its_first_id_at_every_attempt(installation: Installation) -> None:
    await installation.queues.queues_create("dead")
    await installation.queues.queues_create("orders", lease_timeout="1m", dead_queue="dead", requested_partitions=2)
    await installation.queues.queue_produce("orders", ["elsewhere"] * 3)
    (placed,) = (await installation.queues.queue_produce("orders", "a")).items
    ids = []

    async def leased() -> LeasedItem:
        queues = installation.queues
        replies = [await queues.queue_lease("orders", batch_size=10) for _ in range(2)]
        (item,) = [item for reply in replies for item in reply.items if item.payload == b"a"]
        others = [item.id for reply in replies for item in reply.items if item.payload != b"a"]
        await queues.queue_retry("orders", others, partition=1 - placed.partition)
        ids.append(item.id)
        return item

    first = await leased()
    assert (first.id, first.first_id) == (placed.id, "")
    await installation.queues.queue_retry("orders", first.id, partition=placed.partition)
    assert (await leased()).first_id == placed.id
    await installation.advance(60)  # the lease runs out
    await installation.restart()
    again = await leased()
    assert again.first_id == placed.id
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    later = RetryItem(id=again.id, retry_at=at)
    await installation.queues.queue_retry("orders", later, partition=placed.partition)
    await installation.advance(60)
    last = await leased()
    assert (last.first_id, len(set(ids))) == (placed.id, 4)
    await installation.queues.queue_retry("orders", RetryItem(id=last.id, dead=True), partition=placed.partition)
    await installation.rest()
    (letter,) = (await installation.queues.queue_lease("dead")).items
    assert (letter.payload, letter.first_id) == (b"a", ""), "it came into this queue as another item"
    await installation.queues.queue_retry("dead", letter.id)
    back = (await installation.queues.storage_items_list("dead"))[0].id
    await installation.queues.queue_redrive("dead", back, source_queue="orders")
    await installation.rest()
    assert (await leased()).first_id == ""
