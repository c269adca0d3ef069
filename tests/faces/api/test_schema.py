"""schemathesis over the OpenAPI document: whatever fits the schema, or nearly does, gets an answer that the document
names, never a 500."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast.core.moments import parse_duration
from holdfast.core.requests.declare import declared_under
from holdfast.core.requests.queue import VERBS
from holdfast.errors import Invalid
from holdfast.faces.api.endpoints import document
from holdfast.proof.process import python_argv
from tests.faces.api.conftest import open_installation
from tests.faults.serving import TOKEN
from tests.support.eventually import eventually
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "12"))
DOCUMENT = schemathesis.openapi.from_dict(json.loads(document("0")))
CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
#: One has no end, and the others change who may come in while the others are asked.
LEFT_OUT = {"events.watch"}
ENDPOINTS = declared_under("/admin/").values()
AS_OFTEN = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with a few letters in its vault."""
    folder = tmp_path_factory.mktemp("schema")
    asyncio.run(_prepare(folder))
    address = f"127.0.0.1:{free_port()}"
    argv = python_argv("holdfast", "serve", "--url", f"sqlite:///{folder}/data", "--listen", address)
    env = {"HOLDFAST_ADMIN_TOKEN": TOKEN, "PATH": ""}
    log = folder / "log"  # not a pipe that nobody reads: a full one stops the server
    with (
        log.open("wb") as stderr,
        subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=stderr) as process,
    ):
        try:
            asyncio.run(_ready(f"http://{address}"))
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert b"server.bug" not in log.read_bytes()


async def _prepare(folder: Path) -> None:
    async with open_installation(folder) as installation:
        await installation.put(*(f"body {number}".encode() for number in range(30)))


async def _ready(address: str) -> None:
    async def answers() -> bool:
        async with httpx2.AsyncClient() as client:
            try:
                return (await client.get(f"{address}/health")).status_code == 200
            except httpx2.HTTPError:
                return False

    await eventually(answers)


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.name not in LEFT_OUT], ids=lambda one: one.name)
def test_an_endpoint_answers_as_the_document_says(server: str, endpoint: Any) -> None:
    operation = DOCUMENT[endpoint.path][endpoint.method]

    @AS_OFTEN
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=server, headers={"authorization": f"Bearer {TOKEN}"})
        assert response.status_code != 500, response.text
        case.validate_response(response, checks=CHECKS)

    ask()


class Bound:
    """What no schema can say: which queues, items and ids there are, and how fields of a request belong together."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http
        self._count = 0

    def post(self, verb: str, body: dict[str, Any]) -> httpx2.Response:
        return self._http.post(f"/v1/{verb}", json=body)

    def made(self, verb: str, body: dict[str, Any]) -> Any:
        answer = self.post(verb, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def queue(self) -> str:
        """A new queue with a dead queue of its own."""
        self._count += 1
        name = f"queue-{self._count}-{os.urandom(4).hex()}"
        times = {"lease_timeout": "1m", "expire_timeout": "1h"}
        self.made("queues.create", {"queue_name": f"{name}-dead", **times})
        self.made("queues.create", {"queue_name": name, "dead_queue": f"{name}-dead", **times})
        return name

    def leased(self, name: str, count: int) -> list[str]:
        """Ids of so many leased items."""
        asked = {"queue_name": name, "request_timeout": "1m"}
        self.made("queue.produce", {**asked, "items": [{"utf8": "x"}] * count})
        reply = self.made("queue.lease", {**asked, "client_id": "me", "batch_size": count})
        return [item["id"] for item in reply["items"]]

    def bind(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body, so that what it names is there. What it does not name is not added."""
        name = self.queue()
        body = body | ({"queue_name": name} if "queue_name" in body else {})
        if verb == "queues.create":
            body["queue_name"] += "-new"
        at_hand: dict[str, Any] = {"partition": 0, "dead_queue": f"{name}-dead"}
        body |= {key: value for key, value in at_hand.items() if key in body}
        if verb.startswith("storage/"):
            body |= {"pivot": ""} if "pivot" in body else {}
        if verb in {"queue.complete", "queue.extend", "queue.retry"}:
            key = "items" if verb == "queue.retry" else "ids"
            ids = self.leased(name, len(body[key]))
            body[key] = [{**one, "id": id_} for one, id_ in zip(body[key], ids, strict=True)] if key == "items" else ids
        if verb == "queue.redrive":
            body |= {"queue_name": f"{name}-dead", "source_queue": name}
        if verb == "queue.clear" and not (body.get("queue") or body.get("scheduled")):
            body["queue"] = True
        for key, (least, most) in TIMES.items():
            if key in body and not is_between(body[key], least, most):
                body[key] = most if verb != "queue.lease" else least
        if "requested_partitions" in body:
            body["requested_partitions"] %= 4
        body = whole(body)
        assert isinstance(body, dict)
        return body


#: A duration that fits the pattern may be too short or too long, or longer than another.
TIMES = {
    "request_timeout": ("10ms", "1m"),
    "lease_timeout": ("1ms", "20m"),
    "expire_timeout": ("20m", "876000h"),
    "dead_retention": ("0s", "876000h"),
}


def is_between(text: str, least: str, most: str) -> bool:
    try:
        us = [parse_duration(one, what="it") for one in (least, text, most)]
    except Invalid:
        return False
    return us == sorted(us) and not (us[1] < 1_000_000 and least == "10ms")


def whole(value: Any) -> Any:
    """To a schema 1.0 is an integer; nobody writes one so."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: whole(one) for key, one in value.items()}
        case list():
            return [whole(one) for one in value]
    return value


@pytest.fixture
def bound(server: str) -> Iterator[Bound]:
    with httpx2.Client(base_url=server, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        yield Bound(http)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_whatever_fits_the_schema_of_a_verb_is_accepted(bound: Bound, verb: str) -> None:
    @AS_OFTEN
    @given(case=DOCUMENT[f"/v1/{verb}"]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case: Any) -> None:
        answer = bound.post(verb, bound.bind(verb, case.body))
        assert answer.status_code == 200 or (verb, answer.status_code) == ("queue.lease", 454), answer.text

    ask()


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_what_the_document_requires_is_required_and_nothing_else(bound: Bound, verb: str) -> None:
    described = json.loads(document("0"))
    where = described["paths"][f"/v1/{verb}"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = described["components"]["schemas"][where.rpartition("/")[2]]
    values: dict[str, Any] = {
        "queue_name": "x", "request_timeout": "1s", "client_id": "me", "batch_size": 1, "lease_timeout": "1m",
        "expire_timeout": "1h", "source_queue": "x", "ids": ["x"], "items": [{"id": "x"}] if "retry" in verb else [{}],
    }  # fmt: skip
    required = {name: values[name] for name in schema.get("required", [])}
    answer = bound.post(verb, bound.bind(verb, required))
    assert answer.status_code in {200, 454}, answer.text
    for name in required:
        body = bound.bind(verb, required)
        del body[name]
        assert bound.post(verb, body).status_code == 400, name
