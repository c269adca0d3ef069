"""News for open pages: who hears what, from when on, until when."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.declare import Role
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.support.browser import Chromium
from tests.support.eventually import eventually

HTML = {"accept": "text/html"}


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


class News:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_ended = False

    @property
    def topics(self) -> set[str]:
        told = [self.lines[index + 2] for index, line in enumerate(self.lines) if line == "event: changed"]
        return {topic for line in told for topic in line.removeprefix("data: ").split()} - {"time"}

    def forget(self) -> None:
        self.lines = []


@asynccontextmanager
async def listening(browser: httpx2.AsyncClient, path: str = "/live") -> AsyncIterator[News]:
    """A stream that is read until the end of this."""
    news = News()

    async def read() -> None:
        async with browser.stream("GET", path) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                news.lines.append(line)
        news.has_ended = True

    task = asyncio.create_task(read())
    try:
        await eventually(lambda: task.done() or "retry: 3000" in news.lines)
        yield news
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def signed_in(installation: AdminInstallation, token: str = TOKEN) -> AsyncIterator[httpx2.AsyncClient]:
    async with installation.client("") as browser:
        await browser.post("/sign-in", data={"token": token}, headers=HTML)
        yield browser


async def marked(browser: httpx2.AsyncClient) -> str:
    """Where a page says that it is."""
    found = re.search(r'data-live="([^"]+)"', (await browser.get("/", headers=HTML)).text)
    assert found
    return found.group(1)


async def test_who_listens_is_told_what_changed_and_nothing_else(installation: AdminInstallation) -> None:
    async with signed_in(installation) as browser, listening(browser, f"/live?since={await marked(browser)}") as news:
        await installation.put(b"one")
        await eventually(lambda: news.topics == {"letters", "groups"})
        news.forget()
        await installation.queues.queues_create("orders")
        await eventually(lambda: news.topics == {"queues"})
        news.forget()
        await installation.queues.queue_produce("orders", ["hello"])
        await eventually(lambda: news.topics == {"queues"})
        news.forget()
        installation.vault_app.recoveries.changes += 1  # as a run does that has taken another letter
        await eventually(lambda: news.topics == {"recoveries"})


async def test_what_changed_between_a_page_and_its_stream_is_told(installation: AdminInstallation) -> None:
    async with signed_in(installation) as browser:
        mark = await marked(browser)
        await installation.put(b"one")
        async with listening(browser, f"/live?since={mark}") as news:
            await eventually(lambda: "letters" in news.topics)
            told = await eventually(lambda: [line for line in news.lines if line.startswith("id: ")])
        async with listening(browser, f"/live?since={told[-1][4:]}") as news:
            await installation.queues.queues_create("orders")
            await eventually(lambda: news.topics)
            assert news.topics == {"queues"}, "what was told is not told again"


@pytest.mark.parametrize("mark", ["0123abcd-7", "x", "-", "0123abcd-²"])
async def test_a_page_of_before_a_restart_is_told_to_look_at_everything(
    installation: AdminInstallation, mark: str
) -> None:
    async with signed_in(installation) as browser, listening(browser, f"/live?since={mark}") as news:
        await eventually(lambda: {"letters", "groups", "redrives", "captures", "queues"} <= news.topics)


async def test_a_session_that_ends_is_told_so_and_nothing_more(installation: AdminInstallation) -> None:
    token = await installation.token("low", Role.VIEWER)
    async with signed_in(installation, token) as browser, listening(browser) as news:
        await installation.vault_app.tokens.revoke("low", LedgerAct(actor="test", action="tokens.revoke"))
        await eventually(lambda: news.has_ended)
        assert "event: ended" in news.lines
        assert not news.topics


async def test_who_is_not_signed_in_is_told_that_the_session_has_ended(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        told = await browser.get("/live")
        assert (told.status_code, told.text) == (200, "event: ended\ndata:\n\n")


async def test_who_asks_for_the_head_of_the_stream_does_not_wait_for_its_end(installation: AdminInstallation) -> None:
    async with signed_in(installation) as browser:
        told = await browser.head("/live")
        assert (told.status_code, told.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_who_is_held_to_one_queue_hears_no_name(installation: AdminInstallation) -> None:
    token = await installation.token("held", Role.VIEWER, ["other.*"])
    async with signed_in(installation, token) as browser, listening(browser) as news:
        await installation.put(b"one")
        await eventually(lambda: "letters" in news.topics)
        assert "orders" not in "\n".join(news.lines)


async def test_many_tabs_are_told_one_after_the_other(installation: AdminInstallation) -> None:
    """Each comes for its page then: five in a second at the most."""
    told_at: list[float] = []
    loop = asyncio.get_running_loop()

    async def tab(many: httpx2.AsyncClient, mark: str) -> None:
        async with many.stream("GET", f"/live?since={mark}") as answer:
            async for line in answer.aiter_lines():
                if "letters" in line:
                    told_at.append(loop.time())
                    return

    async with signed_in(installation) as browser, installation.client("") as many:
        mark, many.cookies = await marked(browser), browser.cookies
        await installation.put(b"one")
        async with asyncio.TaskGroup() as tabs:
            for _ in range(12):
                tabs.create_task(tab(many, mark))
    assert len(told_at) == 12
    assert told_at[-1] - told_at[0] > 1.5


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="session")
async def test_a_page_that_is_open_is_kept_up_to_date_until_the_session_ends(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_installation(tmp_path) as installation:
        token = await installation.token("low", Role.VIEWER)
        async with chromium.visitor(installation.url) as visitor:
            await visitor.open()
            await visitor.page.get_by_label("Token").fill(token)
            await visitor.page.get_by_role("button", name="Sign in").click()
            await installation.put(b"one")
            await visitor.sees("orders.dlq")
            await installation.vault_app.tokens.revoke("low", LedgerAct(actor="test", action="tokens.revoke"))
            await visitor.sees("Sign in")
