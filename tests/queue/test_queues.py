"""queues.create, update, list, info: settings, their limits, and the rules about dead queues."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Queues
from holdfast.core.moments import moment
from tests.queue.installation import Installation, refused

LONGEST = "q" * 512


async def test_a_queue_is_shown_as_it_was_created(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create(
        "orders",
        lease_timeout="1m30s",
        expire_timeout="24h0m0s",
        max_attempts=5,
        dead_queue="dead",
        reference="team one",
        requested_partitions=2,
    )
    info = await queues.queues_info("orders")
    assert (info.queue_name, info.lease_timeout, info.expire_timeout) == ("orders", "1m30s", "24h0m0s")
    assert info.namespace == "_system"
    assert (info.max_attempts, info.dead_queue, info.reference) == (5, "dead", "team one")
    assert (info.requested_partitions, len(info.partitions)) == (2, 2)
    assert info.created_at == info.updated_at == moment(installation.clock.now_us())
    assert info.dead_retention == ""


async def test_the_dead_retention_is_a_duration(queues: Queues) -> None:
    await queues.queues_create("dead", dead_retention="168h")
    assert (await queues.queues_info("dead")).dead_retention == "168h0m0s"


async def test_a_name_is_taken_once(queues: Queues) -> None:
    await queues.queues_create("orders", max_attempts=3)
    with refused("invalid queue; 'orders' already exists"):
        await queues.queues_create("orders", max_attempts=4)
    assert (await queues.queues_info("orders")).max_attempts == 3


async def test_a_name_may_be_almost_anything(installation: Installation, queues: Queues) -> None:
    names = ["a", LONGEST, "Grüße", "a/b\\c..", "';DROP_TABLE_queues;--", "🦀", "con.db", "%", "a_b", "A"]
    for name in names:
        await queues.queues_create(name)
        await queues.queue_produce(name, [name])
    for name in names:
        assert await installation.payloads(name) == [name.encode()]
    assert [info.queue_name for info in await queues.queues_list()] == sorted(names)


BAD_NAMES = {
    "": "queue name is invalid; queue name cannot be empty",
    "q" * 513: "queue name is invalid; cannot be greater than '512' characters",
    "a b": "queue name is invalid; 'a b' cannot contain whitespace",
    "a\tb": "queue name is invalid; 'a\tb' cannot contain whitespace",
    "a\u2003b": "queue name is invalid; 'a\u2003b' cannot contain whitespace",
    "a~b": "queue name is invalid; 'a~b' cannot contain '~' character",
    "a ~b": "queue name is invalid; 'a ~b' cannot contain whitespace",
    "a\x00b": "queue name is invalid; 'a\\x00b' cannot contain control characters",
    "a\x1bb": "queue name is invalid; 'a\\x1bb' cannot contain control characters",
}


async def test_a_name_may_not_be(queues: Queues) -> None:
    for name, text in BAD_NAMES.items():
        with refused(text):
            await queues.queues_create(name)
    assert await queues.queues_list() == []


# --- limits ---------------------------------------------------------------------------------------------------


async def test_a_lease_timeout_is_needed(queues: Queues) -> None:
    with refused("lease timeout is invalid; cannot be empty"):
        await queues.queues_create("orders", lease_timeout="")


async def test_an_expire_timeout_is_needed(queues: Queues) -> None:
    with refused("expire timeout is invalid; cannot be empty"):
        await queues.queues_create("orders", expire_timeout="")


async def test_a_lease_may_not_be_longer_than_a_life(queues: Queues) -> None:
    with refused("lease timeout is too long; 1h0m0s cannot be greater than the expire timeout 30m0s"):
        await queues.queues_create("orders", lease_timeout="1h", expire_timeout="30m")
    await queues.queues_create("orders", lease_timeout="30m", expire_timeout="30m")
    with refused("lease timeout is too long; 30m0s cannot be greater than the expire timeout 29m0s"):
        await queues.queues_update("orders", expire_timeout="29m")
    assert (await queues.queues_info("orders")).expire_timeout == "30m0s"


FORMATS = {"lease_timeout": "8m, 15m or 1h", "expire_timeout": "60m, 2h or 24h"}
BAD_DURATIONS = {
    "-1s": "'-1s' cannot be negative",
    "1" * 15 + "s": "cannot be greater than '15' characters",
    "99999999999999h": "'99999999999999h' is more than a hundred years",
}


@pytest.mark.parametrize("field", ["lease_timeout", "expire_timeout", "dead_retention"])
async def test_a_duration_may_not_be(queues: Queues, field: str) -> None:
    await queues.queues_create("orders")
    bad = dict(BAD_DURATIONS)
    as_go = {"1x": 'unknown unit "x" in', "5": "missing unit in", "NaNs": "invalid"}
    for text, said in as_go.items():
        go = f'time: {said} duration "{text}" - expected format: {FORMATS.get(field)}'
        bad[text] = go if field in FORMATS else f"'{text}' is not a duration - expected format: 900ms, 5m or 1h30m"
    for text, detail in bad.items():
        setting: dict[str, Any] = {field: text}
        with refused(f"{field.replace('_', ' ')} is invalid; {detail}"):
            await queues.queues_create("others", **setting)
        with refused(f"{field.replace('_', ' ')} is invalid; {detail}"):
            await queues.queues_update("orders", **setting)


async def test_a_duration_of_15_characters_is_allowed(queues: Queues) -> None:
    await queues.queues_create("orders", expire_timeout="000000000001h1m")
    assert (await queues.queues_info("orders")).expire_timeout == "1h1m0s"


async def test_the_limits_of_max_attempts(queues: Queues) -> None:
    await queues.queues_create("orders", max_attempts=65_536)
    await queues.queues_update("orders", max_attempts=0)
    with refused("max attempts is invalid; cannot be negative number"):
        await queues.queues_create("others", max_attempts=-1)
    with refused("max attempts is invalid; cannot be greater than 65536"):
        await queues.queues_create("others", max_attempts=65_537)
    with refused("max attempts is invalid; cannot be negative number"):
        await queues.queues_update("orders", max_attempts=-1)


async def test_the_limit_of_the_reference(queues: Queues) -> None:
    await queues.queues_create("orders", reference="r" * 2000)
    with refused("reference field is invalid; cannot be greater than '2000' characters"):
        await queues.queues_create("others", reference="r" * 2001)


# --- dead queues ----------------------------------------------------------------------------------------------


async def test_a_dead_queue_has_to_exist(queues: Queues) -> None:
    text = "dead_queue does not exist; 'dead' was not found, create it first"
    with refused(text):
        await queues.queues_create("orders", dead_queue="dead")
    await queues.queues_create("orders")
    with refused(text):
        await queues.queues_update("orders", dead_queue="dead")
    assert (await queues.queues_info("orders")).dead_queue == ""


async def test_a_queue_is_not_its_own_dead_queue(queues: Queues) -> None:
    with refused("dead_queue cannot reference itself"):
        await queues.queues_create("orders", dead_queue="orders")
    await queues.queues_create("orders")
    with refused("dead_queue cannot reference itself"):
        await queues.queues_update("orders", dead_queue="orders")


async def test_a_dead_queue_has_no_dead_queue(queues: Queues) -> None:
    await queues.queues_create("c")
    await queues.queues_create("b", dead_queue="c")
    text = (
        "dead_queue is invalid; 'b' already has its own dead_queue configured, "
        "a dead_queue cannot have its own dead_queue"
    )
    with refused(text):
        await queues.queues_create("a", dead_queue="b")
    await queues.queues_create("a")
    with refused(text):
        await queues.queues_update("a", dead_queue="b")


async def test_a_dead_queue_does_not_get_one_later(queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create("other")
    await queues.queues_create("orders", dead_queue="dead")
    with refused("dead_queue is invalid; 'dead' is the dead_queue of 'orders' and cannot have its own dead_queue"):
        await queues.queues_update("dead", dead_queue="other")
    assert (await queues.queues_info("dead")).dead_queue == ""
    await queues.queues_update("orders", dead_queue="")
    await queues.queues_update("dead", dead_queue="other")


async def test_a_valid_dead_queue_is_accepted(queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create("orders", dead_queue="dead")
    await queues.queues_create("others")
    await queues.queues_update("others", dead_queue="dead")
    assert [info.dead_queue for info in await queues.queues_list()] == ["", "dead", "dead"]


# --- update ---------------------------------------------------------------------------------------------------


async def test_what_an_update_leaves_out_stays(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("dead")
    await queues.queues_create(
        "orders", lease_timeout="2m", expire_timeout="2h", max_attempts=3, dead_queue="dead", reference="r"
    )
    before = await queues.queues_info("orders")
    await installation.advance(5)
    await queues.queues_update("orders", lease_timeout="3m")
    after = await queues.queues_info("orders")
    assert after.lease_timeout == "3m0s"
    assert (after.expire_timeout, after.max_attempts, after.dead_queue, after.reference) == ("2h0m0s", 3, "dead", "r")
    assert after.created_at == before.created_at
    assert after.updated_at == moment(installation.clock.now_us())


async def test_empty_and_zero_are_said_explicitly(queues: Queues) -> None:
    await queues.queues_create("dead", dead_retention="1h")
    await queues.queues_create("orders", max_attempts=3, dead_queue="dead", reference="r")
    await queues.queues_update("orders", max_attempts=0, dead_queue="", reference="")
    info = await queues.queues_info("orders")
    assert (info.max_attempts, info.dead_queue, info.reference) == (0, "", "")
    await queues.queues_update("dead", dead_retention="")
    assert (await queues.queues_info("dead")).dead_retention == ""


async def test_a_timeout_cannot_be_taken_away(queues: Queues) -> None:
    await queues.queues_create("orders")
    with refused("lease timeout is invalid; cannot be empty"):
        await queues.queues_update("orders", lease_timeout="")


async def test_a_refused_update_changes_nothing(queues: Queues) -> None:
    await queues.queues_create("orders", reference="old")
    before = await queues.queues_info("orders")
    with refused("max attempts is invalid; cannot be negative number"):
        await queues.queues_update("orders", reference="new", max_attempts=-1)
    assert await queues.queues_info("orders") == before


async def test_a_queue_that_is_not_there_cannot_be_shown_or_updated(queues: Queues) -> None:
    text = "queue does not exist; no such queue named 'orders'"
    with refused(text):
        await queues.queues_info("orders")
    with refused(text):
        await queues.queues_update("orders", max_attempts=1)


# --- list -----------------------------------------------------------------------------------------------------


async def test_queues_are_listed_by_name_in_code_point_order(queues: Queues) -> None:
    names = ["b", "a", "B", "é", "a.b", "a-b", "🦀", "ｚ", "10", "9"]
    for name in names:
        await queues.queues_create(name)
    assert [info.queue_name for info in await queues.queues_list()] == sorted(names)


async def test_a_page_begins_at_its_pivot(queues: Queues) -> None:
    for name in "abcde":
        await queues.queues_create(name)
    assert [info.queue_name for info in await queues.queues_list(pivot="b", limit=2)] == ["b", "c"]
    assert [info.queue_name for info in await queues.queues_list(pivot="bb")] == ["c", "d", "e"]
    assert await queues.queues_list(pivot="f") == []


async def test_the_limits_of_a_page(queues: Queues) -> None:
    await queues.queues_create("a")
    assert len(await queues.queues_list(limit=65_536)) == 1
    with refused("limit is invalid; cannot be greater than 65536"):
        await queues.queues_list(limit=65_537)
    with refused("limit is invalid; limit cannot be negative"):
        await queues.queues_list(limit=-1)
