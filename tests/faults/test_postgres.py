"""PostgreSQL that goes away and comes back, connections that are cut, and two servers on one database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import holdfast
from holdfast.core.item import NewItem
from holdfast.errors import Invalid, TryAgain
from holdfast.proof.proxy import Proxy
from tests.faults.load import DEAD, WORK, Load, create_queues
from tests.faults.serving import Serving
from tests.support.eventually import eventually
from tests.support.postgres import Cluster

pytestmark = pytest.mark.postgres
ANSWERS = 60
DELETED = "select sum(count) from holdfast.ledger where action = 'queue_deleted' and queue_name = 'race'"


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_postgresql_goes_away_and_comes_back(own_cluster: Cluster, end: str, tmp_path: Path) -> None:
    url = own_cluster.create_database("gone")
    async with Serving(url, tmp_path) as server, server.client() as client:
        await server.start()
        await create_queues(client)
        load = Load([client])
        async with load.working():
            await load.answers(ANSWERS)
            await asyncio.to_thread(getattr(own_cluster, end))

            async def is_refused() -> bool:
                try:
                    await client.queue_produce(WORK, [NewItem(payload=b"refused")], request_timeout="2s")
                except TryAgain as error:
                    return error.code == 454
                raise LookupError("still served")

            await eventually(is_refused)
            await asyncio.to_thread(own_cluster.start)
            await load.answers(ANSWERS)
        assert server.child.returncode is None, server.child.stderr.tail
        load.books.put_in_doubt("refused", b"refused")
        (await load.drain(client)).check()


async def test_a_start_without_postgresql_is_a_clear_end(own_cluster: Cluster, tmp_path: Path) -> None:
    url = own_cluster.create_database("absent")
    own_cluster.stop()
    async with Serving(url, tmp_path) as server:
        child = await server.launch()
        assert await child.wait(timeout_s=60) not in {0, -9}
        assert "database" in child.stderr.tail.lower()
        assert "Traceback" not in child.stderr.tail


async def test_connections_that_are_cut_lose_nothing(postgres: Cluster, postgres_url: str, tmp_path: Path) -> None:
    database = postgres_url.rpartition("/")[2]
    async with Proxy("127.0.0.1", postgres.port) as proxy:
        url = postgres.url(database, port=proxy.port)
        async with Serving(url, tmp_path) as server, server.client() as client:
            await server.start()
            await create_queues(client)
            load = Load([client], name="cut")
            async with load.working():
                for round_number in range(6):
                    await load.answers(20)
                    if round_number % 2:
                        await proxy.cut()
                    else:
                        # The answer of a commit is what gets lost.
                        trip = proxy.cut_when("down", lambda recent: b"COMMIT" in recent or len(recent) > 200)
                        await asyncio.wait_for(trip.fired.wait(), 60.0)
            (await load.drain(client)).check()
            for name in (WORK, DEAD):
                await client.queues_delete(name)


async def test_two_servers_with_clocks_30_s_apart_never_lease_an_item_twice(postgres_url: str, tmp_path: Path) -> None:
    late = {"HOLDFAST_CLOCK_OFFSET_S": "-30"}
    async with (
        Serving(postgres_url, tmp_path) as one,
        Serving(postgres_url, tmp_path, env=late) as two,
        one.client() as first,
        two.client() as second,
    ):
        await asyncio.gather(one.start(), two.start())
        await create_queues(first, partitions=2)
        await eventually(lambda: knows(second, WORK))
        load = Load([first, second], name="two")
        async with load.working(producers=4, consumers=8):
            await load.answers(601)
        (await load.drain(second)).check()
        await eventually(lambda: knows(first, WORK))
        for name in (WORK, DEAD):
            await first.queues_delete(name, force=True)


async def knows(client: holdfast.Client, name: str) -> bool:
    try:
        await client.queues_info(name)
    except Invalid:
        return False
    return True


async def test_a_produce_that_races_delete_and_create_is_answered_only_for_what_is_there(
    postgres_url: str, tmp_path: Path
) -> None:
    """One server deletes the queue and makes it anew, the other takes items in: each answered item was deleted with a
    queue that was there after the answer, or is in the last one."""
    async with (
        Serving(postgres_url, tmp_path) as one,
        Serving(postgres_url, tmp_path) as two,
        one.client() as first,
        two.client() as second,
    ):
        await asyncio.gather(one.start(), two.start())
        await first.queues_create("race")
        await eventually(lambda: knows(second, "race"))
        answered: list[str] = []
        stopping = asyncio.Event()

        async def keep_producing() -> None:
            while not stopping.is_set():
                try:
                    reply = await second.queue_produce("race", [b"x"], request_timeout="5s")
                except Invalid:
                    continue  # it was gone: nothing is stored
                answered.extend(item.id for item in reply.items)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(keep_producing())
            for _ in range(8):
                await grown(answered)
                await first.queues_delete("race", force=True)
                await first.queues_create("race")
            await grown(answered)
            stopping.set()
        there = {item.id for item in await first.storage_items_list("race", limit=65_536)}
        newest = max(generation(item_id) for item_id in answered)
        last = {item_id for item_id in answered if generation(item_id) == newest}
        assert there == last, "answered in the last queue, and there: the same items"
        with psycopg.connect(postgres_url) as database:
            (deleted,) = database.execute(DELETED).fetchone() or (0,)
        assert deleted == len(answered) - len(last), "every other answered item was deleted with its queue"


async def grown(answered: list[str]) -> None:
    """Wait for a few more answers."""
    wanted = len(answered) + 5
    await eventually(lambda: len(answered) >= wanted)


def generation(item_id: str) -> int:
    return int(item_id.split("-")[1], 16)
