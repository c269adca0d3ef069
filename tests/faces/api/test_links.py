"""Links that open a session once: made with a token, for a browser on the server's own machine alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.core.requests.declare import Role
from holdfast.services.vault.access import LINK_S, LINKS_COUNT_MAX, SessionLinks
from holdfast.testing import FrozenClock
from tests.faces.api.conftest import AdminInstallation, open_installation
from tests.faces.api.test_session import opened

LINK = "/admin/session/link"


async def test_a_link_holds_a_secret_until_five_minutes_from_now(installation: AdminInstallation) -> None:
    async with installation.client() as client:
        answer = await client.post(LINK)
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        page, _, secret = answer.json()["path"].partition("?secret=")
        assert (page, len(secret)) == ("/sign-in/link", 43)
        left = datetime.fromisoformat(answer.json()["expires_at"]) - datetime.now(UTC)
        assert timedelta(minutes=4) < left <= timedelta(minutes=5)
        rows = (await client.get("/admin/ledger")).text
    assert '"session.link"' in rows
    assert secret not in rows


async def test_a_link_is_made_with_a_token_and_not_with_a_session(installation: AdminInstallation) -> None:
    browser, csrf = await opened(installation)
    async with browser, installation.client("") as stranger:
        assert (await browser.post(LINK, headers={"x-csrf-token": csrf})).status_code == 409
        assert (await stranger.post(LINK)).status_code == 401


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "X-Forwarded-Host", "x-forwarded-proto", "forwarded", "via", "x-real-ip"]
)
async def test_what_came_through_a_proxy_gets_no_link(installation: AdminInstallation, header: str) -> None:
    async with installation.client() as client:
        refused = await client.post(LINK, headers={header: "1"})
        assert (refused.status_code, header.lower() in refused.json()["detail"]) == (403, True)
        assert (await client.post(LINK, headers={"host": "evil.example"})).status_code == 403


async def test_a_server_that_others_can_reach_makes_no_link(tmp_path: Path) -> None:
    async with open_installation(tmp_path, listen="0.0.0.0:8470") as installation, installation.client() as client:
        refused = await client.post(LINK)
        assert (refused.status_code, "others can reach" in refused.json()["detail"]) == (403, True)


async def test_a_viewers_link_is_the_viewers(installation: AdminInstallation) -> None:
    async with installation.client(await installation.token("low", Role.VIEWER)) as client:
        assert (await client.post(LINK)).status_code == 200


async def test_a_link_works_once_and_for_five_minutes() -> None:
    clock = FrozenClock()
    links = SessionLinks(clock=clock)
    first, expires_at_us = links.make("t")
    assert expires_at_us == clock.now_us() + LINK_S * 1_000_000
    assert links.use(first) == "t"
    assert links.use(first) is None
    assert links.use("") is None
    late, _ = links.make("t")
    await clock.advance(LINK_S)
    assert links.use(late) is None


async def test_a_token_has_few_links_and_ends_none_of_anothers() -> None:
    clock = FrozenClock()
    links = SessionLinks(clock=clock)
    admins, _ = links.make("admin")
    made = [links.make("viewer")[0] for _ in range(LINKS_COUNT_MAX + 2)]
    assert len(links) == LINKS_COUNT_MAX + 1
    assert [links.use(secret) for secret in made[:3]] == [None, None, "viewer"]
    assert links.use(admins) == "admin"
    await clock.advance(LINK_S)
    links.make("other")
    assert len(links) == 1, "what has ended is forgotten"
