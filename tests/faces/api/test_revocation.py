"""A token that is revoked, or past its time, gets nothing more, also by a request that was waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from msgspec import json

from holdfast import NewItem
from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import HANDLERS, Role
from holdfast.core.requests.queue import ListItemsRequest
from holdfast.core.requests.results import ListResults
from holdfast.core.requests.vault import CreateToken, ListGroups
from holdfast.faces.api import authenticator
from holdfast.faces.web.console import Visit
from holdfast.services.vault import admin
from holdfast.testing import FrozenClock
from tests.faces.api.conftest import TOKEN, AdminInstallation
from tests.support.eventually import eventually

ACT = LedgerAct(actor="test", action="tokens.revoke")


@pytest.fixture
async def token(installation: AdminInstallation) -> str:
    await installation.queues.queues_create("orders")
    return await installation.token("soon", Role.OPERATOR)


class Asked:
    """One request, and what has come of its answer so far."""

    def __init__(
        self,
        installation: AdminInstallation,
        token: str,
        method: str,
        path: str,
        body: object = None,
        *,
        cookie: str = "",
    ) -> None:
        self.status = 0
        self.body = b""
        content = json.encode(body) if body is not None else b""
        headers = {"cookie": cookie} if cookie else {}
        self.task = asyncio.create_task(self._ask(installation.client(token), method, path, content, headers))

    async def _ask(
        self, client: httpx2.AsyncClient, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> None:
        async with client, client.stream(method, path, content=content, headers=headers) as answer:
            self.status = answer.status_code
            async for chunk in answer.aiter_raw():
                self.body += chunk


@pytest.fixture
async def ask(installation: AdminInstallation, token: str) -> AsyncIterator[Callable[..., Asked]]:
    asked: list[Asked] = []

    def one(method: str, path: str, body: object = None) -> Asked:
        asked.append(Asked(installation, token, method, path, body))
        return asked[-1]

    yield one
    for each in asked:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in asked), return_exceptions=True)


LEASE = {"queue_name": "orders", "batch_size": 1, "request_timeout": "5m", "client_id": "c"}
PRODUCE = {"queue_name": "orders", "request_timeout": "5m", "items": [{"utf8": "too late"}]}


async def _waiting(installation: AdminInstallation, what: str) -> None:
    async def is_there() -> bool:
        (logical,) = (await installation.queues.queue_stats("orders")).logical_queues
        return bool(getattr(logical, what) == 1)

    await eventually(is_there)


async def test_a_waiting_lease_of_a_revoked_token_ends_and_gets_nothing(
    installation: AdminInstallation, ask: Callable[..., Asked]
) -> None:
    lease = ask("POST", "/v1/queue.lease", LEASE)
    await _waiting(installation, "lease_waiting")
    await installation.vault_app.tokens.revoke("soon", ACT)
    await installation.queues.queue_produce("orders", [NewItem(payload=b"secret")])
    await eventually(lease.task.done)
    assert (lease.status, b"secret" in lease.body) == (401, False)
    (item,) = await installation.queues.storage_items_list("orders")
    assert (item.is_leased, item.attempts) == (False, 0)


async def test_what_was_leased_in_the_moment_of_the_end_is_given_back(
    installation: AdminInstallation, ask: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told of the end: whoever hands out looks for himself."""
    lease = ask("POST", "/v1/queue.lease", LEASE)
    await _waiting(installation, "lease_waiting")
    installation.vault_app.tokens.on_change = lambda: None
    await installation.vault_app.tokens.revoke("soon", ACT)
    await installation.queues.queue_produce("orders", [NewItem(payload=b"secret")])
    await eventually(lease.task.done)
    assert (lease.status, b"secret" in lease.body) == (401, False)

    async def is_free() -> bool:
        (item,) = await installation.queues.storage_items_list("orders")
        return not item.is_leased

    await eventually(is_free)


async def test_a_waiting_produce_of_a_revoked_token_stores_nothing(
    installation: AdminInstallation, ask: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = installation.queues._caller.manager.get("orders")  # type: ignore[attr-defined]
    async with queue.freeze():
        produce = ask("POST", "/v1/queue.produce", PRODUCE)
        await eventually(lambda: len(queue.waiting.produces) == 1)
        await installation.vault_app.tokens.revoke("soon", ACT)
        await eventually(produce.task.done)
    assert produce.status == 401
    assert await installation.queues.storage_items_list("orders") == []


@pytest.mark.parametrize(
    ("request_", "method", "path", "body"),
    [
        (ListGroups, "GET", "/admin/groups", None),
        (ListResults, "GET", "/v1/results", None),
        (ListItemsRequest, "POST", "/v1/storage/items.list", {"queue_name": "orders", "partition": 0}),
        (None, "GET", "/", None),
    ],
)
async def test_what_was_read_for_a_revoked_token_is_not_handed_out(
    installation: AdminInstallation,
    ask: Callable[..., Asked],
    monkeypatch: pytest.MonkeyPatch,
    request_: type[Any] | None,
    method: str,
    path: str,
    body: object,
) -> None:
    begun, revoked = asyncio.Event(), asyncio.Event()
    answer: Callable[..., Any] = HANDLERS[request_] if request_ else Visit.ask

    async def slowly(*given: Any) -> Any:
        begun.set()
        await revoked.wait()
        return await answer(*given)

    if request_ is None:
        monkeypatch.setattr(Visit, "ask", slowly)
    else:
        monkeypatch.setitem(HANDLERS, request_, slowly)
    asked = ask(method, path, body)
    await eventually(begun.is_set)
    await installation.vault_app.tokens.revoke("soon", ACT)
    revoked.set()
    await eventually(asked.task.done)
    assert asked.status in (401, 303)
    assert b"orders" not in asked.body


async def test_an_open_event_stream_ends_with_its_token(
    installation: AdminInstallation, ask: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "EVENTS_STEP_S", 0.01)
    stream = ask("GET", "/admin/events")
    await eventually(lambda: b"event: redrives" in stream.body)
    seen = stream.body
    await installation.vault_app.tokens.revoke("soon", ACT)
    await installation.put(b"1")
    await eventually(stream.task.done)
    assert (stream.status, stream.body) == (200, seen)
    assert stream.task.exception() is None


async def test_a_token_has_so_many_event_streams_and_ends_none_of_anothers(
    installation: AdminInstallation, ask: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "ENDLESS_COUNT_MAX", 3)
    other = Asked(installation, await installation.token("another", Role.VIEWER), "GET", "/admin/events")
    await eventually(lambda: b"tallies" in other.body)
    streams = []
    for _ in range(5):
        streams.append(ask("GET", "/admin/events"))
        await eventually(lambda: b"tallies" in streams[-1].body)
    await eventually(lambda: [one.task.done() for one in streams] == [True, True, False, False, False])
    assert not other.task.done()
    other.task.cancel()


async def test_a_token_that_expires_ends_what_waits(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "LOOK_S", 0.01)
    clock = FrozenClock(installation.vault_app.custody.clock.now_us())
    monkeypatch.setattr(installation.vault_app.tokens, "_clock", clock)
    await installation.queues.queues_create("orders")
    wanted = CreateToken(name="short", role="operator", expires_in="1m")
    token = await installation.vault_app.tokens.create(wanted, ACT)
    lease = Asked(installation, token, "POST", "/v1/queue.lease", LEASE)
    stream = Asked(installation, token, "GET", "/admin/events")
    await _waiting(installation, "lease_waiting")
    await eventually(lambda: b"event: redrives" in stream.body)
    assert not lease.task.done()
    await clock.advance(61)
    await eventually(lambda: lease.task.done() and stream.task.done())
    assert lease.status == 401


async def test_a_session_that_is_closed_ends_its_stream(
    installation: AdminInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "LOOK_S", 0.01)
    monkeypatch.setattr(admin, "EVENTS_STEP_S", 0.01)
    async with installation.client() as client:
        opened = await client.post("/admin/session")
    cookie = opened.headers["set-cookie"].partition(";")[0]
    stream = Asked(installation, "", "GET", "/admin/events", cookie=cookie)
    await eventually(lambda: b"event: redrives" in stream.body)
    async with installation.client("") as browser:
        headers = {"cookie": cookie, "x-csrf-token": opened.json()["csrf_token"]}
        assert (await browser.request("DELETE", "/admin/session", headers=headers)).status_code == 200
    await eventually(stream.task.done)


async def test_the_admin_token_waits_without_being_looked_at(installation: AdminInstallation) -> None:
    await installation.queues.queues_create("orders")
    lease = Asked(installation, TOKEN, "POST", "/v1/queue.lease", LEASE)
    await _waiting(installation, "lease_waiting")
    await installation.vault_app.tokens.load()
    await installation.queues.queue_produce("orders", [NewItem(payload=b"x")])
    await eventually(lease.task.done)
    assert lease.status == 200
