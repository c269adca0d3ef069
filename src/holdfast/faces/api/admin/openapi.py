"""The part of the OpenAPI document that describes /admin, made from the table of endpoints."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import msgspec

from holdfast.core.roles import NEEDS, REDRIVES
from holdfast.faces.api.admin.desk import Endpoint
from holdfast.faces.api.admin.routes import ENDPOINTS, PROBLEM
from holdfast.faces.api.admin.views import Problem
from holdfast.faces.api.door import CSRF_HEADER

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
