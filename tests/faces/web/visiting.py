"""A browser without JavaScript, as tests see it: what a page says, and its forms."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html import unescape

import httpx2

from tests.faces.api.conftest import TOKEN, AdminInstallation

HTML = {"accept": "text/html"}


class Tab:
    """A signed-in browser."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http
        self.csrf = ""

    async def get(self, path: str, *, status: int = 200) -> str:
        """A page, as its source."""
        answer = await self.http.get(path, headers=HTML)
        assert answer.status_code == status, answer.text
        assert "unsafe" not in answer.headers.get("content-security-policy", "unsafe"), path
        if found := re.search(r'name="csrf" value="([^"]+)"', answer.text):
            self.csrf = found.group(1)
        return answer.text

    async def post(self, path: str, fields: Mapping[str, str], *, status: int = 303) -> str:
        """Send a form; returns where it leads with what is said there, or the page that it answers."""
        answer = await self.http.post(path, data={"csrf": self.csrf, **fields}, headers=HTML)
        assert answer.status_code == status, answer.text
        if status != 303:
            return answer.text
        return await self.get(answer.headers["location"])


@asynccontextmanager
async def visiting(installation: AdminInstallation, token: str = TOKEN) -> AsyncIterator[Tab]:
    """A browser that has signed in with a token."""
    async with installation.client("") as http:
        await http.post("/sign-in", data={"token": token}, headers=HTML)
        yield Tab(http)


def text_of(page: str) -> str:
    """What a page says, in one line."""
    main = page.partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", main)).split())


def notice_of(page: str) -> str:
    """What is said on top of it."""
    found = re.search(r'<p class="notice[^"]*">(.*?)</p>', page, flags=re.DOTALL)
    return unescape(found.group(1)) if found else ""
