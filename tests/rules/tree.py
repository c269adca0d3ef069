"""The pictures of the code in the documents, drawn from the code: `python -m tests.rules.tree` writes them anew.

Between `<!-- NAME -->` and `<!-- end -->` a document holds what `PICTURES` makes: the tree of modules, and the layers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import holdfast
from tests.rules.layers import MAY_IMPORT

ROOT = Path(__file__).parents[2]
SOURCE = Path(holdfast.__file__).parent
WIDTH = 118


def tree(before: str) -> str:
    """Every module, by package. What each is for is taken from the picture `before`: a new one has no place yet."""
    duties = dict(re.findall(r"^(\S+/) +(.+)$", before, re.MULTILINE))
    lines = ["```"]
    packages: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        if file.name not in ("__init__.py", "__main__.py"):
            package = str(file.parent.relative_to(SOURCE)).replace(".", "", 1)
            packages.setdefault(package, []).append(file.stem)
    for package in sorted(
        packages, key=lambda name: (list(MAY_IMPORT).index(name.split("/")[0]) if name else -1, name)
    ):
        place = f"{package or 'holdfast'}/"
        lines.append(f"{place:24} {duties[place]}")
        lines += textwrap.wrap(" ".join(packages[package]), WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join([*lines, "```"])


def layers(_: str) -> str:
    """Who may import whom; what everybody may, and what follows from others, is left out."""
    lines = ["```mermaid", "flowchart TD"]
    shown = [part for part in MAY_IMPORT if part not in ("", "__main__", "errors")]
    for part in shown:
        above = MAY_IMPORT[part]
        direct = {one for one in above if not any(one in MAY_IMPORT[other] for other in above)}
        lines += [f"    {part} --> {one}" for one in sorted(direct, key=shown.index)]
    return "\n".join([*lines, "```"])


PICTURES: dict[str, Callable[[str], str]] = {"tree": tree, "layers": layers}
DOCUMENTS = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md")


def drawn(text: str) -> str:
    """The document with its pictures as they are now."""
    for name, draw in PICTURES.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        if start in text:
            before, _, rest = text.partition(start)
            picture, _, after = rest.partition(end)
            text = f"{before}{start}{draw(picture)}\n{end}{after}"
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(drawn(document.read_text("utf-8")), "utf-8")
