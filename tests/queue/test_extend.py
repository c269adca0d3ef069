"""queue.extend: a lease runs longer, or shorter, from now; all ids of a request, or none."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast import Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused


@pytest.fixture(autouse=True)
async def orders(queues: Queues) -> None:
    await queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")


async def test_an_extended_lease_runs_as_long_as_the_queues_own_from_now(
    installation: Installation, queues: Queues
) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(50)
    reply = await queues.queue_extend("orders", [leased.id])
    deadline = moment(installation.clock.now_us()) + timedelta(minutes=1)
    assert [(item.id, item.lease_deadline) for item in reply.items] == [(leased.id, deadline)]
    assert (await installation.items("orders"))[0].lease_deadline == deadline
    await installation.advance(59.9)
    await queues.queue_complete("orders", [leased.id])


async def test_a_lease_may_be_shortened(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_extend("orders", [leased.id], lease_timeout="1s")
    await installation.advance(1)
    again = (await queues.queue_lease("orders")).items[0]
    assert (again.payload, again.attempts) == (b"a", 2)


async def test_a_lease_may_run_longer_than_the_queues_own(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_extend("orders", [leased.id], lease_timeout="5m")
    await installation.advance(299)
    await installation.gives_nothing("orders")
    await queues.queue_complete("orders", [leased.id])


async def test_an_extension_is_no_attempt(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await queues.queue_extend("orders", [leased.id])
    assert (await installation.items("orders"))[0].attempts == 1


async def test_an_item_that_is_not_leased_cannot_be_extended(queues: Queues) -> None:
    placed = (await queues.queue_produce("orders", [b"a"])).items[0]
    with refused(f"item(s) cannot be extended; '{placed.id}' is not marked as leased", ids=[placed.id]):
        await queues.queue_extend("orders", [placed.id])


async def test_an_unknown_id_cannot_be_extended(queues: Queues) -> None:
    with refused("invalid storage id; 'x' does not exist", ids=["x"]):
        await queues.queue_extend("orders", ["x"])


async def test_one_bad_id_extends_none(installation: Installation, queues: Queues) -> None:
    await queues.queue_produce("orders", [b"a"])
    leased = (await queues.queue_lease("orders")).items[0]
    await installation.advance(10)
    with refused("invalid storage id; 'x' does not exist", ids=["x"]):
        await queues.queue_extend("orders", [leased.id, "x"])
    assert (await installation.items("orders"))[0].lease_deadline == leased.lease_deadline


async def test_no_ids_are_refused(queues: Queues) -> None:
    with refused("ids is invalid; list of ids cannot be empty"):
        await queues.queue_extend("orders", [])


async def test_a_partition_that_is_not_there_is_refused(queues: Queues) -> None:
    with refused("partition is invalid; '7' is not a valid partition"):
        await queues.queue_extend("orders", ["x"], partition=7)


async def test_a_negative_duration_is_refused(queues: Queues) -> None:
    with refused("lease timeout is invalid; '-1s' cannot be negative"):
        await queues.queue_extend("orders", ["x"], lease_timeout="-1s")
