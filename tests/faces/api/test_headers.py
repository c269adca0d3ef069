"""What answers say to a browser, what pages show to strangers, and what is believed of a proxy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from holdfast import NewItem
from holdfast.core.requests.declare import REQUESTS, Role
from holdfast.errors import CannotStart
from holdfast.faces.api import authenticator
from holdfast.faces.api.authenticator import Authenticator, token_hash
from holdfast.faces.api.listener import HttpServer
from holdfast.faces.api.server import make_server
from holdfast.faces.web import console
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.vault.admin import SERVER
from holdfast.settings import load_settings
from holdfast.telemetry.prometheus import OTHERS
from holdfast.wiring import open_service
from tests.faces.api.conftest import TOKEN, AdminInstallation, open_installation
from tests.faces.api.test_endpoints import dead_item
from tests.queue.installation import listening
from tests.support.eventually import eventually
from tests.vault.letters import DLQ

PATHS = {"queue": DLQ, "id": "1", "key": "none", "hash": "none", "name": "none", "series": "rows", "run": "none"}
PAGES = ["/health", "/metrics", "/openapi.json", "/nothing/here", "/admin/nothing", "/v1/nothing"]


@pytest.mark.parametrize("token", [TOKEN, "", "a-wrong-one"])
async def test_every_answer_is_safe_in_a_browser(
    installation: AdminInstallation, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "WRONG_COUNT_FREE", 1_000)
    places = [("GET", path) for path in PAGES]
    asked = [(one.method, one.path) for one in REQUESTS.values() if one.media != "text/event-stream"]
    asked += [(one.method, one.path) for one in console.PAGES if one.path != "/live"]
    for method, path in asked:
        names = [name.partition(":")[0] for name in re.findall(r"{(.+?)}", path)]
        filled = re.sub(r"{(\w+):\w+}", r"{\1}", path).format(**{name: PATHS.get(name, "none") for name in names})
        places.append((method, filled))
    async with installation.client(token) as client:
        for method, path in places:
            answer = await client.request(method, path)
            headers = answer.headers
            assert headers.get("x-content-type-options") == "nosniff", path
            assert headers.get("cache-control") == "no-store", path
            assert "default-src 'none'" in headers.get("content-security-policy", ""), path


async def test_downloads_are_files_and_no_pages(installation: AdminInstallation) -> None:
    await installation.put(b"<script>alert(1)</script>")
    await installation.queues.queues_create("producer")
    async with installation.client() as client:
        await client.post("/v1/results", json={"producer": "producer", "transaction_id": "t", "series": ["rows"]})
        for path in ("/admin/letters/1/body", "/admin/export", "/v1/results/t/rows"):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-disposition"].startswith("attachment"), path


async def test_strangers_see_no_names_of_queues(installation: AdminInstallation) -> None:
    await dead_item(installation)
    await installation.queues.queues_create("secret-name")
    await installation.queues.queue_produce("secret-name", [NewItem(payload=b"x")])
    async with installation.client() as client:
        await client.post("/admin/captures", json={"queue": DLQ})
    viewer = await installation.token("viewer", Role.VIEWER)
    held = await installation.token("held", Role.VIEWER, ["orders*"])
    async with (
        installation.client("") as nobody,
        installation.client(viewer) as all_of_it,
        installation.client(held) as some,
        installation.client("a-wrong-one") as wrong,
    ):
        page = (await nobody.get("/metrics")).text
        assert "secret-name" not in page
        assert DLQ not in page
        assert f'holdfast_queue_items{{queue="{OTHERS}",state="queued"}} 1' in page
        assert f'holdfast_letters{{queue="{OTHERS}",state="captured"}} 1' in page
        assert f'holdfast_capture_running{{queue="{OTHERS}"}} 0' in page
        assert 'holdfast_events_total{event="server.' not in page or 'queue=""' in page
        page = (await all_of_it.get("/metrics")).text
        assert 'holdfast_queue_items{queue="secret-name",state="queued"} 1' in page
        assert f'holdfast_letters{{queue="{DLQ}",state="captured"}} 1' in page
        page = (await some.get("/metrics")).text
        assert "secret-name" not in page
        assert f'holdfast_letters{{queue="{DLQ}",state="captured"}} 1' in page
        assert (await wrong.get("/metrics")).status_code == 401
        assert (await wrong.get("/health")).status_code == 401


async def test_health_tells_strangers_that_something_stands_and_not_what(installation: AdminInstallation) -> None:
    report = installation.vault_app.custody.keep_capturing("secret.dlq", SERVER)
    await eventually(lambda: report.state == "waiting")
    async with installation.client("") as nobody, installation.client() as admin:
        told = (await nobody.get("/health")).json()
        assert (told["status"], told["notes"]) == ("warn", [f"the capture of {OTHERS} stands still"])
        assert "secret.dlq" in (await admin.get("/health")).json()["notes"][0]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[QueueService]:
    async with open_service({"default": f"sqlite:///{tmp_path}/data"}) as service:
        yield service


@asynccontextmanager
async def _client(server: HttpServer) -> AsyncIterator[httpx2.AsyncClient]:
    async with listening(server) as url, httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        yield client


async def test_a_setting_shows_the_names_to_everybody(service: QueueService) -> None:
    await Queues(service).queues_create("orders")
    server = make_server(service, admin_token_hash=token_hash(TOKEN), version="0", open_names=True)
    async with _client(server) as nobody:
        assert 'queue="orders"' in (await nobody.get("/metrics")).text


@pytest.mark.parametrize("host", ["[::1", "a b", "", "localhost:port", "localhost:99999", "\xff"])
async def test_without_tokens_a_bad_host_is_400(service: QueueService, host: str) -> None:
    server = make_server(service, admin_token_hash=None, version="0")
    async with _client(server) as anybody:
        for path in ("/v1/queues.list", "/health", "/openapi.json"):
            method = "POST" if "v1" in path else "GET"
            answer = await anybody.request(method, path, headers={b"host": host.encode("latin-1")})
            assert answer.status_code == 400, (path, answer.text)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "null"},
        {"origin": "http://[::1"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_without_tokens_other_pages_of_this_machine_are_foreign(
    service: QueueService, headers: dict[str, str]
) -> None:
    server = make_server(service, admin_token_hash=None, version="0")
    async with _client(server) as anybody:
        for path in ("/v1/queues.list", "/metrics"):
            method = "POST" if "v1" in path else "GET"
            assert (await anybody.request(method, path, content=b"{}", headers=headers)).status_code == 403
        own = {"origin": str(anybody.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
        assert (await anybody.post("/v1/queues.list", content=b"{}", headers=own)).status_code == 200
        assert (await anybody.get("/metrics", headers={"sec-fetch-site": "none"})).status_code == 200


@pytest.mark.parametrize(("proxy", "secure"), [("127.0.0.0/8", True), ("127.0.0.1", True), ("192.168.0.1", False)])
async def test_a_trusted_proxy_says_that_the_browser_came_by_https(tmp_path: Path, proxy: str, secure: bool) -> None:
    async with open_installation(tmp_path, trusted_proxy=proxy) as installation:
        headers = {"x-forwarded-proto": "https", "x-forwarded-for": "6.6.6.6, 203.0.113.9, 127.9.9.9"}
        async with installation.client() as browser:
            cookie = (await browser.post("/admin/session", headers=headers)).headers["set-cookie"]
        assert ("Secure" in cookie) is secure
        (row,) = await installation.vault_app.vault.ledger.rows(after=0, count_max=10)
    wanted = {"127.0.0.0/8": "203.0.113.9", "127.0.0.1": "127.9.9.9"}.get(proxy, "127.0.0.1")
    assert row.origin == wanted


async def test_a_client_cannot_pass_for_another_behind_a_proxy_that_adds_a_line(tmp_path: Path) -> None:
    async with open_installation(tmp_path, trusted_proxy="127.0.0.1") as installation:
        forged = [("x-forwarded-for", "6.6.6.6"), ("x-forwarded-for", "203.0.113.9"), ("x-forwarded-proto", "https")]
        async with installation.client() as client:
            answer = await client.post("/admin/session", headers=[*forged, ("x-forwarded-proto", "http")])
        assert "Secure" not in answer.headers["set-cookie"]
        (row,) = await installation.vault_app.vault.ledger.rows(after=0, count_max=10)
    assert row.origin == "203.0.113.9"


async def test_not_more_than_a_few_proxies_are_passed_over(tmp_path: Path) -> None:
    async with open_installation(tmp_path, trusted_proxy="127.0.0.1") as installation:
        forged = {"x-forwarded-for": "6.6.6.6" + ",127.0.0.1" * 1_000}
        async with installation.client() as client:
            assert (await client.post("/admin/session", headers=forged)).status_code == 200
        (row,) = await installation.vault_app.vault.ledger.rows(after=0, count_max=10)
    assert row.origin == "127.0.0.1"


@pytest.mark.parametrize(("peer", "is_told"), [("::ffff:10.0.0.7", True), ("::ffff:11.0.0.7", False), ("::1", False)])
def test_a_proxy_of_ipv4_is_known_to_a_server_that_listens_on_ipv6(peer: str, is_told: bool) -> None:
    behind = {"client": (peer, 1), "scheme": "http", "headers": [(b"x-forwarded-proto", b"https")]}
    assert Authenticator(None, trusted_proxy="10.0.0.0/8").is_https(behind) is is_told


async def test_an_open_event_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with asyncio.timeout(15):  # a request that goes on is waited for for 30 s
        async with AsyncExitStack() as stack:
            installation = await stack.enter_async_context(open_installation(tmp_path))
            client = installation.client()
            stream = await client.send(client.build_request("GET", "/admin/events"), stream=True)
            assert stream.status_code == 200
    await client.aclose()


def test_a_proxy_that_is_no_address_is_refused() -> None:
    with pytest.raises(CannotStart, match="trusted_proxy is invalid"):
        load_settings({"trusted_proxy": "nginx"}, environment={})
