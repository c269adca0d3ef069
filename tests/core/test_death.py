"""Attempts and headers: what is read from a message that strangers sent, and what a publish of ours changes."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import death
from holdfast.core.item import Item
from holdfast.core.message import Message
from holdfast.core.policy import Failure

AT = datetime(2030, 1, 1, tzinfo=UTC)
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
    assert death.attempts_used(message()) == 0
    assert death.attempts_used(message(x_retry_count=1)) == 1
    assert death.attempts_used(message(x_retry_count=1, x_death=x_death)) == 3


@pytest.mark.parametrize("count", ["2", -1, None, True, 2.5, [1], b"1"])
def test_a_count_that_is_none_is_zero(count: object) -> None:
    assert death.attempts_used(message(x_retry_count=count)) == 0


def test_a_count_beyond_every_limit_is_the_limit() -> None:
    assert death.attempts_used(message(x_retry_count=2**62)) == 65_536


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["queue", "reason", "count"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*death.BROKER_HEADERS, "CC", "x-retry-count", "x-original-queue"]), anything))
def test_no_header_that_a_stranger_wrote_can_stop_a_retry_or_a_parking(headers: dict[str, object]) -> None:
    sent = Message(body=b"", queue="q", headers=headers)
    used = death.attempts_used(sent)
    assert 0 <= used <= 65_536
    for change in (
        death.retried(sent, FAILURE),
        death.parked(sent, FAILURE, used=used, reason="attempts", at=AT, by="me"),
    ):
        assert not set(change.put) & set(change.drop)
        assert set(death.BROKER_HEADERS) <= set(change.drop)


def test_a_retry_counts_and_says_where_it_came_from_and_why() -> None:
    change = death.retried(message(2, x_retry_count=1), FAILURE)
    assert change.put == {
        "x-retry-count": 2,
        "x-original-exchange": "events",
        "x-original-routing-key": "files.new",
        "x-original-queue": "q",
        "x-error-type": "ValueError",
        "x-error-message": "no",
        "x-error-stack": "Traceback",
    }


def test_the_origin_is_never_overwritten() -> None:
    change = death.retried(message(x_original_queue="first"), FAILURE)
    assert not any(name.startswith("x-original") for name in change.put)


def test_the_origin_is_read_from_the_first_death() -> None:
    x_death = [entry("q", "rejected", 3), entry("elder", "expired", exchange="orders", key="new")]
    change = death.retried(message(x_death=x_death), FAILURE)
    assert change.put["x-original-queue"] == "elder"
    named = message(x_death=x_death, x_first_death_queue="q", x_first_death_reason="rejected")
    assert death.retried(named, FAILURE).put["x-original-queue"] == "q"


def test_our_own_wait_queue_is_no_origin_and_no_story() -> None:
    change = death.retried(message(x_death=[entry("q.retry", "expired")]), FAILURE, wait_queues={"q.retry"})
    assert change.put["x-original-queue"] == "q"
    assert "x-kept-death" not in change.put


def test_a_parking_keeps_the_count_and_says_when_who_and_why() -> None:
    change = death.parked(message(3, x_retry_count=2), FAILURE, used=2, reason="attempts", at=AT, by="host")
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


def test_the_death_of_an_item_is_read_from_its_fields() -> None:
    item = Item(source_queue="work", death_reason="attempts; ValueError: no", death_attempts=3, died_at=AT)
    assert death.Death.of_item(item) == death.Death(queue="work", reason="attempts; ValueError: no", count=3, at=AT)
    assert death.Death.of_item(Item()) is None
