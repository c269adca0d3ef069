"""`/docs`: the OpenAPI document, for a person. What can be asked, by whom, with a call that can be copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from shlex import quote
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from holdfast.faces.api.endpoints import document
from holdfast.faces.web.console import Visit, page

JSON = "application/json"
REFERENCE = "#/components/schemas/"
#: What stands in an example, by the name of its field; what is not here follows from its schema.
EXAMPLES: Mapping[str, Any] = {
    "queue_name": "orders",
    "queue": "orders.dlq",
    "source_queue": "orders",
    "dead_queue": "orders-dead",
    "request_timeout": "10s",
    "lease_timeout": "1m",
    "client_id": "worker-1",
    "utf8": "hello",
    "batch_size": 10,
    "target": {"kind": "queue"},
    "selection": {"queue": "orders.dlq", "state": "captured"},
    "reason": "the address is mended",
}
TITLES = {
    "queue": "Items of a queue",
    "queues": "Queues",
    "storage": "Storages",
    "results": "Results",
    "dlq": "Dead-letter queues",
    "captures": "Captures",
    "imports": "Failed imports",
    "letters": "Letters",
    "groups": "Groups",
    "plans": "Plans",
    "redrives": "Redrives",
    "ledger": "The ledger",
    "balance": "The balance",
    "tokens": "Tokens",
    "events": "Events",
    "session": "Sessions of browsers",
    "recoveries": "Recoveries",
    "topology": "Topology",
    "settings": "Settings",
    "arrivals": "Numbers over time",
}


class EntryView(Struct, frozen=True):
    """A field as a person reads it: its name, what it holds, whether it is needed, what it says."""

    name: str
    kind: str
    needed: bool
    text: str


class OperationView(Struct, frozen=True):
    """One thing that can be asked."""

    id: str
    method: str
    path: str
    summary: str
    text: str
    fields: list[EntryView]
    reply: str
    call: str


class FormatView(Struct, frozen=True):
    """What a body or a reply holds."""

    name: str
    text: str
    fields: list[EntryView]


@page("GET /docs", is_open=True)
async def docs(visit: Visit) -> Response:
    """The document, readably."""
    groups, schemas = told(visit.console.version)
    return visit.page("docs.html", title="HTTP API", groups=groups, schemas=schemas)


@cache
def told(version: str) -> tuple[dict[str, list[OperationView]], list[FormatView]]:
    """All operations by what they are about, and all schemas."""
    openapi = msgspec.json.decode(document(version))
    schemas: dict[str, Any] = openapi["components"]["schemas"]
    groups: dict[str, list[OperationView]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            about = operation["operationId"].removeprefix("admin.").split(".")[0]
            title = TITLES.get(about, about.capitalize())
            groups.setdefault(title, []).append(_operation(method.upper(), path, operation, schemas))
    shapes = [
        FormatView(name, schema.get("description", ""), list(_fields(schema)))
        for name, schema in sorted(schemas.items())
    ]
    return groups, shapes


def _operation(method: str, path: str, operation: dict[str, Any], schemas: Mapping[str, Any]) -> OperationView:
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    fields = [
        EntryView(one["name"], _kind(one["schema"]), one["required"], one.get("description", f"In the {one['in']}."))
        for one in operation.get("parameters", [])
    ]
    if body is not None:
        fields += _fields(_resolved(body, schemas))
    answered = operation["responses"]["200"]["content"]
    media, content = next(iter(answered.items()))
    return OperationView(
        id=operation["operationId"],
        method=method,
        path=path,
        summary=operation["summary"],
        text=operation.get("description", ""),
        fields=fields,
        reply=_kind(content["schema"]) if media == JSON else media,
        call=_call(method, path, body, schemas),
    )


def _call(method: str, path: str, body: dict[str, Any] | None, schemas: Mapping[str, Any]) -> str:
    """The call by curl, as it can be tried."""
    path = path.replace("{id}", "12").replace("{queue}", "orders.dlq").replace("{name}", "ci").replace("{key}", "KEY")
    parts = ["curl", "-H", '"Authorization: Bearer $HOLDFAST_TOKEN"']
    if method != "GET" and (method != "POST" or body is None):
        parts += ["-X", method]
    if body is not None:
        example = _example(_resolved(body, schemas), schemas)
        parts += ["-d", quote(msgspec.json.encode(example).decode())]
    return " ".join([*parts, f'"$HOLDFAST_URL{path}"'])


def _fields(schema: Mapping[str, Any]) -> Iterator[EntryView]:
    needed = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        yield EntryView(name, _kind(field), name in needed, _text(field))


def _text(field: Mapping[str, Any]) -> str:
    text = field.get("description", "")
    default = field.get("default")
    return f"{text} Default: {msgspec.json.encode(default).decode()}." if default not in (None, "", [], {}) else text


def _kind(schema: Mapping[str, Any] | bool) -> str:
    """What a value is: a schema's name, or its type in words."""
    if isinstance(schema, bool):
        return "anything"
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REFERENCE)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(str(one) if one not in ("", None) else '""' for one in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return {"date-time": "moment (RFC 3339)"}.get(schema.get("format", ""), kind) if kind == "string" else kind


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).removeprefix(REFERENCE)
    return schemas[name] if name else schema


def _example(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str = "") -> Any:
    """A value that fits: of an object what it needs, and what is best shown."""
    schema = _resolved(schema, schemas)
    if name in EXAMPLES:
        return EXAMPLES[name]
    match schema.get("type"):
        case "object":
            needed = schema.get("required", [])
            fields = schema.get("properties", {})
            shown = [field for field in fields if field in needed or field == "utf8"]
            return {field: _example(fields[field], schemas, field) for field in shown}
        case "array":
            return [_example(schema.get("items", {}), schemas)]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return True
    return next((one for one in schema.get("enum", []) if one), "…")
