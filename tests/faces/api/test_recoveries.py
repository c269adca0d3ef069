"""Recoveries over /admin, with the vault in either engine. What a run does to letters: tests/recover."""

from __future__ import annotations

import pytest

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
