"""Waiting for a fact ends as soon as it is true, and says what was missing when it never is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.eventually import LOG, eventually


async def test_it_returns_the_first_true_answer() -> None:
    answers = iter([0, 0, 7, 8])
    assert await eventually(lambda: next(answers)) == 7


async def test_a_coroutine_function_is_awaited() -> None:
    answers = iter(["", "yes"])

    async def fact() -> str:
        return next(answers)

    assert await eventually(fact) == "yes"


async def test_a_failure_counts_as_not_yet_and_the_last_is_reported() -> None:
    def fact() -> bool:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(AssertionError, match="the last failure was ConnectionRefusedError: nobody listens"):
        await eventually(fact, timeout_s=0.05)


async def test_the_last_answer_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"not true after 0.05 s; the last answer was \[\]"):
        await eventually(list, timeout_s=0.05)


async def test_a_fact_that_hangs_is_ended() -> None:
    async def fact() -> bool:
        await asyncio.Event().wait()
        return True

    with pytest.raises(AssertionError, match="TimeoutError"):
        await eventually(fact, timeout_s=0.05)


async def test_another_error_is_not_swallowed() -> None:
    def fact() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await eventually(fact)


async def test_how_near_each_came_to_its_limit_is_written_down_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    answers = iter([0, 1])
    await eventually(lambda: next(answers), timeout_s=7)
    with pytest.raises(AssertionError):
        await eventually(list, timeout_s=0.05)
    came, never = ((tmp_path / "log").read_text().splitlines()[number].split("\t") for number in (0, 1))
    assert "test_how_near" in came[0]
    assert "test_how_near" in came[1]
    assert (0 < float(came[2]) < 7, came[3]) == (True, "7")
    assert (never[1], float(never[2]) > 0, never[3]) == ("<class 'list'>", True, "0.05")
