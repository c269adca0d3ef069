"""The layers of the package hold: read order is import order, and nobody reaches upwards or sideways."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.rules.layers import offences

ROOT = Path(holdfast.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_import_of_the_package_respects_the_layers() -> None:
    found = [
        offence
        for file in FILES
        for offence in offences(file.read_text("utf-8"), module_of(file), is_package=file.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_there_are_files_to_check() -> None:
    assert ROOT / "proof" / "process.py" in FILES


# The checker itself: known to let the allowed through, and known to be able to fail.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("holdfast.core.item", "from holdfast.errors import Invalid"),
        ("holdfast.core.item", "from holdfast.core.moments import now"),
        ("holdfast.core.item", "import datetime, msgspec"),
        ("holdfast.core.item", "import holdfast_other.engines"),
        ("holdfast.ports.queues", "from holdfast.core import item"),
        ("holdfast.engines.sqlite.queues", "from holdfast.ports.queues import Queues"),
        ("holdfast.engines.sqlite.queues", "from holdfast.engines.sqlite.connection import Connection"),
        ("holdfast.engines.sqlite.queues", "from holdfast.proof import crash_point"),
        ("holdfast.engines.sqlite.queues", "from .connection import Connection"),
        ("holdfast.services.recover", "from holdfast.telemetry import emit"),
        ("holdfast.services.recover", "from holdfast.services.queue import manager"),
        ("holdfast.wiring", "from holdfast.engines.sqlite.queues import SqliteQueues"),
        ("holdfast.testing", "import holdfast.engines.folder.queues"),
        ("holdfast.faces.cli.main", "from holdfast.wiring import open_app"),
        ("holdfast.faces.api.app", "from holdfast import __version__"),
        ("holdfast.proof.proxy", "from holdfast.proof import crash_point"),
        ("holdfast", "from holdfast.wiring import open_app"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert offences(source, module) == []


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("holdfast.core.item", "from holdfast.ports.queues import Queues", "ports"),
        ("holdfast.core.item", "import holdfast.proof", "proof"),
        ("holdfast.core.item", "import holdfast.engines.sqlite as engine", "engines"),
        ("holdfast.core.item", "import os, holdfast.services.queue", "services"),
        ("holdfast.core.item", "from holdfast import wiring", "wiring"),
        ("holdfast.core.item", "import holdfast", "the package itself"),
        ("holdfast.core.item", "from ..ports import queues", "ports"),
        ("holdfast.core.item", "from .. import engines", "engines"),
        ("holdfast.core.deep.item", "from ...services.queue import manager", "services"),
        ("holdfast.core.item", "def f():\n    from holdfast.ports import queues", "ports"),
        ("holdfast.core.item", "if TYPE_CHECKING:\n    import holdfast.ports.queues", "ports"),
        ("holdfast.core.item", "import importlib\nimportlib.import_module('holdfast.ports')", "ports"),
        ("holdfast.core.item", "x = __import__('holdfast.engines')", "engines"),
        ("holdfast.ports.queues", "from holdfast.engines.folder import queues", "engines"),
        ("holdfast.engines.sqlite.queues", "from holdfast.services.queue import manager", "services"),
        ("holdfast.engines.sqlite.queues", "from holdfast.engines.folder.queues import Memory", "engines"),
        ("holdfast.engines.sqlite.queues", "from ..folder.queues import Memory", "engines"),
        ("holdfast.services.recover", "from holdfast.engines.sqlite import queues", "engines"),
        ("holdfast.services.recover", "from holdfast.settings import Settings", "settings"),
        ("holdfast.services.recover", "from holdfast.faces.api import app", "faces"),
        ("holdfast.faces.cli.main", "from holdfast.engines.sqlite import queues", "engines"),
        ("holdfast.telemetry.log", "from holdfast.services.queue import manager", "services"),
        ("holdfast.proof.proxy", "from holdfast.core.item import Item", "core"),
        ("holdfast.errors", "from holdfast.core.item import Item", "core"),
        ("holdfast.settings", "from holdfast.wiring import open_app", "wiring"),
        ("holdfast", "from holdfast.engines.sqlite import queues", "engines"),
    ],
)
def test_a_forbidden_import_is_named(module: str, source: str, target: str) -> None:
    (offence,) = offences(source, module)
    assert offence.startswith(f"{module}:")
    assert offence.endswith(f"may not import {target}")


def test_a_relative_import_in_a_package_counts_from_the_package() -> None:
    assert offences("from . import item", "holdfast.core", is_package=True) == []
    assert len(offences("from .. import ports", "holdfast.core", is_package=True)) == 1


def test_a_part_that_nobody_placed_is_an_offence() -> None:
    assert "has no place in the layers" in offences("", "holdfast.helpers.misc")[0]
