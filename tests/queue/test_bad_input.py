"""What every verb refuses, and in which order it looks: name, existence, timeout, partition, list, ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from holdfast import ImportedItem, NewItem, Queues, RetryItem
from holdfast.core.requests.queue import ListRequest, StatsRequest
from tests.queue.installation import Installation, refused

Call = Callable[[Queues, str], Awaitable[object]]

#: Every verb that names a queue, each with as little as it takes.
NAMING: dict[str, Call] = {
    "queue.produce": lambda q, name: q.queue_produce(name, [b"a"]),
    "queue.lease": lambda q, name: q.queue_lease(name),
    "queue.complete": lambda q, name: q.queue_complete(name, ["x"]),
    "queue.retry": lambda q, name: q.queue_retry(name, ["x"]),
    "queue.extend": lambda q, name: q.queue_extend(name, ["x"]),
    "queue.stats": lambda q, name: q.queue_stats(name),
    "queue.clear": lambda q, name: q.queue_clear(name, queue=True),
    "queue.pause": lambda q, name: q.queue_pause(name),
    "queue.resume": lambda q, name: q.queue_resume(name),
    "queue.reload": lambda q, name: q.queue_reload(name),
    "queues.update": lambda q, name: q.queues_update(name, max_attempts=1),
    "queues.info": lambda q, name: q.queues_info(name),
    "queues.delete": lambda q, name: q.queues_delete(name),
    "storage/items.list": lambda q, name: q.storage_items_list(name),
    "storage/scheduled.list": lambda q, name: q.storage_scheduled_list(name),
    "storage/items.import": lambda q, name: q.storage_items_import(name, [ImportedItem(payload=b"a")]),
    "storage/items.delete": lambda q, name: q.storage_items_delete(name, ["x"]),
}

#: The same, with everything behind the name wrong too.
WRONG_BEHIND_THE_NAME: dict[str, Call] = {
    "queue.produce": lambda q, name: q.queue_produce(name, [], request_timeout=""),
    "queue.lease": lambda q, name: q.queue_lease(name, batch_size=0, client_id="", request_timeout="1ms"),
    "queue.complete": lambda q, name: q.queue_complete(name, [], partition=9, request_timeout="16m"),
    "queue.retry": lambda q, name: q.queue_retry(name, [], partition=9),
    "queue.extend": lambda q, name: q.queue_extend(name, [], partition=9, lease_timeout="-1s"),
    "queue.clear": lambda q, name: q.queue_clear(name),
    "queues.update": lambda q, name: q.queues_update(name, max_attempts=-1, lease_timeout="x", dead_queue="a b"),
    "storage/items.list": lambda q, name: q.storage_items_list(name, partition=9, limit=-1, pivot="x"),
    "storage/items.import": lambda q, name: q.storage_items_import(name, [], partition=9),
    "storage/items.delete": lambda q, name: q.storage_items_delete(name, [], partition=9),
}

BAD_NAMES = {
    "": "queue name is invalid; queue name cannot be empty",
    "n" * 513: "queue name is invalid; cannot be greater than '512' characters",
    "a b": "queue name is invalid; 'a b' cannot contain whitespace",
    "a~b": "queue name is invalid; 'a~b' cannot contain '~' character",
    "a ~b": "queue name is invalid; 'a ~b' cannot contain whitespace",
    "\x7f": "queue name is invalid; '\\x7f' cannot contain control characters",
}


async def test_every_verb_refuses_a_bad_name_before_anything_else(queues: Queues) -> None:
    for verb, call in (NAMING | WRONG_BEHIND_THE_NAME).items():
        for name, text in BAD_NAMES.items():
            with refused(text):
                await call(queues, name)
            assert verb


async def test_every_verb_refuses_an_unknown_queue_before_what_is_behind_the_name(queues: Queues) -> None:
    for calls in (NAMING, WRONG_BEHIND_THE_NAME):
        for call in calls.values():
            with refused("queue does not exist; no such queue named 'unknown'"):
                await call(queues, "unknown")


TIMED: dict[str, Callable[[Queues, str], Awaitable[object]]] = {
    "queue.produce": lambda q, timeout: q.queue_produce("orders", [], request_timeout=timeout),
    "queue.lease": lambda q, timeout: q.queue_lease("orders", batch_size=0, client_id="", request_timeout=timeout),
    "queue.complete": lambda q, timeout: q.queue_complete("orders", [], partition=9, request_timeout=timeout),
}


REQUIRED = "request timeout is required; '5m' is recommended, 15m is the maximum"
BAD_TIMEOUTS = {
    "": REQUIRED,
    "0s": REQUIRED,
    "0": REQUIRED,
    "16m": "request timeout is invalid; maximum timeout is '15m' but '16m0s' was requested",
    "15m1ms": "request timeout is invalid; maximum timeout is '15m' but '15m0.001s' was requested",
    "1ms": "request timeout is invalid; minimum timeout is '10ms' but '1ms' was requested",
    "9.999ms": "request timeout is invalid; minimum timeout is '10ms' but '9.999ms' was requested",
    "-5s": "request timeout is invalid; '-5s' cannot be negative",
    "foo": 'request timeout is invalid; time: invalid duration "foo" - expected format: 900ms, 5m or 15m',
}


async def test_a_bad_timeout_is_refused_before_what_is_behind_it(queues: Queues) -> None:
    await queues.queues_create("orders")
    for timeout, text in BAD_TIMEOUTS.items():
        for call in TIMED.values():
            with refused(text):
                await call(queues, timeout)


async def test_a_bad_partition_is_refused_before_the_list(queues: Queues) -> None:
    await queues.queues_create("orders")
    for call in (
        queues.queue_complete("orders", [], partition=65234),
        queues.queue_retry("orders", [], partition=65234),
        queues.queue_extend("orders", [], partition=65234),
        queues.storage_items_import("orders", [], partition=65234),
        queues.storage_items_delete("orders", [], partition=65234),
        queues.storage_items_list("orders", partition=65234, limit=-1),
    ):
        with refused("partition is invalid; '65234' is not a valid partition"):
            await call


async def test_an_empty_list_is_refused(queues: Queues) -> None:
    await queues.queues_create("orders")
    for text, call in {
        "items cannot be empty; at least one item is required": queues.queue_produce("orders", []),
        "ids is invalid; list of ids cannot be empty": queues.queue_complete("orders", []),
        "items is invalid; list of items cannot be empty": queues.queue_retry("orders", []),
        "items is invalid; cannot be empty": queues.storage_items_import("orders", []),
        "ids is invalid; cannot be empty": queues.storage_items_delete("orders", []),
    }.items():
        with refused(text):
            await call


async def test_a_bad_list_is_refused_before_its_ids(queues: Queues) -> None:
    await queues.queues_create("orders")
    with refused("ids is invalid; max_complete_batch_size is 1000 but received 1001"):
        await queues.queue_complete("orders", ["x"] * 1001)
    with refused("items is invalid; max_retry_batch_size is 1000 but received 1001"):
        await queues.queue_retry("orders", [RetryItem(id="x", reason="r" * 2001), *["x"] * 1000])


async def test_a_lease_looks_at_the_client_before_the_batch(queues: Queues) -> None:
    await queues.queues_create("orders")
    with refused("invalid client id; cannot be empty"):
        await queues.queue_lease("orders", client_id="", batch_size=0)


@pytest.mark.parametrize("namespace", ["", "_system"])
async def test_a_namespace_may_be_left_out_or_named(queues: Queues, namespace: str) -> None:
    await queues.queues_create("orders")
    await queues._caller.call(StatsRequest(queue_name="orders", namespace=namespace))


@pytest.mark.parametrize(
    ("namespace", "text"),
    [
        ("mine", "namespace is invalid; 'mine' is not known here, leave it out"),
        ("a b", "namespace name is invalid; 'a b' cannot contain whitespace"),
        ("a~b", "namespace name is invalid; 'a~b' cannot contain '~' character"),
        ("a:b", "namespace name is invalid; 'a:b' cannot contain ':' character"),
        ("n" * 257, "namespace name is invalid; cannot be greater than '256' characters"),
    ],
)
async def test_another_namespace_is_refused(queues: Queues, namespace: str, text: str) -> None:
    with refused(text):
        await queues._caller.call(ListRequest(namespace=namespace))


async def test_a_listing_of_queues_cannot_begin_with_what_no_name_has(queues: Queues) -> None:
    with refused("pivot is invalid; 'a~b' cannot contain '~' character"):
        await queues.queues_list(pivot="a~b")


async def test_huge_numbers_are_refused(queues: Queues) -> None:
    await queues.queues_create("orders")
    huge = 2**62
    with refused(f"invalid batch size; max_lease_batch_size is 1000, but {huge} was requested"):
        await queues.queue_lease("orders", batch_size=huge)
    with refused(f"partition is invalid; '{huge}' is not a valid partition"):
        await queues.storage_items_list("orders", partition=huge)
    with refused("limit is invalid; cannot be greater than 65536"):
        await queues.storage_items_list("orders", limit=huge)
    with refused("max attempts is invalid; cannot be greater than 65536"):
        await queues.queues_update("orders", max_attempts=huge)
    with refused("partitions is invalid; cannot be greater than 1000"):
        await queues.queues_update("orders", requested_partitions=huge)


async def test_whatever_was_refused_changed_nothing(installation: Installation, queues: Queues) -> None:
    await queues.queues_create("orders", reference="r")
    await queues.queue_produce("orders", [b"a"])
    before = (await queues.queues_info("orders"), await installation.items("orders"))
    bad: list[Awaitable[object]] = [
        queues.queue_produce("orders", [NewItem(payload=b"b"), NewItem(payload=b"c", kind="\x00")]),
        queues.queue_clear("orders", destructive=True),
        queues.queues_update("orders", reference="new", lease_timeout="48h"),
        queues.queues_delete("orders"),
        queues.storage_items_import("orders", [ImportedItem(payload=b"b"), ImportedItem(payload=b"c", attempts=-1)]),
        queues.queue_complete("orders", [before[1][0].id]),
    ]
    for call in bad:
        with pytest.raises(Exception, match=";"):
            await call
    assert (await queues.queues_info("orders"), await installation.items("orders")) == before
