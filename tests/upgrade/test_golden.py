"""What the program shows to others, as it was: `golden/` has each of it in a file, and the tests compare.

    python -m tests.upgrade.test_golden [NAME …]     writes them anew, when a change is meant

Each is taken from outside, as somebody who uses the program sees it: over HTTP, from a shell, by the public names. Only
the events and the crash points have to be looked up inside.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest

import holdfast
import holdfast.testing
from holdfast import proof
from holdfast.proof.process import child_process, python_argv
from holdfast.telemetry.events import EVENTS
from tests.faults.serving import TOKEN, Serving
from tests.support.command import Inside
from tests.support.eventually import eventually
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
COLUMNS = "80"
#: What docs/queue.md promises to whoever tests with it.
TESTING = ("FrozenClock", "assert_dead", "drain", "memory_queues")

APP = """
import holdfast
app = holdfast.App("{address}", token="{token}")
@app.consumer("work")
async def handle(message: holdfast.Message) -> None: ...
"""


# --- over HTTP ----------------------------------------------------------------------------------------------------


def openapi() -> str:
    """`/openapi.json` as it is served."""
    return _json(_served()["openapi"])


def metrics() -> str:
    """The families of `/metrics`, of a server and of a process that consumes."""
    return _json({"serve": families(_served()["serve"]), "run": families(_served()["run"])})


@cache
def _served() -> dict[str, Any]:
    """Asked once for all."""
    return asyncio.run(_asked())


async def _asked() -> dict[str, Any]:
    """Of a server that has done something of everything that it counts."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with Serving("memory://", folder) as server, server.client() as client:
            await server.start(HOLDFAST_DATA_FOLDER=name)
            await client.queues_create("dead")
            await client.queues_create("orders", dead_queue="dead")
            await client.queue_produce("orders", [b"one"])
            (item,) = (await client.queue_lease("orders")).items
            await client.queue_retry("orders", [holdfast.RetryItem(id=item.id, dead=True, reason="no")])
            server.ask("/admin/captures", {"queue": "dead", "continuous": True})
            await eventually(lambda: server.ask("/admin/letters")["count"] == 1)
            plan = server.ask("/admin/plans", {"selection": {"queue": "dead"}})
            server.ask("/admin/redrives", {"plan": plan["hash"]})
            await eventually(lambda: server.ask("/admin/redrives")["redrives"][0]["state"] == "done")
            run = await _metrics_of_a_consumer(server, client, folder)
            return {"openapi": server.ask("/openapi.json"), "run": run, "serve": server.answer("GET", "/metrics").text}


async def _metrics_of_a_consumer(server: Serving, client: holdfast.Client, folder: Path) -> str:
    (folder / "golden_app.py").write_text(APP.format(address=server.address, token=TOKEN))
    health = f"127.0.0.1:{free_port()}"
    argv = python_argv("holdfast", "run", "golden_app:app", "--declare", "--health", health)
    async with child_process(argv, cwd=folder) as child:
        await child.wait_http(f"http://{health}/health")
        await client.queue_produce("work", [b"one"])

        def page() -> str:
            return httpx2.get(f"http://{health}/metrics", trust_env=False).text

        await eventually(lambda: "holdfast_handler_seconds_count" in page())
        return page()


def families(page: str) -> dict[str, Any]:
    """Name → type, help, and the labels of each kind of sample; of a histogram also its limits."""
    found: dict[str, Any] = {}
    for line in page.splitlines():
        if match := re.fullmatch(r"# (HELP|TYPE) (\S+) (.*)", line):
            found.setdefault(match[2], {"samples": {}})[match[1].lower()] = match[3]
        elif match := re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            family = next(name for name in (match[1], match[1].rpartition("_")[0]) if name in found)
            found[family]["samples"][match[1]] = sorted(labels)
            if "le" in labels:
                limits = found[family].setdefault("limits", [])
                limits += [] if labels["le"] in limits else [labels["le"]]
    return found


# --- from a shell -------------------------------------------------------------------------------------------------


def cli() -> str:
    """The part of docs/cli.md that is made from the commands; a test elsewhere holds it to them."""
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    made = re.search(r"<!-- made by \S+: begin -->\n(.*)<!-- made by \S+: end -->", page, flags=re.DOTALL)
    assert made is not None, "docs/cli.md has no made part"
    return made[1].strip() + "\n"


def commands() -> list[str]:
    """All commands and groups of commands."""
    leaves = re.findall(r"^### (holdfast.*)$", cli(), flags=re.MULTILINE)
    groups = {" ".join(words[:count]) for words in map(str.split, leaves) for count in range(1, len(words))}
    return sorted({*leaves, *groups})


def help_texts() -> str:
    """`--help` of everything, on a terminal of 80 columns."""
    with TemporaryDirectory() as folder:
        run = Inside(Path(folder), "memory://")
        parts = [f"$ {name} --help\n{_plain(run(*name.split()[1:], '--help', COLUMNS=COLUMNS))}" for name in commands()]
    return "\n".join(parts)


def _plain(ended: Any) -> str:
    assert ended.code == 0, ended
    return "\n".join(line.rstrip() for line in ended.text.strip("\n").splitlines()) + "\n"


def settings() -> str:
    """Every setting with its default and what it means."""
    with TemporaryDirectory() as folder:
        run = Inside(Path(folder), "")
        return _json(run("config", "show", "--explain", "--json").document)


# --- in Python ----------------------------------------------------------------------------------------------------


def names() -> str:
    """The public names, what can be called, and how; without types, whose names are nobody's concern."""
    public = {"holdfast": (holdfast, holdfast.__all__), "holdfast.testing": (holdfast.testing, TESTING)}
    shapes = {module: {name: _shape(getattr(place, name)) for name in some} for module, (place, some) in public.items()}
    return _json(shapes)


def _shape(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value)
    parents = [parent.__name__ for parent in value.__mro__ if parent.__name__ in holdfast.__all__][1:]
    members: dict[str, Any] = {"": _signature(value)}
    for name, member in inspect.getmembers(value):
        if not name.startswith("_") and _is_ours(value, name):
            members[name] = _signature(member) if callable(member) else "property"
    return {"parents": parents, "members": members}


def _is_ours(value: type, name: str) -> bool:
    owner = next((parent for parent in value.__mro__ if name in vars(parent)), None)
    return owner is not None and owner.__module__.startswith("holdfast")


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    text = str(inspect.Signature(plain))
    return f"async {text}" if inspect.iscoroutinefunction(value) else text


def events() -> str:
    """The table of events."""
    return _json({name: [logging.getLevelName(one.level), one.sentence] for name, one in sorted(EVENTS.items())})


def crash_points() -> str:
    """Every name that is given to `crash_point`."""
    return _json(sorted(proof.crash_points()))


# --- comparing ----------------------------------------------------------------------------------------------------

#: File → what makes it.
KEPT: dict[str, Callable[[], str]] = {
    "openapi.json": openapi,
    "metrics.json": metrics,
    "cli.md": cli,
    "help.txt": help_texts,
    "settings.json": settings,
    "names.json": names,
    "events.json": events,
    "crash_points.json": crash_points,
}


def compared(name: str) -> list[str]:
    """Where what is there now differs from what was kept; nothing, or one line each."""
    was, now = (GOLDEN / name).read_text("utf-8"), KEPT[name]()
    if name == "openapi.json":
        return differences(inlined(json.loads(was)), inlined(json.loads(now)))
    if name.endswith(".json"):
        return differences(json.loads(was), json.loads(now))
    return differences(_sections(was), _sections(now))


def _sections(text: str) -> dict[str, str]:
    """By their headings: the order of commands has no meaning."""
    parts = re.split(r"^(### .*|\$ holdfast.* --help)$", text, flags=re.MULTILINE)
    return {"": parts[0].strip(), **dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))}


def differences(was: Any, now: Any, path: str = "") -> list[str]:
    """Line by line, each with the way to it."""
    if was == now:
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        found = [f"{path}/{key}: is gone; was {_short(was[key])}" for key in was if key not in now]
        found += [f"{path}/{key}: is new; {_short(now[key])}" for key in now if key not in was]
        for key in was:
            if key in now:
                found += differences(was[key], now[key], f"{path}/{key}")
        return found
    if isinstance(was, list) and isinstance(now, list):
        gone, new = ([one for one in some if one not in others] for some, others in ((was, now), (now, was)))
        lines = [f"{path}: is gone; was {_short(one)}" for one in gone]
        return lines + [f"{path}: is new; {_short(one)}" for one in new] or [f"{path}: the order or the count differs"]
    if isinstance(was, str) and isinstance(now, str) and "\n" in was + now:
        before, after = was.splitlines(), now.splitlines()
        return differences(
            [one for one in before if one not in after], [one for one in after if one not in before], path
        )
    return [f"{path}: was {_short(was)}, is {_short(now)}"]


def _short(value: Any) -> str:
    return textwrap.shorten(json.dumps(value, ensure_ascii=False), 300, placeholder=" …")


def inlined(document: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI document without the names of its schemas, and in an order that has no meaning taken out."""
    schemas = document["components"].pop("schemas")
    document["info"].pop("version")
    found: dict[str, Any] = _inline(document, schemas)
    return found


def _inline(value: Any, schemas: dict[str, Any], within: tuple[str, ...] = ()) -> Any:
    if isinstance(value, list):
        return [_inline(one, schemas, within) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if name in within:
            return {"$ref": f"{len(within) - within.index(name)} schemas up"}
        schema = {key: one for key, one in schemas[name].items() if (key, one) != ("title", name)}
        beside = {key: one for key, one in value.items() if key != "$ref"}
        return _inline({**schema, **beside}, schemas, (*within, name))
    made = {key: _inline(one, schemas, within) for key, one in value.items()}
    for key in ("required", "enum", "parameters", "anyOf", "oneOf", "allOf", "security"):
        if isinstance(made.get(key), list):
            made[key] = sorted(made[key], key=lambda one: json.dumps(one, sort_keys=True))
    if made.keys() & {"type", "anyOf", "enum", "in"}:  # a schema or a parameter: what it is counts, not how it is told
        for key in ("description", "title"):
            if isinstance(made.get(key), str):
                del made[key]
    if isinstance(made.get("summary"), str):
        made["summary"] = " ".join(made["summary"].split())
    return made


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


# --- the tests --------------------------------------------------------------------------------------------------------


SHOWN_MAX = 25


@pytest.mark.parametrize("name", KEPT)
def test_it_is_as_it_was(name: str) -> None:
    found = compared(name)
    shown = "\n  ".join(found[:SHOWN_MAX])
    more = f"\n  and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    renew = f"If that is meant: .venv/bin/python -m tests.upgrade.test_golden {name}"
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


def main(wanted: list[str]) -> None:
    """Write them."""
    GOLDEN.mkdir(exist_ok=True)
    for name in wanted or KEPT:
        (GOLDEN / name).write_text(KEPT[name](), "utf-8")


if __name__ == "__main__":
    os.environ.pop("HOLDFAST_URL", None)
    main(sys.argv[1:])
