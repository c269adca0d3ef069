"""`/openapi.json`, made from the declared requests and the types that they are decoded with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from holdfast.core.requests import results, vault
from holdfast.core.requests.declare import BYTES, JSON, Declared, declared_under
from holdfast.core.requests.queue import VERBS, ErrorReply
from holdfast.core.requests.vault import Problem
from holdfast.faces.api.authenticator import COOKIE, CSRF_HEADER
from holdfast.faces.api.endpoints import PROBLEM

#: Whose paths they are: the modules declare their requests when they are imported.
RESULTS, ADMIN = results.__name__, vault.__name__
ERROR_CODES = {
    400: "The request cannot be carried out as it stands; nothing changed",
    401: "A valid token is required",
    403: "Not allowed",
    453: "The server is stopping; try another one",
    454: "Nothing was acknowledged; try again",
    455: "The body is not a UTF-8 JSON object",
    500: "A bug; the server's log has the details",
}
PROBLEMS = {
    400: "The request cannot be carried out as it stands; nothing changed",
    401: "A valid token is required",
    403: "The role of this token is too low, or it is for other queues",
    404: "No such thing",
    405: "Another method",
    409: "What the caller saw is no longer so; nothing was done",
    500: "A bug; the server's log has the details",
    502: "The broker said no or cannot be reached",
    503: "The vault cannot be reached, or the server stops; try again",
}
#: Ids stand in one text with commas.
IDS = {"type": "string", "pattern": "^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$"}

Schemas = dict[Any, dict[str, Any]]


@cache
def document(version: str) -> bytes:
    """The OpenAPI 3.1 document."""
    requests = [*VERBS.values(), *declared_under("/v1/results").values(), *declared_under("/admin/").values()]
    types: list[Any] = [Problem, ErrorReply]
    for declared in requests:
        types += [declared.reply] * (declared.media == JSON) + [declared.body] * (declared.body is not None)
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for declared in requests:
        paths.setdefault(declared.path, {})[declared.method.lower()] = _operation(declared, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Holdfast",
                "version": version,
                "summary": "A durable queue with leases, retries and dead queues",
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
                },
            },
        }
    )


def _operation(declared: Declared, schemas: Schemas) -> dict[str, Any]:
    is_admin = declared.path.startswith("/admin/")
    operation: dict[str, Any] = {
        "operationId": f"admin.{declared.name}" if is_admin else declared.name,
        "summary": declared.sentence.removesuffix("."),
        "responses": _responses(declared, schemas, is_admin=is_admin),
        "security": [{"token": []}, {"session": []}] if is_admin else [{"token": []}],
    }
    if declared.name not in VERBS:
        operation["description"] = _need(declared, is_admin=is_admin)
    if parameters := _parameters(declared):
        operation["parameters"] = parameters
    if declared.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(schemas[declared.body])}
    return operation


def _responses(declared: Declared, schemas: Schemas, *, is_admin: bool) -> dict[str, Any]:
    reply = schemas[declared.reply] if declared.media == JSON else {"type": "string"}
    if declared.media == BYTES and not is_admin:
        reply = {"type": "string", "format": "binary"}
    told, media, kind = (PROBLEMS, PROBLEM, Problem) if is_admin else (ERROR_CODES, JSON, ErrorReply)
    errors = {
        str(code): {"description": text, "content": _content(schemas[kind], media)} for code, text in told.items()
    }
    return {"200": {"description": "Done", "content": _content(reply, declared.media)}, **errors}


def _content(schema: dict[str, Any], media: str = JSON) -> dict[str, Any]:
    return {media: {"schema": schema}}


def _need(declared: Declared, *, is_admin: bool) -> str:
    role = f"Needs the role {declared.role.word}."
    if declared.redrives:
        role = f"{role} The settings may say admin."
    is_by_cookie = is_admin and declared.is_change
    return f"{role} By session cookie it needs the header {CSRF_HEADER}." if is_by_cookie else role


def _parameters(declared: Declared) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in declared.in_path
    ]
    in_query = []
    for one in declared.fields if declared.method == "GET" else ():
        schema = msgspec.json.schema(one.type)
        text = schema.pop("description")
        schema = IDS if one.name == "ids" else schema
        in_query.append({"name": one.name, "in": "query", "required": False, "description": text, "schema": schema})
    return in_path + in_query
