"""The first page: what died, what is done about it, what needs somebody; and what it says when there is nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path

import httpx2
import pytest
from msgspec.structs import replace
from playwright.async_api import expect

from holdfast.core.letter import GroupStatus
from holdfast.core.plan import PlanOptions
from holdfast.core.requests.declare import Role
from holdfast.core.requests.vault import CaptureReport
from holdfast.core.selection import ID_MAX, Selection
from holdfast.errors import BrokerUnreachable, StorageFailed
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.api.test_endpoints import dead_item
from tests.faces.web.test_sessions import csrf_of, signed_in
from tests.support.browser import NARROW, Chromium, Visitor
from tests.support.eventually import eventually
from tests.vault.letters import ACT, ADMIN, DLQ, act, letter

HTML = {"accept": "text/html"}
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def shown(installation: AdminInstallation, path: str = "/", token: str = "") -> str:
    """The page as a program with this token is shown it."""
    async with installation.client(token) if token else installation.client() as client:
        answer = await client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    return answer.text


def text_of(page: str) -> str:
    """What a person reads of it."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.partition("<main")[2])).split())


async def group_key(installation: AdminInstallation) -> str:
    (group,) = await installation.vault_app.vault.groups.page(status=None, after=ID_MAX, count_max=2)
    return group.key


async def test_an_empty_store_says_what_to_do_next(installation: AdminInstallation) -> None:
    text = text_of(await shown(installation))
    for command in ("holdfast demo", "make demo", "export HOLDFAST_BROKER_URL", "holdfast queue create orders.dlq"):
        assert command in text
    assert "All is well" not in text


async def test_when_nothing_waits_it_says_so(installation: AdminInstallation) -> None:
    await installation.queues.queues_create(DLQ)
    await installation.queues.queues_create("orders", dead_queue=DLQ)
    text = text_of(await shown(installation))
    assert "All is well." in text
    assert "Letters that wait 0" in text
    assert DLQ in text


async def test_letters_are_counted_by_queue_and_over_time(installation: AdminInstallation) -> None:
    await dead_item(installation)
    vault = installation.vault_app.vault
    await vault.letters.put([letter(b"1"), letter(b"2"), letter(b"3", queue="other.dlq")], ACT)

    async def is_shown() -> str:
        page = await shown(installation)
        assert re.search(r'<td class="number">1</td>', page), "what is in the queue itself is asked beside the page"
        return page

    page = await eventually(is_shown)
    text = text_of(page)
    assert "All is well" not in text
    assert re.search(r"Letters that wait 3 the oldest died .* 1 more in their queues, not captured", text)
    assert "Arrived 3 in 24 h, 3 this hour" in text
    rows = text[text.index("Dead queues") :]
    assert rows.index(DLQ) < rows.index("other.dlq"), "where most wait comes first"
    assert "Arrivals in orders.dlq in each of the last 24 hours: 2 in all, 2 at most in an hour, 2 in this hour" in page
    assert 'href="/letters?queue=orders.dlq&amp;state=captured"' in page


async def test_a_group_that_is_new_is_shown_and_one_that_is_back_before_it(installation: AdminInstallation) -> None:
    vault = installation.vault_app.vault
    await vault.letters.put([letter(b"1", error_type="OldError")], ACT)
    await vault.groups.change(await group_key(installation), status=GroupStatus.RESOLVED, note=None, act=act("groups"))
    await vault.letters.put([letter(b"2", error_type="NewError")], ACT)
    assert "OldError" not in text_of(await shown(installation)).partition("Dead queues")[0]
    await vault.letters.put([letter(b"3", error_type="OldError")], ACT)
    text = text_of(await shown(installation))
    assert "is back, after it was resolved" in text
    assert text.index("OldError") < text.index("regressed") < text.index("NewError")


async def test_a_redrive_under_way_is_shown_with_its_progress(installation: AdminInstallation) -> None:
    app = installation.vault_app
    await dead_item(installation)  # makes the queue that letters go back to
    await app.vault.letters.put([replace(letter(body), origin="queue") for body in (b"1", b"2")], ACT)
    plan = await app.planner.plan(PlanOptions(selection=Selection(queue=DLQ)), ADMIN)
    task, _ = await app.planner.execute(plan.hash, ADMIN, act("redrives.start"), name="the night's")
    page = await shown(installation)
    assert "the night's" in text_of(page)
    assert re.search(r'<progress max="\d+" value="0" aria-label="Progress of redrive 1">', page)
    await app.redrives.change(task.id, "cancel", act("redrives.cancel"))
    assert "Redrives under way" not in await shown(installation)


async def test_a_broker_that_is_away_is_said_on_top_and_with_its_reason(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> list[object]:
        raise BrokerUnreachable("broker cannot be reached; 10.1.2.3: refused")

    await installation.put(b"1")
    monkeypatch.setattr(installation.vault_app.custody.brokers[0].inspector, "queues", away)
    text = text_of(await shown(installation))
    assert text.index("No answer from the queues of this server") < text.index("Letters that wait")
    assert "its numbers are not known until it does" in text
    assert "10.1.2.3" in text
    held = await installation.token("held", Role.VIEWER, ["orders*"])
    assert "10.1.2.3" not in await shown(installation, token=held)


async def test_what_stands_still_and_what_could_not_be_taken_is_said(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [
        CaptureReport(queue="a.dlq", state="waiting", why="the vault is full"),
        CaptureReport(queue="b.dlq", failed_imports=2),
    ]
    monkeypatch.setattr(installation.vault_app.custody, "captures", lambda: reports)
    text = text_of(await shown(installation)).partition("Letters that wait")[0]
    assert "The capture of a.dlq stands still : the vault is full" in text
    assert "2 messages of b.dlq could not be made a letter" in text


async def test_while_the_vault_is_away_the_page_says_that_nothing_is_lost(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> list[object]:
        raise StorageFailed("storage failed; the disk is full")

    await installation.put(b"1")
    monkeypatch.setattr(installation.vault_app.vault.ledger, "tallies", away)
    async with installation.client() as client:
        answer = await client.get("/", headers=HTML)
    assert answer.status_code == 503
    text = text_of(answer.text)
    assert "The vault does not answer" in text
    assert "the disk is full" in text
    assert "Nothing is lost" in text


async def test_a_token_that_is_held_to_a_queue_sees_nothing_of_another(installation: AdminInstallation) -> None:
    await dead_item(installation)
    await installation.vault_app.vault.letters.put([letter(b"1"), letter(b"2", queue="pay.dlq", type="secret")], ACT)
    page = await shown(installation, token=await installation.token("held", Role.ADMIN, ["orders*"]))
    assert "Letters that wait 1" in text_of(page)
    assert "pay" not in page
    assert "secret" not in page
    assert "Groups" not in page, "groups are of all queues"


@asynccontextmanager
async def browsing(installation: AdminInstallation, token: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with installation.client("") as browser:
        await signed_in(browser, token)
        yield browser


async def test_a_capture_is_begun_by_who_may_and_by_nobody_else(installation: AdminInstallation) -> None:
    await dead_item(installation)
    operator = await installation.token("op", Role.OPERATOR)
    viewer = await installation.token("low", Role.VIEWER)
    async with browsing(installation, viewer) as browser:
        page = (await browser.get("/", headers=HTML)).text
        assert 'action="/captures"' not in page
        refused = await browser.post("/captures", data={"csrf": csrf_of(page), "queue": DLQ}, headers=HTML)
        assert refused.status_code == 403
    async with browsing(installation, operator) as browser:

        async def offered() -> str:
            page = (await browser.get("/", headers=HTML)).text
            assert 'action="/captures"' in page
            return page

        csrf = csrf_of(await eventually(offered))
        unknown = await browser.post("/captures", data={"csrf": csrf, "queue": HOSTILE}, headers=HTML)
        assert (unknown.status_code, HOSTILE in unknown.text) == (404, False)
        assert "no dead-letter queue that is configured" in unknown.text
        begun = await browser.post("/captures", data={"csrf": csrf, "queue": DLQ}, headers=HTML)
        assert (begun.status_code, begun.headers["location"]) == (303, "/")

        async def is_captured() -> bool:
            text = text_of((await browser.get("/", headers=HTML)).text)
            return "Letters that wait 1" in text and "running" in text

        await eventually(is_captured)
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert [(row.actor, row.action) for row in rows if row.outcome == "denied"] == [("token:low", "captures.start")]


async def test_what_a_stranger_sent_stays_text(installation: AdminInstallation) -> None:
    hostile = letter(
        b"1", queue=HOSTILE, type=HOSTILE, error_type=HOSTILE, error_message='"><img src=x onerror=alert(1)>'
    )
    await installation.vault_app.vault.letters.put([hostile], ACT)
    page = await shown(installation)
    assert HOSTILE not in page
    assert "<img src=x" not in page
    assert HOSTILE in unescape(page)


@asynccontextmanager
async def at_the_page(chromium: Chromium, installation: AdminInstallation, **more: object) -> AsyncIterator[Visitor]:
    token = await installation.token("somebody", Role.OPERATOR)
    async with chromium.visitor(installation.url, **more) as visitor:  # type: ignore[arg-type]
        await visitor.open("/sign-in")
        await visitor.page.get_by_label("Token").fill(token)
        await visitor.page.get_by_role("button", name="Sign in").click()
        yield visitor


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_is_kept_up_to_date_and_the_focus_stays_where_it_was(tmp_path: Path, chromium: Chromium) -> None:
    async with open_installation(tmp_path) as installation, at_the_page(chromium, installation) as visitor:
        await visitor.sees("Nothing has died here yet")
        assert await visitor.axe() == []
        await dead_item(installation)
        await installation.put(b"1")
        await visitor.sees("Letters that wait", DLQ)
        assert await visitor.axe() == []
        await visitor.tab_to(DLQ, tag="a")
        await installation.put(b"2", b"3")
        await visitor.sees(re.compile(r"Letters that wait\s+3"))
        assert await visitor.focused() == f"a {DLQ}"
        # The page may have been read before the queue's depth was known.
        await expect(visitor.page.get_by_role("button", name=f"Capture {DLQ}")).to_be_visible()
        await visitor.tab_to(f"Capture {DLQ}", tag="button")
        await visitor.press("Enter")
        await visitor.sees("captured from now on", re.compile(r"Letters that wait\s+4"))


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_nothing_moves_in_the_middle_of_a_click_or_while_text_is_marked(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_installation(tmp_path) as installation, at_the_page(chromium, installation) as visitor:
        await installation.put(b"1")
        await visitor.sees(re.compile(r"Letters that wait\s+1"))
        page, told = visitor.page, visitor.page.get_by_role("heading", name="Health")
        for begin, end in (
            (told.hover, page.mouse.up),
            (told.select_text, lambda: page.evaluate("getSelection().removeAllRanges()")),
        ):
            await begin()
            if end == page.mouse.up:
                await page.mouse.down()
            before = await page.evaluate("document.querySelector('#overview').dataset.seen = 'here'")
            async with page.expect_event("console", lambda one: one.text == "changed"):
                await page.evaluate(
                    "new EventSource('/live?since=' + document.body.dataset.live)"
                    ".addEventListener('changed', () => console.log('changed'), {once: true})"
                )
                await installation.put(before.encode())
            assert await page.evaluate("document.querySelector('#overview').dataset.seen") == "here"
            await end()
            await expect(page.locator("#overview[data-seen]")).to_have_count(0)


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_is_read_without_a_script_and_on_a_phone(tmp_path: Path, chromium: Chromium) -> None:
    async with open_installation(tmp_path) as installation:
        await installation.put(b"1")
        async with at_the_page(chromium, installation, javascript=False, width=NARROW, scheme="dark") as visitor:
            await visitor.sees("Letters that wait", DLQ, "Groups that are back or new")
