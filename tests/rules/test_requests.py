"""What can be asked is said once: a declared request has a role, a sentence, a handler, and a text for each field."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
from msgspec import Meta, structs

import holdfast
from holdfast.core.requests import queue, results, vault
from holdfast.core.requests.declare import HANDLERS, REQUESTS, Declared, Role
from holdfast.faces.api import endpoints
from holdfast.faces.cli import TREE, LazyGroup, groups, load
from holdfast.services.collect import service as collect_service
from holdfast.services.queue import service as queue_service

#: They declare requests, and answer them, when they are imported.
MODULES = (queue, results, vault, endpoints, collect_service, queue_service)


@pytest.mark.parametrize("declared", REQUESTS.values(), ids=list(REQUESTS))
def test_a_request_says_everything_that_follows_from_it(declared: Declared) -> None:
    assert isinstance(declared.role, Role)
    assert declared.sentence.endswith(".")
    assert declared.request in HANDLERS
    assert declared.request.declared is declared
    assert set(declared.in_path) <= set(declared.request.__struct_fields__)
    silent = [one.name for one in structs.fields(declared.request) if not _text(one.type)]
    assert silent == []


def _text(hint: object) -> str:
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return "".join(one.description or "" for one in metas if isinstance(one, Meta))


def test_there_are_requests() -> None:
    assert len(REQUESTS) > 60
    assert len({(one.method, one.path) for one in REQUESTS.values()}) == len(REQUESTS)


def _sources() -> dict[str, str]:
    folder = Path(holdfast.__file__).parent / "faces" / "cli"
    return {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*.py"))}


def test_commands_ask_by_requests_and_not_by_http_in_process_or_untyped_texts() -> None:
    banned = ("dict[str, Any]", "ASGITransport", "make_app", "httpx")
    assert [(name, word) for name, text in _sources().items() for word in banned if word in text] == []


def test_the_tree_of_commands_says_what_the_commands_say() -> None:
    for name, entry in TREE.items():
        command = load(name)
        first = " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split("\n"))
        assert entry.line == first, name
        if isinstance(command, LazyGroup):
            assert entry.order.split() == list(command.commands)
            assert {str(one.name) for one in groups[name].registered_commands} <= set(entry.order.split())
