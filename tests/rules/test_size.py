"""Functions of the package stay small enough to be read in one go. How long a module is, is told and never failed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
FUNCTION_LINES_MAX = 50
#: Longer ones that are still to be cut, and how long they may be until then.
STILL_LONGER = {"append": 55, "serve": 52}


def long_functions(source: str, file: str) -> list[str]:
    """Every function of more than the allowed lines, its docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if lines > STILL_LONGER.get(node.name, FUNCTION_LINES_MAX):
                found.append(f"{file}:{node.lineno} {node.name}: {lines} lines, {FUNCTION_LINES_MAX} allowed")
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    match node.body[0]:
        case ast.Expr(value=ast.Constant(value=str())) as docstring:
            return (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return 0


def test_no_function_is_too_long() -> None:
    found = [
        line
        for file in ROOT.rglob("*.py")
        for line in long_functions(file.read_text("utf-8"), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_the_check_itself_can_fail(keyword: str) -> None:
    def source(lines: int) -> str:
        return f'class A:\n    {keyword} f(self):\n        """One.\n\n        Two.\n        """\n' + (
            "        pass\n" * (lines - 1)
        )

    assert long_functions(source(FUNCTION_LINES_MAX), "a.py") == []
    assert long_functions(source(FUNCTION_LINES_MAX + 1), "a.py") == ["a.py:2 f: 51 lines, 50 allowed"]
