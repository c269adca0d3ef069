"""People at a browser: Debian's Chromium, driven by playwright.

One process for all tests of a worker, and for each visitor a context of its own, so that nobody has another's cookies.
What a visitor's browser complains about (an error or a warning in the console, a script that failed, a breach of the
page's Content-Security-Policy) and every request to another host is kept, and fails the test when the visitor leaves,
unless the test has said that it expects it.

Playwright belongs to the event loop that started it: tests of the browser run in the session's
(`pytest.mark.asyncio(loop_scope="session")`).
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Response,
    WebError,
    async_playwright,
    expect,
)

from tests.support.servers import fail_without

CHROMIUM = Path(os.environ.get("HOLDFAST_TEST_CHROMIUM", "/usr/bin/chromium"))
INSTALL = "sudo apt-get install chromium"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing of a page leaves this machine
)
#: Only what never comes costs this.
LIMIT_MS = 30_000
WIDE, NARROW = 1280, 390
HEIGHT = 900
TABS_COUNT_MAX = 200
AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"

#: A breach of the policy is told to the page, and by Chromium to the console, in words that change.
BREACHES = """
document.addEventListener('securitypolicyviolation', event =>
  console.error(`CSP: ${event.violatedDirective} forbids ${event.blockedURI} ${event.sample}`))
"""
#: What somebody with a screen reader would hear of the element that has the focus.
FOCUSED = """() => {
  const element = document.activeElement
  if (!element || element === document.body) return ''
  const named = (element.getAttribute('aria-labelledby') || '').split(' ')
    .map(id => document.getElementById(id)?.textContent || '').join(' ').trim()
  const labels = [...(element.labels || [])].map(label => label.textContent).join(' ')
  const text = element.getAttribute('aria-label') || named || labels || element.textContent || element.title
  return `${element.tagName.toLowerCase()} ${text.replace(/\\s+/g, ' ').trim()}`.slice(0, 200)
}"""

expect.set_options(timeout=LIMIT_MS)


class Chromium:
    """One browser process. Made by `open_chromium`."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @asynccontextmanager
    async def visitor(
        self,
        address: str,
        *,
        javascript: bool = True,
        width: int = WIDE,
        scheme: Literal["light", "dark"] = "light",
    ) -> AsyncIterator[Visitor]:
        """Somebody who looks at the pages of one address. Fails at the end when their browser complained."""
        context = await self._browser.new_context(
            base_url=address,
            java_script_enabled=javascript,
            viewport={"width": width, "height": HEIGHT},
            color_scheme=scheme,
            reduced_motion="reduce",
            service_workers="block",
        )
        context.set_default_timeout(LIMIT_MS)
        try:
            await context.add_init_script(BREACHES)
            visitor = Visitor(context, await context.new_page(), Heard(address.rstrip("/"), context))
            yield visitor
            visitor.check()
        finally:
            await context.close()


@asynccontextmanager
async def open_chromium() -> AsyncIterator[Chromium]:
    """Start the browser; fails the test when there is none."""
    if not CHROMIUM.exists():
        fail_without("browser", f"browser, {CHROMIUM}", INSTALL)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=LIMIT_MS)
        try:
            yield Chromium(browser)
        finally:
            await browser.close()


class Heard:
    """What a browser complains about, and what it asks others for."""

    def __init__(self, address: str, context: BrowserContext) -> None:
        self.complaints: list[str] = []
        self.expected: list[re.Pattern[str]] = []
        self._own = (f"{address}/", "data:", "blob:", "about:")
        context.on("console", self._on_console)
        context.on("weberror", self._on_error)
        context.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            where = message.location.get("url", "")
            self.complaints.append(f"console {message.type}: {message.text} ({where})")

    def _on_error(self, error: WebError) -> None:
        self.complaints.append(f"script failed: {error.error}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith(self._own):
            self.complaints.append(f"request to another host: {request.method} {request.url}")


class Visitor:
    """One person with one tab."""

    def __init__(self, context: BrowserContext, page: Page, heard: Heard) -> None:
        self.context = context
        self.page = page
        self.heard = heard

    async def open(self, path: str = "/") -> Response:
        """Go to a page."""
        answer = await self.page.goto(path)
        assert answer is not None, f"{path} is no page"
        return answer

    async def another(self) -> Visitor:
        """The same person with one more tab."""
        return Visitor(self.context, await self.context.new_page(), self.heard)

    def expects(self, *patterns: str) -> None:
        """Complaints that the test provokes; they do not fail it."""
        self.heard.expected += [re.compile(pattern) for pattern in patterns]

    def check(self) -> None:
        """Fail when the browser complained about anything that was not expected."""
        expected = self.heard.expected
        left = [text for text in self.heard.complaints if not any(pattern.search(text) for pattern in expected)]
        assert not left, "the browser complained:\n" + "\n".join(left)

    async def sees(self, *texts: str | re.Pattern[str]) -> None:
        """Wait until the page shows all of it."""
        for text in texts:
            await expect(self.page.locator("body")).to_contain_text(text, use_inner_text=True)

    async def sees_no(self, *texts: str | re.Pattern[str]) -> None:
        """Wait until the page shows none of it."""
        for text in texts:
            await expect(self.page.locator("body")).not_to_contain_text(text, use_inner_text=True)

    async def text(self) -> str:
        """What the page shows."""
        return await self.page.locator("body").inner_text()

    # --- by the keyboard alone --------------------------------------------------------------------------------

    async def press(self, *keys: str) -> None:
        """One key after the other."""
        for key in keys:
            await self.page.keyboard.press(key)

    async def write(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.page.keyboard.type(text)

    async def focused(self) -> str:
        """The element with the focus: its tag and its name; empty when none has it."""
        return str(await self.page.evaluate(FOCUSED))

    async def tab_to(self, name: str, *, tag: str = "") -> str:
        """Press Tab until an element with this name has the focus."""
        passed = []
        for _ in range(TABS_COUNT_MAX):
            await self.press("Tab")
            passed.append(await self.focused())
            found, _, words = passed[-1].partition(" ")
            if name in words and tag in ("", found):
                return passed[-1]
        raise AssertionError(f"Tab never came to {name!r}; it passed {passed}")

    # --- what it is for people who do not see it --------------------------------------------------------------

    async def axe(self) -> list[str]:
        """What axe-core finds wrong with the page, a line each."""
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(AXE.read_text("utf-8"))
        found: dict[str, Any] = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{violation['id']} ({violation['help']}): {node['html'][:200]} {node['failureSummary'][:400]}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]
