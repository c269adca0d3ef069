"""The browser of the tests hears what a page does wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.browser import Chromium

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

POLICY = "default-src 'self'; script-src 'self'"
PAGES = {
    "/": "<h1>All is well</h1><a href='/other'>Elsewhere</a><label>Name <input></label><button>Go</button>",
    "/other": "<h1>Elsewhere</h1>",
    "/inline": "<h1>Hello</h1><script>document.title = 'changed'</script>",
    "/handler": "<h1>Hello</h1><button onclick='alert(1)'>Go</button>",
    "/abroad": "<h1>Hello</h1><img alt='' src='http://elsewhere.example/x.png'>",
    "/failing": "<h1>Hello</h1><script src='/failing.js'></script>",
    "/shouting": "<h1>Hello</h1><script src='/shouting.js'></script>",
    "/missing": "<h1>Hello</h1><img alt='' src='/nothing.png'>",
    "/unreadable": "<h1>Hello</h1><p style-x><img src='/dot.svg'><input>",
    "/failing.js": "throw new Error('broken')",
    "/shouting.js": "console.warn('beware')",
    "/dot.svg": "<svg xmlns='http://www.w3.org/2000/svg'></svg>",
}
TYPES = {"js": "text/javascript", "svg": "image/svg+xml"}


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = PAGES.get(self.path)
        found = TYPES.get(self.path.rpartition(".")[2], "text/html; charset=utf-8")
        if found.startswith("text/html") and page is not None:
            page = f"<!doctype html><html lang=en><title>A page</title><main>{page}</main></html>"
        self.send_response(404 if page is None and self.path != "/favicon.ico" else 200)
        self.send_header("content-type", found)
        self.send_header("content-security-policy", POLICY)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class calls it
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_page_without_a_fault_is_left_without_one(chromium: Chromium, address: str) -> None:
    async with chromium.visitor(address) as visitor:
        assert (await visitor.open("/")).status == 200
        await visitor.sees("All is well", re.compile("else", re.IGNORECASE))
        await visitor.sees_no("Goodbye")
        assert await visitor.axe() == []
        assert await visitor.tab_to("Elsewhere") == "a Elsewhere"
        assert await visitor.tab_to("Name", tag="input") == "input Name"
        await visitor.press("Shift+Tab", "Enter")
        await visitor.page.wait_for_url("**/other")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/inline", "script-src"),
        ("/handler", "script-src"),
        ("/abroad", "request to another host: GET http://elsewhere.example/x.png|img-src|default-src"),
        ("/failing", "script failed: .*broken"),
        ("/shouting", "console warning: beware"),
        ("/missing", "404"),
    ],
)
async def test_a_fault_of_a_page_fails_the_test(chromium: Chromium, address: str, path: str, complaint: str) -> None:
    async with chromium.visitor(address) as visitor:
        await visitor.open(path)
        await visitor.sees("Hello")
        with pytest.raises(AssertionError, match=complaint):
            visitor.check()
        visitor.expects(complaint, "elsewhere.example", "script-src")


async def test_what_others_cannot_read_is_found(chromium: Chromium, address: str) -> None:
    async with chromium.visitor(address) as visitor:
        await visitor.open("/unreadable")
        found = await visitor.axe()
        assert {line.split(" ")[0] for line in found} >= {"image-alt", "label"}


async def test_a_page_is_read_without_javascript(chromium: Chromium, address: str) -> None:
    async with chromium.visitor(address, javascript=False) as visitor:
        await visitor.open("/failing")
        await visitor.sees("Hello")
        assert await visitor.text() == "Hello"


async def test_two_tabs_are_one_person(chromium: Chromium, address: str) -> None:
    async with chromium.visitor(address) as visitor:
        tab = await visitor.another()
        await tab.open("/failing")
        assert len(visitor.heard.complaints) == 1
        visitor.expects("broken")
