"""The real server beside a real broker: it captures what dies, serves it under /admin, and sends it back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from tests.faults.serving import TOKEN, Serving
from tests.support.amqp import Admin
from tests.support.eventually import eventually
from tests.vault.letters import DLQ, MAIN, dead

pytestmark = pytest.mark.rabbitmq


async def test_a_server_captures_a_queue_that_comes_after_its_start(admin: Admin, tmp_path: Path) -> None:
    env = {"HOLDFAST_BROKER": admin.node.url(admin.vhost), "HOLDFAST_CAPTURE": DLQ}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        child = await server.start()
        async with httpx2.AsyncClient(base_url=server.address, headers=headers, timeout=60) as client:

            async def waits() -> bool:
                (capture,) = (await client.get("/admin/captures")).json()
                assert DLQ in capture["why"]
                return bool(capture["state"] == "waiting")

            async def has_it() -> bool:  # counted after the ack, when the letter has long been there
                (capture,) = (await client.get("/admin/captures")).json()
                return bool(capture["captured"] == 1)

            await eventually(waits)
            assert f"the capture of {DLQ} stands still" in (await client.get("/health")).text
            await admin.queue(DLQ)
            await admin.publish([dead(b"1")])
            await eventually(has_it)
            assert (await client.get("/admin/letters")).json()["count"] == 1
            (capture,) = (await client.get("/admin/captures")).json()
            assert (capture["state"], capture["why"]) == ("running", "")
        assert await child.terminate() == 0, child.stderr.tail
    assert "\n".join(child.stderr.lines).count("waits and tries again") == 1


async def test_a_server_whose_capture_waits_stops_at_once(admin: Admin, tmp_path: Path) -> None:
    env = {"HOLDFAST_BROKER": admin.node.url(admin.vhost), "HOLDFAST_CAPTURE": DLQ}
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        child = await server.start()
        await eventually(lambda: "waits and tries again" in child.stderr.tail)
        async with asyncio.timeout(25):
            assert await child.terminate() == 0, child.stderr.tail


async def test_a_server_captures_all_the_time_and_redrives_on_demand(admin: Admin, tmp_path: Path) -> None:
    await admin.queue(DLQ)
    await admin.queue(MAIN)
    env = {
        "HOLDFAST_BROKER": admin.node.url(admin.vhost),
        "HOLDFAST_MANAGEMENT": admin.node.management_url,
        "HOLDFAST_CAPTURE": DLQ,
    }
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        await server.start()
        await admin.publish([dead(b"1"), dead(b"2")])
        async with httpx2.AsyncClient(base_url=server.address, headers=headers, timeout=60) as client:

            async def has_both() -> bool:
                (capture,) = (await client.get("/admin/captures")).json()
                return bool(capture["captured"] == 2)

            await eventually(has_both)
            (queue,) = (await client.get("/admin/dlq/queues")).json()
            assert (queue["queue"], queue["captured"]) == (DLQ, 2)
            (capture,) = (await client.get("/admin/captures")).json()
            assert (capture["queue"], capture["state"]) == (DLQ, "running")
            done = (await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 10})).json()
            assert (done["redriven"], done["kept"]) == (2, 0)
        assert await server.child.terminate() == 0, server.child.stderr.tail
    assert [one.body for one in await admin.drain(MAIN, 2)] == [b"1", b"2"]
