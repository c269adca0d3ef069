"""`/openapi.json`, generated from the types that the verbs are decoded with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from holdfast.core.verbs import VERBS, ErrorReply
from holdfast.faces.api.admin.openapi import admin_paths, admin_types
from holdfast.faces.api.door import COOKIE
from holdfast.faces.api.results_openapi import results_paths, results_types

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
