"""Finding letters by the search box and by links, and doing something to many of them. As a browser without scripts."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx2
import pytest

from holdfast.core.requests.declare import Role
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.errors import Invalid
from holdfast.faces.web.letters import read_box, written
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.web.test_sessions import HTML, csrf_of, signed_in
from tests.support.browser import Chromium
from tests.vault.letters import ACT, DLQ, act, letter

NOW_US = 1_800_000_000_000_000
EVIL = "<script>alert('x')</script>"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


@asynccontextmanager
async def browser_of(installation: AdminInstallation, token: str = "") -> AsyncIterator[httpx2.AsyncClient]:
    """Signed in, as the admin unless a token is given."""
    async with installation.client("") as browser:
        await signed_in(browser, **({"token": token} if token else {}))
        yield browser


async def page(browser: httpx2.AsyncClient, path: str, status: int = 200) -> str:
    answer = await browser.get(path, headers=HTML)
    assert answer.status_code == status, answer.text
    return answer.text


def shown(text: str) -> list[int]:
    """The letters of a page of results, in order."""
    return [int(number) for number in re.findall(r'<a href="/letters/(\d+)" id="open-', text)]


def hidden(text: str) -> dict[str, str]:
    """What a form carries along."""
    return {
        name: html.unescape(value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', text)
    }


async def states(installation: AdminInstallation) -> list[str]:
    found = await installation.vault_app.vault.letters.find(Selection(), count_max=100)
    return [one.state.value for one in reversed(found.letters)]


# --- the box --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("some words", {"text": "some words"}),
        (
            'queue:orders.dlq reason:rejected "some words"',
            {"queue": "orders.dlq", "reason": "rejected", "text": "some words"},
        ),
        ('queue:"with space" type:a:b', {"queue": "with space", "type": "a:b"}),
        (r'error:"a \"quoted\" one"', {"error": 'a "quoted" one'}),
        ("header:tenant", {"header": "tenant", "header_value": ""}),
        ('header:"tenant=a b"', {"header": "tenant", "header_value": "a b"}),
        ("age:24h", {"older_than": "24h"}),
        ("age:>2d", {"older_than": "48h"}),
        ("age:<1h", {"died_after": "2027-01-15T07:00:00+00:00"}),
        ("died_after:2026-01-02 died_in:orders", {"died_after": "2026-01-02T00:00:00Z", "source_queue": "orders"}),
        ('"http://example"', {"text": "http://example"}),
        ('x"y z', {"text": 'x"y z'}),
    ],
)
def test_a_line_of_the_box_is_the_fields_of_a_search(text: str, fields: dict[str, str]) -> None:
    assert read_box(text, NOW_US) == fields


@pytest.mark.parametrize("text", ["http://example", "tenant:7", "age:soon", "a" * 3000])
def test_what_the_box_does_not_know_is_refused_with_what_it_knows(text: str) -> None:
    with pytest.raises(Invalid):
        read_box(text, NOW_US)


@pytest.mark.parametrize("value", ["plain", "with space", 'a"b', "a\\b", "x:y", ""])
def test_what_is_offered_is_read_back_as_it_was(value: str) -> None:
    assert read_box(written("type", value), NOW_US) == {"type": value}


# --- finding --------------------------------------------------------------------------------------------------


async def test_the_box_writes_an_address_that_shows_the_same_to_a_colleague(installation: AdminInstallation) -> None:
    odd = [letter(b"1", type="pay"), letter(b"two words", type="pay", reason="expired"), letter(b"3")]
    await installation.vault_app.vault.letters.put(odd, ACT)
    async with browser_of(installation) as browser, browser_of(installation) as colleague:
        sent = await browser.get("/letters", params={"q": "type:pay reason:expired"}, headers=HTML)
        assert sent.status_code == 303
        assert dict(parse_qsl(urlsplit(sent.headers["location"]).query)) == {"type": "pay", "reason": "expired"}
        text = await page(colleague, sent.headers["location"])
        assert shown(text) == [2]
        assert "<strong>1</strong> shown, <strong>1</strong> match" in text
        more = await browser.get("/letters", params={"type": "pay", "q": "words"}, headers=HTML)
        assert shown(await page(browser, more.headers["location"])) == [2]
        # What is searched for can be taken away, one by one.
        assert shown(await page(browser, "/letters?type=pay")) == [2, 1]
        assert 'href="/letters?type=pay" aria-label="Without reason expired"' in text


async def test_what_is_not_understood_is_said_and_kept(installation: AdminInstallation) -> None:
    await installation.put(b"x")
    async with browser_of(installation) as browser:
        text = await page(browser, "/letters?queue=orders.dlq&q=tenant:7", 400)
        assert "&#39;tenant&#39; is nothing to search by" in text.lower()
        assert 'value="tenant:7"' in text
        for wrong in ("state=dead", "older_than=soon", "cursor=none", "ids=x", "header_value=1"):
            assert 'class="notice bad"' in await page(browser, f"/letters?{wrong}", 400), wrong


async def test_pages_follow_each_other_and_the_count_says_of_what(installation: AdminInstallation) -> None:
    await installation.put(*(str(one).encode() for one in range(5)))
    async with browser_of(installation) as browser:
        first = await page(browser, f"/letters?queue={DLQ}&limit=2")
        assert shown(first) == [5, 4]
        assert "<strong>2</strong> shown, <strong>5</strong> match" in first
        (found,) = re.findall(r'rel="next" href="([^"]+)"', first)
        second = await page(browser, html.unescape(found))
        assert shown(second)[:2] == [3, 2]
        assert DLQ in second


async def test_values_are_offered_and_an_error_leads_to_its_letters(installation: AdminInstallation) -> None:
    odd = [letter(b"1", error_type="shop.Refused", headers={"tenant": "a"}), letter(b"2", type="two words")]
    await installation.vault_app.vault.letters.put(odd, ACT)
    async with browser_of(installation) as browser:
        text = await page(browser, "/letters")
        for offered in (
            "queue:orders.dlq",
            "error:shop.Refused",
            "header:tenant",
            'type:"two words"',
            "state:redriven",
        ):
            assert f'<option value="{html.escape(offered).replace("&quot;", "&#34;")}">' in text, offered
        assert 'href="/letters?error=shop.Refused"' in text
        assert shown(await page(browser, "/letters?error=shop.Refused")) == [1]


async def test_what_strangers_wrote_stays_text(installation: AdminInstallation) -> None:
    evil = letter(
        b"x",
        queue=f"{EVIL}.dlq",
        type=EVIL,
        headers={EVIL: "1"},
        reason=EVIL,
        error_type="javascript:alert(1)",
        error_message=f'"><svg onload=alert(1)>{EVIL}',
    )
    await installation.vault_app.vault.letters.put([evil], ACT)
    async with browser_of(installation) as browser:
        for path in ("/letters", f"/letters?type={EVIL}&error=javascript:alert(1)", f"/letters?q={EVIL}:x"):
            answer = await browser.get(path, headers=HTML, follow_redirects=True)
            for wrong in ("<script>", "<svg onload", 'href="javascript'):
                assert wrong not in answer.text.replace('<script src="/static', ""), path


async def test_an_empty_vault_says_how_letters_come_into_it(installation: AdminInstallation) -> None:
    async with browser_of(installation) as browser:
        assert "There are no letters yet" in await page(browser, "/letters")
        assert "No letter fits" in await page(browser, "/letters?queue=other")


# --- what is done to them -------------------------------------------------------------------------------------


async def test_selected_letters_are_archived_after_their_number_was_shown(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2", b"3")
    async with browser_of(installation) as browser:
        text = await page(browser, "/letters")
        form = {"csrf": csrf_of(text), "back": f"queue={DLQ}", "action": "archive", "id": ["1", "3"]}
        asked = await browser.post("/letters/act", data=form, headers=HTML)
        assert "Archive 2 letters?" in asked.text
        assert await states(installation) == ["captured"] * 3
        done = await browser.post("/letters/archive", data={**hidden(asked.text), "why": "test"}, headers=HTML)
        assert (done.status_code, done.headers["location"]) == (303, f"/letters?queue={DLQ}")
        assert await states(installation) == ["archived", "captured", "archived"]
        assert "2 letters archived." in await page(browser, done.headers["location"])
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert [(row.reason, row.count) for row in rows if row.action == "letters.archive"] == [("test", 2)]


async def test_all_that_match_are_those_that_match_when_it_is_done_or_none(installation: AdminInstallation) -> None:
    await installation.put(*(str(one).encode() for one in range(60)))
    async with browser_of(installation) as browser:
        text = await page(browser, f"/letters?queue={DLQ}&state=captured")
        assert "Archive all 60…" in text
        form = {"csrf": csrf_of(text), "back": hidden(text)["back"], "action": "archive"}
        asked = await browser.post("/letters/act?scope=all", data=form, headers=HTML)
        assert "Archive 60 letters?" in asked.text
        await installation.put(b"one more")
        refused = await browser.post("/letters/archive", data={**hidden(asked.text), "why": "not lost"}, headers=HTML)
        assert refused.status_code == 409
        assert "60 were expected and 61 fit" in refused.text
        assert "Archive 61 letters?" in refused.text
        assert 'value="not lost"' in refused.text
        assert set(await states(installation)) == {"captured"}
        done = await browser.post("/letters/archive", data=hidden(refused.text), headers=HTML)
        assert done.status_code == 303
        assert set(await states(installation)) == {"archived"}


async def test_to_discard_the_count_is_typed(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2")
    async with browser_of(installation) as browser:
        form = {"csrf": csrf_of(await page(browser, "/letters")), "action": "discard", "id": ["1", "2"]}
        asked = await browser.post("/letters/act", data=form, headers=HTML)
        for typed in ("", "3", "two"):
            refused = await browser.post("/letters/discard", data={**hidden(asked.text), "typed": typed}, headers=HTML)
            assert refused.status_code == 400, typed
        assert await states(installation) == ["captured", "captured"]
        done = await browser.post("/letters/discard", data={**hidden(asked.text), "typed": "2"}, headers=HTML)
        assert done.status_code == 303
        assert await states(installation) == ["discarded", "discarded"]


async def test_letters_of_another_state_are_left_out_and_that_is_said(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2")
    letters = installation.vault_app.vault.letters
    captured, archived = LetterState.CAPTURED, LetterState.ARCHIVED
    await letters.move([1], source=captured, target=archived, act=act("archive"), expected=1)
    async with browser_of(installation) as browser:
        form = {"csrf": csrf_of(await page(browser, "/letters")), "action": "restore", "id": ["1", "2"]}
        asked = await browser.post("/letters/act", data=form, headers=HTML)
        assert "Restore 1 letter?" in asked.text
        assert "1 of the 2 that were selected is not archived" in asked.text
        await browser.post("/letters/restore", data=hidden(asked.text), headers=HTML)
        assert await states(installation) == ["captured", "captured"]


async def test_a_plan_is_asked_for_by_the_address_and_many_letters_by_a_form(installation: AdminInstallation) -> None:
    await installation.put(b"1", b"2")
    async with browser_of(installation) as browser:
        form = {"csrf": csrf_of(await page(browser, "/letters")), "action": "plan", "back": f"queue={DLQ}&type=order"}
        few = await browser.post("/letters/act", data={**form, "id": ["1", "2"]}, headers=HTML)
        assert few.headers["location"] == f"/plans/new?ids=1%2C2&queue={DLQ}"
        assert "2 letters" in re.sub(r"<[^>]+>", "", await page(browser, few.headers["location"]))
        many = await browser.post(
            "/letters/act", data={**form, "id": [str(one) for one in range(1, 1001)]}, headers=HTML
        )
        assert 'action="/plans/new"' in many.text
        assert hidden(many.text)["ids"].count(",") == 999
        assert (await browser.post("/plans/new", data=hidden(many.text), headers=HTML)).status_code == 200
        none = await browser.post("/letters/act", data=form, headers=HTML)
        assert (none.status_code, none.headers["location"]) == (303, f"/letters?queue={DLQ}&type=order")


async def test_who_may_not_is_shown_no_button_and_refused(installation: AdminInstallation) -> None:
    await installation.put(b"1")
    viewer = await installation.token("viewer", Role.VIEWER)
    operator = await installation.token("operator", Role.OPERATOR)
    async with browser_of(installation, viewer) as browser:
        text = await page(browser, "/letters")
        assert "checkbox" not in text
        form = {"csrf": csrf_of(text), "state": "captured", "count": "1", "ids": "1"}
        assert (await browser.post("/letters/archive", data=form, headers=HTML)).status_code == 403
    async with browser_of(installation, operator) as browser:
        text = await page(browser, "/letters")
        assert ("Archive…" in text, "Discard…" in text) == (True, False)
        form = {"csrf": csrf_of(text), "state": "captured", "count": "1", "ids": "1", "typed": "1"}
        assert (await browser.post("/letters/discard", data=form, headers=HTML)).status_code == 403
    assert await states(installation) == ["captured"]
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert [row.action for row in rows if row.outcome == "denied"] == ["letters.archive", "letters.discard"]


async def test_who_is_held_to_queues_sees_nothing_of_others(installation: AdminInstallation) -> None:
    theirs = [letter(b"a-secret", queue="pay.dlq", type="secret-type", headers={"secret-name": 1}), letter(b"1")]
    await installation.vault_app.vault.letters.put([*theirs, letter(b"2", queue="orders.eu.dlq")], ACT)
    held = await installation.token("held", Role.ADMIN, ["orders*"])
    async with browser_of(installation, held) as browser:
        text = await page(browser, "/letters")
        assert ("orders.dlq" in text, "orders.eu.dlq" in text, "pay" in text) == (True, True, False)
        text = await page(browser, f"/letters?queue={DLQ}")
        assert shown(text) == [2]
        assert "secret" not in text
        assert "pay.dlq" not in text
        assert "pay.dlq" not in re.sub(r"value=\"[^\"]*\"", "", await page(browser, "/letters?ids=1"))
        refused = await browser.get("/letters?queue=pay.dlq", headers=HTML)
        assert (refused.status_code, "secret" in refused.text) == (403, False)
        form = {"csrf": csrf_of(text), "action": "archive", "id": ["1"], "back": f"queue={DLQ}"}
        assert "None of them is captured now" in (await browser.post("/letters/act", data=form, headers=HTML)).text
        ours = {"csrf": csrf_of(text), "state": "captured", "count": "1", "ids": "1", "queue": DLQ}
        assert (await browser.post("/letters/archive", data=ours, headers=HTML)).status_code == 409


# --- in a browser ---------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_letters_are_found_and_archived_by_the_keyboard_alone(tmp_path: Path, chromium: Chromium) -> None:
    async with open_installation(tmp_path) as installation, chromium.visitor(installation.url) as visitor:
        visitor.expects("/live")
        await installation.vault_app.vault.letters.put([letter(b"1", type="pay"), letter(b"2"), letter(b"3")], ACT)
        await visitor.open("/sign-in")
        await visitor.write("the-admin-token")
        await visitor.press("Enter")
        await visitor.sees("Sign out")
        await visitor.open("/letters")
        assert await visitor.axe() == []
        await visitor.press("/")
        assert await visitor.focused() == "input Find letters"
        await visitor.write("reason:rejected ")
        offered = await visitor.page.eval_on_selector_all("#terms option", "all => all.map(one => one.value)")
        assert "reason:rejected type:order" in offered
        await visitor.write("type:order")
        await visitor.press("Enter")
        await visitor.sees("2 shown, 2 match")
        await visitor.tab_to("Select all that are shown")
        await visitor.press("Space")
        await visitor.sees("2 selected")
        await visitor.tab_to("Archive…", tag="button")
        await visitor.press("Enter")
        await visitor.sees("Archive 2 letters?")
        assert await visitor.axe() == []
        await visitor.write("tests of somebody")
        await visitor.press("Enter")
        await visitor.sees("2 letters archived.", "2 shown, 2 match")
        assert await states(installation) == ["captured", "archived", "archived"]
