"""A protocol is a seam: small enough to be implemented a second time, and implemented a second time, by a model too."""

from __future__ import annotations

import ast
from pathlib import Path

import holdfast

ROOT = Path(holdfast.__file__).parent
TESTS = Path(__file__).parents[1]
METHODS_COUNT_MAX = 12
#: Seams that only one engine has so far: a local store of starts, and a broker with topologies.
EXEMPT = frozenset({"Starts", "TopologyBroker"})


def classes() -> dict[str, list[ast.ClassDef]]:
    """By name: those of the package and of the tests."""
    found: dict[str, list[ast.ClassDef]] = {}
    for folder in (ROOT, TESTS):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether it says what is needed, not how. (`asyncio.Protocol` is something else.)"""
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def members(node: ast.ClassDef, known: dict[str, list[ast.ClassDef]]) -> set[str]:
    """The public names that an instance has, those of its bases included."""
    found = {name for base in node.bases for each in known.get(_name(base), [])[:1] for name in members(each, known)}
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name), *_]):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


def methods(node: ast.ClassDef) -> list[str]:
    """What somebody who implements it has to write."""
    return [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]


def _name(base: ast.expr) -> str:
    match base:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _name(value)
    return ""


def test_a_protocol_is_small_and_has_two_implementations() -> None:
    known = classes()
    concrete = [(node, members(node, known)) for each in known.values() for node in each if not is_protocol(node)]
    wrong = []
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.ClassDef) or not is_protocol(node) or node.name in EXEMPT:
                continue
            if (count := len(methods(node))) > METHODS_COUNT_MAX:
                wrong.append(f"{node.name} has {count} methods, {METHODS_COUNT_MAX} are allowed")
            wanted = members(node, known)
            made_by = [one.name for one, has in concrete if wanted <= has]
            if len(made_by) < 2:
                wrong.append(f"{node.name} is implemented by {made_by or 'nobody'}: a second one, or no protocol")
    assert not wrong, "\n".join(wrong)
