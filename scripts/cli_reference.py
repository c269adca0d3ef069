"""The reference part of docs/cli.md, made from the commands themselves.

`python -m scripts.cli_reference docs/cli.md` writes it anew; a test compares the two.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.faces.cli import TREE, LazyGroup, load
from holdfast.faces.cli.command import PANEL, SHARED

BEGIN = "<!-- made by scripts.cli_reference: begin -->\n"
END = "<!-- made by scripts.cli_reference: end -->\n"

_SHARED_NAMES = frozenset(parameter.name for parameter in SHARED)


def every_command() -> Mapping[str, Any]:
    """Every command of the tree by its full name, in order."""
    return dict(one for name in TREE for one in _walk(f"holdfast {name}", load(name)))


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(command, LazyGroup):
        yield path, command
        return
    for name in command.commands:
        yield from _walk(f"{path} {name}", command.make(name))


def reference() -> str:
    """One section for each command."""
    return "\n".join(_section(path, command) for path, command in every_command().items())


def renewed(page: str) -> str:
    """The page with its made part made anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{reference()}\n{END}{tail}"


def _section(path: str, command: Any) -> str:
    # By where it stands as well: `--url` of `serve` is not the shared one.
    shared = [param for param in command.params if getattr(param, "rich_help_panel", None) == PANEL]
    own = [param for param in command.params if param.name not in _SHARED_NAMES or param not in shared]
    arguments = [param for param in own if param.param_type_name == "argument"]
    options = [param for param in own if param.param_type_name == "option"]
    usage = " ".join([path, "[OPTIONS]", *(_argument(param) for param in arguments)])
    lines = [f"### {path}", "", inspect.cleandoc(command.help), "", "```", usage, "```", ""]
    if own:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [_row(_argument(param), param) for param in arguments]
        lines += [_row(" ".join(param.opts), param) for param in options]
        lines.append("")
    example = _unescaped(command.epilog).split("\n\n")[1:]
    return "\n".join([*lines, "```sh", *(line.strip().removeprefix("$ ") for line in example), "```", ""])


def _argument(param: Any) -> str:
    name: str = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _row(name: str, param: Any) -> str:
    says_nothing = param.required or param.default in (None, "") or param.default is False
    default = "" if says_nothing else f"`{param.default}`"
    return f"| `{name}` | {default} | {_unescaped(param.help)} |"


def _unescaped(text: str) -> str:
    """Without what keeps a bracket from being markup."""
    return text.replace("\\[", "[")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(renewed(target.read_text("utf-8")), "utf-8")
