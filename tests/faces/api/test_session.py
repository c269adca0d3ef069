"""Sessions of browsers: a cookie that no script reads, a token that every change needs, and an end."""

from __future__ import annotations

import httpx2
import pytest

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import Role
from holdfast.services.vault.access import SESSION_S, SESSIONS_COUNT_MAX, Sessions, is_own_page
from holdfast.testing import FrozenClock
from tests.faces.api.conftest import TOKEN, AdminInstallation
from tests.vault.letters import DLQ

ARCHIVE = {"selection": {"queue": DLQ}, "count": 1}


async def opened(installation: AdminInstallation, token: str = TOKEN) -> tuple[httpx2.AsyncClient, str]:
    """A browser with a session, and its CSRF token."""
    async with installation.client(token) as client:
        answer = await client.post("/admin/session")
        assert answer.status_code == 200, answer.text
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Secure" not in cookie, "over plain http a browser would drop it"
    assert answer.headers["cache-control"] == "no-store"
    assert TOKEN not in answer.text + cookie
    browser = installation.client("")
    browser.headers["cookie"] = cookie.partition(";")[0]
    return browser, answer.json()["csrf_token"]


async def test_a_change_by_cookie_needs_the_csrf_token_and_a_look_does_not(installation: AdminInstallation) -> None:
    await installation.put(b"1")
    browser, csrf = await opened(installation)
    async with browser:
        assert (await browser.get("/admin/letters")).json()["count"] == 1
        for headers in ({}, {"x-csrf-token": ""}, {"x-csrf-token": "guess"}):
            denied = await browser.post("/admin/letters/archive", json=ARCHIVE, headers=headers)
            assert (denied.status_code, "x-csrf-token" in denied.json()["detail"]) == (403, True)
        rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=100)
        assert [row.outcome for row in rows if row.action == "letters.archive"] == ["denied"] * 3
        produce = {"queue_name": "q", "request_timeout": "1s", "items": [{"utf8": "x"}]}
        assert (await browser.post("/v1/queue.produce", json=produce)).status_code == 403
        done = await browser.post("/admin/letters/archive", json=ARCHIVE, headers={"x-csrf-token": csrf})
        assert done.json() == {"count": 1}
        newest = (await installation.vault_app.vault.ledger.rows(after=0, count_max=10_000))[-1]
        assert (newest.actor, newest.action) == ("admin", "letters.archive")


async def test_a_session_is_shown_again_and_ended(installation: AdminInstallation) -> None:
    browser, csrf = await opened(installation)
    async with browser:
        shown = (await browser.get("/admin/session")).json()
        assert (shown["name"], shown["role"], shown["csrf_token"]) == ("admin", "admin", csrf)
        assert (await browser.request("DELETE", "/admin/session")).status_code == 403
        ended = await browser.request("DELETE", "/admin/session", headers={"x-csrf-token": csrf})
        assert (ended.json(), "Max-Age=0" in ended.headers["set-cookie"]) == ({"count": 1}, True)
        assert (await browser.get("/admin/letters")).status_code == 401


async def test_a_session_may_do_what_its_token_may_and_ends_with_it(installation: AdminInstallation) -> None:
    token = await installation.token("low", Role.VIEWER)
    browser, csrf = await opened(installation, token)
    async with browser:
        assert (await browser.get("/admin/session")).json()["role"] == "viewer"
        denied = await browser.post("/admin/letters/archive", json=ARCHIVE, headers={"x-csrf-token": csrf})
        assert denied.status_code == 403
        again = await browser.post("/admin/session", headers={"x-csrf-token": csrf})
        assert again.status_code == 409, "a session opens no other"
        await installation.vault_app.tokens.revoke("low", LedgerAct(actor="test", action="tokens.revoke"))
        assert (await browser.get("/admin/letters")).status_code == 401


@pytest.mark.parametrize("cookie", ["holdfast_session=", "holdfast_session=wrong", "other=1", "=;;=", "\xff"])
async def test_a_cookie_that_is_no_session_is_401(installation: AdminInstallation, cookie: str) -> None:
    async with installation.client("") as client:
        answer = await client.get("/admin/letters", headers={b"cookie": cookie.encode("latin-1")})
        assert answer.status_code == 401


async def test_sessions_end_by_time_and_are_bounded() -> None:
    clock = FrozenClock()
    sessions = Sessions(clock=clock)
    first, _ = sessions.open("t")
    assert sessions.find(first) is not None
    await clock.advance(SESSION_S)
    assert sessions.find(first) is None
    kept = [sessions.open("t")[0] for _ in range(SESSIONS_COUNT_MAX + 3)]
    assert len(sessions) == SESSIONS_COUNT_MAX
    assert [sessions.find(secret) is None for secret in kept[:4]] == [True, True, True, False]
    secret, session = sessions.open("t")
    assert is_own_page(session, session.csrf)
    assert not is_own_page(session, secret)
    assert sessions.close(secret)
    assert not sessions.close(secret)
