"""The real server beside a real broker: it captures what dies, serves it under /admin, and sends it back."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.engines.rabbitmq.admin import Admin
from tests.faults.serving import TOKEN, serving
from tests.support.eventually import eventually
from tests.vault.brokers import DLQ, MAIN, dead, send

pytestmark = pytest.mark.rabbitmq


async def test_a_server_captures_all_the_time_and_redrives_on_demand(admin: Admin, tmp_path: Path) -> None:
    await admin.queue(DLQ)
    await admin.queue(MAIN)
    env = {
        "HOLDFAST_BROKER": admin.node.url(admin.vhost),
        "HOLDFAST_MANAGEMENT": admin.node.management_url,
        "HOLDFAST_CAPTURE": DLQ,
    }
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        await server.start()
        await send(admin, [dead(b"1"), dead(b"2")])
        async with httpx2.AsyncClient(base_url=server.address, headers=headers, timeout=60) as client:

            async def has_both() -> bool:
                return bool((await client.get("/admin/letters")).json()["count"] == 2)

            await eventually(has_both)
            (queue,) = (await client.get("/admin/dlq/queues")).json()
            assert (queue["queue"], queue["captured"]) == (DLQ, 2)
            (capture,) = (await client.get("/admin/captures")).json()
            assert (capture["queue"], capture["state"], capture["captured"]) == (DLQ, "running", 2)
            done = (await client.post(f"/admin/dlq/queues/{DLQ}/re-drive", json={"limit": 10})).json()
            assert (done["redriven"], done["kept"]) == (2, 0)
        assert await server.child.terminate() == 0, server.child.stderr.tail
    assert [one.body for one in await admin.drain(MAIN, 2)] == [b"1", b"2"]
