"""Who may import whom. `offences` reads a source with `ast` and names every import that breaks the rule.

An import counts wherever it stands: at the top, in a function, under `TYPE_CHECKING`, relative or absolute.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "holdfast"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

#: A part is the first name below the package: a folder (core) or a module (wiring). `errors` is open to all.
#: `""` is the package itself, `holdfast/__init__.py`: the public names.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "core": frozenset(),
    "proof": frozenset(),
    "ports": frozenset({"core"}),
    "telemetry": frozenset({"core"}),
    "settings": frozenset({"core"}),
    "engines": frozenset({"core", "ports", "telemetry", "proof"}),
    "stores": frozenset({"core", "ports", "telemetry", "proof"}),
    "services": frozenset({"core", "ports", "stores", "telemetry", "proof"}),
    "wiring": frozenset({"core", "ports", "engines", "stores", "services", "settings", "telemetry", "proof"}),
    "testing": frozenset(
        {"core", "ports", "engines", "stores", "services", "settings", "wiring", "telemetry", "proof"}
    ),
    "faces": frozenset({"core", "ports", "services", "settings", "wiring", "telemetry", "proof"}),
    "": frozenset({"core", "ports", "services", "settings", "wiring", "faces"}),
    "__main__": frozenset({"faces"}),
}

#: What engines share.
SHARED = frozenset({"__init__", "threads"})
#: Siblings, a folder or a module each, do not know each other: each can be deleted without touching another.
ENGINES = frozenset(found.stem for found in SOURCE.glob("engines/[a-z]*")) - SHARED


def offences(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Every forbidden import in `source`, the text of the dotted `module`, as one readable line each."""
    importer = part_of(module)
    if importer not in MAY_IMPORT:
        return [f"{module}: '{importer}' has no place in the layers; give it one in tests/rules/layers.py"]
    found = []
    for line, target in imported(source, module, is_package=is_package):
        if not _allowed(importer, module, target):
            rule = f"{_name(importer)} may not import {_name(part_of(target))}"
            found.append(f"{module}:{line} imports {target}: {rule}")
    return found


def part_of(module: str) -> str:
    """The part that a module of ours belongs to: `holdfast.core.item` → `core`, `holdfast` → ``."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


def imported(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The line and the dotted name of everything of ours that is imported."""
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package=is_package)
            # `from holdfast import core` imports a part; `from holdfast.core import item` stays in the part.
            targets = [f"{base}.{alias.name}" for alias in node.names] if base == PACKAGE else [base]
        elif isinstance(node, ast.Call):
            targets = _imported_by_name(node)
        for target in targets:
            if target == PACKAGE or target.startswith(PACKAGE + "."):
                yield getattr(node, "lineno", 0), target


def _imported_by_name(call: ast.Call) -> list[str]:
    """`importlib.import_module("holdfast.x")` and `__import__("holdfast.x")`."""
    match call:
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    drop = node.level - 1 if is_package else node.level
    return ".".join([*parts[: len(parts) - drop], *([node.module] if node.module else [])])


def _allowed(importer: str, module: str, target: str) -> bool:
    part = part_of(target)
    if part in ("errors", "__version__"):
        return True
    if part == importer:
        ours, theirs = _engine(module), _engine(target)
        return importer != "engines" or ours == theirs or theirs not in ENGINES
    # `import holdfast` alone, from within, would make every part depend on all that the package exports.
    return part in MAY_IMPORT[importer]


def _engine(module: str) -> str:
    return [*module.split("."), "", "", ""][2]


def _name(part: str) -> str:
    return part or "the package itself"
