"""A letter goes back to the queue that it died in, and to no other: however it came into the dead-letter queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Message, Retry
from holdfast.core.message import Delivery
from holdfast.settings import load_settings
from holdfast.wiring import scheduled_recoveries, vault_of
from tests.recover.dead_letter_queue import summary
from tests.support.amqp import Admin, ResumingConsumer, headers_of, outgoing
from tests.support.command import Ended, Forked
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq


class TwoQueues:
    """A topic exchange that gives each message to `a` and to `b`; both have consumers, `b` one of ours or none."""

    def __init__(self, admin: Admin, folder: Path) -> None:
        self.admin = admin
        self._folder = folder

    async def make(self) -> TwoQueues:
        await self.admin.exchange("events", "topic")
        for queue in ("a", "b"):
            await self.admin.queue(queue)
            await self.admin.bind(queue, "events", "order.#")
            await self.park_by(queue)
        return self

    async def park_by(self, queue: str) -> None:
        """As the seeds lay it out: the dead queue is led to by an exchange of its own."""
        await self.admin.queue(f"{queue}.dlq")
        await self.admin.exchange(f"dlq.{queue}")
        await self.admin.bind(f"{queue}.dlq", f"dlq.{queue}", "parking")

    async def dead_letter(self, queue: str, into: str, **arguments: int | str) -> None:
        """The broker sends what dies in `queue` there."""
        await self.admin.delete(queue)
        back: dict[str, int | str] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": into}
        await self.admin.queue(queue, **back, **arguments)

    async def die(self, queue: str, count: int = 1) -> None:
        """Reject what is in it."""
        async with ResumingConsumer(self.admin.broker_url(), queue, prefetch=count) as consumer:
            for _ in range(count):
                consumer.dead_letter(await consumer.batch(count_max=1, timeout_s=60.0))

    async def recover(self, dead_queue: str, *more: str, is_seen: bool = True) -> Ended:
        url = self.admin.node.management_url if is_seen else "http://127.0.0.1:1"
        given = ("recover", self.admin.url, dead_queue, "--json", "--management", url, *more)
        return await asyncio.to_thread(lambda: Forked(self._folder, "memory://")(*given, stdin=b""))

    async def counts(self, *queues: str) -> list[int]:
        return [await self.admin.count(queue) for queue in queues]

    async def letter(self, queue: str) -> Delivery:
        [one] = await self.admin.look(queue)
        return one

    async def fail_in(self, *queues: str, attempts: int = 2) -> None:
        """A consumer of ours runs on each until what is there is parked."""
        app = holdfast.App(self.admin.url, management=self.admin.node.management_url)
        for queue in queues:

            async def handle(message: Message) -> None:
                raise ValueError(message.queue)

            app.consumer(queue, retry=Retry(attempts=attempts, delay="100ms"))(handle)
        before = await self.counts(*(f"{queue}.dlq" for queue in queues))

        async def are_parked() -> bool:
            return await self.counts(*(f"{queue}.dlq" for queue in queues)) == [count + 1 for count in before]

        async with app.running(declare=True):
            await eventually(are_parked)


@pytest.fixture
async def two(admin: Admin, tmp_path: Path) -> TwoQueues:
    return await TwoQueues(admin, tmp_path).make()


async def test_a_copy_that_died_in_b_goes_back_to_b(admin: Admin, tmp_path: Path) -> None:
    """The first letter of A is sent to the exchange again: the copy that B gets, and rejects, is B's."""
    two = TwoQueues(admin, tmp_path)
    await admin.exchange("events", "topic")
    for queue in ("a", "b"):
        await admin.queue(queue, **{"x-dead-letter-exchange": f"retry.{queue}", "x-dead-letter-routing-key": "retry"})
        await admin.bind(queue, "events", "order.#")
        await two.park_by(queue)
    await admin.publish([outgoing("order.new", exchange="events")])
    await admin.drain("b", 1)
    await two.fail_in("a")
    assert headers_of(await two.letter("a.dlq"))["x-original-for"] == "a.dlq"
    assert summary(await two.recover("a.dlq", "--to-exchange", "--allow-copies"))["recovered"] == 1
    assert "x-original-for" not in headers_of(await two.letter("b"))
    await two.fail_in("b")
    found = headers_of(await two.letter("b.dlq"))
    assert (found["x-original-queue"], found["x-original-for"], found["x-first-original-queue"]) == ("b", "b.dlq", "a")
    assert (found["x-original-exchange"], found["x-original-routing-key"]) == ("events", "order.new")
    told = summary(await two.recover("b.dlq", "--to-source"))
    assert told["by_queue"] == {"b": 1}
    assert await two.counts("a", "b") == [1, 1]


STORY = {"x-original-queue": "a", "x-original-exchange": "events", "x-original-routing-key": "order.new"}
STORIES: list[dict[str, Any]] = [
    STORY,
    {**STORY, "x-parked-at": "2026-01-02T03:04:05+00:00"},
    {"x-original-exchange": "spring"},
]


@pytest.mark.parametrize("way", [(), ("--to-source",)])
@pytest.mark.parametrize("told", STORIES, ids=["foreign", "redriven", "spring"])
async def test_what_stood_in_its_headers_before_is_not_believed(
    two: TwoQueues, told: dict[str, Any], way: Sequence[str]
) -> None:
    await two.dead_letter("b", "b.dlq")
    await two.admin.publish([outgoing("b", headers=told)])
    await two.die("b")
    assert summary(await two.recover("b.dlq", *way))["by_queue"] == {"b": 1}
    found = headers_of(await two.letter("b"))
    assert found["x-original-queue"] == "b"
    assert found["x-first-original-exchange"] == told["x-original-exchange"]


async def test_through_a_wait_queue(two: TwoQueues) -> None:
    """Rejected, waited, rejected again and then parked by a client that keeps the headers: the front entry waits."""
    await two.dead_letter("b.retry", "b", **{"x-message-ttl": 50})
    await two.dead_letter("b", "b.retry")
    await two.admin.publish([outgoing("b", headers=STORY)])
    await two.die("b", 2)
    [back] = await two.admin.drain("b", 1)
    headers = headers_of(back)
    assert headers["x-death"][0]["queue"] == "b.retry"  # type: ignore[index]
    await two.admin.publish([outgoing("parking", exchange="dlq.b", headers=headers)])
    assert summary(await two.recover("b.dlq"))["by_queue"] == {"b": 1}


async def test_two_dead_letter_queues_in_a_row(two: TwoQueues) -> None:
    await two.admin.queue("graves")
    await two.dead_letter("b.dlq", "graves", **{"x-message-ttl": 50})
    await two.dead_letter("b", "b.dlq")
    await two.admin.publish([outgoing("b", message_id="rejected", headers=STORY)])
    await two.die("b")
    await eventually(lambda: two.admin.count("graves"))
    noted = {**STORY, "x-original-queue": "b", "x-original-for": "b.dlq"}
    await two.admin.publish(
        [outgoing("b.dlq", message_id="parked", headers=noted), outgoing("b.dlq", message_id="mute")]
    )

    async def have_come() -> bool:
        return await two.admin.count("graves") == 3

    await eventually(have_come)
    assert summary(await two.recover("graves"))["by_queue"] == {"b": 3}


async def test_a_shared_dead_letter_queue(two: TwoQueues) -> None:
    await two.admin.queue("graves")
    for queue in ("a", "b"):
        await two.dead_letter(queue, "graves")
        await two.admin.publish([outgoing(queue, headers=STORY)])
        await two.die(queue)
        noted = {**STORY, "x-original-queue": queue, "x-original-for": "graves"}
        await two.admin.publish([outgoing("graves", headers=noted)])
    await two.admin.publish([outgoing("graves", b"mute")])
    told = summary(await two.recover("graves"))
    assert (told["by_queue"], told["remaining"]) == ({"a": 2, "b": 2}, 1)
    assert list(told["reasons"]) == ["nothing says in which queue it died, and 2 queues lead here"]
    assert summary(await two.recover("graves", "--source", "b"))["by_queue"] == {"b": 1}


async def test_a_shovelled_dead_letter_queue(two: TwoQueues) -> None:
    """Whoever moved letters here by hand kept their headers: what they were parked for is another queue."""
    died = {"queue": "a", "reason": "rejected", "count": 1, "exchange": "events", "routing-keys": ["order.new"]}
    letters = [{"x-death": [died]}, {**STORY, "x-original-for": "a.dlq"}]
    await two.admin.publish([outgoing("b.dlq", headers=told) for told in letters])
    told = summary(await two.recover("b.dlq"))
    assert (told["by_queue"], told["remaining"]) == ({"a": 1}, 1)
    assert list(told["reasons"]) == ["it was parked into 'a.dlq', and nothing says how it came here"]
    assert summary(await two.recover("b.dlq", "--source", "a"))["by_queue"] == {"a": 1}


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_letter_without_any_story_goes_to_the_queue_whose_consumer_parks_here(
    two: TwoQueues, is_seen: bool
) -> None:
    await two.admin.publish([outgoing("b.dlq")])
    assert summary(await two.recover("b.dlq", is_seen=is_seen))["by_queue"] == {"b": 1}


@pytest.mark.parametrize("is_seen", [True, False])
async def test_the_name_of_a_dead_letter_queue_alone_is_not_enough(two: TwoQueues, is_seen: bool) -> None:
    await two.admin.queue("c")
    await two.admin.queue("c.dlq")
    await two.admin.publish([outgoing("c.dlq", b"mute")])
    told = summary(await two.recover("c.dlq", is_seen=is_seen))
    assert (told["recovered"], told["remaining"]) == (0, 1)
    assert list(told["reasons"]) == ["nothing says in which queue it died"]


async def test_letters_that_an_older_program_parked(two: TwoQueues) -> None:
    """It wrote no x-original-for, and what stood there first stayed."""
    parked = {"x-parked-at": "2026-01-02T03:04:05+00:00", "x-parked-reason": "attempts", "x-retry-count": 2}
    own = {**parked, **STORY, "x-original-queue": "b"}
    await two.admin.publish([outgoing("b.dlq", headers={**parked, **STORY}), outgoing("b.dlq", headers=own)])
    assert summary(await two.recover("b.dlq"))["by_queue"] == {"b": 2}


async def test_a_put_back_changes_none_of_it(every_admin: Admin, tmp_path: Path) -> None:
    """A letter near the delivery limit goes back into its queue by a publish: on 4.x the broker's notes are then only
    headers, on 3.10 it counts on in them."""
    admin = every_admin
    two = TwoQueues(admin, tmp_path)
    for queue in ("a", "b"):
        await admin.queue(queue)
    await admin.quorum_queue("b.dlq", **{"x-delivery-limit": 1})
    await two.dead_letter("b", "b.dlq")
    noted = {**STORY, "x-original-queue": "b", "x-original-for": "b.dlq"}
    await admin.publish([outgoing("b", headers=STORY), outgoing("b.dlq", headers=noted)])
    await two.die("b")
    dry = summary(await two.recover("b.dlq", "--dry-run"))
    assert (dry["put_back"], dry["planned"]) == (2, {"(no type)": {"b": 2}})
    assert summary(await two.recover("b.dlq"))["by_queue"] == {"b": 2}


async def test_copies_are_made_only_where_somebody_wants_them(two: TwoQueues) -> None:
    """Without a route table a letter goes to its queue; that its headers lead to several has to be said."""
    noted = {**STORY, "x-original-for": "a.dlq"}
    await two.admin.publish([outgoing("a.dlq", headers=noted)])
    dry = summary(await two.recover("a.dlq", "--dry-run"))
    assert (dry["planned"], dry["copies"]) == ({"(no type)": {"a": 1}}, {})
    kept = summary(await two.recover("a.dlq", "--to-exchange"))
    why = "exchange 'events' with key 'order.new' gives a copy to each of a, b"
    assert (kept["recovered"], kept["skipped"], kept["remaining"]) == (0, 1, 1)
    assert [reason.partition(";")[0] for reason in kept["reasons"]] == [why]
    copies = {"exchange 'events' with key 'order.new'": ["a", "b"]}
    dry = summary(await two.recover("a.dlq", "--to-exchange", "--allow-copies", "--dry-run"))
    assert dry["copies"] == copies
    told = summary(await two.recover("a.dlq", "--to-exchange", "--allow-copies"))
    assert (told["recovered"], told["copies"]) == (1, copies)
    assert await two.counts("a", "b") == [1, 1]


@pytest.mark.parametrize("is_table", [True, False])
async def test_a_route_that_somebody_wrote_is_named_and_not_stopped(
    two: TwoQueues, tmp_path: Path, is_table: bool
) -> None:
    routes = tmp_path / "routes.toml"
    routes.write_text("exchange = 'events'\n[routes]\norder = 'order.new'\n")
    way = ["--routes", str(routes)] if is_table else ["--to", "exchange=events,key=order.new"]
    await two.admin.publish([outgoing("a.dlq", type="order")])
    ended = await two.recover("a.dlq", *way)
    told = summary(ended)
    assert (told["recovered"], told["copies"]) == (1, {"exchange 'events' with key 'order.new'": ["a", "b"]})
    assert "copies to 2 queues: a, b" in ended.stderr
    untyped = {**STORY, "x-original-for": "a.dlq"}
    await two.admin.publish([outgoing("a.dlq", headers=untyped)])
    assert summary(await two.recover("a.dlq", "--routes", str(routes)))["remaining"] == 1


@pytest.mark.parametrize(("more", "recovered"), [("", 0), ("allow_copies = true", 1)])
async def test_a_schedule_says_so_as_well(
    two: TwoQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, recovered: int
) -> None:
    await two.admin.publish([outgoing("a.dlq", headers={**STORY, "x-original-for": "a.dlq"})])
    monkeypatch.chdir(tmp_path)
    Path("holdfast.toml").write_text(
        f'management = "{two.admin.node.management_url}"\n[recover."a.dlq"]\nto = "exchange"\non_start = true\n{more}\n'
    )
    settings = load_settings({}, environment={}, serving=False)
    schedule = scheduled_recoveries(settings, queues=lambda: None, broker=two.admin.url, vault=vault_of(settings))
    [found] = schedule._kept
    told = await schedule.run_once(found)
    assert told is not None
    assert (told.recovered, told.skipped) == (recovered, 1 - recovered)


async def test_the_type_of_the_message_counts_where_no_header_tells_it(two: TwoQueues, tmp_path: Path) -> None:
    routes = tmp_path / "routes.toml"
    routes.write_text("[routes]\norder = 'a'\ninvoice = 'b'\n")
    kinds = ["order", "invoice", "order", "strange", "invoice"]
    await two.admin.queue("graves.dlq")
    await two.admin.publish([outgoing("graves.dlq", type=kind) for kind in kinds])
    dry = summary(await two.recover("graves.dlq", "--dry-run", "--where", "type!=strange", "--to", "a"))
    assert dry["planned"] == {"order": {"a": 2}, "invoice": {"a": 2}}
    told = summary(await two.recover("graves.dlq", "--routes", str(routes)))
    assert (told["by_queue"], told["remaining"]) == ({"a": 2, "b": 2}, 1)
    assert list(told["reasons"]) == ["type 'strange' is not in the route table"]
