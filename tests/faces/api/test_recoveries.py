"""Recoveries over /admin, with the vault in either engine. What a run does to letters: tests/recover."""

from __future__ import annotations

import pytest

from holdfast import NewItem, RetryItem
from holdfast.services.queue.queues import Queues
from tests.faces.api.conftest import AdminInstallation
from tests.support.eventually import eventually

DEAD = "orders.dead"


async def test_old_runs_go_and_pages_hold_the_others(
    stored: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.stores.recoveries.KEPT_COUNT_MAX", 4)
    queues = stored.queues
    await queues.queues_create(DEAD)
    await queues.queues_create("orders", dead_queue=DEAD)
    async with stored.client() as client:
        runs = []
        for _ in range(6):
            begun = (await client.post("/admin/recoveries", json={"queue": DEAD})).json()
            runs.append(begun["recovery"]["run"])

            async def has_ended(run: str = runs[-1]) -> bool:
                return bool((await client.get(f"/admin/recoveries/{run}")).json()["recovery"]["ended_at"])

            await eventually(has_ended)
        first = (await client.get("/admin/recoveries", params={"limit": 3})).json()
        rest = (await client.get("/admin/recoveries", params={"limit": 3, "cursor": first["next"]})).json()
        assert [one["run"] for one in first["recoveries"] + rest["recoveries"]] == runs[:1:-1]
        assert rest["next"] == ""
        assert (await client.get(f"/admin/recoveries/{runs[0]}")).status_code == 404


async def _three_dead(queues: Queues, name: str) -> str:
    """An embedded dead queue with three items."""
    dead_queue = f"{name}.dead"
    await queues.queues_create(dead_queue)
    await queues.queues_create(name, dead_queue=dead_queue)
    await queues.queue_produce(name, [NewItem(payload=b"x") for _ in range(3)])
    leased = await queues.queue_lease(name, batch_size=3)
    await queues.queue_retry(
        name, [RetryItem(id=one.id, dead=True) for one in leased.items], partition=leased.partition
    )

    async def have_died() -> bool:
        return len(await queues.storage_items_list(dead_queue)) == 3

    await eventually(have_died)
    return dead_queue


async def test_a_few_run_at_once_and_all_end_with_the_server(installation: AdminInstallation) -> None:
    queues = installation.queues
    dead = [await _three_dead(queues, name) for name in ("a", "b", "c", "d")]
    async with installation.client() as client:
        for queue in dead[:3]:
            begun = await client.post("/admin/recoveries", json={"queue": queue, "rate": 0.01})
            assert begun.status_code == 200, begun.text
        refused = await client.post("/admin/recoveries", json={"queue": dead[3]})
        assert (refused.status_code, "3 run at once" in refused.text) == (409, True)
        await installation.vault_app.close()
        listed = (await client.get("/admin/recoveries")).json()["recoveries"]
        assert {one["stopped_by"] for one in listed} == {"signal"}
        late = await client.post("/admin/recoveries", json={"queue": dead[3]})
        assert late.status_code == 503
    for name in ("a", "b", "c"):
        there = [len(await queues.storage_items_list(one)) for one in (name, f"{name}.dead")]
        assert sum(there) == 3, there
