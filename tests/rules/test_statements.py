"""SQL lives in one file per subject and engine; each statement has one name, and somebody uses it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
FOLDERS = sorted(SOURCE.rglob("sql"))


def names_in(file: Path) -> list[str]:
    return re.findall(r"^-- name: (.*)$", file.read_text("utf-8"), re.MULTILINE)


def texts_in(package: Path) -> set[str]:
    """Every literal text in the modules of a package."""
    return {
        node.value
        for module in package.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_there_are_statements() -> None:
    assert {folder.parent.name for folder in FOLDERS} == {"stores", "sqlite", "postgres"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_each_statement_has_one_name_and_is_used(folder: Path) -> None:
    counts = Counter(name for file in folder.iterdir() for name in names_in(file))
    assert counts
    assert [name for name, count in counts.items() if count > 1] == []
    assert sorted(set(counts) - texts_in(folder.parent)) == []


def test_a_subject_is_written_once_for_all_engines_or_once_for_each() -> None:
    for_all = {file.stem for file in (SOURCE / "stores" / "sql").iterdir()}
    engines = {folder.parent.name: {file.stem for file in folder.iterdir()} for folder in FOLDERS}
    assert {name: sorted(for_all & subjects) for name, subjects in engines.items() if name != "stores"} == {
        "sqlite": [],
        "postgres": [],
    }


def test_no_statement_stands_elsewhere() -> None:
    others = [file for file in SOURCE.rglob("*.sql") if not {"sql", "migrations"} & set(file.parent.parts)]
    assert others == []
