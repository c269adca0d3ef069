"""The verbs as JSON over HTTP: codes, texts, names, bodies that are not what they should be, and the door."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from holdfast import Client, HoldfastError
from holdfast.core.verbs import VERBS
from tests.conformance.queue.house import TOKEN, House, answered, serving
from tests.support.eventually import eventually

CODE_TEXTS = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 453: "Request Failed", 454: "Retry Request"}
CODE_TEXTS |= {455: "Client Content Error", 500: "Internal Error", 501: "Not Implemented"}


@pytest.fixture(params=["http"])
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def http(house: House) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client with the token."""
    async with httpx2.AsyncClient(
        base_url=house.url, headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=30
    ) as client:
        await house.queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        yield client


async def post(http: httpx2.AsyncClient, verb: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON of a reply; `body` is bytes, or becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await http.post(f"/v1/{verb}", content=content)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


async def error(http: httpx2.AsyncClient, verb: str, body: Any, code: int) -> str:
    """The message of a refusal, whose body is as the contract says."""
    status, reply = await post(http, verb, body)
    assert status == reply["code"] == code
    assert reply["code_text"] == CODE_TEXTS[code]
    assert set(reply) <= {"code", "code_text", "message", "details"}
    return str(reply["message"])


# --- replies --------------------------------------------------------------------------------------------------


async def test_a_json_client_goes_through_a_whole_life(house: House, http: httpx2.AsyncClient) -> None:
    payload = base64.b64encode(b"\x00\xff").decode()
    items = [{"bytes": payload, "kind": "k", "encoding": "e", "reference": "r"}, {"utf8": "Grüße"}]
    status, produced = await post(
        http, "queue.produce", {"queue_name": "orders", "request_timeout": "1m", "items": items}
    )
    assert (status, produced["code"]) == (200, 200)
    first, second = produced["items"]
    assert set(first) == {"id", "partition"}
    status, leased = await post(
        http,
        "queue.lease",
        {"queue_name": "orders", "client_id": "me", "batch_size": 2, "request_timeout": "1m"},
    )
    assert status == 200
    assert (leased["queue_name"], leased["partition"]) == ("orders", 0)
    assert leased["items"] == [
        {
            "id": first["id"],
            "attempts": 1,
            "lease_deadline": "2030-01-01T00:01:00Z",
            "bytes": payload,
            "encoding": "e",
            "kind": "k",
            "reference": "r",
        },
        {
            "id": second["id"],
            "attempts": 1,
            "lease_deadline": "2030-01-01T00:01:00Z",
            "bytes": base64.b64encode("Grüße".encode()).decode(),
        },
    ]
    status, extended = await post(
        http, "queue.extend", {"queue_name": "orders", "ids": [first["id"]], "lease_timeout": "90s"}
    )
    assert (status, extended["items"]) == (200, [{"id": first["id"], "lease_deadline": "2030-01-01T00:01:30Z"}])
    done = {"queue_name": "orders", "partition": 0, "request_timeout": "1m", "ids": [first["id"]]}
    assert await post(http, "queue.complete", done) == (200, {"code": 200})
    back = {"queue_name": "orders", "items": [{"id": second["id"], "retry_at": "2030-01-01T01:00:00+01:00"}]}
    assert await post(http, "queue.retry", back) == (200, {"code": 200})
    assert len(await house.items("orders")) == 1


async def test_a_listing_has_the_names_of_the_contract(house: House, http: httpx2.AsyncClient) -> None:
    await house.queues.queue_produce("orders", [b"a"])
    status, reply = await post(http, "storage/items.list", {"queue_name": "orders", "partition": 0})
    assert status == 200
    (item,) = reply["items"]
    assert item == {
        "id": item["id"],
        "created_at": "2030-01-01T00:00:00Z",
        "expire_deadline": "2030-01-01T01:00:00Z",
        "payload": "YQ==",
    }
    await house.queues.queue_lease("orders")
    status, reply = await post(http, "storage/items.list", {"queue_name": "orders"})
    assert reply["items"][0] | item == reply["items"][0]
    assert (reply["items"][0]["is_leased"], reply["items"][0]["attempts"]) == (True, 1)
    assert reply["items"][0]["lease_deadline"] == "2030-01-01T00:01:00Z"


async def test_statistics_have_the_names_of_the_contract(http: httpx2.AsyncClient) -> None:
    status, reply = await post(http, "queue.stats", {"queue_name": "orders"})
    assert (status, reply["queue_name"]) == (200, "orders")
    (logical,) = reply["logicalQueues"]
    assert set(logical) == {"produce_waiting", "lease_waiting", "complete_waiting", "in_flight", "partitions"}
    (partition,) = logical["partitions"]
    assert set(partition) == {
        "partition",
        "total",
        "total_leased",
        "failures",
        "average_age",
        "average_leased_age",
        "scheduled",
        "dying",
        "overdue",
    }


async def test_a_queue_has_the_names_of_the_contract(http: httpx2.AsyncClient) -> None:
    status, reply = await post(http, "queues.info", {"queue_name": "orders"})
    assert status == 200
    assert reply == {
        "queue_name": "orders",
        "lease_timeout": "1m",
        "expire_timeout": "1h",
        "requested_partitions": 1,
        "created_at": "2030-01-01T00:00:00Z",
        "updated_at": "2030-01-01T00:00:00Z",
        "partitions": reply["partitions"],
    }


async def test_a_queue_as_it_is_shown_can_be_sent_back(http: httpx2.AsyncClient) -> None:
    _, shown = await post(http, "queues.info", {"queue_name": "orders"})
    assert await post(http, "queues.update", shown) == (200, {"code": 200})
    assert await post(http, "queues.create", shown | {"queue_name": "copy"}) == (200, {"code": 200})


async def test_an_item_as_it_is_listed_can_be_imported(house: House, http: httpx2.AsyncClient) -> None:
    await house.queues.queue_produce("orders", [b"a"])
    await house.queues.queue_lease("orders")
    _, listed = await post(http, "storage/items.list", {"queue_name": "orders"})
    extra = {"updated_at": "2029-01-01T00:00:00Z", "dead_deadline": "2029-01-01T00:00:00Z"}
    request = {"queue_name": "orders", "partition": 0, "items": [listed["items"][0] | extra]}
    status, reply = await post(http, "storage/items.import", request)
    assert status == 200
    assert reply["items"][0]["payload"] == "YQ=="
    assert reply["items"][0]["id"] != listed["items"][0]["id"]


async def test_where_ids_are_at_fault_the_details_name_them(http: httpx2.AsyncClient) -> None:
    request = {"queue_name": "orders", "request_timeout": "1m", "ids": ["x", "y"]}
    status, reply = await post(http, "queue.complete", request)
    assert status == 400
    assert reply == {
        "code": 400,
        "code_text": "Bad Request",
        "message": "invalid storage id; 'x' does not exist",
        "details": {"ids": ["x", "y"]},
    }


async def test_nothing_to_lease_is_454(house: House, http: httpx2.AsyncClient) -> None:
    request = {"queue_name": "orders", "client_id": "me", "batch_size": 1, "request_timeout": "10ms"}
    task = asyncio.create_task(error(http, "queue.lease", request, 454))
    await house.waiting_leases("orders", 1)
    await house.advance(0.01)
    assert await answered(task) == "request timeout; no items are in the queue, try again"


async def test_a_stopping_server_is_453(house: House, http: httpx2.AsyncClient) -> None:
    house.service.manager.stop()
    text = await error(http, "queue.stats", {"queue_name": "orders"}, 453)
    assert text == "queue is shutting down; try another server"


# --- bodies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
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
    house: House, http: httpx2.AsyncClient, verb: str, body: Any
) -> None:
    await error(http, verb, body, 400)
    assert await house.items("orders") == []
    assert [info.queue_name for info in await house.queues.queues_list()] == ["orders"]


async def test_a_body_at_its_limit_is_taken_and_one_byte_more_is_400(house: House, http: httpx2.AsyncClient) -> None:
    def body(size: int) -> bytes:
        frame = b'{"queue_name":"orders","request_timeout":"1m","items":[{"utf8":"%b"}]}'
        return frame % (b"a" * (size - len(frame) + 2))

    assert len(body(5_000_000)) == 5_000_000
    assert (await post(http, "queue.produce", body(5_000_000)))[0] == 200
    text = await error(http, "queue.produce", body(5_000_001), 400)
    assert text == "body is too large; 5000001 bytes were sent, 5000000 is the maximum"
    assert len(await house.items("orders")) == 1


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


async def test_an_import_takes_64_megabytes(house: House, http: httpx2.AsyncClient) -> None:
    payload = base64.b64encode(bytes(6_000_000)).decode()
    request = {"queue_name": "orders", "items": [{"payload": payload}]}
    assert (await post(http, "storage/items.import", request))[0] == 200
    (item,) = await house.items("orders")
    assert len(item.payload) == 6_000_000


# --- methods and paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
async def test_another_http_method_is_400(http: httpx2.AsyncClient, method: str) -> None:
    answer = await http.request(method, "/v1/queue.stats")
    assert answer.status_code == 400
    if method != "HEAD":
        assert answer.json()["message"] == f"method is invalid; use POST, not {method}"


@pytest.mark.parametrize("verb", ["queue.destroy", "queue", "", "queues.list/", "storage/items.steal", "QUEUE.STATS"])
async def test_an_unknown_verb_is_501(http: httpx2.AsyncClient, verb: str) -> None:
    assert await error(http, verb, {}, 501) == f"method is unknown; there is no '{verb}'"


async def test_every_verb_of_the_contract_is_there(http: httpx2.AsyncClient) -> None:
    assert len(VERBS) == 19
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
    house: House, http: httpx2.AsyncClient, headers: dict[str, str]
) -> None:
    async with httpx2.AsyncClient(base_url=house.url, headers=headers, trust_env=False) as stranger:
        for verb in ("queue.stats", "queues.list", "queue.destroy"):
            text = await error(stranger, verb, b"nonsense", 401)
            assert text == "unauthorized; a valid token is required"


async def test_a_client_with_a_wrong_token_is_told(house: House) -> None:
    async with Client(house.url, "wrong") as stranger:
        with pytest.raises(HoldfastError) as caught:
            await stranger.queues_list()
    assert (caught.value.code, str(caught.value)) == (401, "unauthorized; a valid token is required")


async def test_without_tokens_only_this_machine_is_let_in(house: House) -> None:
    async with (
        serving(house.service, token="") as url,
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


async def test_a_client_that_closes_its_connection_waits_no_more(house: House, http: httpx2.AsyncClient) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"queue_name":"orders","client_id":"me","batch_size":1,"request_timeout":"15m"}'
    head = f"POST /v1/queue.lease HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {TOKEN}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await house.waiting_leases("orders", 1)
    writer.close()
    await writer.wait_closed()
    await house.waiting_leases("orders", 0)
    await house.queues.queue_produce("orders", [b"a"])
    (item,) = await house.items("orders")
    assert (item.is_leased, item.attempts) == (False, 0)
    assert await reader.read() == b""


# --- pages ----------------------------------------------------------------------------------------------------


async def test_health_needs_no_token_and_tells_what_fails(house: House, http: httpx2.AsyncClient) -> None:
    async with httpx2.AsyncClient(base_url=house.url, trust_env=False) as stranger:
        answer = await stranger.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "pass")
        assert answer.headers["content-type"].startswith("application/health+json")
        await house.queues.queues_create("others")
        house.faults.down.add("orders")
        assert (await post(http, "queue.produce", _item("orders")))[0] == 454
        answer = await stranger.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "warn")
        house.faults.down.add("others")
        assert (await post(http, "queue.produce", _item("others")))[0] == 454
        assert (await stranger.get("/health")).status_code == 503
        house.faults.down.clear()
        await house.advance(31)
        await eventually(lambda: _is_healthy(stranger))
        house.service.manager.stop()
        assert (await stranger.get("/health")).status_code == 503


def _item(queue_name: str) -> dict[str, Any]:
    return {"queue_name": queue_name, "request_timeout": "1m", "items": [{"utf8": "a"}]}


async def _is_healthy(http: httpx2.AsyncClient) -> bool:
    return bool((await http.get("/health")).json()["status"] == "pass")


async def test_metrics_need_no_token_and_count(house: House, http: httpx2.AsyncClient) -> None:
    await post(http, "queue.produce", _item("orders"))
    await error(http, "queue.stats", {"queue_name": "x"}, 400)
    async with httpx2.AsyncClient(base_url=house.url, trust_env=False) as stranger:
        answer = await stranger.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'holdfast_requests_total{verb="queue.produce",code="200"} 1' in lines
    assert 'holdfast_requests_total{verb="queue.stats",code="400"} 1' in lines
    assert any('queue="orders"' in line and line.endswith(" 1") for line in lines)


async def test_openapi_describes_every_verb(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    document = answer.json()
    assert document["openapi"].startswith("3.")
    assert {f"/v1/{verb}" for verb in VERBS} <= set(document["paths"])
    for verb in VERBS:
        assert set(document["paths"][f"/v1/{verb}"]) == {"post"}


async def test_other_paths_are_400(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/nothing/here")
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
