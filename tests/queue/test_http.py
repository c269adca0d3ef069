"""HTTP itself: bodies that are not what they should be, methods, the door, and the pages that programs watch.

None of this depends on the store, so one is enough.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import httpx2
import pytest

from holdfast import Client, HoldfastError
from holdfast.core.requests.queue import VERBS
from holdfast.faces.api.connection import HttpConnection
from holdfast.faces.api.server import make_server
from tests.queue.installation import TOKEN, Installation, MakeStorage, error, plain_client, post, serving
from tests.support.eventually import eventually
from tests.support.flaky import LastingMemory


@pytest.fixture
def make_storage() -> MakeStorage:
    return cache(lambda name, clock: LastingMemory(clock))


@pytest.fixture
def face() -> str:
    return "http"


@pytest.fixture
async def http(installation: Installation) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client with the token, and a queue."""
    async with plain_client(installation) as client:
        await installation.queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        yield client


# --- bodies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nonsense",
        b'{"queue_name": "orders"',
        b'{"queue_name": "orders"} x',
        b'{"queue_name": NaN}',
        b'{"queue_name": "orders", "limit": NaN}',
        b'{"queue_name": "orders", "limit": Infinity}',
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b'{"queue_name": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
        b'{"queue_name": "\\ud800"}',
        b"[" * 100_000,
        b'{"queue_name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_body_that_is_no_json_object_is_455(http: httpx2.AsyncClient, body: bytes) -> None:
    text = await error(http, "storage/items.list", body, 455)
    assert text.startswith("body is invalid; ")
    assert (await post(http, "queue.stats", {"queue_name": "orders"}))[0] == 200


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("queues.info", {"queue_name": "orders", "colour": "red"}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": [{"payload": "YQ=="}]}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": [{"bytes": "not base64!"}]}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": [{"bytes": 7}]}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": [{"enqueue_at": "tomorrow"}]}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": {}}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": 60, "items": [{"utf8": "a"}]}),
        ("queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": [None]}),
        ("queue.retry", {"queue_name": "orders", "items": [{"retry_at": "2030-01-01T00:00:00Z"}]}),
        ("queues.info", {"queue_name": 7}),
        ("queues.info", {"queue_name": None}),
        ("queues.info", {"queue_name": ["orders"]}),
        ("queue.clear", {"queue_name": "orders", "queue": "yes"}),
        ("queue.lease", {"queue_name": "orders", "client_id": "c", "batch_size": 1.5, "request_timeout": "1m"}),
        ("queue.lease", {"queue_name": "orders", "client_id": "c", "batch_size": "1", "request_timeout": "1m"}),
        ("storage/items.list", {"queue_name": "orders", "limit": 10**30}),
        ("storage/items.list", {"queue_name": "orders", "partition": -(10**30)}),
        ("storage/items.list", b'{"queue_name": "orders", "limit": 1e400}'),
        ("storage/items.list", b'{"queue_name": "orders", "limit": ' + b"9" * 5000 + b"}"),
        ("queues.create", {"queue_name": "new", "lease_timeout": "1m", "expire_timeout": "1h", "max_attempts": 1e300}),
    ],
)
async def test_unknown_fields_wrong_types_and_huge_numbers_are_400(
    installation: Installation, http: httpx2.AsyncClient, verb: str, body: Any
) -> None:
    await error(http, verb, body, 400)
    assert await installation.items("orders") == []
    assert [info.queue_name for info in await installation.queues.queues_list()] == ["orders"]


async def test_a_body_at_its_limit_is_taken_and_one_byte_more_is_400(
    installation: Installation, http: httpx2.AsyncClient
) -> None:
    def body(size: int) -> bytes:
        frame = b'{"queue_name":"orders","request_timeout":"1m","items":[{"utf8":"%b"}]}'
        return frame % (b"a" * (size - len(frame) + 2))

    assert len(body(5_000_000)) == 5_000_000
    assert (await post(http, "queue.produce", body(5_000_000)))[0] == 200
    text = await error(http, "queue.produce", body(5_000_001), 400)
    assert text == "body is too large; 5000001 bytes were sent, 5000000 is the maximum"
    assert len(await installation.items("orders")) == 1


async def test_other_verbs_take_512_kilobytes(http: httpx2.AsyncClient) -> None:
    frame = b'{"queue_name":"orders"}'
    assert (await post(http, "queue.stats", frame + b" " * (512_000 - len(frame))))[0] == 200
    text = await error(http, "queue.stats", frame + b" " * (512_001 - len(frame)), 400)
    assert text == "body is too large; 512001 bytes were sent, 512000 is the maximum"


async def test_an_oversized_body_is_read_to_its_end_and_the_connection_lives(http: httpx2.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 2**20

    answer = await http.post("/v1/queue.stats", content=chunks())
    assert answer.status_code == 400
    assert answer.json()["message"] == f"body is too large; {64 * 2**20} bytes were sent, 512000 is the maximum"
    assert (await post(http, "queue.stats", {"queue_name": "orders"}))[0] == 200


async def test_an_import_takes_64_megabytes(installation: Installation, http: httpx2.AsyncClient) -> None:
    payload = base64.b64encode(bytes(6_000_000)).decode()
    request = {"queue_name": "orders", "items": [{"payload": payload}]}
    assert (await post(http, "storage/items.import", request))[0] == 200
    (item,) = await installation.items("orders")
    assert len(item.payload) == 6_000_000


# --- methods and paths ----------------------------------------------------------------------------------------


OTHER_METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND"]


@pytest.mark.parametrize("method", OTHER_METHODS)
async def test_another_http_method_is_405(http: httpx2.AsyncClient, method: str) -> None:
    answer = await http.request(method, "/v1/queue.stats")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    if method != "HEAD":
        assert answer.json()["message"] == f"method is invalid; use POST, not {method}"
        assert (await http.request(method, "/v1/queue.destroy")).status_code == 501


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_another_method_of_a_page_is_405(http: httpx2.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["message"] == f"method is invalid; use GET, HEAD, not {method}"


@pytest.mark.parametrize("path", ["/", "/nothing", "/health/", "/v2/queue.stats", "/health/x", "/a%0Ab"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PROPFIND"])
async def test_an_unknown_path_is_404(http: httpx2.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (404, 404)
    assert answer.json()["message"].startswith("path is invalid; there is nothing at '/")


async def test_an_empty_body_is_called_empty(http: httpx2.AsyncClient) -> None:
    assert await error(http, "queue.stats", b"", 455) == "body is empty; a JSON object is expected"


@pytest.mark.parametrize("verb", ["queue.destroy", "queue", "", "queues.list/", "storage/items.steal", "QUEUE.STATS"])
async def test_an_unknown_verb_is_501(http: httpx2.AsyncClient, verb: str) -> None:
    assert await error(http, verb, {}, 501) == f"method is unknown; there is no '{verb}'"


async def test_every_verb_of_the_contract_is_there(http: httpx2.AsyncClient) -> None:
    assert len(VERBS) == 19 + 2, "those of the contract, queue.redrive and queues.depths"
    for verb in VERBS:
        assert await error(http, verb, {"colour": "red"}, 400) != ""


# --- the door -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
    ],
)
async def test_without_the_token_every_verb_is_401_before_the_body_is_read(
    installation: Installation, http: httpx2.AsyncClient, headers: dict[str, str]
) -> None:
    async with plain_client(installation, headers) as stranger:
        for verb in ("queue.stats", "queues.list", "queue.destroy"):
            text = await error(stranger, verb, b"nonsense", 401)
            assert text == "unauthorized; a valid token is required"


async def test_a_client_with_a_wrong_token_is_told(installation: Installation) -> None:
    async with Client(installation.url, "wrong") as stranger:
        with pytest.raises(HoldfastError) as caught:
            await stranger.queues_list()
    assert (caught.value.code, str(caught.value)) == (401, "unauthorized; a valid token is required")


async def test_without_tokens_only_this_machine_is_let_in(installation: Installation) -> None:
    async with (
        serving(installation.service, token="") as url,
        httpx2.AsyncClient(base_url=url, trust_env=False) as anybody,
    ):
        port = url.rpartition(":")[2]
        assert (await post(anybody, "queues.list", {}))[0] == 200
        for headers, text in (
            ({"host": "evil.example"}, "forbidden; without tokens this server answers only to a loopback host name"),
            (
                {"host": f"127.0.0.1.evil.example:{port}"},
                "forbidden; without tokens this server answers only to a loopback host name",
            ),
            ({"origin": "http://evil.example"}, "forbidden; this server takes no requests from other web pages"),
            ({"origin": "null"}, "forbidden; this server takes no requests from other web pages"),
        ):
            answer = await anybody.post("/v1/queues.list", content=b"{}", headers=headers)
            assert (answer.status_code, answer.json()["message"]) == (403, text)
        for headers in ({"host": f"localhost:{port}"}, {"origin": f"http://localhost:{port}"}):
            assert (await anybody.post("/v1/queues.list", content=b"{}", headers=headers)).status_code == 200


# --- who went away --------------------------------------------------------------------------------------------


async def test_a_client_that_closes_its_connection_waits_no_more(
    installation: Installation, http: httpx2.AsyncClient
) -> None:
    host, port = installation.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"queue_name":"orders","client_id":"me","batch_size":1,"request_timeout":"15m"}'
    head = f"POST /v1/queue.lease HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {TOKEN}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await installation.waiting_leases("orders", 1)
    writer.close()
    await writer.wait_closed()
    await installation.waiting_leases("orders", 0)
    await installation.queues.queue_produce("orders", [b"a"])
    (item,) = await installation.items("orders")
    assert (item.is_leased, item.attempts) == (False, 0)
    assert await reader.read() == b""


async def test_a_client_that_goes_in_the_moment_of_its_answer_gives_its_lease_back(
    installation: Installation, http: httpx2.AsyncClient
) -> None:
    await installation.queues.queue_produce("orders", [b"a"])
    body = b'{"queue_name":"orders","client_id":"me","batch_size":1,"request_timeout":"1m"}'
    server = make_server(installation.service, admin_token_hash=None, version="test")
    connection, transport = HttpConnection(server), Unheard()
    connection.connection_made(transport)
    head = b"POST /v1/queue.lease HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.data_received(head + body)
    transport.close_soon(connection)  # behind the request and before its answer, in one turn of the loop
    await asyncio.sleep(0)
    await installation.rest()
    (item,) = await installation.items("orders")
    assert (transport.written, item.is_leased, item.attempts) == ([], False, 0)


class Unheard(asyncio.Transport):
    """A client that goes away."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def close_soon(self, connection: HttpConnection) -> None:
        asyncio.get_running_loop().call_soon(connection.connection_lost, None)


# --- pages ----------------------------------------------------------------------------------------------------


async def test_health_needs_no_token_and_tells_what_fails(installation: Installation, http: httpx2.AsyncClient) -> None:
    async with plain_client(installation, {}) as stranger:
        answer = await stranger.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "pass")
        assert answer.headers["content-type"].startswith("application/health+json")
        await installation.queues.queues_create("others")
        installation.faults.down.add("orders")
        assert (await post(http, "queue.produce", _item("orders")))[0] == 454
        answer = await stranger.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "warn")
        installation.faults.down.add("others")
        assert (await post(http, "queue.produce", _item("others")))[0] == 454
        assert (await stranger.get("/health")).status_code == 503
        installation.faults.down.clear()
        await installation.advance(31)
        await eventually(lambda: _is_healthy(stranger))
        installation.service.manager.stop()
        assert (await stranger.get("/health")).status_code == 503


def _item(queue_name: str) -> dict[str, Any]:
    return {"queue_name": queue_name, "request_timeout": "1m", "items": [{"utf8": "a"}]}


async def _is_healthy(http: httpx2.AsyncClient) -> bool:
    return bool((await http.get("/health")).json()["status"] == "pass")


async def test_metrics_need_no_token_and_count(installation: Installation, http: httpx2.AsyncClient) -> None:
    await post(http, "queue.produce", _item("orders"))
    await error(http, "queue.stats", {"queue_name": "x"}, 400)
    async with plain_client(installation, {}) as stranger:
        answer = await stranger.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'holdfast_requests_total{verb="queue.produce",code="200"} 1' in lines
    assert 'holdfast_requests_total{verb="queue.stats",code="400"} 1' in lines
    assert not any('queue="orders"' in line for line in lines), "a stranger sees no names"
    lines = (await http.get("/metrics")).text.splitlines()
    assert any('queue="orders"' in line and line.endswith(" 1") for line in lines)


async def test_openapi_describes_every_verb(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    document = answer.json()
    assert document["openapi"].startswith("3.")
    assert {f"/v1/{verb}" for verb in VERBS} <= set(document["paths"])
    for verb in VERBS:
        assert set(document["paths"][f"/v1/{verb}"]) == {"post"}
