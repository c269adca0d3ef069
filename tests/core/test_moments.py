"""Moments and durations: what is written is read back as the same."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.moments import (
    DURATION_CHARACTERS_MAX,
    DURATION_US_MAX,
    format_duration,
    go_duration,
    microseconds,
    moment,
    moment_or_none,
    parse_duration,
    written_duration,
)
from holdfast.errors import Invalid

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "duration_us"),
    [
        ("", 0),
        ("0", 0),
        ("0s", 0),
        ("900ms", 900_000),
        ("30s", 30 * SECOND),
        ("5m", 300 * SECOND),
        ("1h30m", 5400 * SECOND),
        ("1h30m1.5s", 5401 * SECOND + 500_000),
        ("24h0m0s", 86_400 * SECOND),
        ("1.5h", 5400 * SECOND),
        ("10us", 10),
        ("10µs", 10),
        ("1500ns", 2),
        ("0.1s", 100_000),
    ],
)
def test_a_duration_is_read(text: str, duration_us: int) -> None:
    assert parse_duration(text, what="it") == duration_us


@pytest.mark.parametrize(
    "text", ["x", "1", "1.5", "s", "1 s", " 1s", "1s ", "1S", "1d", "1.s", ".5s", "1e3s", "infs", "nans", "+1s", "١s"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"^it is invalid; '.*' is not a duration"):
        parse_duration(text, what="it")


@pytest.mark.parametrize(
    ("what", "formats"),
    [
        ("request timeout", "900ms, 5m or 15m"),
        ("lease timeout", "8m, 15m or 1h"),
        ("expire timeout", "60m, 2h or 24h"),
    ],
)
def test_clients_of_the_queue_service_hear_what_go_would_say(what: str, formats: str) -> None:
    text = f'{what} is invalid; time: invalid duration "foo" - expected format: {formats}'
    with pytest.raises(Invalid, match=f"^{re.escape(text)}$"):
        parse_duration("foo", what=what)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo", 'invalid duration "foo"'),
        ("1h foo", 'unknown unit "h foo" in duration "1h foo"'),
        ("5", 'missing unit in duration "5"'),
        ("1h5", 'missing unit in duration "1h5"'),
        ("1.5.5s", 'missing unit in duration "1.5.5s"'),
        ("5x", 'unknown unit "x" in duration "5x"'),
        ("1h5S", 'unknown unit "S" in duration "1h5S"'),
        ("1m-5s", 'unknown unit "m-" in duration "1m-5s"'),
        (" 5s", 'invalid duration " 5s"'),
        ("1h.s", 'invalid duration "1h.s"'),
        (".", 'invalid duration "."'),
    ],
)
def test_a_text_that_is_no_duration_is_refused_in_the_words_of_go(text: str, said: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_duration(text, what="request timeout")
    assert caught.value.message == f"request timeout is invalid; time: {said} - expected format: 900ms, 5m or 15m"


def test_a_duration_is_never_negative() -> None:
    with pytest.raises(Invalid, match=r"^it is invalid; '-1s' cannot be negative$"):
        parse_duration("-1s", what="it")


def test_a_duration_of_15_characters_is_the_longest() -> None:
    assert parse_duration("0000000000001ms", what="it") == 1000
    with pytest.raises(Invalid, match=r"^it is invalid; cannot be greater than '15' characters$"):
        parse_duration("00000000000001ms", what="it")


def test_a_hundred_years_are_the_longest() -> None:
    assert parse_duration("876000h", what="it") == DURATION_US_MAX
    with pytest.raises(Invalid, match=r"^it is invalid; '876001h' is more than a hundred years$"):
        parse_duration("876001h", what="it")


@given(st.integers(0, DURATION_US_MAX))
def test_a_duration_is_read_back_as_the_same(duration_us: int) -> None:
    text = format_duration(duration_us)
    if len(text) <= DURATION_CHARACTERS_MAX:
        assert parse_duration(text, what="it") == duration_us


@given(st.integers(0, 100 * 365 * 24 * 3600))
def test_whole_seconds_are_short_enough_to_be_sent_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds * SECOND), what="it") == seconds * SECOND


@given(st.integers(0, DURATION_US_MAX))
def test_what_is_written_as_go_does_is_read_back(duration_us: int) -> None:
    assert written_duration(go_duration(duration_us)) == duration_us


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [
        (0, "0s"),
        (1, "1µs"),
        (1500, "1.5ms"),
        (900_000, "900ms"),
        (SECOND, "1s"),
        (59_999_999, "59.999999s"),
        (60 * SECOND, "1m0s"),
        (90 * SECOND, "1m30s"),
        (960 * SECOND, "16m0s"),
        (3600 * SECOND, "1h0m0s"),
        (86_400 * SECOND, "24h0m0s"),
        (3600 * SECOND + 1_500_000, "1h0m1.5s"),
        (36_010 * 60 * SECOND, "600h10m0s"),
    ],
)
def test_a_duration_is_written_as_go_does(duration_us: int, text: str) -> None:
    assert go_duration(duration_us) == text


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [
        (0, "0s"),
        (600 * SECOND, "10m"),
        (36_010 * 60 * SECOND, "600h10m"),
        (1, "1us"),
        (1500, "1.5ms"),
        (900_000, "900ms"),
        (SECOND, "1s"),
        (90 * SECOND, "1m30s"),
        (3600 * SECOND, "1h"),
        (86_400 * SECOND, "24h"),
        (3600 * SECOND + 1_500_000, "1h1.5s"),
    ],
)
def test_a_duration_is_written_short(duration_us: int, text: str) -> None:
    assert format_duration(duration_us) == text


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        duration_us = parse_duration(text, what="it")
    except Invalid:
        return
    assert 0 <= duration_us <= DURATION_US_MAX


@given(st.integers(1, 253_402_300_799_000_000))
def test_a_moment_is_read_back_as_the_same(at_us: int) -> None:
    assert microseconds(moment(at_us)) == at_us


@given(
    st.datetimes(
        timezones=st.builds(timezone, st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59)))
    )
)
def test_every_moment_in_every_zone_can_be_kept_and_shown(at: datetime) -> None:
    at_us = microseconds(at)
    assert at_us >= 1
    shown = moment(at_us)
    assert shown.tzinfo is UTC
    if datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC) <= at <= datetime(9999, 12, 30, tzinfo=UTC):
        assert shown == at


def test_a_moment_without_a_zone_is_utc() -> None:
    assert microseconds(datetime(2030, 1, 1)) == microseconds(datetime(2030, 1, 1, tzinfo=UTC))  # noqa: DTZ001


def test_no_moment_is_none() -> None:
    assert moment_or_none(0) is None
    assert moment_or_none(None) is None
    assert moment_or_none(SECOND) == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
