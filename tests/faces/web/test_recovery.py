"""The pages of recoveries. What a run does to letters: tests/recover."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from holdfast import NewItem, RetryItem
from holdfast.core.requests.declare import Role
from holdfast.settings import Secret
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.web.test_sessions import HTML, csrf_of, signed_in
from tests.faults.serving import Serving
from tests.recover.dead_letter_queue import ROUTES, DeadLetterQueue, letter
from tests.support.amqp import Admin
from tests.support.browser import Chromium
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.rabbitmq import Node, vhost_name

DEAD = "orders.dead"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    """Three items in an embedded dead queue."""
    async with open_installation(tmp_path) as installation:
        queues = installation.queues
        await queues.queues_create(DEAD)
        await queues.queues_create("orders", dead_queue=DEAD)
        await queues.queue_produce("orders", [NewItem(payload=b"x", kind="Order") for _ in range(3)])
        leased = await queues.queue_lease("orders", batch_size=3)
        dead = [RetryItem(id=one.id, dead=True, reason="<script>no</script>") for one in leased.items]
        await queues.queue_retry("orders", dead, partition=leased.partition)

        async def have_died() -> bool:
            return len(await queues.storage_items_list(DEAD)) == 3

        await eventually(have_died)
        yield installation


async def post(browser: httpx2.AsyncClient, path: str = "/recovery/start", **fields: str) -> httpx2.Response:
    csrf = csrf_of((await browser.get("/recovery/start", headers=HTML)).text)
    return await browser.post(path, data={"csrf": csrf, **fields}, headers=HTML)


async def at_end(browser: httpx2.AsyncClient, begun: httpx2.Response) -> str:
    """The page of a run that has ended."""
    assert begun.status_code == 303, begun.text
    where = begun.headers["location"]

    async def has_ended() -> str:
        text = (await browser.get(where, headers=HTML)).text
        return text if "it ended because" in text else ""

    return await eventually(has_ended)


async def test_look_try_and_recover(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        await signed_in(browser)
        page = (await browser.get("/recovery", headers=HTML)).text
        assert "No RabbitMQ is configured here" in page
        assert "No recovery has run yet" in page
        assert f"/recovery/start?queue={DEAD}" in page
        looked = await post(browser, queue=DEAD, do="preflight")
        assert looked.status_code == 200
        assert "Nothing has been taken yet" in looked.text
        assert "Recover 3 letters" in looked.text
        dry = await at_end(browser, await post(browser, queue=DEAD, do="dry_run", limit="2", where="type=Order"))
        assert "Would be recovered" in dry
        again = re.search(r'href="(/recovery/start\?[^"]+)"', dry)
        assert again
        form = (await browser.get(again[1].replace("&amp;", "&"), headers=HTML)).text
        assert 'value="2"' in form
        assert "type=Order</textarea>" in form
        done = await at_end(browser, await post(browser, queue=DEAD, do="start"))
        assert re.search(r'figure">3</div>recovered', done)
        assert '<th scope="row">orders</th>' in done
        listed = (await browser.get("/recovery", headers=HTML)).text
        assert listed.count("/recovery/runs/") == 2
    assert len(await installation.queues.storage_items_list("orders")) == 3


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"routes": "[routes]\nA = '</textarea><script>'"}, "Option is for a broker"),
        ({"limit": "many"}, "Form is invalid"),
        ({"total_timeout": "soon"}, "Total_timeout is invalid"),
        ({"where": "colour=<b>"}, "Filter is invalid"),
        ({"queue": "nobody"}, "Queue is unknown"),
        ({"to": "elsewhere"}, "Form is invalid"),
    ],
)
async def test_what_is_refused_is_said_and_what_was_written_is_kept(
    installation: AdminInstallation, fields: dict[str, str], why: str
) -> None:
    async with installation.client("") as browser:
        await signed_in(browser)
        for do in ("preflight", "dry_run", "start"):
            refused = await post(browser, **{"queue": DEAD, "do": do, "source": "kept", **fields})
            assert 400 <= refused.status_code < 500
            assert why in refused.text
            assert 'value="kept"' in refused.text
            assert "<script>" not in refused.text.replace("<script src", "")
            assert "colour=<b>" not in refused.text
    assert len(await installation.queues.storage_items_list(DEAD)) == 3


async def test_a_viewer_sees_runs_and_starts_none(installation: AdminInstallation) -> None:
    viewer = await installation.token("low", Role.VIEWER)
    async with installation.client("") as admin, installation.client("") as browser:
        await signed_in(admin)
        run = (await post(admin, queue=DEAD, do="dry_run")).headers["location"]
        await signed_in(browser, viewer)
        page = (await browser.get("/recovery", headers=HTML)).text
        assert run in page
        assert "/recovery/start" not in page
        assert "/recovery/start" not in (await browser.get(run, headers=HTML)).text
        assert (await browser.get("/recovery/start", headers=HTML)).status_code == 403
        csrf = csrf_of((await browser.get("/", headers=HTML)).text)
        for path in ("/recovery/start", f"{run}/stop"):
            fields = {"csrf": csrf, "queue": DEAD, "do": "start"}
            assert (await browser.post(path, data=fields, headers=HTML)).status_code == 403
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert {row.action for row in rows if row.outcome == "denied"} == {"recoveries.start", "recoveries.stop"}


async def test_a_token_for_other_queues_sees_nothing_of_a_run(installation: AdminInstallation) -> None:
    held = await installation.token("held", Role.ADMIN, ["mine*"])
    async with installation.client("") as admin, installation.client("") as browser:
        await signed_in(admin)
        run = (await post(admin, queue=DEAD, do="dry_run")).headers["location"]
        await signed_in(browser, held)
        page = (await browser.get("/recovery", headers=HTML)).text
        assert "orders" not in page
        assert "/topology" not in page
        assert (await browser.get(run, headers=HTML)).status_code == 404
        assert (await browser.get("/topology", headers=HTML)).status_code == 403
        assert (await post(browser, queue=DEAD, do="preflight")).status_code == 403


async def test_who_is_too_late_to_stop_it_is_told_so(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        await signed_in(browser)
        begun = await post(browser, queue=DEAD, do="start")
        await at_end(browser, begun)
        late = await post(browser, f"{begun.headers['location']}/stop")
        assert (late.status_code, "Recovery is over" in late.text) == (409, True)
        assert (await browser.get("/recovery/runs/nothing", headers=HTML)).status_code == 404


@pytest.mark.slow
async def test_a_broker_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    env = {"HOLDFAST_BROKER_URL": f"amqp://127.0.0.1:{free_port()}", "HOLDFAST_MANAGEMENT_URL": "http://127.0.0.1:1"}
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path, env=env) as server:
        await server.start()
        async with httpx2.AsyncClient(base_url=server.address, timeout=30, trust_env=False) as browser:
            await signed_in(browser, server.token)

            async def says_so() -> bool:
                recovery = (await browser.get("/recovery", headers=HTML)).text
                topology = (await browser.get("/topology", headers=HTML)).text
                return "RabbitMQ cannot be reached." in recovery and "The broker cannot be read." in topology

            await eventually(says_so)
            refused = await post(browser, queue="orders.dlq", do="start")
            assert (refused.status_code, 'value="orders.dlq"' in refused.text) == (409, True)


@pytest.mark.browser
@pytest.mark.rabbitmq
@pytest.mark.asyncio(loop_scope="session")
async def test_a_person_recovers_a_queue(
    tmp_path: Path, node: Node, chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with Admin.open(node, vhost_name("a person recovers")) as admin:
        dlq = await DeadLetterQueue(admin, tmp_path).make()
        await dlq.fill(letter(n, kind=("CollectionScan", "Strange")[n % 10 == 9]) for n in range(300))
        broker = {"broker": Secret(admin.url), "management": Secret(node.management_url)}
        async with (
            open_installation(tmp_path, **broker) as installation,
            chromium.visitor(installation.url) as visitor,
        ):
            page = visitor.page
            await visitor.open("/sign-in?next=/recovery")
            await page.get_by_label("Token").fill(TOKEN)
            await page.get_by_role("button", name="Sign in").click()
            await page.get_by_role("link", name=f"Recover {dlq.name}").click()
            await page.get_by_label("Routes", exact=True).fill(ROUTES)
            await page.get_by_role("button", name="Pre-flight").click()
            await visitor.sees("It can begin", "300 letters", "May write")
            assert await visitor.axe() == []
            await page.get_by_role("button", name="Dry run").click()
            await visitor.sees("Would be recovered", "type 'Strange' is not in the route table")
            await page.get_by_role("link", name="Now for real").click()
            await page.get_by_label("Letters a second").fill("40")
            await page.get_by_role("button", name=re.compile("^Recover")).click()
            await visitor.sees(re.compile(r"[1-9]\d* of 300 letters looked at"))
            assert await visitor.axe() == []
            await page.get_by_role("button", name="Stop").click()
            await visitor.sees("somebody stopped it", "Kept, by reason")
            assert await visitor.axe() == []
            await visitor.open("/recovery")
            await visitor.sees("partly done", "dry run")
            assert await visitor.axe() == []
        await dlq.check(duplicates_max=0)
