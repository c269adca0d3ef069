"""What follows from an outcome, over every attempt and every policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.moments import DURATION_US_MAX, SECOND_US
from holdfast.core.policy import (
    FAILURE_BYTES_MAX,
    Ack,
    Dead,
    Done,
    Failure,
    Park,
    Permanent,
    RetryAfter,
    RetryLater,
    RetryPolicy,
    Run,
    Wait,
    admit,
    decide,
    outcome_of,
    step_for,
)
from holdfast.errors import Invalid

FAILURE = Failure(type="ValueError", message="no")
policies = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 100),
    delay=st.lists(st.floats(0, 1e6), min_size=1, max_size=5),
    spread=st.floats(0, 1),
)


def test_attempts_is_how_often_the_handler_runs() -> None:
    policy = RetryPolicy(attempts=3, delay="15s")
    runs = []
    attempt = 1
    while isinstance(decision := decide(RetryLater(failure=FAILURE), attempt=attempt, policy=policy), Wait):
        runs.append(decision.delay)
        attempt += 1
    assert (attempt, runs) == (3, ["15s", "15s"])
    assert decision == Park(reason="attempts", failure=FAILURE)


def test_a_ladder_is_climbed_and_its_last_step_repeated() -> None:
    policy = RetryPolicy(attempts=9, delay=["1s", "15s", "5m"])
    delays = [decide(RetryLater(failure=FAILURE), attempt=n, policy=policy) for n in range(1, 6)]
    assert [wait.delay for wait in delays if isinstance(wait, Wait)] == ["1s", "15s", "5m", "5m", "5m"]


@given(policies, st.integers(1, 200), st.floats(0, 1))
def test_every_failure_waits_or_parks_and_parks_at_the_limit(policy: RetryPolicy, attempt: int, chance: float) -> None:
    decision = decide(RetryLater(failure=FAILURE), attempt=attempt, policy=policy, chance=chance)
    if attempt >= policy.attempts:
        assert decision == Park(reason="attempts", failure=FAILURE)
    else:
        assert isinstance(decision, Wait)
        low_us = policy.delay_us(attempt)
        assert low_us <= decision.delay_us <= min(DURATION_US_MAX, 2 * low_us)


@given(policies, st.integers(1, 200))
def test_success_acks_and_a_permanent_error_parks_at_every_attempt(policy: RetryPolicy, attempt: int) -> None:
    assert decide(Done(), attempt=attempt, policy=policy) == Ack()
    assert decide(Dead(failure=FAILURE), attempt=attempt, policy=policy) == Park(reason="permanent", failure=FAILURE)


@given(policies, st.integers(0, 200), st.booleans())
def test_a_message_runs_only_while_it_has_attempts_left(policy: RetryPolicy, used: int, step_aside: bool) -> None:
    decision = admit(used=used, policy=policy, step_aside=step_aside)
    if used >= policy.attempts:
        assert isinstance(decision, Park)
        assert decision.reason == "poison"
    else:
        assert isinstance(decision, Wait if step_aside else Run)


def test_a_handler_may_ask_for_a_time() -> None:
    outcome = outcome_of(RetryAfter("90s"))
    decision = decide(outcome, attempt=1, policy=RetryPolicy(attempts=2))
    assert isinstance(decision, Wait)
    assert decision.delay == "1m30s"
    assert isinstance(decide(outcome, attempt=2, policy=RetryPolicy(attempts=2)), Park)
    assert outcome_of(RetryAfter(0.5)) == outcome_of(RetryAfter(0.5))
    zero = decide(outcome_of(RetryAfter(0)), attempt=1, policy=RetryPolicy(attempts=2))
    assert isinstance(zero, Wait)
    assert zero.delay_us == 0


@pytest.mark.parametrize("delay", ["-1s", "soon", -1, float("nan"), float("inf")])
def test_a_delay_that_is_none_is_refused_where_it_is_said(delay: str | float) -> None:
    with pytest.raises(Invalid):
        RetryAfter(delay)
    with pytest.raises(Invalid):
        RetryPolicy(delay=delay)


@pytest.mark.parametrize("attempts", [0, -1, 65_537, True])
def test_attempts_must_be_a_number_of_runs(attempts: int) -> None:
    with pytest.raises(Invalid):
        RetryPolicy(attempts=attempts)


def test_a_ladder_needs_a_step() -> None:
    with pytest.raises(Invalid):
        RetryPolicy(delay=[])


class Refused(Exception):
    pass


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_types_can_be_named_as_permanent() -> None:
    assert isinstance(outcome_of(Permanent("no")), Dead)
    assert isinstance(outcome_of(Refused("no"), permanent=[Refused]), Dead)
    assert isinstance(outcome_of(Refused("no")), RetryLater)
    assert outcome_of(None) == Done()


def test_an_error_that_cannot_say_what_it_is_can_still_be_told() -> None:
    failure = Failure.of(Odd())
    assert failure.type.endswith("Odd")
    assert failure.message == "(its text cannot be read)"


@given(st.text(max_size=600), st.text(max_size=5_000), st.text(max_size=9_000))
def test_the_texts_of_a_failure_fit_into_headers(kind: str, message: str, stack: str) -> None:
    failure = Failure.cut(kind, message, stack)
    texts = (failure.type, failure.message, failure.stack)
    assert sum(len(text.encode()) for text in texts) <= FAILURE_BYTES_MAX
    assert not any("\x00" in text for text in texts)


def test_the_end_of_a_stack_trace_is_kept() -> None:
    failure = Failure.cut("E", "m" * 10_000, "begin" + "x" * 20_000 + "the end")
    assert failure.stack.endswith("the end")
    assert failure.message.startswith("mmm")


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**9), min_size=1, max_size=6, unique=True))
def test_the_wait_queue_that_is_chosen_never_wakes_a_message_too_early_if_one_can_help_it(
    delay_us: int, steps_us: list[int]
) -> None:
    chosen = steps_us[step_for(delay_us, steps_us)]
    assert chosen >= delay_us or chosen == max(steps_us)
    assert not any(delay_us <= step < chosen for step in steps_us)


def test_a_whole_second_is_a_second() -> None:
    assert RetryPolicy(delay=2).delay_us(1) == 2 * SECOND_US


def test_the_broker_carries_to_one_wait_queue_only() -> None:
    assert RetryPolicy(by="broker").by == "broker"
    with pytest.raises(Invalid, match="a ladder needs by='publish'"):
        RetryPolicy(by="broker", delay=["1s", "2s"])
    with pytest.raises(Invalid, match="neither 'publish' nor 'broker'"):
        RetryPolicy(by="pigeon")  # type: ignore[arg-type]
