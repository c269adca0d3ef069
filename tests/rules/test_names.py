"""Names: plain words with one meaning, from `docs/words.md` or the field; no class name twice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import holdfast
from tests.rules.words import glossary, is_known, names, words

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
