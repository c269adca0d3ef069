"""A storage that fails: nothing is acknowledged that is not stored, the others go on, and it comes back by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from holdfast import ImportedItem, NewItem, Queues, RetryItem
from holdfast.ports.queue_store import Arrive, Complete, Due, LeaseItems, Produce, Remove, RetryItems
from tests.queue.installation import Installation, answered, refused

FAILING = "partition is failing; the storage of queue '{}' cannot be used now, try again"
DOWN = "storage failed; {} is down, try again"
LONG_ENOUGH_S = 31  # the longest back-off, and a little more


@pytest.fixture
async def orders(queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create("orders", lease_timeout="10m", expire_timeout="24h", max_attempts=2, dead_queue="dead")


# --- one storage ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("orders")
async def test_a_produce_that_fails_is_454_and_nothing_is_stored(installation: Installation, queues: Queues) -> None:
    installation.faults.arm("before", "orders", Produce)
    with refused("storage failed; orders failed before the commit, try again", code=454):
        await queues.queue_produce("orders", [b"a"])
    await installation.advance(LONG_ENOUGH_S)
    assert await installation.items("orders") == []
    await queues.queue_produce("orders", [b"b"])
    assert await installation.payloads("orders") == [b"b"]


@pytest.mark.usefixtures("orders")
async def test_while_the_only_storage_fails_requests_are_454(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    installation.faults.down.add("orders")
    with refused(DOWN.format("orders"), code=454):
        await queues.queue_produce("orders", [b"b"])
    text = FAILING.format("orders")
    with refused(text, code=454):
        await queues.queue_produce("orders", [b"b"])
    with refused(text, code=454):
        await queues.queue_complete("orders", [leased.id])
    with refused(text, code=454):
        await queues.queue_retry("orders", [leased.id])
    with refused(text, code=454):
        await queues.queue_extend("orders", [leased.id])
    with refused(text, code=454):
        await queues.storage_items_import("orders", [ImportedItem(payload=b"b")])
    with refused(text, code=454):
        await queues.queue_clear("orders", queue=True)
    assert (await installation.stats("orders")).failures >= 1
    installation.faults.down.clear()
    await installation.advance(LONG_ENOUGH_S)
    assert (await installation.stats("orders")).failures == 0
    await queues.queue_complete("orders", [leased.id])
    assert await installation.items("orders") == []


@pytest.mark.usefixtures("orders")
async def test_it_is_tried_again_with_back_off_until_it_is_back(installation: Installation, queues: Queues) -> None:
    installation.faults.down.add("orders")
    with refused(DOWN.format("orders"), code=454):
        await queues.queue_produce("orders", [b"a"])
    failures = []
    for _ in range(8):
        failures.append((await installation.stats("orders")).failures)
        await installation.advance(LONG_ENOUGH_S)
    assert failures == sorted(failures)
    assert failures[-1] > failures[0]
    installation.faults.down.clear()
    await installation.advance(LONG_ENOUGH_S)
    await queues.queue_produce("orders", [b"a"])


@pytest.mark.usefixtures("orders")
async def test_a_waiting_lease_outlives_a_failure(installation: Installation, queues: Queues) -> None:
    async with installation.waiting("orders") as lease:
        installation.faults.arm("before", "orders", Produce)
        with refused("storage failed; orders failed before the commit, try again", code=454):
            await queues.queue_produce("orders", [b"a"])
        assert not lease.done()
        await installation.advance(LONG_ENOUGH_S)
        await queues.queue_produce("orders", [b"b"])
        assert (await answered(lease)).items[0].payload == b"b"


@pytest.mark.usefixtures("orders")
async def test_a_lease_whose_answer_was_lost_runs_out_like_any_other(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a"])
    installation.faults.arm("after", "orders", LeaseItems)
    async with installation.waiting("orders") as lease:
        await installation.advance(600)
        reply = await answered(lease)
        assert (reply.items[0].payload, reply.items[0].attempts) == (b"a", 2)


@pytest.mark.usefixtures("orders")
async def test_a_complete_whose_answer_was_lost_can_be_repeated_and_tells(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    installation.faults.arm("after", "orders", Complete)
    with refused("storage failed; orders took effect, the answer was lost, try again", code=454):
        await queues.queue_complete("orders", [leased.id])
    await installation.advance(LONG_ENOUGH_S)
    with refused(f"invalid storage id; '{leased.id}' does not exist", ids=[leased.id]):
        await queues.queue_complete("orders", [leased.id])
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased) == (0, 0)


@pytest.mark.usefixtures("orders")
async def test_a_produce_whose_answer_was_lost_is_stored_once_with_a_key(
    installation: Installation, queues: Queues
) -> None:
    item = NewItem(payload=b"a", dedupe_key="k")
    installation.faults.arm("after", "orders", Produce)
    with refused("storage failed; orders took effect, the answer was lost, try again", code=454):
        await queues.queue_produce("orders", [item])
    await installation.advance(LONG_ENOUGH_S)
    reply = await queues.queue_produce("orders", [item])
    assert [i.id for i in await installation.items("orders")] == [reply.items[0].id]


@pytest.mark.usefixtures("orders")
async def test_other_queues_go_on(installation: Installation, queues: Queues) -> None:
    installation.faults.down.add("orders")
    with refused(DOWN.format("orders"), code=454):
        await queues.queue_produce("orders", [b"a"])
    await queues.queue_produce("dead", [b"b"])
    assert (await queues.queue_lease("dead")).items[0].payload == b"b"


async def test_a_queue_whose_storage_fails_at_the_start_comes_later(installation: Installation) -> None:
    await installation.queues.queues_create("orders")
    await installation.queues.queue_produce("orders", [b"a"])
    installation.faults.down.add("orders")
    await installation.restart()
    with refused(FAILING.format("orders"), code=454):
        await installation.queues.queue_produce("orders", [b"b"])
    installation.faults.down.clear()
    await installation.advance(LONG_ENOUGH_S)
    assert (await installation.queues.queue_lease("orders")).items[0].payload == b"a"


async def test_a_catalog_that_fails_changes_nothing(installation: Installation, queues: Queues) -> None:
    installation.faults.arm("before", " catalog")
    with refused("storage failed;  catalog failed before the commit, try again", code=454):
        await queues.queues_create("orders")
    assert await queues.queues_list() == []
    await queues.queues_create("orders")


# --- deaths ---------------------------------------------------------------------------------------------------

Deaths = Callable[[Installation], Awaitable[str]]


@pytest.fixture
async def apart(make_installation: Callable[..., Awaitable[Installation]]) -> Installation:
    """An installation whose dead queue lives in another storage than its source: a death takes three commits there."""
    installation = await make_installation("here", "there")
    installation.place_on("there")
    await installation.queues.queues_create("dead")
    installation.place_on("here")
    await installation.queues.queues_create(
        "orders", lease_timeout="10m", expire_timeout="24h", max_attempts=2, dead_queue="dead"
    )
    return installation


async def kill(installation: Installation, payload: bytes = b"a") -> str:
    """Produce, lease, reject; returns the id that died."""
    await installation.queues.queue_produce("orders", [payload])
    leased = (await installation.queues.queue_lease("orders")).items[0]
    await installation.queues.queue_retry("orders", [RetryItem(id=leased.id, dead=True, reason="poison")])
    await installation.rest()
    return leased.id


async def test_while_its_target_is_down_an_item_is_dying(apart: Installation, caplog: pytest.LogCaptureFixture) -> None:
    apart.faults.down.add("dead")
    old = await kill(apart)
    stats = await apart.stats("orders")
    assert (stats.total, stats.total_leased, stats.scheduled, stats.dying) == (0, 0, 0, 1)
    assert await apart.items("orders") == []
    await apart.gives_nothing("orders")
    with refused(f"invalid storage id; '{old}' does not exist", ids=[old]):
        await apart.queues.queue_complete("orders", [old])
    await apart.queues.storage_items_delete("orders", [old])
    await apart.queues.queue_clear("orders", queue=True, scheduled=True, destructive=True)
    await apart.advance(24 * 3600)
    assert (await apart.stats("orders")).dying == 1
    assert any(
        record.getMessage().startswith("failed to produce to dead_queue 'dead': ")
        for record in caplog.records
        if record.levelno == logging.ERROR
    )
    apart.faults.down.clear()
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert (await apart.stats("orders")).dying == 0
    assert [(i.payload, i.source_id) for i in await apart.items("dead")] == [(b"a", old)]


async def test_what_is_dying_waits_for_its_own_target_while_others_pass(apart: Installation) -> None:
    apart.place_on("there")
    await apart.queues.queues_create("graveyard")
    apart.faults.down.add("dead")
    old = await kill(apart)
    await apart.queues.queues_update("orders", dead_queue="graveyard")
    other = await kill(apart, b"b")
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert [i.source_id for i in await apart.items("graveyard")] == [other]
    apart.faults.down.clear()
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert [i.source_id for i in await apart.items("dead")] == [old]
    assert (await apart.stats("orders")).dying == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("queue_name", "operation"), [("orders", RetryItems), ("dead", Arrive), ("orders", Remove)], ids=str
)
async def test_a_failure_at_any_commit_of_a_death_ends_in_exactly_one_place(
    apart: Installation, when: str, queue_name: str, operation: type
) -> None:
    await apart.queues.queue_produce("orders", [b"a"])
    leased = (await apart.queues.queue_lease("orders")).items[0]
    apart.faults.arm(when, queue_name, operation)  # type: ignore[arg-type]
    await asyncio.gather(
        apart.queues.queue_retry("orders", [RetryItem(id=leased.id, dead=True)]), return_exceptions=True
    )
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert apart.faults.armed == []
    dead, alive = await apart.payloads("dead"), await apart.payloads("orders")
    refused_before = (when, operation) == ("before", RetryItems)
    assert (alive, dead) == (([b"a"], []) if refused_before else ([], [b"a"]))
    assert (await apart.stats("orders")).dying == 0


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_failure_while_a_lease_runs_out_ends_in_exactly_one_place(apart: Installation, when: str) -> None:
    await apart.queues.queues_update("orders", max_attempts=1)
    await apart.queues.queue_produce("orders", [b"a"])
    await apart.queues.queue_lease("orders")
    await apart.rest()
    apart.faults.arm(when, "orders", Due)  # type: ignore[arg-type]
    await apart.advance(600)
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert apart.faults.armed == []
    assert (await apart.payloads("orders"), await apart.payloads("dead")) == ([], [b"a"])
    assert (await apart.stats("orders")).dying == 0


async def test_a_letter_that_was_completed_does_not_arrive_again(apart: Installation) -> None:
    apart.faults.arm("before", "orders", Remove)
    await kill(apart)
    letter = (await apart.queues.queue_lease("dead")).items[0]
    await apart.queues.queue_complete("dead", [letter.id])
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    assert (await apart.stats("orders")).dying == 0
    assert await apart.items("dead") == []


async def test_when_its_target_is_gone_for_good_an_item_dies_by_todays_rules(apart: Installation) -> None:
    apart.faults.down.add("dead")
    await apart.queues.queue_produce("orders", [NewItem(payload=b"a", dedupe_key="k")])
    for _ in range(2):
        leased = (await apart.queues.queue_lease("orders")).items[0]
        await apart.queues.queue_retry("orders", [leased.id])
    await apart.rest()
    assert (await apart.stats("orders")).dying == 1
    newer = (await apart.queues.queue_produce("orders", [NewItem(payload=b"b", dedupe_key="k")])).items[0]
    await apart.queues.queues_update("orders", dead_queue="")
    apart.faults.down.clear()
    await apart.queues.queues_delete("dead", force=True)
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    # Two leases of two are used up, and there is no dead queue any more: deleted, and in the ledger.
    assert (await apart.stats("orders")).dying == 0
    assert await apart.payloads("orders") == [b"b"]
    assert [entry[0] for entry in await apart.noted("orders")] == ["dead_lettered", "deleted"]
    again = await apart.queues.queue_produce("orders", [NewItem(payload=b"c", dedupe_key="k")])
    assert again.items[0].id == newer.id


async def test_a_rejected_item_whose_target_is_gone_lives_again(apart: Installation) -> None:
    apart.faults.down.add("dead")
    await kill(apart)
    await apart.queues.queues_update("orders", dead_queue="")
    apart.faults.down.clear()
    await apart.queues.queues_delete("dead", force=True)
    for _ in range(3):
        await apart.advance(LONG_ENOUGH_S)
    (item,) = await apart.items("orders")
    assert (item.payload, item.attempts, item.death_reason, item.died_at) == (b"a", 1, "", None)
    assert (await apart.queues.queue_lease("orders")).items[0].attempts == 2


# --- several storages -----------------------------------------------------------------------------------------


@pytest.fixture
async def spread(make_installation: Callable[..., Awaitable[Installation]]) -> Installation:
    """An installation with one queue over two storages: partition 0 here, 1 there."""
    installation = await make_installation("here", "there")
    await installation.queues.queues_create("wide", lease_timeout="10m", requested_partitions=2)
    await installation.rest()
    return installation


async def produced(installation: Installation, queue_name: str, payload: bytes) -> int:
    """Produce while both storages are idle (a busy one is not waited for); returns the partition."""
    await installation.rest()
    return (await installation.queues.queue_produce(queue_name, [payload])).items[0].partition


async def test_partitions_are_spread_over_the_storages(spread: Installation) -> None:
    info = await spread.queues.queues_info("wide")
    assert [(p.partition, p.storage) for p in info.partitions] == [(0, "here"), (1, "there")]
    placed = [await produced(spread, "wide", b"%d" % number) for number in range(4)]
    assert placed == [0, 1, 0, 1]
    assert await spread.payloads("wide") == [b"0", b"2", b"1", b"3"]
    got = set()
    for _ in range(4):
        reply = await spread.queues.queue_lease("wide")
        got.add(reply.items[0].payload)
        await spread.queues.queue_complete("wide", [reply.items[0].id], partition=reply.partition)
    assert got == {b"0", b"1", b"2", b"3"}


async def test_affinity_says_how_many_partitions_a_storage_gets(spread: Installation) -> None:
    spread.affinities |= {"here": 3.0, "there": 1.0}
    await spread.queues.queues_create("tilted", requested_partitions=8)
    storages = [place.storage for place in (await spread.queues.queues_info("tilted")).partitions]
    assert (storages.count("here"), storages.count("there")) == (6, 2)


async def test_an_update_may_add_a_partition_in_another_storage(spread: Installation) -> None:
    spread.place_on("here")
    await spread.queues.queues_create("narrow")
    await spread.queues.queue_produce("narrow", [b"a"])
    spread.place_on("here", "there")
    await spread.queues.queues_update("narrow", requested_partitions=2)
    assert await produced(spread, "narrow", b"b") == 1
    assert [p.storage for p in (await spread.queues.queues_info("narrow")).partitions] == ["here", "there"]
    await spread.restart()
    assert await spread.payloads("narrow") == [b"a", b"b"]


async def test_everything_is_there_after_a_restart_of_both(spread: Installation) -> None:
    for number in range(4):
        await spread.queues.queue_produce("wide", [b"%d" % number])
    await spread.restart()
    assert sorted(await spread.payloads("wide")) == [b"0", b"1", b"2", b"3"]


async def test_one_failing_storage_is_set_aside_and_the_other_serves(spread: Installation) -> None:
    for number in range(4):
        await produced(spread, "wide", b"%d" % number)
    await spread.rest()
    spread.faults.storages_down.add("here")
    with refused("storage failed; wide is down, try again", code=454):
        await spread.queues.queue_complete("wide", ["x"], partition=0)
    assert [(await spread.stats("wide", number)).failures > 0 for number in (0, 1)] == [True, False]
    reply = await spread.queues.queue_produce("wide", [b"4"])
    assert reply.items[0].partition == 1
    leased = await spread.queues.queue_lease("wide", batch_size=10)
    assert (leased.partition, sorted(i.payload for i in leased.items)) == (1, [b"1", b"3", b"4"])
    await spread.queues.queue_complete("wide", [i.id for i in leased.items], partition=1)
    with refused(FAILING.format("wide"), code=454):
        await spread.queues.queue_complete("wide", ["x"], partition=0)
    with refused(FAILING.format("wide"), code=454):
        await spread.queues.queue_retry("wide", ["x"], partition=0)
    async with spread.waiting("wide", batch_size=10) as lease:
        spread.faults.storages_down.clear()
        await spread.advance(LONG_ENOUGH_S)
        reply_of_lease = await answered(lease)
        assert (reply_of_lease.partition, [i.payload for i in reply_of_lease.items]) == (0, [b"0", b"2"])
    assert (await spread.stats("wide", 0)).failures == 0
