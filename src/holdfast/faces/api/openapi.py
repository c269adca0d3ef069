"""`/openapi.json`, generated from the types that the verbs are decoded with.

The part of the OpenAPI document that describes /admin, made from the table of endpoints.

The part of the OpenAPI document that describes /v1/results, made from the table of its routes.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from holdfast.core.requests.queue import VERBS, ErrorReply
from holdfast.core.requests.results import AbandonResultRequest, GapsReply, ResultsReply, ResultView, StartResultRequest
from holdfast.core.requests.roles import NEEDS, REDRIVES
from holdfast.faces.api.admin.desk import Endpoint
from holdfast.faces.api.admin.routes import ENDPOINTS, PROBLEM
from holdfast.faces.api.admin.views import Problem
from holdfast.faces.api.authenticator import COOKIE, CSRF_HEADER
from holdfast.faces.api.results import PATHS
from holdfast.services.collect.service import PAGE_COUNT_MAX

ERROR_CODES = {
    400: "The request cannot be carried out as it stands; nothing changed",
    401: "A valid token is required",
    403: "Not allowed",
    453: "The server is stopping; try another one",
    454: "Nothing was acknowledged; try again",
    455: "The body is not a UTF-8 JSON object",
    500: "A bug; the server's log has the details",
}


@cache
def document(version: str) -> bytes:
    """The OpenAPI 3.1 document."""
    verbs = VERBS.values()
    types: list[Any] = [
        *admin_types(),
        *results_types(),
        ErrorReply,
        *(verb.request for verb in verbs),
        *(verb.reply for verb in verbs),
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    errors: dict[str, dict[str, Any]] = {
        str(code): {"description": text, "content": _content(by_type[ErrorReply])} for code, text in ERROR_CODES.items()
    }
    done: dict[str, dict[str, Any]] = {
        name: {"200": {"description": "Done", "content": _content(by_type[verb.reply])}} for name, verb in VERBS.items()
    }
    paths = {
        f"/v1/{name}": {
            "post": {
                "operationId": name,
                "summary": verb.summary,
                "requestBody": {"required": True, "content": _content(by_type[verb.request])},
                "responses": done[name] | errors,
                "security": [{"token": []}],
            }
        }
        for name, verb in VERBS.items()
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Holdfast",
                "version": version,
                "summary": "A durable queue with leases, retries and dead queues",
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths | results_paths(by_type, errors) | admin_paths(by_type),
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
                },
            },
        }
    )


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


PROBLEMS = {
    "400": "The request cannot be carried out as it stands; nothing changed",
    "401": "A valid token is required",
    "403": "The role of this token is too low, or it is for other queues",
    "404": "No such thing",
    "405": "Another method",
    "409": "What the caller saw is no longer so; nothing was done",
    "500": "A bug; the server's log has the details",
    "502": "The broker said no or cannot be reached",
    "503": "The vault cannot be reached, or the server stops; try again",
}


def admin_types() -> list[Any]:
    """Every type that has a schema in the document."""
    types: list[Any] = [Problem]
    for endpoint in ENDPOINTS:
        types += [one for one in (endpoint.reply, endpoint.request) if one is not None and one is not bytes]
    return list(dict.fromkeys(types))


def admin_paths(schemas: dict[Any, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The paths. `schemas` has the schema of each of `admin_types`."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _admin_operation(endpoint, schemas)
    return paths


def _admin_operation(endpoint: Endpoint, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    reply = {"type": "string"} if endpoint.reply is bytes else schemas[endpoint.reply]
    responses: dict[str, Any] = {"200": {"description": "Done", "content": {endpoint.media: {"schema": reply}}}}
    responses |= {
        code: {"description": text, "content": {PROBLEM: {"schema": schemas[Problem]}}}
        for code, text in PROBLEMS.items()
    }
    operation: dict[str, Any] = {
        "operationId": f"admin.{endpoint.name}",
        "summary": endpoint.summary,
        "description": _need(endpoint),
        "responses": responses,
        "security": [{"token": []}, {"session": []}],
    }
    parameters = [*_path_parameters(endpoint.path), *_query_parameters(endpoint)]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.request is not None:
        content = {"application/json": {"schema": schemas[endpoint.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _need(endpoint: Endpoint) -> str:
    role = f"Needs the role {NEEDS[endpoint.name].word}."
    if endpoint.name in REDRIVES:
        role = f"{role} The settings may say admin."
    return f"{role} By session cookie it needs the header {CSRF_HEADER}." if endpoint.is_change else role


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parameters = []
    for kind in endpoint.query:
        hints = get_type_hints(kind, include_extras=True)
        for name in kind.__struct_fields__:
            # Ids stand in one text with commas.
            schema: dict[str, Any] = (
                {"type": "string", "pattern": "^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$"}
                if name == "ids"
                else msgspec.json.schema(hints[name])
            )
            parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    return parameters


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
