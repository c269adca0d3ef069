"""One letter: its story, body, headers and revisions, and the form that edits it. As a browser without scripts."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from msgspec.structs import replace
from playwright.async_api import expect

from holdfast.core.letter import NewLetter
from holdfast.core.requests.declare import Role
from holdfast.core.requests.vault import EditLetter
from holdfast.core.states import LetterState
from holdfast.services.vault.capture import CLAIM_S
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.web.test_letters import browser_of, hidden, page
from tests.faces.web.test_sessions import HTML, csrf_of
from tests.support.browser import Chromium, Visitor
from tests.vault.letters import ACT, ADMIN, DLQ, act, letter

EVIL = "<script>alert('x')</script>"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def put(installation: AdminInstallation, *letters: NewLetter) -> None:
    await installation.vault_app.vault.letters.put(letters, ACT)


def shown_body(text: str) -> str:
    (found,) = re.findall(r'<pre id="bytes"[^>]*>\n(.*?)</pre>', text, flags=re.DOTALL)
    return html.unescape(found)


def form_of(text: str) -> dict[str, str]:
    """What a browser would send of the form that edits, with nothing changed in it."""
    fields = dict(re.findall(r'<input name="((?:h|new|value)-[^"]+)" value="([^"]*)"', text)) | hidden(text)
    fields |= dict(re.findall(r'<textarea[^>]* name="([^"]+)"[^>]*>\n(.*?)</textarea>', text, flags=re.DOTALL))
    fields |= dict(re.findall(r'<select name="([^"]+)".*?<option value="(\w+)" selected>', text))
    # A browser ends every line in this way.
    return {html.unescape(name): html.unescape(value).replace("\n", "\r\n") for name, value in fields.items()}


async def save(browser: httpx2.AsyncClient, number: int, fields: dict[str, str]) -> httpx2.Response:
    return await browser.post(f"/letters/{number}/edit", data=fields, headers=HTML)


async def body_of(installation: AdminInstallation, number: int) -> bytes:
    found = await installation.vault_app.vault.letters.content(number)
    assert found is not None
    return found.body


# --- reading --------------------------------------------------------------------------------------------------


async def test_a_body_is_shown_as_what_it_is_and_not_changed(installation: AdminInstallation) -> None:
    cases = [
        (
            b'{"b":1.0,"a":12345678901234567890.50,"b":[]}',
            '{\n  "b": 1.0,\n  "a": 12345678901234567890.50,\n  "b": []\n}',
        ),
        (b"<a x='1'><b>t</b><c/></a>", "<a x='1'>\n  <b>t</b>\n  <c/>\n</a>"),
        (b"\n\n plain <b> &amp; \xc3\xa9\n", "\n\n plain <b> &amp; é\n"),
        (b'<!DOCTYPE x [<!ENTITY y "z">]><x>&y;</x>', '<!DOCTYPE x [<!ENTITY y "z">]><x>&y;</x>'),
        (b"\x00\xff", f"00000000  {'00 ff':<49} ··"),
        (b'{"broken":', '{"broken":'),
    ]
    await put(installation, *(letter(body) for body, _ in cases))
    async with browser_of(installation) as browser:
        for number, (body, text) in enumerate(cases, start=1):
            assert shown_body(await page(browser, f"/letters/{number}")) == text, body
            assert shown_body(await page(browser, f"/letters/{number}?view=hex")).startswith("00000000  ")
            downloaded = await browser.get(f"/letters/{number}/body")
            assert downloaded.content == body
            assert downloaded.headers["content-type"] == "application/octet-stream"
            assert downloaded.headers["content-disposition"].startswith("attachment;")
            assert downloaded.headers["x-content-type-options"] == "nosniff"
            assert "sandbox" in downloaded.headers["content-security-policy"]
        assert shown_body(await page(browser, "/letters/1?view=raw")) == cases[0][0].decode()


async def test_of_a_large_body_the_first_part_is_shown_and_the_rest_offered(installation: AdminInstallation) -> None:
    vault_app = installation.vault_app
    line = "é" * 9 + "\n"
    large = line.encode() * (16 * 2**20 // len(line.encode()))
    blobs = vault_app.custody._blobs
    assert blobs is not None
    await vault_app.vault.unclaimed.announce(["letters/large"], for_s=CLAIM_S)
    await blobs.put("letters/large", large)
    await put(installation, replace(letter(b""), blob="letters/large", body_bytes=len(large)))
    async with browser_of(installation) as browser:
        answer = await browser.get("/letters/1", headers=HTML)
        assert answer.elapsed.total_seconds() < 1
        assert len(answer.content) < 500_000
        parts = [shown_body(answer.text)]
        while len(parts) < 4:
            (onward,) = re.findall(r'href="(/letters/1\?[^"]*from=\d+)#body">Next', answer.text)
            answer = await browser.get(html.unescape(onward), headers=HTML)
            parts.append(shown_body(answer.text))
        assert "".join(parts) == large.decode()[: len("".join(parts))]
        assert "← Before" in answer.text
        assert (await browser.get("/letters/1/body")).content == large


async def test_its_story_is_told_from_its_headers_and_the_ledger(installation: AdminInstallation) -> None:
    deep: object = [None] * 20_000
    for _ in range(60):
        deep = [deep]
    headers: dict[str, object] = {
        "x-death": [
            {"queue": "orders", "reason": "rejected", "count": 2, "time": {"timestamp": "2026-01-02T03:04:05+00:00"}},
            {"queue": "orders.retry", "reason": "expired", "count": 1, "time": {"timestamp": "not a moment"}},
            "nonsense",
        ],
        "x-redriven-at": "2026-01-01T00:00:00+00:00",
        "x-redriven-by": "alice",
        "x-redriven-count": 1,
        "deep": deep,
    }
    sent = {"timestamp": {"timestamp": "2025-12-31T00:00:00+00:00"}, "app_id": "shop"}
    await put(installation, replace(letter(b"x", headers=headers), shown=sent))
    letters, captured = installation.vault_app.vault.letters, LetterState.CAPTURED
    await letters.move([1], source=captured, target=LetterState.ARCHIVED, act=act("letters.archive"), expected=1)
    async with browser_of(installation) as browser:
        text = await page(browser, "/letters/1")
    (timeline,) = re.findall(r'<ol class="timeline">(.*?)</ol>', text, flags=re.DOTALL)
    assert len(text) < 200_000
    assert re.findall(r"<strong>(.*?)</strong>", timeline) == [
        "Published",
        "Redriven, redrive 1 of it",
        "expired in orders.retry",
        "rejected in orders, 2 times",
        "Died in orders after 3 attempts: rejected",
        "Captured from orders.dlq",
        "Archived",
    ]
    assert "2025-12-31 00:00:00 UTC" in timeline
    assert "ValueError: no" in timeline
    assert "because" in timeline
    assert "shop" in text


async def test_what_a_stranger_sent_stays_text(installation: AdminInstallation) -> None:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{EVIL}</svg>'
    evil = letter(
        svg.encode(),
        queue=f"{EVIL}.dlq",
        type=EVIL,
        headers={
            EVIL: EVIL,
            "link": "javascript:alert(1)",
            "x-death": [{"queue": EVIL, "reason": EVIL}],
            "list": [EVIL] * 30,
        },
        reason=EVIL,
        error_message=f'"><img src=x onerror=alert(1)>{EVIL}',
        error_stack=f"{EVIL}</pre>{EVIL}",
    )
    await put(installation, replace(evil, message_id=f'"{EVIL}', shown={"app_id": EVIL, EVIL: "x"}))
    async with browser_of(installation) as browser:
        texts = [await page(browser, f"/letters/1{more}") for more in ("", "?view=raw", "?view=hex", "/edit")]
        fields = form_of(texts[-1])
        assert fields[f"h-{EVIL}"] == EVIL
        await save(browser, 1, {**fields, "body": f"<b>{EVIL}", f"h-{EVIL}": f"other {EVIL}", "why": EVIL})
        texts.append(await page(browser, "/letters/1"))
    for text in texts:
        for wrong in ("<script>", "<svg xmlns", "<img src=x", 'href="javascript', "<b>"):
            assert wrong not in text, wrong


async def test_who_may_not_read_bodies_sees_none(installation: AdminInstallation) -> None:
    await put(installation, letter(b"a-secret"))
    viewer = await installation.token("viewer", Role.VIEWER)
    operator = await installation.token("operator", Role.OPERATOR)
    async with browser_of(installation, viewer) as browser:
        text = await page(browser, "/letters/1")
        assert ("a-secret" in text, "Redrive this one" in text) == (False, False)
        assert (await browser.get("/letters/1/body", headers=HTML)).status_code == 403
    async with browser_of(installation, operator) as browser:
        text = await page(browser, "/letters/1")
        assert ("a-secret" in text, "Archive…" in text, "Discard…" in text, "/edit" in text) == (
            True,
            True,
            False,
            False,
        )
        assert (await browser.get("/letters/1/edit", headers=HTML)).status_code == 403
        refused = await save(browser, 1, {"csrf": csrf_of(text), "revision": "0", "body": "other"})
        assert refused.status_code == 403
    assert await body_of(installation, 1) == b"a-secret"


async def test_a_letter_of_another_queue_or_none_is_not_there(installation: AdminInstallation) -> None:
    await put(installation, letter(b"a-secret", queue="pay.dlq", headers={"secret": 1}))
    held = await installation.token("held", Role.ADMIN, ["orders*"])
    async with browser_of(installation, held) as browser:
        for path in ("/letters/1", "/letters/1/body", "/letters/1/edit", "/letters/99", "/letters/x"):
            answer = await browser.get(path, headers=HTML)
            assert (answer.status_code, "secret" in answer.text) == (404, False), path


# --- editing --------------------------------------------------------------------------------------------------


async def test_an_edit_changes_what_was_changed_and_nothing_else(installation: AdminInstallation) -> None:
    headers: dict[str, object] = {
        "tenant": "a",
        "number": 7,
        "lines": "one\ntwo",
        "moment": {"timestamp": "2026-01-01T00:00:00+00:00"},
        "x-kept-cc": ["b"],
        "x-retry-count": 3,
    }
    body = "\nfirst\nsecond é\n".encode()
    await put(installation, letter(body, headers=headers))
    async with browser_of(installation) as browser:
        fields = form_of(await page(browser, "/letters/1/edit"))
        assert "h-x-retry-count" not in fields
        assert "h-moment" not in fields
        unchanged = await save(browser, 1, fields)
        assert (unchanged.status_code, "Nothing was changed" in unchanged.text) == (400, True)
        done = await save(browser, 1, {**fields, "h-tenant": "b", "why": "mended"})
        assert (done.status_code, done.headers["location"]) == (303, "/letters/1")
        assert await body_of(installation, 1) == body
        more = form_of(await page(browser, "/letters/1/edit"))
        assert more["h-tenant"] == "b"
        await save(
            browser,
            1,
            {
                **more,
                "body": more["body"].replace("second", "2nd"),
                "h-number": "8",
                "drop-lines": "1",
                "new-0": "extra",
                "value-0": '{"a": [1]}',
                "new-as-0": "json",
            },
        )
        content = await installation.vault_app.vault.letters.content(1)
        assert content is not None
        assert content.body == "\nfirst\n2nd é\n".encode()
        assert content.put == {"tenant": "b", "number": 8, "extra": {"a": [1]}}
        assert content.drop == ("lines",)
        text = await page(browser, "/letters/1")
        assert "<del>− second é</del><ins>+ 2nd é</ins>" in text
        assert "mended" in text
        assert shown_body(await page(browser, "/letters/1?revision=0")) == body.decode()
        again = await browser.post("/letters/1/original", data={"csrf": csrf_of(text), "revision": "2"}, headers=HTML)
        assert again.status_code == 303
        assert await body_of(installation, 1) == body


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"h-x-kept-cc": '["c"]'}, "is sensitive"),
        ({"new-0": "x-death", "value-0": "x"}, "is locked"),
        ({"new-0": "x-redrive-id", "value-0": "x"}, "is locked"),
        ({"h-number": "{"}, "is invalid"),
        ({"revision": "x"}, "not a whole number"),
    ],
)
async def test_what_may_not_be_edited_is_refused_and_what_was_written_is_kept(
    installation: AdminInstallation, changed: dict[str, str], why: str
) -> None:
    await put(installation, letter(b"x", headers={"x-kept-cc": ["b"], "number": 7}))
    async with browser_of(installation) as browser:
        fields = form_of(await page(browser, "/letters/1/edit"))
        refused = await save(browser, 1, {**fields, **changed, "body": "what I wrote"})
        assert (refused.status_code, why in refused.text) == (400, True), refused.text
        if "revision" not in changed:
            assert form_of(refused.text)["body"] == "what I wrote"
            assert await body_of(installation, 1) == b"x"
            meant = await save(browser, 1, {**form_of(refused.text), "sensitive": "1"})
            assert meant.status_code == (303 if "h-x-kept-cc" in changed else 400)


@pytest.mark.parametrize("body", [b"\x00binary", b"a\r\nb\nc", b"a\rb", b"x" * (1024 * 1024 + 1)])
async def test_a_body_that_a_form_would_change_is_not_offered_there(
    installation: AdminInstallation, body: bytes
) -> None:
    await put(installation, letter(body, headers={"tenant": "a"}))
    async with browser_of(installation) as browser:
        fields = form_of(await page(browser, "/letters/1/edit"))
        assert "body" not in fields
        await save(browser, 1, {**fields, "h-tenant": "b", "body": "slipped in"})
    assert await body_of(installation, 1) == body


async def test_the_ends_of_lines_stay_as_they_are(installation: AdminInstallation) -> None:
    await put(installation, letter(b"a\r\nb\r\n"), letter(b"a\nb\n"))
    async with browser_of(installation) as browser:
        for number, expected in ((1, b"a\r\nbc\r\n"), (2, b"a\nbc\n")):
            fields = form_of(await page(browser, f"/letters/{number}/edit"))
            await save(browser, number, {**fields, "body": fields["body"].replace("b", "bc")})
            assert await body_of(installation, number) == expected


async def test_who_was_slower_keeps_what_he_wrote_and_is_told_what_changed(installation: AdminInstallation) -> None:
    await put(installation, letter(b"first\nsecond", headers={"tenant": "a", "other": "x"}))
    async with browser_of(installation) as browser:
        fields = form_of(await page(browser, "/letters/1/edit"))
        await installation.vault_app.call(
            EditLetter(id=1, revision=0, body=b"theirs", put={"other": "y"}, reason="we were faster"), ADMIN
        )
        refused = await save(browser, 1, {**fields, "h-tenant": "mine"})
        assert refused.status_code == 409
        assert "What changed meanwhile" in refused.text
        assert "we were faster" in refused.text
        now = form_of(refused.text)
        # What was touched is kept, all else is as it is now.
        assert (now["h-tenant"], now["h-other"], now["body"], now["revision"]) == ("mine", "y", "theirs", "1")
        assert (await save(browser, 1, now)).status_code == 303
    content = await installation.vault_app.vault.letters.content(1)
    assert content is not None
    assert (content.body, content.put) == (b"theirs", {"other": "y", "tenant": "mine"})


async def test_a_letter_that_went_on_its_way_is_not_edited_and_nothing_written_is_lost(
    installation: AdminInstallation,
) -> None:
    await put(installation, letter(b"x"))
    async with browser_of(installation) as browser:
        fields = form_of(await page(browser, "/letters/1/edit"))
        letters, captured = installation.vault_app.vault.letters, LetterState.CAPTURED
        await letters.move([1], source=captured, target=LetterState.ARCHIVED, act=act("archive"), expected=1)
        refused = await save(browser, 1, {**fields, "body": "a long text"})
        assert (refused.status_code, "a long text" in refused.text) == (409, True)
        assert "only a captured one can be edited" in refused.text
        assert "Save as" not in refused.text


# --- in a browser ---------------------------------------------------------------------------------------------


async def sign_in(visitor: Visitor, token: str) -> None:
    visitor.expects("/live", "status of 409")
    await visitor.open("/sign-in")
    await visitor.page.fill("#token", token)
    await visitor.press("Enter")
    await visitor.sees("Sign out")


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_two_people_edit_one_letter(tmp_path: Path, chromium: Chromium) -> None:
    async with (
        open_installation(tmp_path) as installation,
        chromium.visitor(installation.url) as one,
        chromium.visitor(installation.url, javascript=False) as other,
    ):
        await put(installation, letter(b'{"amount": 1}', headers={"tenant": EVIL}))
        await sign_in(one, TOKEN)
        await sign_in(other, await installation.token("bob", Role.ADMIN))
        for visitor in (one, other):
            await visitor.open(f"/letters?queue={DLQ}")
            await visitor.page.click("#open-1")
            await visitor.sees("Its story", '"amount": 1', EVIL)
            await visitor.page.get_by_role("link", name="Edit").click()
        assert await one.axe() == []
        await other.page.locator("#text").fill('{"amount": 2}')
        await other.page.get_by_role("button", name="Save as revision 1").click()
        await other.sees("Revision 1 is made", '"amount": 2')
        await one.page.locator("#text").fill('{"amount": 3}')
        await one.page.get_by_role("button", name="Save as revision 1").click()
        await one.sees("What changed meanwhile", "by token:bob", '"amount": 2')
        assert await one.axe() == []
        await expect(one.page.locator("#text")).to_have_value('{"amount": 3}')
        await one.page.get_by_role("button", name="Save as revision 2").click()
        await one.sees("Revision 2 is made")
        assert await one.axe() == []
        assert await body_of(installation, 1) == b'{"amount": 3}'
