"""What a request must look like, at the edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import checks
from holdfast.errors import Invalid


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (checks.batch_size, [1, 1000], [0, -1, 1001]),
        (checks.max_attempts, [0, 65_536], [-1, 65_537]),
        (checks.list_limit, [0, 1, 65_536], [-1, 65_537]),
        (checks.partitions, [0, 1, 1000], [-1, 1001]),
        (checks.request_timeout, ["10ms", "15m", "5m"], ["", "9.9ms", "15m0.1s", "-1s", "x"]),
        (checks.client_id, ["a", "a" * 2000], ["", " ", "a" * 2001]),
        (checks.queue_name, ["a", "n" * 512, "Ü/\\'\""], ["", " ", "n" * 513, "a b", "a\n", "~", "a\x01", "a\x7f"]),
        (checks.namespace, ["", "_system"], ["x", " "]),
        (checks.items, [[1], [1] * 1000], [[], [1] * 1001]),
        (checks.ids, [["a"], ["a"] * 1000], [[], ["a"] * 1001]),
    ],
)
def test_the_edges_are_allowed_and_one_beyond_is_refused(
    check: Callable[[object], object], good: list[object], bad: list[object]
) -> None:
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(Invalid):
            check(value)


def test_a_lease_may_be_as_long_as_a_life() -> None:
    checks.timeouts(60_000_000, 60_000_000)
    with pytest.raises(Invalid, match=r"^lease timeout is too long; 1m0\.000001s cannot be greater"):
        checks.timeouts(60_000_001, 60_000_000)


@pytest.mark.parametrize("text", ["a\x00", "\x00", "a\ud800", "\udfff"])
def test_a_text_that_not_every_store_can_keep_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"^kind field is invalid; "):
        checks.text_field(text, what="kind")


@given(st.text(max_size=600))
def test_a_name_that_is_accepted_can_be_written_anywhere(name: str) -> None:
    try:
        checks.queue_name(name)
    except Invalid as error:
        error.message.encode()  # what is told can be sent
    else:
        assert 1 <= len(name) <= 512
        assert name.isprintable()
        assert name.encode().decode() == name
        assert not set(" ~\t\n") & set(name)


@given(st.text(max_size=3000))
def test_a_text_that_is_accepted_can_be_written_anywhere(text: str) -> None:
    try:
        checks.text_field(text, what="kind")
    except Invalid as error:
        error.message.encode()
    else:
        assert text.encode().decode() == text
        assert "\x00" not in text


@given(st.text(alphabet=st.characters(codec=None, categories=None), max_size=5))
def test_lone_surrogates_are_refused_everywhere(text: str) -> None:
    for check in (checks.queue_name, lambda t: checks.text_field(t, what="kind")):
        try:
            check(text)
        except Invalid:
            continue
        text.encode()
