"""queue.lease: the long poll, who gets what, and what wakes a waiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import pytest

from holdfast import ImportedItem, NewItem, NothingToLease, Queues, RetryItem
from holdfast.core.moments import moment
from tests.queue.installation import Installation, answered, refused
from tests.support.eventually import eventually


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


async def test_a_leased_item_carries_its_payload_and_its_deadline(installation: Installation, queues: Queues) -> None:
    item = NewItem(payload=b"\xffa", encoding="x", kind="order", reference="r")
    placed = (await queues.queue_produce("orders", [item])).items[0]
    reply = await queues.queue_lease("orders", batch_size=10)
    assert (reply.queue_name, reply.partition) == ("orders", 0)
    (leased,) = reply.items
    assert (leased.id, leased.payload, leased.encoding, leased.kind, leased.reference) == (
        placed.id,
        b"\xffa",
        "x",
        "order",
        "r",
    )
    assert leased.attempts == 1
    assert leased.lease_deadline == moment(installation.clock.now_us()) + timedelta(minutes=1)


async def test_a_lease_hides_the_item_until_it_runs_out(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    first = await queues.queue_lease("orders")
    await installation.gives_nothing("orders")
    await installation.advance(59.98)
    await installation.gives_nothing("orders")
    again = await queues.queue_lease("orders")
    assert (again.items[0].payload, again.items[0].attempts) == (b"a", 2)
    assert again.items[0].id > first.items[0].id


async def test_a_leased_item_is_listed_as_leased(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    leased = (await queues.queue_lease("orders")).items[0]
    first, second = await queues.storage_items_list("orders")
    assert (first.id, first.is_leased, first.attempts) == (leased.id, True, 1)
    assert first.lease_deadline == leased.lease_deadline
    assert (second.is_leased, second.lease_deadline, second.attempts) == (False, None, 0)


async def test_items_come_in_the_order_of_arrival(queues: Queues) -> None:
    for number in range(5):
        await queues.queue_produce("orders", [b"%d" % number])
    got = [(await queues.queue_lease("orders")).items[0].payload for _ in range(5)]
    assert got == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_batch_is_as_large_as_there_are_items(queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b", b"c"])
    assert [i.payload for i in (await queues.queue_lease("orders", batch_size=2)).items] == [b"a", b"b"]
    assert [i.payload for i in (await queues.queue_lease("orders", batch_size=1000)).items] == [b"c"]


async def test_an_empty_queue_answers_when_the_time_is_up(installation: Installation, queues: Queues) -> None:
    task = asyncio.create_task(queues.queue_lease("orders", request_timeout="5s"))
    await installation.waiting_leases("orders", 1)
    await installation.advance(4.999)
    assert not task.done()
    await installation.advance(0.001)
    with refused("request timeout; no items are in the queue, try again", code=454):
        await answered(task)
    await installation.waiting_leases("orders", 0)


@pytest.mark.parametrize("timeout", ["10ms", "15m"])
async def test_the_ends_of_the_request_timeout_are_allowed(queues: Queues, timeout: str) -> None:
    await queues.queue_produce("orders", [b"a"])
    assert len((await queues.queue_lease("orders", request_timeout=timeout)).items) == 1


async def test_no_client_id_is_refused(queues: Queues) -> None:
    with refused("invalid client id; cannot be empty"):
        await queues.queue_lease("orders", client_id="")


@pytest.mark.parametrize("size", [0, -1])
async def test_a_batch_of_nothing_is_refused(queues: Queues, size: int) -> None:
    with refused("invalid batch size; must be greater than zero"):
        await queues.queue_lease("orders", batch_size=size)


async def test_a_batch_of_more_than_a_thousand_is_refused(queues: Queues) -> None:
    with refused("invalid batch size; max_lease_batch_size is 1000, but 1001 was requested"):
        await queues.queue_lease("orders", batch_size=1001)


# --- client ids -----------------------------------------------------------------------------------------------


async def test_a_client_cannot_wait_twice_at_one_queue(installation: Installation, queues: Queues) -> None:
    first = asyncio.create_task(queues.queue_lease("orders", client_id="me", request_timeout="1m"))
    await installation.waiting_leases("orders", 1)
    with refused("duplicate client id; a client cannot make multiple leased requests to the same queue"):
        await queues.queue_lease("orders", client_id="me")
    assert not first.done()
    await queues.queue_produce("orders", [b"a"])
    assert (await answered(first)).items[0].payload == b"a"


async def test_a_client_id_is_free_once_its_request_is_answered(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a", b"b"])
    for payload in (b"a", b"b"):
        assert (await queues.queue_lease("orders", client_id="me")).items[0].payload == payload
    task = asyncio.create_task(queues.queue_lease("orders", client_id="me", request_timeout="10ms"))
    await installation.waiting_leases("orders", 1)
    await installation.advance(0.01)
    with pytest.raises(NothingToLease):
        await answered(task)
    await queues.queue_produce("orders", [b"c"])
    assert (await queues.queue_lease("orders", client_id="me")).items[0].payload == b"c"


async def test_a_client_id_may_wait_at_two_queues(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("others")
    tasks = [asyncio.create_task(queues.queue_lease(name, client_id="me")) for name in ("orders", "others")]
    for name in ("orders", "others"):
        await installation.waiting_leases(name, 1)
        await queues.queue_produce(name, [name])
    assert [(await answered(task)).items[0].payload for task in tasks] == [b"orders", b"others"]


async def test_a_client_that_went_away_frees_its_id(installation: Installation, queues: Queues) -> None:
    task = asyncio.create_task(queues.queue_lease("orders", client_id="me", request_timeout="1m"))
    await installation.waiting_leases("orders", 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await installation.waiting_leases("orders", 0)
    await queues.queue_produce("orders", [b"a"])
    assert (await queues.queue_lease("orders", client_id="me")).items[0].payload == b"a"


# --- sharing --------------------------------------------------------------------------------------------------


async def shared(installation: Installation, wanted: list[int], item_count: int) -> list[int]:
    """How many items each of these waiting requests is given."""
    tasks = []
    for number, size in enumerate(wanted):
        tasks.append(
            asyncio.create_task(installation.queues.queue_lease("orders", batch_size=size, request_timeout="30s"))
        )
        await installation.waiting_leases("orders", number + 1)
    await installation.queues.queue_produce("orders", [b"a"] * item_count)
    await installation.rest()
    await installation.advance(30)  # whoever got nothing hears it now
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    return [0 if isinstance(answer, BaseException) else len(answer.items) for answer in answers]


@pytest.mark.parametrize(
    ("wanted", "item_count", "given"),
    [
        ([20, 6, 1], 23, [16, 6, 1]),
        ([10] * 5, 10, [2] * 5),
        ([10] * 3, 10, [4, 3, 3]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([5, 5], 100, [5, 5]),
        ([1000], 1000, [1000]),
    ],
)
async def test_waiting_requests_share_items_round_robin(
    installation: Installation, wanted: list[int], item_count: int, given: list[int]
) -> None:
    assert await shared(installation, wanted, item_count) == given


WIDE = 5


@pytest.fixture
async def leased(installation: Installation) -> list[str]:
    """A queue of five partitions with an item leased in each, which will die when its lease runs out."""
    await installation.queues.queues_create("wide", lease_timeout="1m", max_attempts=1, requested_partitions=5)
    for _ in range(5):
        await installation.queues.queue_produce("wide", [b"leased"])
    return [(await installation.queues.queue_lease("wide")).items[0].id for _ in range(5)]


@asynccontextmanager
async def two_each(installation: Installation) -> AsyncIterator[None]:
    """Five requests for ten items wait; what is done inside brings ten, and each gets two of them."""
    async with AsyncExitStack() as stack:
        tasks = [await stack.enter_async_context(installation.waiting("wide", batch_size=10)) for _ in range(5)]
        yield

        def given() -> list[int]:
            return [len(task.result().items) if task.done() else 0 for task in tasks]

        await eventually(lambda: sum(given()) == 10)
        assert given() == [2] * 5


async def test_a_resumed_queue_sends_nobody_to_an_empty_partition(
    installation: Installation, queues: Queues, leased: list[str]
) -> None:
    await queues.queue_pause("wide")
    async with two_each(installation):
        await queues.queue_produce("wide", [b"a"] * 10)
        await installation.rest()
        await queues.queue_resume("wide")


async def test_a_partition_with_an_item_for_many_is_left_to_others(
    installation: Installation, queues: Queues, leased: list[str]
) -> None:
    await queues.queue_pause("wide")
    async with two_each(installation):
        for count in (1, 10):
            await queues.queue_produce("wide", [b"a"] * count)
        await queues.queue_resume("wide")


async def test_a_deadline_that_brings_nothing_attracts_nobody(
    installation: Installation, queues: Queues, leased: list[str]
) -> None:
    at = moment(installation.clock.now_us()) + timedelta(minutes=1)
    await queues.queue_produce("wide", [NewItem(payload=b"a", enqueue_at=at)] * 10)
    async with two_each(installation):
        await installation.advance(60)


@pytest.mark.parametrize("elsewhere", ["deadlines", "retries", "schedules"])
async def test_what_may_bring_items_elsewhere_keeps_nobody_from_those_that_are_there(
    installation: Installation, queues: Queues, leased: list[str], elsewhere: str
) -> None:
    at_the_gate, go_on = asyncio.Event(), asyncio.Event()

    async def gate(queue_name: str, operations: object) -> None:
        at_the_gate.set()
        await go_on.wait()

    waiting = installation.service.manager.get("wide").waiting
    at = moment(installation.clock.now_us()) + timedelta(hours=1)
    async with two_each(installation), asyncio.TaskGroup() as group:
        installation.faults.gate = gate
        group.create_task(queues.queue_extend("wide", leased[:1]))
        await answered(at_the_gate.wait())
        group.create_task(queues.queue_produce("wide", [b"a"] * 10, request_timeout="15m"))
        await eventually(lambda: len(waiting.produces) == 1)
        if elsewhere == "deadlines":
            await installation.clock.advance(60)
        elif elsewhere == "retries":
            for partition in range(1, 5):
                group.create_task(queues.queue_retry("wide", [leased[partition]], partition=partition))
            await eventually(lambda: waiting.settling_count() == 4)
        else:
            for _ in range(4):
                group.create_task(queues.queue_produce("wide", [NewItem(payload=b"later", enqueue_at=at)] * 2))
            await eventually(lambda: len(waiting.produces) == 5)
        installation.faults.gate = None
        go_on.set()


async def test_a_thousand_requests_may_wait_and_the_next_is_told_to_come_back(
    installation: Installation, queues: Queues
) -> None:
    queue = installation.service.manager.get("orders")
    waiting = [asyncio.create_task(queue.lease(f"waiter {number}", 1, timeout_us=60_000_000)) for number in range(999)]
    last = asyncio.create_task(queues.queue_lease("orders", client_id="the thousandth", request_timeout="1m"))
    await installation.waiting_leases("orders", 1000)
    with refused("queue is overloaded; try again later", code=454):
        await queues.queue_lease("orders", client_id="one too many")
    await installation.advance(60)
    answers = await asyncio.gather(*waiting, last, return_exceptions=True)
    assert all(isinstance(answer, NothingToLease) for answer in answers)


# --- what wakes a waiter --------------------------------------------------------------------------------------


async def test_a_produced_item_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    async with installation.waiting("orders") as lease:
        await queues.queue_produce("orders", [b"a"])
        assert (await answered(lease)).items[0].payload == b"a"


async def test_a_retried_item_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = await queues.queue_lease("orders")
    async with installation.waiting("orders") as lease:
        await queues.queue_retry("orders", [leased.items[0].id])
        assert (await answered(lease)).items[0].attempts == 2


async def test_a_lease_that_runs_out_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    await queues.queue_lease("orders")
    async with installation.waiting("orders") as lease:
        await installation.advance(60)
        assert (await answered(lease)).items[0].attempts == 2


async def test_a_schedule_that_is_due_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(seconds=30)
    await queues.queue_produce("orders", [NewItem(payload=b"a", enqueue_at=at)])
    async with installation.waiting("orders") as lease:
        await installation.advance(29.999)
        assert not lease.done()
        await installation.advance(0.001)
        assert (await answered(lease)).items[0].payload == b"a"


async def test_a_retry_that_is_due_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    at = moment(installation.clock.now_us()) + timedelta(seconds=30)
    await queues.queue_retry("orders", [RetryItem(id=leased.id, retry_at=at)])
    async with installation.waiting("orders") as lease:
        await installation.advance(30)
        assert (await answered(lease)).items[0].attempts == 2


async def test_an_imported_item_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    async with installation.waiting("orders") as lease:
        await queues.storage_items_import("orders", [ImportedItem(payload=b"a")])
        assert (await answered(lease)).items[0].payload == b"a"


async def test_an_imported_schedule_that_is_due_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    at = moment(installation.clock.now_us()) + timedelta(seconds=30)
    async with installation.waiting("orders") as lease:
        await queues.storage_items_import("orders", [ImportedItem(payload=b"a", enqueue_at=at)])
        await installation.advance(30)
        assert (await answered(lease)).items[0].payload == b"a"


async def test_an_arriving_dead_letter_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("source", dead_queue="orders", max_attempts=1)
    await queues.queue_produce("source", [b"a"])
    leased = (await queues.queue_lease("source")).items[0]
    async with installation.waiting("orders") as lease:
        await queues.queue_retry("source", [leased.id])
        assert (await answered(lease)).items[0].payload == b"a"


async def test_a_resumed_queue_wakes_a_waiter(installation: Installation, queues: Queues) -> None:
    await queues.queue_pause("orders")
    async with installation.waiting("orders") as lease:
        await queues.queue_produce("orders", [b"a"])
        await installation.rest()
        assert not lease.done()
        await queues.queue_resume("orders")
        assert (await answered(lease)).items[0].payload == b"a"


# --- who went away --------------------------------------------------------------------------------------------


async def test_a_waiter_that_went_away_is_given_nothing(installation: Installation, queues: Queues) -> None:
    task = asyncio.create_task(queues.queue_lease("orders", request_timeout="1m"))
    await installation.waiting_leases("orders", 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await installation.waiting_leases("orders", 0)
    await queues.queue_produce("orders", [b"a"])
    (listed,) = await queues.storage_items_list("orders")
    assert (listed.is_leased, listed.attempts) == (False, 0)


async def test_a_waiter_whose_time_is_up_is_given_nothing(installation: Installation, queues: Queues) -> None:
    await installation.gives_nothing("orders")
    await queues.queue_produce("orders", [b"a"])
    (listed,) = await queues.storage_items_list("orders")
    assert (listed.is_leased, listed.attempts) == (False, 0)


async def test_a_waiter_that_goes_away_during_the_commit_gives_its_lease_back(
    installation: Installation, queues: Queues
) -> None:
    placed = (await queues.queue_produce("orders", [b"a", b"b"])).items
    at_the_gate, go_on = asyncio.Event(), asyncio.Event()

    async def gate(queue_name: str, operations: object) -> None:
        at_the_gate.set()
        await go_on.wait()

    installation.faults.gate = gate
    task = asyncio.create_task(queues.queue_lease("orders", request_timeout="1m"))
    await answered(at_the_gate.wait())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    queue = installation.service.manager.get("orders")
    await eventually(lambda: not queue.waiting.leases)
    installation.faults.gate = None
    go_on.set()
    await installation.rest()
    assert [(i.id, i.is_leased, i.attempts) for i in await installation.items("orders")] == [
        (placed[0].id, False, 0),
        (placed[1].id, False, 0),
    ]
    stats = await installation.stats("orders")
    assert (stats.total, stats.total_leased) == (2, 0)
    assert [i.payload for i in (await queues.queue_lease("orders", batch_size=2)).items] == [b"a", b"b"]


async def test_what_a_leaver_does_not_take_goes_to_those_who_stayed(installation: Installation, queues: Queues) -> None:
    leaver = asyncio.create_task(queues.queue_lease("orders", batch_size=5, request_timeout="1m"))
    await installation.waiting_leases("orders", 1)
    async with installation.waiting("orders", batch_size=5) as stayer:
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        await installation.waiting_leases("orders", 1)
        await queues.queue_produce("orders", [b"a"] * 4)
        assert len((await answered(stayer)).items) == 4
