"""Rows of the ledger that fit a filter, page by page, and the table of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import convert

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import NewLetter
from holdfast.core.moments import moment
from holdfast.core.requests.vault import LedgerFilter
from holdfast.core.states import LetterState
from holdfast.errors import Invalid
from holdfast.stores.vault import Vault
from holdfast.testing import FrozenClock
from tests.vault.letters import letter

STEP_S = 10


def act(actor: str, action: str) -> LedgerAct:
    return LedgerAct(actor=actor, action=action, origin="tests")


@pytest.fixture
async def told(vault: Vault, clock: FrozenClock) -> Vault:
    """Ten rows, ten seconds apart: letters 1 to 6 of two queues are captured, some are archived, others discarded."""

    async def put(actor: str, *letters: NewLetter) -> None:
        await vault.letters.put(list(letters), act(actor, "capture"))
        await clock.advance(STEP_S)

    async def move(actor: str, action: str, ids: list[int], target: LetterState) -> None:
        await vault.letters.move(
            ids, source=LetterState.CAPTURED, target=target, act=act(actor, action), expected=len(ids)
        )
        await clock.advance(STEP_S)

    await put("eve", letter(b"1"), letter(b"2"), letter(b"3"))  # row 1
    await put("eve", letter(b"4", queue="pay.dlq"), letter(b"5", queue="pay.dlq"), letter(b"6", queue="pay.dlq"))
    await move("bob", "letters.archive", [1, 3], LetterState.ARCHIVED)
    await move("bob", "letters.discard", [2], LetterState.DISCARDED)
    await move("eve", "letters.discard", [4, 6], LetterState.DISCARDED)
    for number in range(5):
        await vault.ledger.append(act("bob", "tokens.create"), outcome="denied" if number else "done")
        await clock.advance(STEP_S)
    return vault


async def numbers(vault: Vault, *, count_max: int = 3, newest_first: bool = False, **wanted: Any) -> list[int]:
    """The numbers of all rows that fit, over all pages."""
    found: list[int] = []
    after, rule = 0, convert(wanted, LedgerFilter)
    while True:
        page = await vault.ledger.find(rule, after=after, newest_first=newest_first, count_max=count_max)
        assert len(page.rows) <= count_max
        found += [row.number for row in page.rows]
        if not page.after:
            return found
        after = page.after


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"actor": "eve"}, [1, 2, 5]),
        ({"action": "letters.discard"}, [4, 5]),
        ({"actor": "bob", "action": "letters.discard"}, [4]),
        ({"outcome": "denied"}, [7, 8, 9, 10]),
        ({"queue": "pay.dlq"}, [2, 5]),
        ({"letter": 2}, [1, 4]),
        ({"letter": 5}, [2]),
        ({"letter": 99}, []),
        ({"actor": "nobody"}, []),
        ({"action": "%"}, []),
    ],
)
async def test_rows_that_fit_are_found_from_both_ends(told: Vault, wanted: dict[str, Any], expected: list[int]) -> None:
    assert await numbers(told, **wanted) == expected
    assert await numbers(told, newest_first=True, **wanted) == expected[::-1]
    assert await numbers(told, count_max=1, **wanted) == expected


async def test_rows_of_a_time_are_found_also_when_the_clock_was_set_back(told: Vault, clock: FrozenClock) -> None:
    rows = (await told.ledger.find(LedgerFilter(), after=0, newest_first=False, count_max=20)).rows
    third = rows[2].at
    assert await numbers(told, done_before=third) == [1, 2]
    assert await numbers(told, done_after=third) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert await numbers(told, done_after=third, done_before=third + timedelta(seconds=STEP_S)) == [3]
    assert await numbers(told, done_after=moment(clock.now_us()) + timedelta(days=1)) == []
    await clock.advance(-75)
    await told.ledger.append(act("bob", "balance.read"), outcome="done")
    assert await numbers(told, done_before=rows[3].at) == [1, 2, 3, 11]


async def test_a_text_that_cannot_be_there_is_refused(told: Vault) -> None:
    with pytest.raises(Invalid, match="actor holds a character"):
        await numbers(told, actor="a\x00b")
