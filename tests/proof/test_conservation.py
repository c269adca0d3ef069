"""The checker finds every way in which messages can go wrong, and lets a right run pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.proof.conservation import Conservation, NotConserved


def books(*message_ids: str) -> Conservation:
    made = Conservation()
    for message_id in message_ids:
        made.put(message_id, message_id.encode())
    return made


def test_all_found_once_is_conserved() -> None:
    count = books("a", "b")
    count.found("queue", "a", b"a")
    count.found("dead queue", "b", b"b")
    report = count.check()
    assert (report.put_count, report.found_count, report.lost) == (2, 2, ())


def test_nothing_put_and_nothing_found_is_conserved() -> None:
    assert Conservation().check().put_count == 0


def test_a_lost_message_is_named() -> None:
    count = books("a", "b")
    count.found("queue", "a", b"a")
    with pytest.raises(NotConserved, match=r"(?s)lost 1, duplicates 0, altered 0.*lost: 'b'") as raised:
        count.check()
    assert raised.value.ids == ("b",)


def test_a_message_in_two_places_is_a_duplicate_unless_duplicates_are_allowed() -> None:
    count = books("a")
    count.found("queue", "a")
    count.found("dead queue", "a")
    with pytest.raises(NotConserved, match="duplicated: 'a' in queue, dead queue"):
        count.check()
    assert count.check(duplicates_max=1).duplicated == {"a": ("queue", "dead queue")}
    count.check(duplicates_max=None)


def test_the_same_place_twice_is_a_duplicate_too() -> None:
    count = books("a")
    count.found("queue", "a")
    count.found("queue", "a")
    with pytest.raises(NotConserved, match="duplicated: 'a' in queue, queue"):
        count.check()


def test_every_copy_is_a_duplicate() -> None:
    count = books("a", "b")
    for message_id in ("a", "a", "a", "b", "b"):
        count.found("queue", message_id)
    assert count.check(duplicates_max=3).duplicates_count == 3
    with pytest.raises(NotConserved, match="duplicates 3"):
        count.check(duplicates_max=2)


def test_an_altered_body_is_named_with_its_place() -> None:
    count = books("a")
    count.found("queue", "a", b"A")
    with pytest.raises(NotConserved, match="altered: 'a' in queue"):
        count.check(duplicates_max=None)


def test_a_message_that_nobody_put_is_unexpected() -> None:
    count = books()
    count.found("queue", "x", b"")
    with pytest.raises(NotConserved, match="unexpected: 'x' in queue"):
        count.check(duplicates_max=None)


def test_a_message_put_in_doubt_may_be_there_or_not_but_not_twice() -> None:
    count = Conservation()
    count.put_in_doubt("there", b"1")
    count.put_in_doubt("not there", b"2")
    count.found("queue", "there", b"1")
    assert count.check().in_doubt_count == 2
    count.found("queue", "there", b"1")
    with pytest.raises(NotConserved, match="duplicates 1"):
        count.check()


def test_a_doubt_that_was_cleared_up_is_certain() -> None:
    count = Conservation()
    count.put_in_doubt("a", b"1")
    count.put("a", b"1")
    with pytest.raises(NotConserved, match="lost: 'a'"):
        count.check()


def test_found_in_doubt_is_neither_lost_nor_a_duplicate() -> None:
    count = books("a", "b")
    count.found_in_doubt("completed", "a")
    count.found_in_doubt("completed", "b")
    count.found("queue", "b")
    count.check()
    count.found_in_doubt("completed", "x")
    with pytest.raises(NotConserved, match="unexpected: 'x' in \\(in doubt\\)"):
        count.check()


@pytest.mark.parametrize("body", [b"a", b"other"])
def test_one_id_for_two_messages_is_refused(body: bytes) -> None:
    count = books("a")
    with pytest.raises(ValueError, match="the id 'a' was put already"):
        count.put("a", body)


def test_only_a_few_samples_are_named() -> None:
    with pytest.raises(NotConserved, match="'m4' and 95 more"):
        books(*(f"m{number}" if number < 10 else f"n{number}" for number in range(100))).check()


def test_the_line_for_a_long_run_is_json() -> None:
    count = books("a", "b", "c")
    for _ in range(3):
        count.found("queue", "a")
    count.put_in_doubt("d", b"")
    line = count.report().line("kill the server", kills=50, store="sqlite")
    assert "\n" not in line
    assert json.loads(line) == {
        "scenario": "kill the server",
        "kills": 50,
        "messages": 3,
        "in_doubt": 1,
        "lost": 2,
        "duplicates": 2,
        "altered": 0,
        "unexpected": 0,
        "store": "sqlite",
    }


@given(st.dictionaries(st.text(), st.binary(), max_size=20), st.lists(st.text(), max_size=20))
def test_it_passes_exactly_when_each_is_found_once(put: dict[str, bytes], found: list[str]) -> None:
    count = Conservation()
    for message_id, body in put.items():
        count.put(message_id, body)
    for message_id in found:
        count.found("place", message_id, put.get(message_id))
    if sorted(found) == sorted(put):
        count.check()
    else:
        with pytest.raises(NotConserved):
            count.check()
