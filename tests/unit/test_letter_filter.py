"""`--where`: which letters of a dead-letter queue a recovery takes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from holdfast.core.letter_filter import LetterFilter
from holdfast.core.message import Message
from holdfast.core.moments import SECOND_US, microseconds
from holdfast.errors import Invalid

DIED = datetime(2026, 1, 1, tzinfo=UTC)
LETTER = Message(
    body=b'{"error": "timeout"}',
    headers={
        "tenant": "acme",
        "n": 5,
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


@pytest.mark.parametrize("text", ["", "nonsense", "age=1h", "age>soon", "body=x", "reason~x", "color=red", "header.=x"])
def test_a_condition_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        LetterFilter([text])


def test_nobody_knows_how_old_a_letter_without_a_death_is() -> None:
    for text in ("age>0s", "age<100h"):
        assert not LetterFilter([text]).fits(Message(body=b""), "", HOUR_LATER_US)
