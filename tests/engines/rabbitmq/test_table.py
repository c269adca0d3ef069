"""Header tables and property lists: what is not named stays byte for byte, whatever it is."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.letter import Kinds
from holdfast.engines.rabbitmq.letters import kinds_of
from holdfast.engines.rabbitmq.wire import properties, table
from holdfast.engines.rabbitmq.wire.table import Undecodable
from tests.engines.rabbitmq.raw import HEADERS, header_table, short
from tests.support.amqp import raw_header

names = st.text(min_size=1, max_size=40)
raw_values = st.sampled_from(list(HEADERS.values()))
tables = st.dictionaries(names, raw_values, max_size=12)
property_lists = st.fixed_dictionaries(
    {},
    optional={
        name: {
            "s": st.binary(max_size=30).map(lambda text: bytes((len(text),)) + text),
            "o": st.binary(min_size=1, max_size=1),
            "T": st.binary(min_size=8, max_size=8),
            "F": tables.map(header_table),
        }[kind]
        for name, kind in properties.KINDS.items()
    },
)


@given(entries=tables, data=st.data())
def test_a_splice_changes_only_what_it_names(entries: dict[str, bytes], data: st.DataObject) -> None:
    drop = data.draw(st.sets(st.sampled_from(sorted(entries)))) if entries else set()
    put = data.draw(st.dictionaries(names, raw_values, max_size=4))
    left = {name: raw for name, raw in entries.items() if name not in drop and name not in put}
    assert table.splice(header_table(entries), put=put, drop=drop) == header_table({**left, **put})


@given(entries=tables)
def test_a_splice_of_nothing_is_the_same_bytes(entries: dict[str, bytes]) -> None:
    raw = header_table(entries)
    assert table.splice(raw) == raw
    for name, value in entries.items():
        assert raw_header(raw, name) == value
    assert raw_header(raw, "\0missing") is None


@given(junk=st.binary(max_size=200))
def test_any_bytes_can_be_scanned_shown_and_spliced(junk: bytes) -> None:
    raw = len(junk).to_bytes(4, "big") + junk
    assert table.splice(raw) == raw
    table.decode(raw)
    added = table.splice(raw, put={"x-ours": b"t\1"})
    assert raw_header(added, "x-ours") == b"t\1"
    assert len(added) <= len(raw) + len(b"\6x-ourst\1")


def test_an_entry_nobody_can_read_is_kept_and_shown_as_such() -> None:
    raw = header_table({"good": b"t\1", "bad": b"?what", "lost": b"t\1"})
    shown = table.decode(raw)
    assert shown["good"] is True
    assert isinstance(shown["(unreadable)"], Undecodable)
    spliced = table.splice(raw, put={"ours": b"V"}, drop=["good"])
    assert spliced[4:].startswith(b"\4oursV")
    assert spliced.endswith(raw[raw.index(b"\3bad") :])


def test_values_are_shown_for_people() -> None:
    shown = table.decode(header_table(HEADERS))
    assert shown["int8"] == -7
    assert shown["uint32"] == 4_000_000_000
    assert shown["double"] == 1.1
    assert shown["decimal"] == Decimal("123.45")
    assert shown["text"] == "häm!"
    assert shown["bytes"] == b"\0\1\xff"
    assert shown["timestamp"] == datetime.fromtimestamp(1_700_000_000, UTC)
    assert shown["void"] is None
    assert shown["table"] == {"n": 1, "deep": {"x": [True, None]}}
    assert shown["array"] == [1, 9]
    for name in ("text-not-utf8", "timestamp-huge"):
        assert isinstance(shown[name], Undecodable)


def test_kinds_are_told_by_the_names_that_amqp_has_for_them() -> None:
    values = {"text": "x", "number": 7, "part": 1.5, "flag": True, "none": None, "raw": b"x", "list": [1], "more": {}}
    raw = properties.encode({"message_id": "m", "priority": 3, "headers": values})  # type: ignore[dict-item]
    assert kinds_of(raw) == Kinds(
        {"message_id": "shortstr", "priority": "octet"},
        {
            "text": "longstr", "number": "int64", "part": "double", "flag": "bool", "none": "void", "raw": "bytes",
            "list": "array", "more": "table",
        },
    )  # fmt: skip
    assert kinds_of(b"\xff") == Kinds()


@given(st.binary(max_size=60))
def test_kinds_of_any_bytes_can_be_asked(junk: bytes) -> None:
    kinds_of(junk)
    table.kinds(junk)


def test_a_table_of_any_depth_is_shown_without_going_down_for_ever() -> None:
    raw = b"t\1"
    for _ in range(2000):
        inner = b"\1x" + raw
        raw = b"F" + len(inner).to_bytes(4, "big") + inner
    assert table.decode(header_table({"deep": raw}))


@given(
    values=st.dictionaries(
        names,
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False)
            | st.text(max_size=20)
            | st.binary(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    )
)
def test_values_of_our_own_read_back(values: dict[str, table.Value]) -> None:
    assert table.decode(table.encode(values)) == values


def test_a_value_or_a_name_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be a header value"):
        table.encode_value(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="255 bytes"):
        table.splice(table.EMPTY, put={"n" * 256: b"V"})


@given(pieces=property_lists, data=st.data())
def test_a_splice_of_properties_changes_only_what_it_names(pieces: dict[str, bytes], data: st.DataObject) -> None:
    raw = properties.join(pieces)
    assert properties.split(raw) == pieces
    assert properties.splice(raw) == raw
    drop = data.draw(st.sets(st.sampled_from(sorted(properties.KINDS))))
    put = {"message_id": short("new")}
    expected = {name: piece for name, piece in pieces.items() if name not in drop} | put
    assert properties.splice(raw, put=put, drop=drop) == properties.join(expected)


@given(pieces=property_lists)
def test_persistent_changes_the_delivery_mode_and_nothing_else(pieces: dict[str, bytes]) -> None:
    changed = properties.persistent(properties.join(pieces))
    assert properties.split(changed) == {**pieces, "delivery_mode": b"\2"}
    assert properties.persistent(changed) is changed


@given(junk=st.binary(max_size=80))
def test_any_property_bytes_are_shown_or_refused_but_never_crash(junk: bytes) -> None:
    properties.decode(junk)
    for change in (properties.persistent, properties.splice, properties.splice_headers):
        try:
            change(junk)
        except properties.Unreadable:
            continue


def test_headers_are_spliced_inside_the_property_list() -> None:
    raw = properties.encode({"message_id": "m", "headers": {"keep": 1, "go": 2}})
    changed = properties.splice_headers(raw, put={"x-retry-count": 3}, drop=["go"])
    assert properties.decode(changed) == {"message_id": "m", "headers": {"keep": 1, "x-retry-count": 3}}


def test_no_header_table_is_made_when_there_is_nothing_to_put() -> None:
    raw = properties.encode({"message_id": "m"})
    assert properties.splice_headers(raw, drop=["go"]) == raw


@pytest.mark.parametrize(
    ("name", "value"),
    [("message_id", "x" * 256), ("message_id", 7), ("delivery_mode", "2"), ("delivery_mode", 256)],
)
def test_a_property_of_the_wrong_kind_is_refused(name: str, value: str | int) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        properties.encode_value(name, value)
