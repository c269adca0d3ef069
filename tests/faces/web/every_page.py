"""Every page of the console, filled in with what a demo has: what all pages have to be is tried on all of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

import holdfast.faces.api.server  # noqa: F401 - it registers the pages
from holdfast.faces.web.console import PAGES
from holdfast.proof.process import child_process
from tests.support.command import PROGRAM
from tests.support.eventually import eventually

FOLDER = "holdfast-demo"
#: Answers that are no page: files, streams, parts of bodies.
NO_PAGES = ("/live", "/sign-in/link", "/queue-payload/", "/download", ".csv", "/body", "/export", "/content")


class Demo(NamedTuple):
    """A demo that is served."""

    address: str
    token: str

    def client(self, token: str | None = None) -> httpx2.AsyncClient:
        """Who asks it as a program does."""
        headers = {"authorization": f"Bearer {self.token if token is None else token}"}
        return httpx2.AsyncClient(base_url=self.address, headers=headers, trust_env=False, timeout=60)


@asynccontextmanager
async def serving_demo(folder: Path) -> AsyncIterator[Demo]:
    """`holdfast demo` in a process of its own; its redrive is under way."""
    environment = dict.fromkeys((name for name in os.environ if name.startswith("HOLDFAST_")), "")
    async with child_process([str(PROGRAM), "demo"], cwd=folder, env=environment) as child:
        address = (await child.wait_line(r"(http://127\.0\.0\.1:\d+)", timeout_s=120))[1]
        demo = Demo(address, (folder / FOLDER / "admin-token").read_text().strip())

        async def redriving() -> bool:
            async with demo.client() as client:
                return any(one["redriven"] for one in (await client.get("/admin/redrives")).json()["redrives"][:1])

        await eventually(redriving)
        yield demo


async def every_page(demo: Demo) -> dict[str, str]:
    """The address of one page of each kind, by the path that it is declared with. Fails for a page that it does not
    know how to fill in."""
    known = await _known(demo)
    found = {}
    for one in PAGES:
        if one.method == "GET" and not any(part in one.path for part in NO_PAGES):
            assert one.path in known or "{" not in one.path, f"say here what stands for the names in {one.path}"
            found[one.path] = known.get(one.path, one.path)
    return found


async def _known(demo: Demo) -> Mapping[str, str]:
    async with demo.client() as client:

        async def ask(path: str, **query: Any) -> Any:
            return (await client.get(path, params=query)).json()

        letter = (await ask("/admin/letters", queue="orders.dlq", state="captured", limit=1))["letters"][0]["id"]
        group = (await ask("/admin/groups"))["groups"][0]["key"]
        begun = await client.post("/admin/recoveries", json={"queue": "orders.dlq", "dry_run": True})
        run = begun.json()["recovery"]["run"]
        redrive = (await ask("/admin/redrives"))["redrives"][0]
    return {
        "/letters/{id}": f"/letters/{letter}",
        "/letters/{id}/edit": f"/letters/{letter}/edit",
        "/groups/{key:any}": f"/groups/{group}",
        "/plans/new": "/plans/new?queue=payments.dlq",
        "/plans/{hash}": f"/plans/{redrive['plan']}",
        "/redrives/{id}": f"/redrives/{redrive['id']}",
        "/queues/{queue:any}": "/queues/orders",
        "/recovery/start": "/recovery/start?queue=orders.dlq",
        "/recovery/runs/{run}": f"/recovery/runs/{run}",
        "/results/{id}": "/results/report-of-the-day",
    }
