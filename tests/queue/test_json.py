"""The JSON of the verbs: names, moments, base64, codes and details, word for word."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.queue.installation import Installation, answered, error, plain_client, post


@pytest.fixture
def face() -> str:
    return "http"


@pytest.fixture
async def http(installation: Installation) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client with the token, and a queue."""
    async with plain_client(installation) as client:
        await installation.queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
        yield client


async def test_a_json_client_goes_through_a_whole_life(installation: Installation, http: httpx2.AsyncClient) -> None:
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
    assert len(await installation.items("orders")) == 1


async def test_a_listing_has_the_names_of_the_contract(installation: Installation, http: httpx2.AsyncClient) -> None:
    await installation.queues.queue_produce("orders", [b"a"])
    status, reply = await post(http, "storage/items.list", {"queue_name": "orders", "partition": 0})
    assert status == 200
    (item,) = reply["items"]
    assert item == {
        "id": item["id"],
        "created_at": "2030-01-01T00:00:00Z",
        "expire_deadline": "2030-01-01T01:00:00Z",
        "payload": "YQ==",
    }
    await installation.queues.queue_lease("orders")
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
        "namespace": "_system",
        "lease_timeout": "1m0s",
        "expire_timeout": "1h0m0s",
        "requested_partitions": 1,
        "created_at": "2030-01-01T00:00:00Z",
        "updated_at": "2030-01-01T00:00:00Z",
        "partitions": reply["partitions"],
    }


async def test_a_queue_as_it_is_shown_can_be_sent_back(http: httpx2.AsyncClient) -> None:
    _, shown = await post(http, "queues.info", {"queue_name": "orders"})
    assert await post(http, "queues.update", shown) == (200, {"code": 200})
    assert await post(http, "queues.create", shown | {"queue_name": "copy"}) == (200, {"code": 200})


async def test_an_item_as_it_is_listed_can_be_imported(installation: Installation, http: httpx2.AsyncClient) -> None:
    await installation.queues.queue_produce("orders", [b"a"])
    await installation.queues.queue_lease("orders")
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


async def test_nothing_to_lease_is_454(installation: Installation, http: httpx2.AsyncClient) -> None:
    request = {"queue_name": "orders", "client_id": "me", "batch_size": 1, "request_timeout": "10ms"}
    task = asyncio.create_task(error(http, "queue.lease", request, 454))
    await installation.waiting_leases("orders", 1)
    await installation.advance(0.01)
    assert await answered(task) == "request timeout; no items are in the queue, try again"


async def test_a_stopping_server_is_453(installation: Installation, http: httpx2.AsyncClient) -> None:
    installation.service.manager.stop()
    text = await error(http, "queue.stats", {"queue_name": "orders"}, 453)
    assert text == "queue is shutting down; try another server"
