"""Which words the names of classes and modules are made of, and whether the glossary or the field knows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

#: An ending, and what stands for it in the word that it was made from.
ENDINGS = (
    ("ies", "y"), ("ied", "y"), ("ier", "y"), ("es", ""), ("s", ""), ("ed", ""), ("ed", "e"), ("er", ""), ("er", "e"),
    ("ing", ""), ("ing", "e"), ("or", ""), ("or", "e"), ("able", ""), ("able", "e"), ("ion", ""), ("ion", "e"),
    ("al", ""), ("ment", ""), ("ure", ""), ("ence", ""),
)  # fmt: skip
#: Words that mean nothing by themselves.
SMALL = re.compile("a|after|again|any|back|be|by|cannot|down|in|later|left|may|new|no|not|nothing|of|once|ours|out|to")


def names(root: Path) -> Iterator[tuple[str, str]]:
    """Every name of a module and a class below `root`, and where it stands."""
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).with_suffix("")
        for part in path.parts:
            if not part.startswith("__"):
                yield part, str(path)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path}.{node.name}"


def words(name: str) -> list[str]:
    """`_RabbitConsumer` → rabbit, consumer; `letter_search` → letter, search."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def is_known(word: str, known: set[str]) -> bool:
    """Whether the word, or the one that it was made from, is known."""
    if SMALL.fullmatch(word) or _made_from(word) & known:
        return True
    return word.startswith("un") and bool(_made_from(word[2:]) & known)


def _made_from(word: str) -> set[str]:
    found = {word}
    for ending, stands_for in ENDINGS:
        if word.endswith(ending):
            stem = word.removesuffix(ending)
            found |= {stem + stands_for, stem[:-1] if stem[-2:-1] == stem[-1:] else stem}
    return found


def glossary(text: str) -> set[str]:
    """The words that a glossary defines: those in bold."""
    return {word for bold in re.findall(r"\*\*(.+?)\*\*", text) for word in re.findall(r"\w+", bold.lower())}
