"""Names: plain words with one meaning, from `docs/words.md` or the field; no class name twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import holdfast

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


ROOT = Path(holdfast.__file__).parent
TESTS = Path(__file__).parents[1]
GLOSSARY = glossary((Path(__file__).parents[2] / "docs/words.md").read_text("utf-8"))
FIELD_WORDS = Path(__file__).with_name("field_words.txt").read_text("utf-8").split()
FIELD_WORDS_MAX = 290  # what we aim for is 250: a word that more than one idea needs belongs into the glossary

#: What classes were called before they were called by plain words. Nothing is called so again.
OLD_NAMES = set(Path(__file__).with_name("old_names.txt").read_text("utf-8").split())
#: Old names, and words of names, that are still there, and go with the modules that they stand in.
STILL_THERE = set(Path(__file__).with_name("still_there.txt").read_text("utf-8").split())


def test_every_word_of_a_name_is_in_the_glossary_or_of_the_field() -> None:
    known = GLOSSARY | set(FIELD_WORDS) | STILL_THERE
    strange = [
        f"'{word}' in {where}" for name, where in names(ROOT) for word in words(name) if not is_known(word, known)
    ]
    assert not strange, "say it in words of docs/words.md, or of tests/rules/field_words.txt:\n" + "\n".join(strange)


def test_the_words_of_the_field_are_few_and_needed() -> None:
    assert sorted(set(FIELD_WORDS)) == FIELD_WORDS
    assert len(FIELD_WORDS) <= FIELD_WORDS_MAX
    assert not set(FIELD_WORDS) & GLOSSARY


def test_no_old_name_comes_back() -> None:
    found = [where for name, where in names(ROOT) if name.lstrip("_") in OLD_NAMES - STILL_THERE]
    found += [where for name, where in names(TESTS) if name.lstrip("_") in OLD_NAMES]
    assert not found, "\n".join(found)


def test_no_class_name_has_two_meanings() -> None:
    places = defaultdict(set)
    for name, where in names(ROOT):
        if where.endswith(f".{name}"):
            places[name].add(where)
    assert not {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_the_words_of_names() -> None:
    assert words("_RabbitConsumer") == ["rabbit", "consumer"]
    assert words("letter_search") == ["letter", "search"]
    assert words("AMQPSession") == ["amqp", "session"]
    assert glossary("| **Dead queue**, **DLQ** | where") == {"dead", "queue", "dlq"}


def test_words_are_known_by_what_they_were_made_from() -> None:
    known = {"letter", "settle", "stop", "retry", "store", "deliver"}
    assert all(is_known(word, known) for word in ("letters", "settled", "stopped", "retrier", "unstorable"))
    assert not any(is_known(word, known) for word in ("shelves", "told", "lane"))
