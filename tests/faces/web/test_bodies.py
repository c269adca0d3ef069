"""Bytes of strangers as they are shown: readable, within bounds, and never changed in what they say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.faces.web.bodies import (
    DIFF_LINES_MAX,
    HEX_PART_BYTES,
    BodyMode,
    as_text,
    diff,
    hex_lines,
    part_of,
    shown_body,
)

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def shown(body: bytes, mode: BodyMode = "") -> str:
    return shown_body(body, start=0, size=len(body), mode=mode).text


@given(TREES, st.booleans())
def test_json_says_the_same_when_it_is_indented(tree: object, is_ascii: bool) -> None:
    body = json.dumps([tree], ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    if as_text(body)[1] is not None:
        view = shown_body(body, start=0, size=len(body), mode="")
        assert view.kind == "JSON"
        assert json.loads(view.text) == [tree]


@given(
    st.recursive(
        st.just("<a/>"),
        lambda inner: st.lists(inner | st.just("text"), max_size=4).map(lambda found: f"<b x='1'>{''.join(found)}</b>"),
    )
)
def test_xml_says_the_same_when_it_is_indented(body: str) -> None:
    found = shown(body.encode())
    # Between two texts beside an element a line may end; no character of any part is another one.
    assert re.sub(r"\s+", "", found) == re.sub(r"\s+", "", body)
    ET.fromstring(found)  # noqa: S314 - our own


@given(st.binary(max_size=300), st.sampled_from(["", "raw", "hex"]))
def test_any_bytes_can_be_shown(body: bytes, mode: BodyMode) -> None:
    view = shown_body(body, start=0, size=len(body), mode=mode)
    assert (view.start, view.end) == (0, len(body))
    if view.mode == "raw" and body:
        assert view.text.encode() == body


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=60), st.data())
def test_parts_of_a_text_that_are_cut_inside_characters_make_the_whole(text: str, data: st.DataObject) -> None:
    body, found, place = text.encode(), "", 0
    while place < len(body):
        size = data.draw(st.integers(8, 20))
        view = shown_body(body[place : place + size], start=place, size=len(body) + 1, mode="")
        found, place = found + view.text, view.end
        if view.kind == "bytes":
            return  # a last part that ends inside a character, because there is more
    assert found == text


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 900 + b"1" + b",1" * 30_000 + b"]" * 900,
        b"<a>" * 9_000 + b"</a>" * 9_000,
        b'["' + b'\\"' * 30_000,
        b"<!--" * 16_000,
        b"<a '" * 16_000,
        b'<!DOCTYPE a [<!ENTITY b "cccccccc"><!ENTITY d "&b;&b;&b;">]><a>&d;</a>',
        b"{}" * 32_000,
    ],
)
def test_a_small_body_never_becomes_a_large_page(body: bytes) -> None:
    assert shown(body) == body.decode()


def test_only_the_beginning_of_what_is_large_or_binary_is_shown() -> None:
    assert part_of(10, "") == 10
    assert part_of(2**24, "") == 2**16
    view = shown_body(b"\0" * 2**16, start=0, size=2**24, mode="")
    assert (view.mode, view.end) == ("hex", HEX_PART_BYTES)
    assert hex_lines(b"ab\xff", 32) == f"00000020  {'61 62 ff':<49} ab·"


def test_a_difference_has_the_lines_that_changed_and_some_beside() -> None:
    told = diff(b'{"a":1,"b":2,"c":3}', b'{"a": 1, "b": 5, "c": 3}')
    assert told is not None
    assert [(one.tag, one.text) for one in told if one.tag != "span"] == [("del", '  "b": 2,'), ("ins", '  "b": 5,')]
    assert diff(b"a", b"\xff") is None
    assert diff(b"--- a\nb", b"+++ a\nb") == [("del", "--- a"), ("ins", "+++ a"), ("span", "b")]
    assert diff(b'{"a":1}', b'{"a": 1}') == []
    many = b"\n".join(b"%d" % one for one in range(2 * DIFF_LINES_MAX))
    found = diff(many, many.replace(b"\n", b" \n"))
    assert found is not None
    assert found[-1].text.endswith("more lines")
