"""How the real server stops, and what a second one on the same folder is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.core.item import NewItem
from holdfast.errors import ShuttingDown, Unreachable
from tests.faults.load import NOTHING_SENT, WORK, Load, create_queues
from tests.faults.serving import Serving
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow


async def test_sigterm_answers_who_waits_finishes_commits_and_ends_with_0(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as client:
        child = await server.start()
        await create_queues(client)
        waiting = asyncio.create_task(client.queue_lease(WORK, request_timeout="5m"))

        async def is_waiting() -> bool:
            return (await client.queue_stats(WORK)).logical_queues[0].lease_waiting == 1

        await eventually(is_waiting)
        code = await child.terminate()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], ShuttingDown)
        assert code == 0, child.stderr.tail


async def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as client:
        child = await server.start()
        await create_queues(client)
        load = Load([client])
        async with load.working():
            await load.answers(51)
            assert await child.terminate() == 0, child.stderr.tail
        await server.start()
        (await load.drain(client)).check()


async def test_a_second_process_on_the_folder_is_told_who_has_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with Serving(url, tmp_path) as first, Serving(url, tmp_path) as second, first.client() as client:
        child = await first.start()
        await create_queues(client)
        other = await second.launch()
        assert await other.wait() not in {0, -9}
        assert f"is locked by process {child.pid}" in other.stderr.tail + other.stdout.tail
        await client.queue_produce(WORK, [NewItem(payload=b"still served")])


async def test_a_connection_that_is_refused_is_said_to_have_sent_nothing(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as client:
        with pytest.raises(Unreachable, match=NOTHING_SENT):  # the books of the load rely on it
            await client.queue_produce(WORK, [b"x"])
