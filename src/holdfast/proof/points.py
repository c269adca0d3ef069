"""Which crash points there are, found by reading the source, so that a test can demand each of them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def crash_points(folder: Path = PACKAGE) -> frozenset[str]:
    """All names given to `crash_point` in the Python files below `folder`.

    Raises ValueError for a call whose name is not a plain string: it could not be listed.
    """
    return frozenset(
        name for file in sorted(folder.rglob("*.py")) for name in _names(file.read_text("utf-8"), str(file))
    )


def _names(source: str, file: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source, file)):
        if not isinstance(node, ast.Call) or not _is_crash_point(node.func):
            continue
        match node.args:
            case [ast.Constant(value=str(name))]:
                names.append(name)
            case _:
                raise ValueError(f"{file}:{node.lineno}: crash_point takes one plain string")
    return names


def _is_crash_point(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="crash_point") | ast.Attribute(attr="crash_point"):
            return True
    return False
