"""The part of the OpenAPI document that describes /v1/results, made from the table of its routes."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from holdfast.core.collect_views import (
    AbandonResultRequest,
    GapsReply,
    ResultsReply,
    ResultView,
    StartResultRequest,
)
from holdfast.core.roles import NEEDS
from holdfast.faces.api.results import PATHS
from holdfast.services.collect.service import PAGE_COUNT_MAX

BYTES = "application/octet-stream"
JSON = "application/json"


class Described(Struct, frozen=True, kw_only=True):
    """What a route does, takes and answers; without a reply it streams bytes."""

    summary: str
    request: type[Struct] | None = None
    reply: type[Struct] | None = None
    query: tuple[tuple[str, dict[str, Any]], ...] = ()


#: By the names in the table of roles.
DESCRIBED = {
    "results.list": Described(
        summary="Transactions by id, a page at a time",
        reply=ResultsReply,
        query=(
            ("after", {"type": "string"}),
            ("limit", {"type": "integer", "minimum": 1, "maximum": PAGE_COUNT_MAX}),
        ),
    ),
    "results.start": Described(
        summary="Ask for a result, or find the one that has this id", request=StartResultRequest, reply=ResultView
    ),
    "results.show": Described(summary="One transaction with its series", reply=ResultView),
    "results.gaps": Described(summary="Which ordinals are missing, as ranges with both ends", reply=GapsReply),
    "results.read": Described(summary="The bytes of a series in order, verified, up to the first gap"),
    "results.abandon": Described(summary="Give a result up", request=AbandonResultRequest, reply=ResultView),
}


def results_types() -> list[Any]:
    """Every type that has a schema in the document."""
    types = [kind for one in DESCRIBED.values() for kind in (one.request, one.reply) if kind is not None]
    return list(dict.fromkeys(types))


def results_paths(schemas: dict[Any, dict[str, Any]], errors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The paths. `schemas` has the schema of each of `results_types`."""
    paths: dict[str, dict[str, Any]] = {}
    for path, method, _, need in PATHS:
        paths.setdefault(path, {})[method.lower()] = _results_operation(path, need, schemas, errors)
    return paths


def _results_operation(
    path: str, need: str, schemas: dict[Any, dict[str, Any]], errors: dict[str, Any]
) -> dict[str, Any]:
    told = DESCRIBED[need]
    content: dict[str, Any] = {BYTES: {"schema": {"type": "string", "format": "binary"}}}
    if told.reply is not None:
        content = {JSON: {"schema": schemas[told.reply]}}
    operation: dict[str, Any] = {
        "operationId": need,
        "summary": told.summary,
        "description": f"Needs the role {NEEDS[need].word}.",
        "responses": {"200": {"description": "Done", "content": content}, **errors},
        "security": [{"token": []}],
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in told.query]
    if parameters:
        operation["parameters"] = parameters
    if told.request is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[told.request]}}}
    return operation
