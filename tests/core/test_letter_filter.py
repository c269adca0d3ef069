"""`--where`: which letters of a dead-letter queue a recovery takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import Message
from holdfast.core.moments import SECOND_US, microseconds
from holdfast.core.selection import LetterFilter
from holdfast.errors import Invalid

DIED = datetime(2026, 1, 1, tzinfo=UTC)
LETTER = Message(
    body=b'{"error": "timeout"}',
    headers={
        "tenant": "acme",
        "n": 5,
        "a b!c": "odd",
        "x-death": [{"queue": "orders", "reason": "rejected", "count": 1, "time": DIED, "routing-keys": ["k"]}],
    },
)
HOUR_LATER_US = microseconds(DIED) + 3600 * SECOND_US


@pytest.mark.parametrize(
    ("texts", "fits"),
    [
        ([], True),
        (["type=Scan"], True),
        (["type!=Scan"], False),
        (["type~Sc"], True),
        (["reason=rejected", "queue=orders"], True),
        (["reason=expired"], False),
        (["reason!=rejected"], False),
        (["age>30m"], True),
        (["age>2h"], False),
        (["age<2h"], True),
        (["header.tenant=acme", "header.n=5"], True),
        (["header.tenant=zeta"], False),
        (["header.missing="], True),
        (["body~timeout"], True),
        (["body~Timeout"], False),
    ],
)
def test_conditions(texts: list[str], fits: bool) -> None:
    assert LetterFilter(texts).fits(LETTER, "Scan", HOUR_LATER_US) is fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("reason=permanent", True),
        ("reason!=permanent", False),
        ("reason=permanent; shop.NoSuchOrder: 7; 8", True),
        ("reason=perm", False),
        ("reason=shop.NoSuchOrder: 7", False),
    ],
)
def test_a_reason_fits_by_what_stands_before_its_details(text: str, fits: bool) -> None:
    death = {"queue": "orders", "reason": "permanent; shop.NoSuchOrder: 7; 8", "count": 1, "time": DIED}
    parked = {"x-parked-reason": death["reason"]}
    for headers in ({"x-death": [death]}, parked):
        assert LetterFilter([text]).fits(Message(body=b"", headers=headers), "", HOUR_LATER_US) is fits


@pytest.mark.parametrize("text", ["", "nonsense", "age=1h", "age>soon", "body=x", "color=red", "header.=x"])
def test_a_condition_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        LetterFilter([text])


def test_nobody_knows_how_old_a_letter_without_a_death_is() -> None:
    for text in ("age>0s", "age<100h"):
        assert not LetterFilter([text]).fits(Message(body=b""), "", HOUR_LATER_US)


# --- every operator of every kind ---------------------------------------------------------------------------------

#: Kind → what the letter has there, and another value of which that is no part.
VALUES = {
    "type": ("Scan", "Other"),
    "reason": ("rejected", "expired"),
    "queue": ("orders", "bills"),
    "header.tenant": ("acme", "zeta"),
    "header.n": ("5", "33"),
    "header.a b!c": ("odd", "even"),
    "body": ("timeout", "refused"),
}
COMPARED: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "!=": operator.ne, "~": operator.contains}
FORMS = ("{}{}{}", "{} {} {}", "  {}  {}{}  ")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", COMPARED)
@pytest.mark.parametrize("name", VALUES)
def test_every_operator_of_every_kind_says_what_it_means(name: str, sign: str, form: str) -> None:
    there, other = VALUES[name]
    for value in (there, other, there[1:]):
        text = form.format(name, sign, value)
        if name == "body" and sign != "~":
            with pytest.raises(Invalid):
                LetterFilter([text])
            continue
        assert LetterFilter([text]).fits(LETTER, "Scan", HOUR_LATER_US) is COMPARED[sign](there, value), text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sign", "fits"), [("<", (False, True)), (">", (True, False))])
def test_an_age_is_less_or_more(sign: str, fits: tuple[bool, bool], form: str) -> None:
    for value, expected in zip(("30m", "2h"), fits, strict=True):
        text = form.format("age", sign, value)
        assert LetterFilter([text]).fits(LETTER, "Scan", HOUR_LATER_US) is expected, text


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        *((name, sign) for name in VALUES for sign in ("<", ">", "!~", "!", "<>")),
        *(("age", sign) for sign in ("=", "!=", "~", "<=", ">=")),
    ],
)
def test_an_operator_that_a_kind_does_not_have_is_refused(name: str, sign: str) -> None:
    with pytest.raises(Invalid):
        LetterFilter([f"{name}{sign}1h"])


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="=~<>!"), min_size=1).map(str.strip)
TEXTS = st.text(st.characters(codec="utf-8")).map(str.strip)


@given(NAMES.filter(bool), TEXTS, TEXTS, st.sampled_from(list(COMPARED)))
def test_any_header_is_compared_with_any_value(name: str, there: str, value: str, sign: str) -> None:
    letter = Message(body=b"", headers={name: there})
    assert LetterFilter([f"header.{name}{sign}{value}"]).fits(letter, "", 0) is COMPARED[sign](there, value)


@pytest.mark.parametrize(("text", "fits"), [("header.x!=1", True), ("header.x=1", False), ("header.x~1", False)])
def test_a_header_that_is_not_there_is_empty(text: str, fits: bool) -> None:
    assert LetterFilter([text]).fits(Message(body=b""), "", 0) is fits


@pytest.mark.parametrize(("text", "fits"), [("reason~NoSuchOrder", True), ("reason~perm", True), ("reason~x", False)])
def test_a_reason_contains(text: str, fits: bool) -> None:
    headers = {"x-parked-reason": "permanent; shop.NoSuchOrder: 7"}
    assert LetterFilter([text]).fits(Message(body=b"", headers=headers), "", 0) is fits


def test_what_it_waited_for_is_no_death() -> None:
    x_death = [{"queue": "orders.retry", "reason": "expired", "count": 2}, *LETTER.headers["x-death"]]  # type: ignore[misc]
    letter = Message(body=b"", queue="orders.dlq", type="Scan", headers={"x-death": x_death})
    assert LetterFilter(["queue=orders", "reason=rejected", "age>30m", "type=Scan"]).fits(letter, "", HOUR_LATER_US)


def test_a_letter_that_was_parked_is_found_by_the_queue_that_it_died_in() -> None:
    headers = {"x-original-queue": "orders", "x-original-for": "graves"}
    assert LetterFilter(["queue=orders"]).fits(Message(body=b"", queue="graves", headers=headers), "", HOUR_LATER_US)
