"""A module is a duty of its own, not a slice of its only importer.

How much a module imports, and how long it is, is never failed: a limit would be met by cutting again.
"""

from __future__ import annotations

import ast
from collections import defaultdict

from holdfast.faces.cli import TREE
from tests.rules.test_layers import FILES, module_of

#: More would be modules that were cut out of the only one that needs them.
LONE_SHARE_MAX = 0.15
#: What these import is where a way into the package begins: engines that are wired, commands and pages that are
#: registered.
STARTING_POINTS = frozenset(
    f"holdfast{name}"
    for name in ("", ".__main__", ".testing", ".wiring", ".faces.cli", ".faces.api.server", ".faces.web")
)


def importers() -> dict[str, set[str]]:
    """Module → who imports it, of those that are not empty."""
    known = {module_of(file): file.read_text("utf-8") for file in FILES}
    found: dict[str, set[str]] = defaultdict(set)
    for module, source in known.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # `from holdfast.core.topology import model` imports a module, not a name of the package.
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names = (inside & known.keys()) | ({str(node.module)} if inside - known.keys() else set())
            else:
                continue
            for name in names - {module}:
                found[name].add(module)
    # What is imported by its name when it is first wanted: commands, and what the package shows.
    for modules in (entry.modules.split() for entry in TREE.values()):
        for module in modules:
            found[f"holdfast.faces.cli.{module}"].add("holdfast.faces.cli")
    return {module: found[module] for module, source in known.items() if source.strip()}


def test_few_modules_have_a_single_importer() -> None:
    modules = importers()
    lone = sorted(module for module, who in modules.items() if len(who) == 1 and not who <= STARTING_POINTS)
    text = f"{len(lone)} of {len(modules)} modules have a single importer: {', '.join(lone)}"
    assert len(lone) / len(modules) <= LONE_SHARE_MAX, text
