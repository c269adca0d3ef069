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
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast.core.requests.declare import declared_under
from holdfast.faces.api.endpoints import document
from holdfast.proof.process import python_argv
from tests.faces.api.installation import open_installation
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with a few letters in its vault."""
    folder = tmp_path_factory.mktemp("schema")
    asyncio.run(_prepare(folder))
    address = f"127.0.0.1:{free_port()}"
    argv = python_argv("holdfast", "serve", "--url", f"sqlite:///{folder}/data", "--listen", address)
    env = {"HOLDFAST_ADMIN_TOKEN": TOKEN, "PATH": ""}
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            asyncio.run(_ready(f"http://{address}"))
            yield f"http://{address}"
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
    assert b"server.bug" not in log, log


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

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=server, headers={"authorization": f"Bearer {TOKEN}"})
        assert response.status_code != 500, response.text
        case.validate_response(response, checks=CHECKS)

    ask()
