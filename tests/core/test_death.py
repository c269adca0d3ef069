"""Attempts and headers: what is read from a message that strangers sent, and what a publish of ours changes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import death
from holdfast.core.message import Message
from holdfast.core.policy import Failure

AT = datetime(2030, 1, 1, tzinfo=UTC)
DLQ = "q.dlq"
FAILURE = Failure(type="ValueError", message="no", stack="Traceback")


def entry(queue: str, reason: str, count: int = 1, exchange: str = "ex", key: str = "key") -> dict[str, object]:
    return {
        "queue": queue,
        "reason": reason,
        "count": count,
        "exchange": exchange,
        "routing-keys": [key],
        "time": AT,
    }


WAITS = frozenset({"q.retry"})
BACK = [entry("q.retry", "expired")]


def message(attempt: int = 1, *, redelivered: bool = False, **headers: object) -> Message:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Message(
        body=b"x",
        queue="q",
        exchange="events",
        routing_key="files.new",
        headers=names,
        attempt=attempt,
        redelivered=redelivered,
    )


def test_attempts_are_our_count_and_the_rejections_since_then() -> None:
    x_death = [entry("q.retry", "expired", 7), entry("q", "rejected", 2), entry("other", "rejected", 5)]
    assert death.attempts_used(message(), WAITS) == 0
    assert death.attempts_used(message(x_retry_count=1, x_death=x_death[:1]), WAITS) == 1
    assert death.attempts_used(message(x_retry_count=1, x_death=x_death), WAITS) == 3


@pytest.mark.parametrize("x_death", [[], [entry("q", "rejected", 9)], [entry("other.retry", "expired")]])
def test_what_did_not_come_through_a_wait_queue_of_its_own_is_here_for_the_first_time(x_death: list[object]) -> None:
    assert death.attempts_used(message(x_retry_count=7, x_death=x_death), WAITS) == 0


@pytest.mark.parametrize("count", ["2", -1, None, True, 2.5, [1], b"1"])
def test_a_count_that_is_none_is_zero(count: object) -> None:
    assert death.attempts_used(message(x_retry_count=count, x_death=BACK), WAITS) == 0


def test_a_count_beyond_every_limit_is_the_limit() -> None:
    assert death.attempts_used(message(x_retry_count=2**62, x_death=BACK), WAITS) == 65_536


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["queue", "reason", "count"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*death.BROKER_HEADERS, "CC", "x-retry-count", "x-original-queue"]), anything))
def test_no_header_that_a_stranger_wrote_can_stop_a_retry_or_a_parking(headers: dict[str, object]) -> None:
    sent = Message(body=b"", queue="q", headers=headers)
    used = death.attempts_used(sent, WAITS)
    assert 0 <= used <= 65_536
    for change in (
        death.retried(sent, FAILURE, dead_queue=DLQ),
        death.parked(sent, FAILURE, used=used, reason="attempts", at=AT, by="me", dead_queue=DLQ),
    ):
        assert not set(change.put) & set(change.drop)
        assert set(death.BROKER_HEADERS) <= set(change.drop)


def test_a_retry_counts_and_says_where_it_came_from_and_why() -> None:
    change = death.retried(message(2, x_retry_count=1), FAILURE, dead_queue=DLQ)
    assert change.put == {
        "x-retry-count": 2,
        "x-original-exchange": "events",
        "x-original-routing-key": "files.new",
        "x-original-queue": "q",
        "x-original-for": DLQ,
        "x-error-type": "ValueError",
        "x-error-message": "no",
        "x-error-stack": "Traceback",
    }


def origin(change: death.HeaderChange) -> dict[str, object]:
    return {name.removeprefix("x-"): value for name, value in change.put.items() if "original" in name}


HERE = {
    "original-exchange": "events",
    "original-routing-key": "files.new",
    "original-queue": "q",
    "original-for": DLQ,
}
ELSEWHERE: dict[str, Any] = {"x_original_queue": "a", "x_original_exchange": "e", "x_original_routing_key": "k"}


def test_the_origin_stays_when_a_message_comes_back_through_its_own_wait_queue() -> None:
    first = death.retried(message(), FAILURE, dead_queue=DLQ)
    again = Message(body=b"x", queue="q", exchange="", routing_key="q", headers=dict(first.put), attempt=2)
    assert origin(death.retried(again, FAILURE, dead_queue=DLQ)) == {}
    parked = death.parked(again, FAILURE, used=1, reason="attempts", at=AT, by="me", dead_queue=DLQ)
    assert origin(parked) == {}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"x_original_for": "a.dlq"},  # parked there, and sent here by whomever
        {"x_original_for": DLQ},  # of another queue that shares the dead queue
        {"x_parked_at": AT.isoformat()},
    ],
)
def test_an_origin_of_another_queue_is_written_anew_and_kept_as_the_first(told: dict[str, Any]) -> None:
    change = death.retried(message(**ELSEWHERE, **told), FAILURE, dead_queue=DLQ)
    first = {"first-original-queue": "a", "first-original-exchange": "e", "first-original-routing-key": "k"}
    assert origin(change) == {**HERE, **first}


def test_the_first_origin_is_never_overwritten() -> None:
    change = death.retried(message(**ELSEWHERE, x_first_original_queue="z"), FAILURE, dead_queue=DLQ)
    assert origin(change) == HERE


@pytest.mark.parametrize("odd", [7, None, b"x", [1], {"a": 1.5}])
def test_what_a_stranger_wrote_for_an_origin_is_kept_as_text(odd: object) -> None:
    change = death.retried(message(x_original_exchange=odd), FAILURE, dead_queue=DLQ)
    assert origin(change) == {**HERE, "first-original-exchange": str(odd)}


def test_a_death_in_another_queue_is_not_where_it_failed_here() -> None:
    x_death = [entry("elder", "expired", exchange="orders", key="new")]
    assert origin(death.retried(message(x_death=x_death), FAILURE, dead_queue=DLQ)) == HERE


def test_what_the_broker_brought_back_was_consumed_first_from_where_the_broker_says() -> None:
    x_death = [entry("q.retry", "expired", exchange="", key="q.retry"), entry("q", "rejected", exchange="e", key="k")]
    change = death.retried(message(x_death=x_death), FAILURE, dead_queue=DLQ, wait_queues={"q.retry"})
    assert origin(change) == {**HERE, "original-exchange": "e", "original-routing-key": "k"}


def test_our_own_wait_queue_is_no_origin_and_no_story() -> None:
    x_death = [entry("q.retry", "expired")]
    change = death.retried(message(x_death=x_death), FAILURE, dead_queue=DLQ, wait_queues={"q.retry"})
    assert origin(change) == HERE
    assert "x-kept-death" not in change.put


NAMES = death.QueueNames()
NOTED = {"x-original-queue": "a", "x-original-exchange": "e", "x-original-routing-key": "k"}
PARKED = {**NOTED, "x-parked-at": AT.isoformat()}
CAME_BACK = {"x-death": [entry("b.retry", "expired"), entry("b", "rejected"), entry("a", "rejected")]}
MOVED = {"x-death": [entry("a.dlq", "expired")]}


@pytest.mark.parametrize(
    ("headers", "sources", "queue"),
    [
        ({**NOTED, "x-original-for": "b.dlq", **CAME_BACK}, [], "a"),
        ({**NOTED, **CAME_BACK}, ["a"], "b"),
        ({**PARKED, "x-original-for": "a.dlq", **CAME_BACK}, [], "b"),
        ({"x-death": [entry("b.dlq", "expired"), *CAME_BACK["x-death"]]}, [], "b"),
        ({"x-death": [entry("a.dlq", "expired"), entry("a", "rejected")]}, ["b"], "a"),
        ({**NOTED, "x-original-for": "a.dlq", **MOVED}, ["b"], "a"),
        ({**NOTED, "x-original-for": "graves", "x-death": [entry("graves", "expired")]}, ["b"], "a"),
        ({**PARKED, "x-original-for": "a.dlq"}, ["b"], None),
        (PARKED, ["a", "b"], "a"),
        (PARKED, ["b"], "b"),
        (PARKED, ["b", "c"], None),
        ({**PARKED, "x-original-queue": "b"}, [], "b"),
        (NOTED, ["b"], "b"),
        (NOTED, [], None),
        ({"x-original-exchange": "spring", "x-death": "nonsense"}, [], None),
        ({**NOTED, "x-original-for": ["a.dlq"]}, ["b"], "b"),
        ({**PARKED, "x-original-for": 5}, ["a", "b"], "a"),
        ({**NOTED, "x-original-for": ""}, [], None),
        ({}, ["b"], "b"),
    ],
)
def test_where_a_letter_of_b_died(headers: dict[str, object], sources: list[str], queue: str | None) -> None:
    died, why = death.where_it_died(headers, "b.dlq", NAMES, lambda: sources)
    assert (died.queue if died else None) == queue
    assert bool(why) is (died is None)


def test_the_order_of_the_list_tells_and_never_the_times() -> None:
    late, early = datetime(2031, 1, 1, tzinfo=UTC), datetime(2029, 1, 1, tzinfo=UTC)
    x_death = [{**entry("b", "rejected"), "time": early}, {**entry("a", "rejected"), "time": late}]
    died, _ = death.where_it_died({"x-death": x_death}, "b.dlq", NAMES)
    assert died is not None
    assert died.queue == "b"


def redriven(**headers: Any) -> death.HeaderChange:
    return death.redriven(message(**headers), death.RedriveStamp(run="r", by="me", dead_queue=DLQ))


def test_a_redrive_takes_off_for_which_dead_queue_the_origin_was() -> None:
    assert "x-original-for" in redriven(**ELSEWHERE, x_original_for=DLQ).drop
    assert origin(redriven(**ELSEWHERE, x_original_for=DLQ)) == {}


def test_a_redrive_writes_down_what_x_death_tells() -> None:
    change = redriven(**ELSEWHERE, x_death=[entry("q.retry", "expired"), entry("q", "rejected", exchange="x")])
    assert origin(change) == {
        "original-exchange": "x",
        "original-routing-key": "key",
        "original-queue": "q",
        "first-original-queue": "a",
        "first-original-exchange": "e",
        "first-original-routing-key": "k",
    }
    assert origin(redriven(**ELSEWHERE)) == {}, "where nothing tells, nothing is made up"


def test_a_parking_keeps_the_count_and_says_when_who_and_why() -> None:
    change = death.parked(
        message(3, x_retry_count=2), FAILURE, used=2, reason="attempts", at=AT, by="host", dead_queue=DLQ
    )
    assert change.put["x-retry-count"] == 2
    assert change.put["x-parked-at"] == "2030-01-01T00:00:00+00:00"
    assert (change.put["x-parked-by"], change.put["x-parked-reason"]) == ("host", "attempts")


def test_what_makes_a_publish_unsafe_is_taken_off_and_kept() -> None:
    sent = Message(
        body=b"", queue="q", expiration="60000", user_id="eve", headers={"CC": ["a", "b"], "BCC": ["c"], "x-delay": 5}
    )
    change = death.published(sent, user="guest")
    assert change.drop_properties == ("expiration", "user_id")
    assert {"CC", "BCC", "x-delay"} <= set(change.drop)
    assert change.put["x-kept-expiration"] == "60000"
    assert change.put["x-kept-user-id"] == "eve"
    assert change.put["x-kept-cc"] == ["a", "b"]


def test_our_own_user_may_stay() -> None:
    change = death.published(Message(body=b"", queue="q", user_id="guest"), user="guest")
    assert change.drop_properties == ()


def test_the_kept_story_of_deaths_is_json_of_4_kib_at_the_most() -> None:
    many = [entry(f"queue-{number}" * 5, "rejected") for number in range(200)]
    kept = death.published(message(x_death=many)).put["x-kept-death"]
    assert isinstance(kept, str)
    assert len(kept.encode()) <= 4096
    assert json.loads(kept)[0]["queue"] == "queue-0" * 5


def test_returns_are_only_believed_of_a_message_that_came_again() -> None:
    assert death.returns(message()) is None
    assert death.returns(message(x_delivery_count=4)) == 0
    assert death.returns(message(redelivered=True, x_delivery_count=4)) == 4
    assert death.returns(message(redelivered=True, x_acquired_count=4)) == 0, "given back on purpose, from 4.3 on"
