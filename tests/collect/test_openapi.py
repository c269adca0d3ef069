"""`/openapi.json` describes `/v1/results` by the types that it is decoded and answered with."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.core.requests.declare import declared_under
from holdfast.core.requests.results import ResultView, StartResultRequest
from holdfast.faces.api.endpoints import document


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document("0"))
    return found


def test_every_route_is_described_and_nothing_else(told: dict[str, Any]) -> None:
    described = {
        (path, method.upper(), operation["operationId"])
        for path, methods in told["paths"].items()
        if path.startswith("/v1/results")
        for method, operation in methods.items()
    }
    assert described == {(one.path, one.method, one.name) for one in declared_under("/v1/results").values()}


def test_the_schemas_are_those_of_the_types(told: dict[str, Any]) -> None:
    start = told["paths"]["/v1/results"]["post"]
    schemas = told["components"]["schemas"]

    def fields(content: dict[str, Any]) -> set[str]:
        return set(schemas[content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]]["properties"])

    assert fields(start["requestBody"]["content"]) == {
        field.encode_name for field in msgspec.structs.fields(StartResultRequest)
    }
    assert fields(start["responses"]["200"]["content"]) == set(ResultView.__struct_fields__)
    streamed = told["paths"]["/v1/results/{id}/{series}"]["get"]
    assert list(streamed["responses"]["200"]["content"]) == ["application/octet-stream"]
    assert [each["name"] for each in streamed["parameters"]] == ["id", "series"]
