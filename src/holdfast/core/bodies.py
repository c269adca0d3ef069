"""What a program publishes, as bytes: JSON of what it has as a value; bytes and texts as they are."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import msgspec
from msgspec import Struct

from holdfast.errors import Invalid

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: What can be published.
Body: TypeAlias = Union[
    bytes, bytearray, memoryview, str, dict[str, Any], list[Any], tuple[Any, ...], Struct, "DataclassInstance"
]


def encode_body(body: Body, content_type: str = "") -> tuple[bytes, str]:
    """The bytes, and the content type that they have: the given one, else that of the form. Raises Invalid."""
    match body:
        case bytes():
            return body, content_type
        case bytearray() | memoryview():
            return bytes(body), content_type
        case str():
            try:
                return body.encode(), content_type or TEXT_TYPE
            except UnicodeEncodeError as error:
                raise Invalid(f"body is invalid; it is no text that UTF-8 has: {error}") from error
    is_object = is_dataclass(body) and not isinstance(body, type)
    if not (is_object or isinstance(body, dict | list | tuple | Struct)):
        kinds = "bytes, str, dict, list, a dataclass or a msgspec.Struct"
        raise Invalid(f"body is invalid; '{type(body).__name__}' cannot be published, give {kinds}")
    if content_type and "json" not in content_type.lower():
        raise Invalid(f"content_type is invalid; '{content_type}' is not JSON, give the body as bytes or str")
    try:
        return msgspec.json.encode(body), content_type or JSON_TYPE
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise Invalid(f"body is invalid; it has no form in JSON: {error}") from error
