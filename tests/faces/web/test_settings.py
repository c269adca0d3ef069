"""The page of settings: tokens are made and revoked, and what the server was started with is shown without secrets."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from holdfast.core.requests.declare import Role
from holdfast.settings import Secret
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.web.visiting import notice_of, text_of, visiting
from tests.support.browser import Chromium

HIDDEN = "a-password-of-theirs"


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


def made_token(page: str) -> str:
    found = re.search(r'<code id="made">([^<]+)</code>', page)
    assert found, text_of(page)
    return found.group(1)


async def may_enter(installation: AdminInstallation, token: str) -> int:
    async with installation.client(token) as client:
        answer: httpx2.Response = await client.get("/admin/letters")
        return answer.status_code


async def test_a_token_is_made_shown_once_and_revoked(installation: AdminInstallation) -> None:
    async with visiting(installation) as tab:
        assert "No tokens were made yet." in await tab.get("/settings")
        fields = {"do": "create", "name": "ci <x>", "role": "operator", "expires_in": "720h", "queues": ""}
        page = await tab.post("/settings", fields, status=200)
        token = made_token(page)
        assert await may_enter(installation, token) == 200
        assert f'data-copy="{token}"' in page
        assert token not in await tab.get("/settings"), "shown this once"
        assert "ci <x> operator all" in text_of(page)
        again = await tab.post("/settings", fields, status=409)
        assert notice_of(again)
        assert 'value="ci &lt;x&gt;"' in again, "what was written stays"
        done = await tab.post("/settings", {"do": "revoke", "name": "ci <x>"})
        assert notice_of(done) == "The token ci <x> is revoked: it lets nobody in any more."
        assert await may_enter(installation, token) == 401
        assert "revoked" in text_of(await tab.get("/settings"))
        gone = await tab.post("/settings", {"do": "revoke", "name": "ci <x>"}, status=404)
        assert notice_of(gone)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": ""}, "Token is invalid"),
        ({"role": "king"}, "Token is invalid"),
        ({"expires_in": "soon"}, "expires_in"),
        ({"expires_in": "9" * 16}, "Token is invalid"),
        ({"do": "steal"}, "does not say what is to be done"),
    ],
)
async def test_what_is_no_token_is_refused(installation: AdminInstallation, wrong: dict[str, str], why: str) -> None:
    async with visiting(installation) as tab:
        await tab.get("/settings")
        fields = {"do": "create", "name": "ci", "role": "viewer", "expires_in": "", "queues": "", **wrong}
        page = await tab.post("/settings", fields, status=400)
        assert why.lower() in notice_of(page).lower()
        assert "No tokens were made yet." in page


async def test_a_token_may_be_for_some_queues(installation: AdminInstallation) -> None:
    async with visiting(installation) as tab:
        await tab.get("/settings")
        fields = {"do": "create", "name": "mine", "role": "admin", "expires_in": "", "queues": "mine*, my.dlq  other"}
        page = await tab.post("/settings", fields, status=200)
        assert "mine*, my.dlq, other" in text_of(page)
        token = made_token(page)
    async with visiting(installation, token) as tab:
        assert "Settings" not in await tab.get("/")
        await tab.get("/settings", status=403)


async def test_only_admins_see_it_and_who_tries_is_recorded(installation: AdminInstallation) -> None:
    for role in (Role.VIEWER, Role.OPERATOR):
        token = await installation.token(role.word, role)
        async with visiting(installation, token) as tab:
            assert "Settings" not in await tab.get("/queues")
            assert "needs the role admin" in text_of(await tab.get("/settings", status=403))
            await tab.get("/queues")
            await tab.post("/settings", {"do": "revoke", "name": "viewer"}, status=403)
    async with visiting(installation) as tab:
        assert "operator" in await tab.get("/ledger?outcome=denied&action=tokens.revoke")
        assert "valid" in text_of(await tab.get("/settings"))


async def test_the_configuration_is_shown_without_secrets_as_programs_get_it(tmp_path: Path) -> None:
    secrets = {
        "admin_token": Secret(HIDDEN),
        "ledger_key": Secret(HIDDEN),
        "vault": Secret(f"sqlite:///{tmp_path}/vault"),
        "collect_broker": Secret(f"amqp://user:{HIDDEN}@127.0.0.1/"),
    }
    sources = {"dead_queues": "environment HOLDFAST_DEAD_QUEUES"}
    async with open_installation(tmp_path, dead_queues="*.dlq,*.dead", sources=sources, **secrets) as installation:
        async with visiting(installation) as tab:
            page = await tab.get("/settings")
            assert "*.dlq,*.dead" in page
            assert "environment HOLDFAST_DEAD_QUEUES" in page
            assert HIDDEN not in page
        async with installation.client() as client:
            told = (await client.get("/admin/config")).json()
        assert HIDDEN not in str(told)
        found = {one["key"]: one for one in told}
        assert found["ledger_key"]["text"] == "***"
        assert found["dead_queues"]["source"] == sources["dead_queues"]
        assert [key for key in found if f"<code>{key}</code>" not in page] == []


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_pages_of_the_ledger_and_of_settings_are_for_everybody(chromium: Chromium, tmp_path: Path) -> None:
    async with open_installation(tmp_path) as installation, chromium.visitor(installation.url) as visitor:
        await installation.put(b"1", b"2")
        await installation.token("ci", Role.VIEWER)
        await visitor.open("/sign-in?next=/settings")
        await visitor.write(TOKEN)
        await visitor.press("Enter")
        await visitor.sees("Configuration")
        for path in ("/settings", "/ledger", "/ledger/verify?verify=true", "/ledger/balance", "/queues", "/new-queue"):
            await visitor.open(path)
            assert await visitor.axe() == [], path
