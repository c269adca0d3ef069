"""queues.depths: queues page by page, with how many items each has; and lists for who is held to some queues."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.core.requests import queue as requests
from holdfast.core.requests.declare import Caller, Role
from tests.queue.installation import Installation, refused

HELD = Caller(name="held", role=Role.VIEWER, queues=("b*",))


async def filled(installation: Installation) -> None:
    """Five queues with different depths; `b.dlq` is the dead queue of `b`, which is paused."""
    await installation.queues.queues_create("b.dlq")
    await installation.queues.queues_create("b", dead_queue="b.dlq", requested_partitions=2)
    for name, count in (("a", 2), ("b", 5), ("c", 0), ("d", 2)):
        if name != "b":
            await installation.queues.queues_create(name)
        for number in range(count):
            await installation.queues.queue_produce(name, [f"{number}".encode()])
    await installation.queues.queue_lease("a")
    await installation.queues.queue_pause("b")


async def pages(installation: Installation, asked: requests.DepthsRequest) -> list[list[str]]:
    found = []
    while True:
        reply = await installation.service.call(asked)
        found.append([one.queue_name for one in reply.queues])
        if not reply.next:
            return found
        asked = replace(asked, cursor=reply.next)


async def test_a_queue_is_shown_with_what_is_in_it(installation: Installation) -> None:
    await filled(installation)
    found = {one.queue_name: one for one in (await installation.service.call(requests.DepthsRequest())).queues}
    read = await installation.service.call(requests.DepthsRequest(exact=True))
    assert {one.queue_name: one for one in read.queues} == found
    a, b, dead = found["a"], found["b"], found["b.dlq"]
    assert (a.queued, a.leased, a.scheduled, a.dying, a.is_healthy) == (1, 1, 0, 0, True)
    assert (b.queued, b.partitions, b.paused, b.dead_queue) == (5, 2, True, "b.dlq")
    assert (dead.is_dead_queue, b.is_dead_queue) == (True, False)


async def test_queues_come_in_order_a_page_at_a_time(installation: Installation) -> None:
    await filled(installation)
    by_name = requests.DepthsRequest(limit=2)
    assert await pages(installation, by_name) == [["a", "b"], ["b.dlq", "c"], ["d"]]
    by_depth = requests.DepthsRequest(limit=2, sort="depth")
    assert await pages(installation, by_depth) == [["b", "a"], ["d", "b.dlq"], ["c"]]
    assert (await installation.service.call(by_name)).count == 5


async def test_queues_are_found_by_a_part_of_their_name_and_by_what_they_are(installation: Installation) -> None:
    await filled(installation)

    async def found(**more: object) -> list[str]:
        return [name for page in await pages(installation, requests.DepthsRequest(**more)) for name in page]  # type: ignore[arg-type]

    assert await found(search="DLQ") == ["b.dlq"]
    assert await found(paused=True) == ["b"]
    assert await found(queue_name="b") == ["b"]
    assert await found(queue_name="nothing") == []
    assert await found(dead_queue_for="~") == ["a", "b.dlq", "c", "d"], "not one that has a dead queue"
    assert await found(dead_queue_for="a") == ["b.dlq", "c", "d"], "nor the queue itself"
    assert await found(dead_queue_for="b.dlq") == [], "a dead queue has none"


async def test_a_cursor_that_was_never_given_out_is_refused(installation: Installation) -> None:
    for cursor in ("x", "1", "-1~a", "1" * 30 + "~a"):
        with refused("cursor is invalid; begin without one"):
            await installation.service.call(requests.DepthsRequest(cursor=cursor))


async def test_who_is_held_to_some_queues_sees_these_alone(installation: Installation) -> None:
    await filled(installation)
    depths = await installation.service.call(requests.DepthsRequest(sort="depth"), HELD)
    assert ([one.queue_name for one in depths.queues], depths.count) == (["b", "b.dlq"], 2)
    assert (await installation.service.call(requests.DepthsRequest(queue_name="a"), HELD)).queues == []
    for asked, names in (
        (requests.ListRequest(), ["b", "b.dlq"]),
        (requests.ListRequest(limit=1), ["b"]),
        (requests.ListRequest(pivot="b."), ["b.dlq"]),
        (requests.ListRequest(pivot="c"), []),
    ):
        assert [one.queue_name for one in (await installation.service.call(asked, HELD)).items] == names
