"""Who guesses tokens waits and is told of; who floods sessions or the ledger fills only what is his own."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from holdfast.core.moments import Backoff
from holdfast.core.requests.declare import Role
from holdfast.errors import Unauthorized
from holdfast.faces.api import authenticator
from holdfast.services.vault import access
from holdfast.services.vault.access import SESSIONS_COUNT_MAX, Sessions
from holdfast.testing import FrozenClock
from tests.faces.api.conftest import TOKEN, AdminInstallation
from tests.support.command import Command


def test_a_token_ends_only_its_own_sessions() -> None:
    sessions = Sessions(clock=FrozenClock())
    admin, _ = sessions.open("admin")
    first, _ = sessions.open("viewer")
    newest = [sessions.open("viewer")[0] for _ in range(3 * SESSIONS_COUNT_MAX)][-SESSIONS_COUNT_MAX:]
    assert sessions.find(admin) is not None
    assert sessions.find(first) is None
    assert all(sessions.find(secret) is not None for secret in newest)
    assert len(sessions) == SESSIONS_COUNT_MAX + 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/queue.stats"), ("GET", "/admin/letters"), ("GET", "/v1/results"), ("GET", "/openapi.json")],
)
async def test_wrong_tokens_are_slowed_down_counted_and_told_without_them(
    installation: AdminInstallation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(authenticator, "WAITS", Backoff(first_s=0.3, delay_s_max=0.3))
    async with installation.client("a-guess-of-mine") as guesser, installation.client() as admin:
        started_s = time.monotonic()
        for _ in range(authenticator.WRONG_COUNT_FREE + 1):
            assert (await guesser.request(method, path)).status_code == 401
        assert time.monotonic() - started_s >= 0.3
        slow = asyncio.create_task(guesser.request(method, path))
        assert (await admin.get("/admin/letters")).status_code == 200
        assert not slow.done(), "the right token from the same address does not wait"
        await slow
        page = (await admin.get("/metrics")).text
    assert 'holdfast_events_total{event="server.wrong_token"' in page
    told = [record.message for record in caplog.records if "wrong tokens" in record.message]
    assert [line.split()[0] for line in told] == ["1", "2", "4"]
    assert "a-guess-of-mine" not in caplog.text


async def test_a_request_without_a_token_is_no_guess(installation: AdminInstallation) -> None:
    async with installation.client("") as nobody:
        for _ in range(50):
            assert (await nobody.get("/admin/letters")).status_code == 401


async def test_the_addresses_that_guess_are_bounded(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "ADDRESSES_COUNT_MAX", 3)
    own = authenticator.Authenticator(authenticator.token_hash(TOKEN))
    for number in range(10):
        scope = {"headers": [(b"authorization", b"Bearer no")], "client": (f"10.0.0.{number}", 1)}
        await own.slow_down(scope, Unauthorized())
    assert len(own._wrong) == 3


async def test_refused_calls_of_one_caller_are_summed_up(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await installation.token("low", Role.VIEWER)
    async with installation.client(token) as client:
        for _ in range(50):
            assert (await client.post("/admin/tokens", json={})).status_code == 403
        assert (await client.post("/admin/letters/archive", json={})).status_code == 403
    await installation.vault_app.close()
    rows = await installation.vault_app.vault.ledger.rows(after=0, count_max=1_000)
    denied = [row for row in rows if row.outcome == "denied"]
    assert len(denied) == access.REFUSED_ROWS_COUNT_MAX + 1
    assert denied[-1].actor == "token:low"
    assert "51 calls were refused" in denied[-1].detail
    assert "50 tokens.create, 1 letters.archive" in denied[-1].detail


@pytest.mark.slow
def test_a_short_admin_token_is_refused_at_the_start(tmp_path: Path) -> None:
    command = Command(tmp_path, f"sqlite:///{tmp_path}/data")
    refused = command("serve", "--listen", "127.0.0.1:0", HOLDFAST_ADMIN_TOKEN="s3cret-and-short")
    assert refused.code == 1
    assert refused.stderr.count("\n") == 1
    assert "admin token is too short" in refused.stderr
    assert "s3cret" not in refused.stderr
    (tmp_path / "holdfast-data").mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "holdfast-data" / "admin-token").write_text("short")
    refused = command("serve", "--listen", "127.0.0.1:0")
    assert "admin token is too short" in refused.stderr
