"""What the program shows to others stays as it was: HTTP, metrics, commands, settings, names, events, crash points."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upgrade.golden import KEPT, compared, differences, families, inlined

SHOWN_MAX = 25


@pytest.mark.parametrize("name", KEPT)
def test_it_is_as_it_was(name: str) -> None:
    found = compared(name)
    shown = "\n  ".join(found[:SHOWN_MAX])
    more = f"\n  and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    renew = f"If that is meant: .venv/bin/python -m tests.upgrade.golden {name}"
    assert not found, f"tests/upgrade/golden/{name} says otherwise:\n  {shown}{more}\n{renew}"


# The comparison itself: known to pass over what has no meaning, and known to be able to fail.


def document(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"title": name, "type": "object", "properties": properties, "required": list(required)}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    paths = {"/x": {"get": {"responses": {"200": {"content": content}}}}}
    return {"info": {"version": "1"}, "paths": paths, "components": {"schemas": {name: schema}}}


def test_a_schema_may_be_called_otherwise_and_be_written_in_another_order() -> None:
    a, b = {"type": "string"}, {"type": "integer"}
    was, now = document("Old", {"a": a, "b": b}, "a", "b"), document("New", {"b": b, "a": a}, "b", "a")
    assert differences(inlined(was), inlined(now)) == []


def test_a_field_that_is_gone_and_one_that_has_another_type_are_named() -> None:
    was = document("Old", {"a": {"type": "string"}, "b": {"type": "integer"}}, "a")
    now = document("New", {"a": {"type": "integer"}}, "a")
    found = differences(inlined(was), inlined(now))
    assert len(found) == 2
    assert found[0].endswith('/schema/properties/b: is gone; was {"type": "integer"}')
    assert found[1].endswith('/schema/properties/a/type: was "string", is "integer"')


def test_a_schema_that_holds_itself_has_an_end() -> None:
    tree = document("Tree", {"child": {"$ref": "#/components/schemas/Tree"}})
    assert "schemas up" in str(inlined(tree))


def test_a_label_and_a_limit_of_a_metric_are_seen() -> None:
    page = '# HELP x_seconds How long.\n# TYPE x_seconds histogram\nx_seconds_bucket{le="1",queue="a\\"b"} 3\n'
    assert families(page) == {
        "x_seconds": {
            "help": "How long.",
            "type": "histogram",
            "limits": ["1"],
            "samples": {"x_seconds_bucket": ["le", "queue"]},
        }
    }
