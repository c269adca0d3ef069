"""Signing in and out, and what every page carries. In a browser: test_browser.py."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation

HTML = {"accept": "text/html"}


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[AdminInstallation]:
    async with open_installation(tmp_path) as installation:
        yield installation


async def signed_in(browser: httpx2.AsyncClient, token: str = TOKEN, where: str = "/") -> httpx2.Response:
    return await browser.post("/sign-in", data={"token": token, "next": where}, headers=HTML)


def csrf_of(text: str) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', text)
    assert found, text
    return found.group(1)


async def test_who_has_no_session_is_sent_to_sign_in_and_back(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        sent = await browser.get("/", headers=HTML)
        assert (sent.status_code, sent.headers["location"]) == (303, "/sign-in")
        opened = await signed_in(browser, where="/?a=b")
        assert (opened.status_code, opened.headers["location"]) == (303, "/?a=b")
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert (await browser.get("/", headers=HTML)).status_code == 200


@pytest.mark.parametrize("where", ["//evil.example", "https://evil.example", "/\\evil.example", "evil"])
async def test_signing_in_never_leads_to_another_host(installation: AdminInstallation, where: str) -> None:
    async with installation.client("") as browser:
        assert (await signed_in(browser, where=where)).headers["location"] == "/"


async def test_a_wrong_token_is_told_so_and_opens_nothing(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        for token in ("wrong", "", "ünicode", "a\nb", "x" * 1000):
            told = await signed_in(browser, token)
            assert told.status_code == 401
            assert "not known here" in told.text
            assert not browser.cookies


async def test_a_form_without_the_sessions_token_or_from_elsewhere_is_refused(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        await signed_in(browser)
        csrf = csrf_of((await browser.get("/", headers=HTML)).text)
        for fields, headers in (
            ({}, {}),
            ({"csrf": "other"}, {}),
            ({"csrf": csrf}, {"origin": "http://evil.example"}),
            ({"csrf": csrf}, {"sec-fetch-site": "cross-site"}),
        ):
            refused = await browser.post("/sign-out", data=fields, headers={**HTML, **headers})
            assert refused.status_code == 403, (fields, headers)
        assert (await browser.get("/", headers=HTML)).status_code == 200
        done = await browser.post("/sign-out", data={"csrf": csrf}, headers=HTML)
        assert done.headers["location"] == "/sign-in"
        assert (await browser.get("/", headers=HTML)).status_code == 303
        foreign = await browser.post("/sign-in", data={"token": TOKEN}, headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403


async def test_a_form_that_no_browser_would_send_is_refused(installation: AdminInstallation) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded", **HTML}
    async with installation.client() as client:
        for content in (b"token=%FF", b"token=\xff", b"a&" * 30_000):
            refused = await client.post("/sign-out", content=content, headers=kind)
            assert (refused.status_code, "Form is invalid" in refused.text) == (400, True), content[:20]


async def test_every_page_runs_nothing_of_elsewhere(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        await signed_in(browser)
        for path in ("/", "/sign-in", "/nothing-here"):
            page = await browser.get(path, headers=HTML)
            policy = page.headers["content-security-policy"]
            assert "unsafe" not in policy, path
            assert "frame-ancestors 'none'" in policy, path
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["cache-control"] == "no-store"


async def test_what_is_not_there_is_a_page_for_browsers_and_json_for_programs(installation: AdminInstallation) -> None:
    async with installation.client() as client:
        page = await client.get("/nothing-here", headers=HTML)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        told = await client.get("/nothing-here")
        assert (told.status_code, told.headers["content-type"]) == (404, "application/json")
        method = await client.put("/", headers=HTML)
        assert (method.status_code, method.headers["allow"]) == (405, "GET")


async def test_files_of_pages_may_be_kept(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        page = (await browser.get("/sign-in", headers=HTML)).text
        found = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
        assert len(set(found)) >= 4
        for path in found:
            file = await browser.get(path)
            assert file.status_code == 200, path
            assert "immutable" in file.headers["cache-control"], path
        assert (await browser.get("/static/x/../console.py")).status_code == 404
        assert (await browser.get("/static/x/nothing.css")).status_code == 404


async def test_the_document_of_the_api_is_read_without_a_token(installation: AdminInstallation) -> None:
    async with installation.client("") as browser:
        described = (await browser.get("/openapi.json")).json()
        page = await browser.get("/docs", headers=HTML)
    assert page.status_code == 200
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page.text, path
    for name in described["components"]["schemas"]:
        assert f'id="{name}"' in page.text
