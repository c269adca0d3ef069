"""What every page of the console has to be: signed in for, reachable without a script, readable, and nobody's but whose
queues it shows."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx2
import pytest
import pytest_asyncio

from holdfast.faces.web.console import PAGES
from tests.faces.web.every_page import Demo, every_page, serving_demo
from tests.support.browser import NARROW, WIDE, Chromium, Visitor

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

HTML = {"accept": "text/html"}
LOOKS: list[tuple[Literal["light", "dark"], int]] = [("light", WIDE)]
if os.environ.get("HOLDFAST_TEST_PAGES") == "all":
    LOOKS += [("dark", WIDE), ("light", NARROW), ("dark", NARROW)]
#: A part of a page that is wider than the window, other than in a box that scrolls by itself.
TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Demo]:
    async with serving_demo(Path(tmp_path_factory.mktemp("demo"))) as demo:
        yield demo


@asynccontextmanager
async def signed_in(demo: Demo, token: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser with a session, as far as it is one."""
    async with httpx2.AsyncClient(base_url=demo.address, headers=HTML, trust_env=False, timeout=60) as browser:
        opened = await browser.post("/sign-in", data={"token": token, "next": "/"})
        assert opened.status_code == 303, opened.text
        yield browser


async def a_token(demo: Demo, name: str, role: str, queues: list[str]) -> str:
    async with demo.client() as client:
        answer = await client.post("/admin/tokens", json={"name": name, "role": role, "queues": queues})
        token: str = answer.json()["token"]
        return token


async def sign_in(visitor: Visitor, token: str) -> None:
    await visitor.open("/sign-in")
    await visitor.page.get_by_label("Token").fill(token)
    await visitor.page.get_by_role("button", name="Sign in").click()
    await visitor.sees("Sign out")


async def test_every_page_but_the_open_ones_asks_to_sign_in(demo: Demo) -> None:
    is_open = {one.path for one in PAGES if one.is_open}
    async with httpx2.AsyncClient(base_url=demo.address, headers=HTML, trust_env=False) as stranger:
        for path, address in (await every_page(demo)).items():
            answer = await stranger.get(address)
            if path in is_open:
                assert answer.status_code == 200, address
            else:
                assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/sign-in"), address
                assert "dlq" not in answer.text, address


async def test_every_page_is_whole_and_says_what_it_is(demo: Demo) -> None:
    async with signed_in(demo, demo.token) as browser:
        for path, address in (await every_page(demo)).items():
            answer = await browser.get(address, follow_redirects=True)
            assert answer.status_code == 200, (address, answer.text)
            assert len(re.findall(r"<h1[ >]", answer.text)) == 1, path
            assert re.search(r"<title>[^<]+ · Holdfast</title>", answer.text), path
            assert '<html lang="en">' in answer.text
            assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|javascript:", answer.text), path
            assert "unsafe" not in answer.headers["content-security-policy"], path
            elsewhere = re.findall(r'(?:src|href|action)="(?:https?:)?//[^"]*"', answer.text)
            assert not elsewhere, path


async def test_a_token_that_is_held_to_a_queue_sees_nothing_of_another_on_any_page(demo: Demo) -> None:
    pages = await every_page(demo)
    async with demo.client() as client:
        foreign = (await client.get("/admin/letters", params={"queue": "invoices.dlq", "limit": 1})).json()["letters"][
            0
        ]
    others = [f"/letters/{foreign['id']}", "/letters?queue=invoices.dlq", "/queues/invoices", "/live"]
    others += [f"/groups/{foreign['group']}", "/plans/new?queue=invoices.dlq", f"/plans/new?ids={foreign['id']}"]
    for role in ("viewer", "operator", "admin"):
        token = await a_token(demo, f"held-{role}", role, ["orders*"])
        async with signed_in(demo, token) as browser:
            for address in [*pages.values(), *others]:
                async with browser.stream("GET", address) as answer:
                    assert answer.status_code < 500, (role, address)
                    if address == "/live":
                        continue  # topics alone; it does not end
                    text = (await answer.aread()).decode(errors="replace")
                # What it asked for may stand in the address of the page.
                text = text.replace("queue=invoices.dlq", "").replace("/queues/invoices", "")
                for name in ("invoices", "payments", "mailings", "NoTaxRule", "no tax rule"):
                    told = [line for line in text.splitlines() if name in line]
                    is_refusal = answer.status_code in (403, 404)
                    assert not told or is_refusal, (role, address, told)


async def test_a_viewer_is_shown_no_form_that_changes_anything(demo: Demo) -> None:
    token = await a_token(demo, "only-looks", "viewer", [])
    async with signed_in(demo, token) as browser:
        for address in (await every_page(demo)).values():
            answer = await browser.get(address, follow_redirects=True)
            if answer.status_code == 200:
                forms = re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', answer.text)
                assert set(forms) <= {"/sign-out", "/sign-in"}, address


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
async def test_everybody_can_read_every_page(
    demo: Demo, chromium: Chromium, scheme: Literal["light", "dark"], width: int
) -> None:
    found: list[str] = []
    async with chromium.visitor(demo.address, scheme=scheme, width=width) as visitor:
        await sign_in(visitor, demo.token)
        for address in (await every_page(demo)).values():
            await visitor.open(address)
            found += [f"{address}: {one}" for one in await visitor.axe()]
            if await visitor.page.evaluate(TOO_WIDE):
                found.append(f"{address}: wider than a window of {width}")
    assert not found, "\n".join(found)


@pytest.mark.browser
async def test_every_page_is_narrow_enough_for_a_phone(demo: Demo, chromium: Chromium) -> None:
    async with chromium.visitor(demo.address, width=NARROW) as visitor:
        await sign_in(visitor, demo.token)
        wide = []
        for address in (await every_page(demo)).values():
            await visitor.open(address)
            if await visitor.page.evaluate(TOO_WIDE):
                wide.append(address)
    assert not wide


@pytest.mark.browser
async def test_without_a_script_every_page_says_the_same(demo: Demo, chromium: Chromium) -> None:
    async with (
        chromium.visitor(demo.address) as visitor,
        chromium.visitor(demo.address, javascript=False) as without,
    ):
        await sign_in(visitor, demo.token)
        await sign_in(without, demo.token)
        for address in (await every_page(demo)).values():
            shown = [one.page.get_by_role("heading") for one in (visitor, without)]
            await visitor.open(address)
            await without.open(address)
            texts = [await one.all_inner_texts() for one in shown]
            assert texts[0] == texts[1], address
