"""What is remembered from letter to letter changes nothing: every letter is redriven as if it were the first."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.death import REDRIVE_ID, RedriveStamp
from holdfast.core.message import Address, Delivery
from holdfast.core.routes import Mode, RouteTable
from holdfast.engines.rabbitmq.letters import digest
from holdfast.engines.rabbitmq.redriver import REMEMBERED_BYTES_MAX, RabbitRedriver
from holdfast.engines.rabbitmq.wire import properties, table

ID_HEAD = b"\x0cx-redrive-idS\0\0\0\x24"
IDS = st.sampled_from(["a" * 36, "b" * 36, "c" * 36])
#: What looks like the entry of an id, and is in the middle of a value; and ids that are none of ours.
SPOOFS = st.sampled_from([ID_HEAD.decode() + "x" * 36, ID_HEAD.decode() + "y" * 36, "z" * 35, "", "d" * 36])
VALUES = st.one_of(IDS, SPOOFS, st.integers(0, 3), st.lists(SPOOFS, max_size=2))
NAMES = st.sampled_from(["a", "zz", "x-redrive-ie", "x-redriven-count", "x-delivery-count", "MessageType", "x-death"])


@st.composite
def header_tables(draw: st.DrawFn) -> bytes:
    """Entries in any order; names may repeat, as strangers can make them."""
    entries = draw(st.lists(st.tuples(NAMES, VALUES), max_size=3))
    entries += [(REDRIVE_ID, draw(st.one_of(IDS, IDS, SPOOFS))) for _ in range(draw(st.integers(0, 2)))]
    packed = [bytes((len(name),)) + name.encode() + table.encode_value(value) for name, value in entries]  # type: ignore[arg-type]
    payload = b"".join(draw(st.permutations(packed))) + draw(st.sampled_from([b"", b"", b"", b"\x01?\x7f"]))
    return len(payload).to_bytes(4, "big") + payload


def _redriver(type_header: str) -> RabbitRedriver:
    place: Any = {"mode": Mode.ADDRESS, "address": Address(exchange="e", routing_key="k"), "type_header": type_header}
    return RabbitRedriver(
        RedriveStamp(run="r", by="me", dead_queue="dlq"),
        RouteTable(**place),
        now=lambda: datetime(2026, 11, 15, tzinfo=UTC),
    )


@given(st.lists(header_tables(), min_size=2, max_size=6), st.sampled_from(["MessageType", REDRIVE_ID]))
def test_a_letter_is_redriven_as_if_it_were_the_first(tables: list[bytes], type_header: str) -> None:
    remembering = _redriver(type_header)
    remembering.tick()
    for number, headers in enumerate(tables):
        raw = properties.join({"headers": headers, "delivery_mode": b"\x02"})
        delivery = Delivery(1, number, False, "", "dlq", "tag", raw, b"body")
        fresh = _redriver(type_header)
        fresh.tick()
        first, again = fresh.letter(delivery), remembering.letter(delivery)
        assert again.digest == first.digest == digest(raw, b"body")
        assert again.properties == first.properties
        assert (again.route, again.returns, again.size_bytes) == (first.route, first.returns, first.size_bytes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"expiration": "60000"}),
        ({"expiration": "1"}, {"expiration": "60000"}),
        ({"user_id": "eve"}, {"expiration": "60000"}),
        ({}, {"type": "Scan"}),
        ({"type": "Other"}, {"type": "Scan"}),
    ],
)
def test_a_property_of_one_letter_decides_nothing_for_another(first: dict[str, str], second: dict[str, str]) -> None:
    def redriver() -> RabbitRedriver:
        stamp = RedriveStamp(run="r", by="me", dead_queue="dlq")
        table = RouteTable(
            routes={"Scan": Address(routing_key="scan")}, redirect=Address(routing_key="k"), has_table=True
        )
        made = RabbitRedriver(stamp, table, now=lambda: datetime(2026, 11, 15, tzinfo=UTC))
        made.tick()
        return made

    letters = [
        Delivery(1, 1, False, "", "dlq", "t", properties.encode({"headers": {}, **one}), b"") for one in (first, second)
    ]
    remembering, fresh = redriver(), redriver()
    remembering.letter(letters[0])
    again, expected = remembering.letter(letters[1]), fresh.letter(letters[1])
    assert again.properties == expected.properties
    assert again.route == expected.route
    assert "expiration" not in properties.decode(again.properties)


def test_a_type_that_decides_nothing_is_not_remembered() -> None:
    redriver = _redriver("MessageType")
    redriver.tick()
    raws = [properties.encode({"type": kind}) for kind in ("Scan", "Other")]
    assert [redriver.letter(Delivery(1, 1, False, "", "dlq", "t", raw, b"")).route.type for raw in raws] == ["", ""]


@pytest.mark.parametrize("name", ["stack", "MessageType", "x-death"])
@pytest.mark.parametrize("size", [8_000, 100_000])
def test_what_is_remembered_is_bounded_by_its_bytes(name: str, size: int) -> None:
    redriver = _redriver("MessageType")
    redriver.tick()
    tracemalloc.start()
    try:
        for number in range(1_000):
            raw = properties.encode({"headers": {name: f"{number:08}" + "x" * size}})
            redriver.letter(Delivery(1, number, False, "", "dlq", "tag", raw, b"body"))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 3 * REMEMBERED_BYTES_MAX
