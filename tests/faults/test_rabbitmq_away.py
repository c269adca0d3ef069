"""A server whose RabbitMQ is not there when it starts: it serves what it can, says what waits, and goes on later."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.item import NewItem
from holdfast.proof.proxy import Proxy
from tests.faults.load import WORK, create_queues
from tests.faults.serving import Serving
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.support.rabbitmq import Node, vhost_name
from tests.vault.letters import DLQ, MAIN, dead

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]


@pytest.fixture
async def admin(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Admin]:
    async with Admin.open(node, vhost_name(request.node.name)) as made:
        await made.queue(DLQ)
        await made.queue(MAIN)
        yield made


@pytest.fixture
async def proxy(admin: Admin) -> AsyncIterator[Proxy]:
    """The way to the broker, which refuses."""
    async with Proxy("127.0.0.1", admin.node.port) as made:
        await made.refuse()
        yield made


@pytest.fixture
async def server(admin: Admin, proxy: Proxy, tmp_path: Path) -> AsyncIterator[Serving]:
    url = admin.node.url(admin.vhost).replace(f":{admin.node.port}/", f":{proxy.port}/")
    env = {
        "HOLDFAST_BROKER": url,
        "HOLDFAST_DEAD_QUEUES": DLQ,
        "HOLDFAST_CAPTURE": DLQ,
        "HOLDFAST_COLLECT_BROKER": url,
        "HOLDFAST_BLOBS": str(tmp_path / "blobs"),
    }
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as made:
        yield made


async def ask(server: Serving, path: str, body: object = None, **query: Any) -> Any:
    """Beside the proxy, which runs here."""
    return await asyncio.to_thread(partial(server.ask, path, body, **query))


def says(server: Serving, path: str, **wanted: object) -> Callable[[], Awaitable[bool]]:
    """Whether an answer has these values."""

    async def look() -> bool:
        found = await ask(server, path)
        return all(found[name] == value for name, value in wanted.items())

    return look


async def test_it_serves_says_what_waits_and_goes_on(server: Serving, proxy: Proxy, admin: Admin) -> None:
    await admin.publish([dead(b"%d" % number) for number in range(3)])
    child = await server.start()
    async with server.client() as client:
        await create_queues(client)
        await client.queue_produce(WORK, [NewItem(payload=b"served")])
    health = await ask(server, "/health")
    assert (health["status"], health["notes"][1]) == ("warn", "redrives wait: no connection to publish on")
    assert f"the capture of {DLQ} stands still: broker cannot be reached" in health["notes"][0]
    assert (await ask(server, "/admin/letters"))["count"] == 0
    assert "is not there; what needs it waits" in child.stderr.tail
    proxy.accept()
    await eventually(says(server, "/admin/letters", count=3))
    await eventually(says(server, "/health", status="pass"))
    again = await ask(server, f"/admin/dlq/queues/{DLQ}/re-drive", {"limit": 3})
    assert again["redriven"] == 3
    assert {one.body for one in await admin.drain(MAIN, 3)} == {b"0", b"1", b"2"}
    await ask(server, "/v1/results")  # the collector is there, too


async def test_a_broker_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"
        env = {"HOLDFAST_BROKER": url, "HOLDFAST_COLLECT_BROKER": url, "HOLDFAST_BLOBS": str(tmp_path / "blobs")}
        async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
            began_s = time.monotonic()
            child = await server.start()
            took_s = time.monotonic() - began_s
            assert took_s < 18, "so long a greeting is waited for"
            async with server.client() as client:
                await create_queues(client)
            assert "its broker has not answered" in child.stderr.tail
            assert (await ask(server, "/health"))["status"] == "warn"


async def test_a_redrive_leases_nothing_while_its_broker_is_away(server: Serving, proxy: Proxy, admin: Admin) -> None:
    """It was begun before; after the restart it waits, and nothing of it counts as published twice, perhaps."""
    await admin.publish([dead(b"%d" % number) for number in range(3)])
    proxy.accept()
    await server.start()
    await eventually(says(server, "/admin/letters", count=3))
    plan = await ask(server, "/admin/plans", {"selection": {"queue": DLQ}, "max_per_s": 1})
    task = (await ask(server, "/admin/redrives", {"plan": plan["hash"], "name": "slow"}))["id"]
    await eventually(says(server, f"/admin/redrives/{task}", redriven=1))
    await ask(server, f"/admin/redrives/{task}/pause", {})
    sent = (await ask(server, f"/admin/redrives/{task}"))["redriven"]
    await server.close()
    await proxy.refuse()
    await proxy.cut()
    await server.start()
    await ask(server, f"/admin/redrives/{task}/resume", {})
    await eventually(lambda: f"redrive {task} waits" in server.child.stderr.tail)
    assert (await ask(server, f"/admin/redrives/{task}"))["redriven"] == sent
    proxy.accept()
    await eventually(says(server, f"/admin/redrives/{task}", state="done"))
    ended = await ask(server, f"/admin/redrives/{task}")
    assert (ended["redriven"], ended["unknown"], ended["possible_duplicates"]) == (3, 0, 0)


async def test_it_ends_where_that_is_wanted(server: Serving) -> None:
    child = await server.launch(HOLDFAST_REQUIRE_BROKER="true")
    assert await child.wait() == 1
    assert "cannot be reached" in child.stderr.tail


async def test_a_broker_that_says_no_ends_it(server: Serving, proxy: Proxy, admin: Admin) -> None:
    proxy.accept()
    child = await server.launch(HOLDFAST_BROKER=server.env["HOLDFAST_BROKER"].replace("guest:guest", "guest:wrong"))
    assert await child.wait() == 1
