"""`holdfast recover` on an embedded dead queue: every item ends in exactly one place, whatever is killed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.item import Item, RetryItem
from holdfast.core.recovery import RecoveryOrder, RunLimits, StoppedBy, Summary
from holdfast.core.requests.queue import ImportedItem
from holdfast.errors import Invalid, QueueMissing, StorageFailed
from holdfast.ports.queue_store import Arrive
from holdfast.services.queue.logical_queue import LogicalQueue
from holdfast.services.queue.queues import Queues
from holdfast.services.recover.embedded import EmbeddedRecovery
from holdfast.wiring import SystemClock
from tests.faults.serving import TOKEN, Serving
from tests.support.command import Command, Inside
from tests.support.eventually import eventually

QUICK = RunLimits(stop_timeout_s=5.0, stall_timeout_s=2.0)
POINTS = ("queue.before_reply", "dead.after_mark", "dead.after_arrive", "dead.after_remove", "dead.after_forget")


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return f"sqlite:///{tmp_path}/work" if request.param == "sqlite" else "memory://"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Queues]:
    """Two queues with one dead queue; empty."""
    async with holdfast.open(url) as queues:
        for info in sorted(await queues.queues_list(), key=lambda info: not info.dead_queue):
            await queues.queues_delete(info.queue_name, force=True)
        await queues.queues_create("dead")
        await queues.queues_create("orders", dead_queue="dead", max_attempts=2)
        await queues.queues_create("bills", dead_queue="dead", max_attempts=2)
        yield queues


async def kill(queues: Queues, queue: str, *payloads: bytes, reason: str = "why") -> None:
    """Produce and park."""
    await queues.queue_produce(queue, list(payloads))
    leased = await queues.queue_lease(queue, batch_size=len(payloads))
    retried = [RetryItem(id=item.id, dead=True, reason=reason) for item in leased.items]
    await queues.queue_retry(queue, retried, partition=leased.partition)
    await eventually(lambda: settled(queues, queue))


async def settled(queues: Queues, queue: str) -> bool:
    stats = await queues.queue_stats(queue)
    return not any(one.dying for one in stats.logical_queues[0].partitions)


async def items(queues: Queues, queue: str) -> list[Item]:
    return await queues.storage_items_list(queue)


async def bodies(queues: Queues, queue: str) -> list[bytes]:
    return [item.payload for item in await items(queues, queue)]


async def recover(queues: Queues, **options: Any) -> Summary:
    order = RecoveryOrder(dead_queue="dead", run="r", **{"limits": QUICK, **options})
    return await EmbeddedRecovery(queues, order, clock=SystemClock()).run()


async def test_each_goes_back_to_its_queue_and_begins_anew(url: str) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", b"a", b"b")
        await kill(queues, "bills", b"c")
        dead = await items(queues, "dead")
        summary = await recover(queues)
        assert (summary.found, summary.recovered, summary.remaining, summary.stopped_by) == (3, 3, 0, "all_taken")
        assert summary.by_queue == {"orders": 2, "bills": 1}
        assert summary.is_complete
        assert await bodies(queues, "dead") == []
        assert await bodies(queues, "orders") == [b"a", b"b"]
        (bill,) = await items(queues, "bills")
        assert (bill.payload, bill.attempts, bill.source_id) == (b"c", 0, dead[2].id)
        assert (bill.source_queue, bill.death_reason, bill.death_attempts, bill.died_at) == ("", "", 0, None)
        leased = await queues.queue_lease("bills")
        assert leased.items[0].attempts == 1
        await queues.queue_retry("bills", [RetryItem(id=leased.items[0].id, dead=True, reason="again")])
        await eventually(lambda: settled(queues, "bills"))
        (letter,) = await items(queues, "dead")
        assert (letter.source_queue, letter.source_id, letter.death_reason) == ("bills", leased.items[0].id, "again")


async def test_what_cannot_go_is_kept_with_its_reason(url: str) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", b"leased")
        await queues.queue_lease("dead")
        story = ImportedItem(payload=b"gone", source_queue="gone", source_id="g")
        circle = ImportedItem(payload=b"circle", source_queue="dead", source_id="c")
        await queues.storage_items_import("dead", [ImportedItem(payload=b"nobody's"), story, circle])
        await kill(queues, "orders", b"good")
        summary = await recover(queues)
        assert (summary.recovered, summary.failed, summary.skipped, summary.remaining) == (1, 2, 2, 4)
        assert summary.failed_by_queue == {"gone": 1, "dead": 1}
        assert {text: reason.count for text, reason in summary.reasons.items()} == {
            "leased by somebody, left alone": 1,
            "nothing says in which queue it died": 1,
            "queue does not exist; no such queue named 'gone'": 1,
            "its source queue is 'dead' itself": 1,
        }
        assert not summary.is_complete
        assert await bodies(queues, "dead") == [b"leased", b"nobody's", b"gone", b"circle"]
        assert await bodies(queues, "orders") == [b"good"]
        with pytest.raises(Invalid, match="into itself"):
            await queues.queue_redrive("dead", ["x"], source_queue="dead")


async def test_a_limit_a_filter_and_a_dry_run(url: str) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", b"one", b"two", b"three")
        planned = await recover(queues, dry_run=True)
        assert planned.planned == {"(no type)": {"orders": 3}}
        assert (planned.recovered, planned.remaining, planned.is_complete) == (0, 3, True)
        chosen = await recover(queues, where=("body~two",))
        assert (chosen.recovered, chosen.filtered) == (1, 2)
        none = await recover(queues, where=("reason=other",))
        assert (none.recovered, none.filtered) == (0, 2)
        one = await recover(queues, limits=RunLimits(limit=1, rate_per_s=1000.0))
        assert (one.recovered, one.remaining) == (1, 1)
        assert await bodies(queues, "orders") == [b"two", b"one"]


async def test_a_reason_fits_by_what_stands_before_its_details(url: str) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", b"one", reason="permanent; holdfast.core.policy.Permanent: no such order")
        await kill(queues, "orders", b"two", reason="attempts; ValueError: permanent")
        others = await recover(queues, where=("reason!=permanent",), dry_run=True)
        assert (others.planned, others.filtered) == ({"(no type)": {"orders": 1}}, 1)
        summary = await recover(queues, where=("reason=permanent",))
        assert (summary.recovered, summary.filtered) == (1, 1)
        assert summary.reasons["left out by --where"].count == 1
        assert await bodies(queues, "dead") == [b"two"]


async def test_a_limit_counts_what_fits(url: str) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", *(b"no %d" % number for number in range(150)))
        await kill(queues, "orders", *(b"yes %d" % number for number in range(5)))
        await kill(queues, "orders", b"last")
        few = await recover(queues, where=("body~yes",), limits=RunLimits(limit=2))
        assert (few.recovered, few.filtered, few.unseen, few.remaining) == (2, 150, 4, 154)
        assert few.stopped_by == StoppedBy.ALL_TAKEN
        rest = await recover(queues, where=("body~yes",), limits=RunLimits(limit=9))
        assert (rest.recovered, rest.filtered, rest.unseen, rest.remaining) == (3, 151, 0, 151)


async def test_what_dies_again_is_not_chased(url: str) -> None:
    async with opened(url) as queues:
        await queues.queues_update("orders", max_attempts=1)
        await kill(queues, "orders", *(b"%d" % number for number in range(40)))
        is_done = False

        async def fail_always() -> None:
            while not is_done:
                try:
                    leased = await queues.queue_lease("orders", batch_size=10, request_timeout="50ms")
                except holdfast.HoldfastError:
                    continue
                retried = [RetryItem(id=item.id, dead=True) for item in leased.items]
                await queues.queue_retry("orders", retried)

        failing = asyncio.create_task(fail_always())
        summary = await recover(queues, limits=RunLimits(window_count_max=3, stop_timeout_s=5.0))
        is_done = True
        await failing
        assert summary.recovered == 40
        assert summary.stopped_by == StoppedBy.ALL_TAKEN
        places = Counter(await bodies(queues, "dead")) + Counter(await bodies(queues, "orders"))
        assert places == Counter(b"%d" % number for number in range(40))


@pytest.mark.postgres
async def test_two_at_once_on_one_database_share_the_work(postgres_url: str) -> None:
    count = 300
    async with opened(postgres_url) as queues:
        await kill(queues, "orders", *(b"%d" % number for number in range(count)))
        async with holdfast.open(postgres_url) as others:
            both = await asyncio.gather(recover(queues), recover(others))
        assert sum(summary.recovered for summary in both) == count
        assert sum(summary.failed for summary in both) == 0
        assert await bodies(queues, "dead") == []
        assert Counter(await bodies(queues, "orders")) == Counter(b"%d" % number for number in range(count))


async def test_a_queue_that_is_deleted_on_the_way_gives_the_item_back_with_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(f"sqlite:///{tmp_path}/work") as queues:
        await kill(queues, "orders", b"a")
        (before,) = await items(queues, "dead")
        operate = LogicalQueue.operate
        fails = True

        async def fail_arrivals(queue: LogicalQueue, operation: Any, **options: Any) -> Any:
            if fails and isinstance(operation, Arrive):
                raise StorageFailed("storage failed; by a test")
            return await operate(queue, operation, **options)

        monkeypatch.setattr(LogicalQueue, "operate", fail_arrivals)
        summary = await recover(queues, limits=RunLimits(stop_timeout_s=0.2))
        assert (summary.recovered, summary.remaining) == (0, 1)
        assert "on their way" in summary.notes[0]
        await queues.queues_delete("orders", force=True)
        fails = False

        await eventually(lambda: items(queues, "dead"))
        (after,) = await items(queues, "dead")
        assert after.id != before.id
        assert (after.source_id, after.source_queue) == (before.source_id, "orders")
        assert (after.death_reason, after.died_at) == ("why", before.died_at)


async def test_a_storage_that_fails_is_waited_for_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("memory://") as queues:
        await kill(queues, "orders", b"a")

        async def fail(*given: Any, **options: Any) -> Any:
            raise StorageFailed("storage failed; by a test")

        monkeypatch.setattr(queues, "queue_redrive", fail)
        summary = await recover(queues, limits=RunLimits(stall_timeout_s=0.3))
        assert (summary.stopped_by, summary.recovered, summary.unknown) == ("stall", 0, 1)
        assert summary.remaining == 1
        assert await bodies(queues, "dead") == [b"a"]


async def test_there_is_no_such_dead_queue(url: str) -> None:
    async with opened(url) as queues:
        await queues.queues_update("orders", dead_queue="")
        await queues.queues_update("bills", dead_queue="")
        await queues.queues_delete("dead")
        with pytest.raises(QueueMissing):
            await recover(queues)


# --- the command --------------------------------------------------------------------------------------------------


def document(stdout: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return found


async def filled(url: str, count: int) -> None:
    async with opened(url) as queues:
        await kill(queues, "orders", *(b"%d" % number for number in range(count)))


def test_the_command_its_exit_codes_and_its_report(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(filled(url, 5))
    command = Inside(tmp_path, "memory://")
    some = command("recover", url, "dead", "--json", "--limit", "2", "--report", tmp_path / "report.json")
    assert some.code == 3
    assert document(some.stdout)["recovered"] == 2
    assert json.loads((tmp_path / "report.json").read_text())["remaining"] == 3
    every = command("recover", url, "dead")
    assert every.code == 0, every
    assert "Total Recovered: 3 messages" in every.text
    assert "   orders: 3" in every.text
    assert command("recover", url, "nowhere", "--json").code == 1
    assert command("recover", url, "dead", "--to", "orders").code == 2
    assert command("recover", "ftp://x", "dead").code == 2


def test_what_is_for_a_broker_is_refused_by_its_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(filled(url, 2))
    command = Inside(tmp_path, "memory://")
    refused = command("recover", url, "dead", "--to", "orders", "--strict")
    assert refused.code == 2
    assert "error: --to and --strict are for a broker (amqp://…); " in refused.stderr
    one = command("recover", url, "dead", "--no-journal")
    assert "error: --no-journal is for a broker (amqp://…); " in one.stderr
    filtered = command("recover", url, "dead", "--where", "header.x=1")
    assert filtered.code == 2
    assert "--where is invalid; 'header.x=1': an item has no headers, use type, reason, queue, age" in filtered.stderr
    assert command("recover", url, "dead", "--where", "type!=a").code == 0


def test_a_dry_run_says_what_there_is_to_say(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(filled(url, 3))
    command = Inside(tmp_path, "memory://")
    some = command("recover", url, "dead", "--dry-run").text
    assert "Would be recovered:\n   (no type) -> orders: 3\n" in some
    assert "returns" not in some
    none = command("recover", url, "dead", "--dry-run", "--where", "type=a").text
    assert "Would be recovered: nothing\n" in none


def test_the_advice_is_for_this_command(tmp_path: Path) -> None:
    """It takes its place from an argument, and a token from the environment alone."""
    url = f"sqlite:///{tmp_path}/work"
    asyncio.run(filled(url, 1))
    command = Inside(tmp_path, "memory://")
    gone = command("recover", "http://127.0.0.1:1", "dead")
    assert gone.code == 1
    assert gone.stderr.endswith("; start it with 'holdfast serve', or give another URL\n")
    as_json = command("recover", "http://127.0.0.1:1", "dead", "--json")
    assert json.loads(as_json.stderr.splitlines()[-1])["code"] == 454

    async def in_use() -> str:
        async with holdfast.open(url):
            return (await asyncio.to_thread(Command(tmp_path, "memory://"), "recover", url, "dead")).stderr

    assert "give its address instead: holdfast recover http://" in asyncio.run(in_use())


async def test_a_server_is_asked_to_do_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work"
    await filled(url, 5)
    async with Serving(url, tmp_path) as server, server.client() as client:
        await server.start()
        done = await asyncio.to_thread(
            Command(tmp_path, "memory://"), "recover", server.address, "dead", "--json", HOLDFAST_TOKEN=TOKEN
        )
        assert done.code == 0, done
        assert document(done.stdout)["by_queue"] == {"orders": 5}
        assert len(await client.storage_items_list("orders")) == 5


async def crash_and_count(url: str, folder: Path, point: str, passes: int) -> None:
    """Kill it there, consume what is in the source queue meanwhile, run it again, count."""
    count = 30
    await filled(url, count)
    arguments = ("recover", url, "dead", "--rate", "100", "--json")  # ten at a time
    command = Command(folder, "memory://")
    killed = await asyncio.to_thread(command, *arguments, HOLDFAST_CRASH_AT=f"{point}:{passes}")
    assert killed.code == -9, killed
    seen: Counter[bytes] = Counter()
    async with holdfast.open(url) as queues:
        await eventually(lambda: settled(queues, "dead"))
        for item in await items(queues, "orders"):
            seen[item.payload] += 1
        if seen:  # a copy that is done must not come again
            leased = await queues.queue_lease("orders", batch_size=sum(seen.values()))
            await queues.queue_complete("orders", [item.id for item in leased.items])
        assert (await recover(queues)).is_complete
        assert await items(queues, "dead") == []
        for item in await items(queues, "orders"):
            seen[item.payload] += 1
    assert seen == Counter(b"%d" % number for number in range(count))


@pytest.mark.parametrize(("point", "passes"), [(point, 2) for point in POINTS] + [(POINTS[1], 1), (POINTS[2], 1)])
async def test_a_kill_on_sqlite_leaves_each_in_one_place(point: str, passes: int, tmp_path: Path) -> None:
    await crash_and_count(f"sqlite:///{tmp_path}/work", tmp_path, point, passes)


@pytest.mark.postgres
@pytest.mark.parametrize("point", ["queue.before_reply", "postgres.before_commit"])
async def test_a_kill_on_postgresql_leaves_each_in_one_place(point: str, postgres_url: str, tmp_path: Path) -> None:
    await crash_and_count(postgres_url, tmp_path, point, 2)
