"""The same results through HTTP, the command line against a server, and the command line alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

import holdfast
from tests.collect.producing import (
    NOTIFY,
    PRODUCER,
    answer,
    body_of,
    header,
    make_queues,
    payload,
    produce,
    take_request,
)
from tests.faults.serving import TOKEN, Serving
from tests.support.command import Command
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

SHAPE = {"rows": 40, "lines": 3}


def whole(series: str) -> bytes:
    return b"".join(body_of(series, ordinal) for ordinal in range(SHAPE[series]))


async def test_a_result_over_http_and_the_command_line_of_a_server(tmp_path: Path) -> None:
    async with Serving(f"sqlite:///{tmp_path}/data", tmp_path) as server, server.client() as queues:
        await server.start()
        await make_queues(queues)
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(base_url=server.address, headers=headers, trust_env=False) as http:
            assert (await http.get("/v1/results")).json() == {"items": []}
            assert (await http.get("/v1/results", headers={"authorization": "Bearer no"})).status_code == 401
            wanted = {"producer": PRODUCER, "notify": NOTIFY, "transaction_id": "t", "series": ["rows", "lines"]}
            begun = await http.post("/v1/results", json={**wanted, "utf8": "May"})
            assert (begun.status_code, begun.json()["id"]) == (200, "t")
            again = (await http.post("/v1/results", json={**wanted, "utf8": "June"})).json()
            assert again["created_at"] == begun.json()["created_at"], "the same id is the same transaction"
            body, attributes = await take_request(queues)
            assert (body, attributes["message-id"]) == (b"May", "t")
            await produce(queues, "t", "payload", [payload("t", "rows", number) for number in (0, 1, 4)])
            await produce(queues, "t", "header", [header("t", "rows", 6)])

            async def gaps() -> object:
                return (await http.get("/v1/results/t/gaps")).json()["items"][1]

            expected = {"series": "rows", "count": 6, "stored_count": 3, "missing": [[2, 3], [5, 5]], "is_open": False}

            async def has_gaps() -> bool:
                return await gaps() == expected

            await eventually(has_gaps)
            streamed = await http.get("/v1/results/t/rows")
            assert streamed.content == body_of("rows", 0) + body_of("rows", 1), "up to the first gap"
            asked = await http.post("/v1/results/t/missing")
            assert asked.json() == {"ranges": 2}, "of rows; how many lines there are nobody has said"
            body, attributes = await take_request(queues)
            assert b'"rows":[[2,3],[5,5]]' in body
            assert {one["id"] for one in (await http.get("/v1/results?unfinished=true")).json()["items"]} == {"t"}
            assert (await http.get("/v1/results/nothing")).status_code == 400
            assert (await http.get("/v1/results/t/.x")).status_code == 400
            assert (await http.post("/v1/results", json={"producer": "nobody"})).status_code == 400
            assert (await http.post("/v1/results", content=b"{")).status_code == 455
            ended = (await http.post("/v1/results/t/abandon", json={"reason": "a mistake"})).json()
            assert (ended["state"], ended["reason"]) == ("abandoned", "a mistake")
            assert (await http.post("/v1/results/t/abandon", json={})).json()["state"] == "abandoned"
            assert (await http.post("/v1/results/t/missing")).status_code == 400

            async def is_finished() -> bool:
                return not (await http.get("/v1/results?unfinished=true")).json()["items"]

            await eventually(is_finished)
        command = Command(tmp_path, server.address)
        started = await asyncio.to_thread(
            command.done, "results", "start", "May", "--producer", PRODUCER, "--id", "u", "--json", HOLDFAST_TOKEN=TOKEN
        )
        assert started.document["state"] == "forwarding"
        await take_request(queues)
        await produce(queues, "u", "payload", [payload("u", name, n) for name in SHAPE for n in range(SHAPE[name])])
        await produce(queues, "u", "header", [header("u", name, SHAPE[name], series_count=2) for name in SHAPE])

        async def told(*arguments: str) -> bytes:
            return (await asyncio.to_thread(command.done, "results", *arguments, HOLDFAST_TOKEN=TOKEN)).stdout

        async def is_done() -> bool:
            return b"u is completed" in await told("show", "u")

        await eventually(is_done)
        assert await told("cat", "u", "rows") == whole("rows")
        listed = await told("list")
        assert b"abandoned" in listed
        assert b"completed" in listed
        assert b"rows" in await told("gaps", "u")
        assert await server.child.terminate() == 0


async def test_the_command_line_alone_collects_while_it_waits(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/data"
    async with holdfast.open(url) as queues:
        await make_queues(queues)
        async with holdfast.Collector(url, queues=queues) as collector:
            await collector.start(b"May", producer=PRODUCER, transaction_id="t", series=list(SHAPE))
            await take_request(queues)
        await answer(queues, "t", SHAPE)
    command = Command(tmp_path, url)
    waited = await asyncio.to_thread(
        command.done, "results", "start", "--producer", PRODUCER, "--id", "t", "--wait", "--json"
    )
    assert waited.document["state"] == "completed"
    assert (await asyncio.to_thread(command.done, "results", "cat", "t", "lines")).stdout == whole("lines")
    unknown = await asyncio.to_thread(command, "results", "cat", "t", "nosuchseries")
    assert (unknown.code, unknown.stdout) == (1, b"")
    assert "'t' has no series 'nosuchseries', it has " in unknown.stderr
