"""The pictures of the code in the documents, drawn from the code: `python -m tests.rules.tree` writes them anew.

Between `<!-- NAME -->` and `<!-- end -->` a document holds what `PICTURES` makes: the tree of modules, and the layers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import holdfast
from tests.rules.layers import MAY_IMPORT

ROOT = Path(__file__).parents[2]
SOURCE = Path(holdfast.__file__).parent
WIDTH = 118

#: What a package is for. A package that is not here has no place yet.
DUTIES = {
    "": "what is public, and what puts everything together",
    "core": "pure values and decisions: no clock, no file, no socket",
    "core/requests": "what callers may ask for, and what they get",
    "core/topology": "what stands in a virtual host, layouts, differences, hazards",
    "ports": "what services need of engines",
    "stores": "what we keep, written once over a database or files",
    "engines/rabbitmq": "AMQP, confirms, consumers, the management API",
    "engines/rabbitmq/wire": "AMQP 0-9-1 without I/O",
    "engines/sqlite": "queues and databases in files of this machine, or in memory",
    "engines/postgres": "queues and databases that several servers share",
    "engines/folder": "blobs as files",
    "engines/objects": "blobs in a bucket",
    "services/queue": "the queue service: one loop for each queue",
    "services/consume": "handlers, retries, parking",
    "services/recover": "a run that empties a dead-letter queue",
    "services/vault": "capture, plans, redrives, roles",
    "services/collect": "results out of numbered messages",
    "services": "what Holdfast does, whoever asks and whatever stores it",
    "faces": "the ways in: Python, HTTP, shell. They decide nothing",
    "faces/api": "HTTP",
    "faces/cli": "the `holdfast` command",
    "telemetry": "events, counts, Prometheus",
    "proof": "what proves that nothing is lost: crash points, proxy, kills, counts",
}


def tree() -> str:
    """Every module, by package."""
    lines = ["```"]
    packages: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        if file.name not in ("__init__.py", "__main__.py"):
            package = str(file.parent.relative_to(SOURCE)).replace(".", "", 1)
            packages.setdefault(package, []).append(file.stem)
    for package in sorted(
        packages, key=lambda name: (list(MAY_IMPORT).index(name.split("/")[0]) if name else -1, name)
    ):
        lines.append(f"{package + '/' if package else 'holdfast/':24} {DUTIES[package]}")
        lines += textwrap.wrap(" ".join(packages[package]), WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join([*lines, "```"])


def layers() -> str:
    """Who may import whom; what everybody may, and what follows from others, is left out."""
    lines = ["```mermaid", "flowchart TD"]
    shown = [part for part in MAY_IMPORT if part not in ("", "__main__", "errors")]
    for part in shown:
        above = MAY_IMPORT[part]
        direct = {one for one in above if not any(one in MAY_IMPORT[other] for other in above)}
        lines += [f"    {part} --> {one}" for one in sorted(direct, key=shown.index)]
    return "\n".join([*lines, "```"])


PICTURES: dict[str, Callable[[], str]] = {"tree": tree, "layers": layers}
DOCUMENTS = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md")


def drawn(text: str) -> str:
    """The document with its pictures as they are now."""
    for name, draw in PICTURES.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        if start in text:
            before, _, rest = text.partition(start)
            text = f"{before}{start}{draw()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(drawn(document.read_text("utf-8")), "utf-8")
