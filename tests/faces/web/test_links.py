"""The page that a one-time link opens: whoever looks uses up nothing, its button signs in once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import Role
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.support.browser import Chromium

HTML = {"accept": "text/html"}
USED = "has been used, or its five minutes are over"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def a_link(installation: AdminInstallation, token: str = TOKEN) -> str:
    async with installation.client(token) as client:
        path: str = (await client.post("/admin/session/link")).json()["path"]
        return path


async def follow(browser: httpx2.AsyncClient, path: str, **headers: str) -> httpx2.Response:
    """As the button of the page does."""
    page, _, secret = path.partition("?secret=")
    return await browser.post(page, data={"secret": secret}, headers={**HTML, **headers})


async def test_a_look_uses_up_nothing_and_the_button_signs_in_once(installation: AdminInstallation) -> None:
    path = await a_link(installation, await installation.token("low", Role.VIEWER))
    async with installation.client("") as preview, installation.client("") as browser:
        for _ in range(3):
            page = await preview.get(path, headers=HTML)
            assert page.status_code == 200
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["cache-control"] == "no-store"
            assert not preview.cookies
        opened = await follow(browser, path, origin="null", **{"sec-fetch-site": "same-origin"})
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert "low" in (await browser.get("/", headers=HTML)).text
        again = await follow(preview, path)
        assert (again.status_code, USED in again.text, len(preview.cookies)) == (401, True, 0)
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
    assert [(row.actor, row.detail) for row in rows if row.action == "session.open"] == [("token:low", "by a link")]


async def test_a_link_that_was_not_made_opens_nothing(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        for path in ("/sign-in/link?secret=", "/sign-in/link?secret=guess", "/sign-in/link?secret=%FF"):
            assert (await follow(browser, path)).status_code == 401
        assert USED in (await browser.get("/sign-in/link", headers=HTML)).text
        assert not browser.cookies


async def test_a_link_ends_with_its_token(installation: AdminInstallation) -> None:
    path = await a_link(installation, await installation.token("low", Role.VIEWER))
    await installation.vault_app.tokens.revoke("low", LedgerAct(actor="test", action="tokens.revoke"))
    async with installation.client("") as browser:
        assert (await follow(browser, path)).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "for=10.0.0.1"},
        {"via": "1.1 proxy"},
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_a_link_is_for_a_page_on_this_machine_alone(
    installation: AdminInstallation, headers: dict[str, str]
) -> None:
    path = await a_link(installation)
    async with installation.client("") as browser:
        assert (await follow(browser, path, **headers)).status_code == 403
        assert (await follow(browser, path)).status_code == 303, "what was refused has not used it up"


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_a_person_signs_in_by_a_link(tmp_path: Path, chromium: Chromium) -> None:
    async with open_installation(tmp_path) as installation:
        for javascript in (True, False):
            async with chromium.visitor(installation.url, javascript=javascript) as visitor:
                visitor.expects("/live")
                await visitor.open(await a_link(installation))
                if javascript:
                    assert await visitor.axe() == []
                await visitor.page.get_by_role("button", name="Sign in").click()
                await visitor.sees("admin", "Sign out")
                assert visitor.page.url == f"{installation.url}/"
