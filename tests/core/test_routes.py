"""Where a letter goes back to: one rule after the other, and never a guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import Address
from holdfast.core.routes import Mode, RouteTable, find_route, parse_place, parse_routes
from holdfast.errors import Invalid

DLQ = "imageviewer.dlq"
ORIGINAL = {"x-original-exchange": "e", "x-original-routing-key": "o"}
FILE = b"""
exchange = "imageviewer"
redirect = "review"
[routes]
CollectionScan = "collection.scan"
LibraryScan = { exchange = "", key = "library_scan_queue" }
"""


def death(queue: str, key: str, *, exchange: str = "x", reason: str = "rejected") -> dict[str, object]:
    return {"queue": queue, "reason": reason, "exchange": exchange, "routing-keys": [key], "count": 1}


def test_a_file_is_read() -> None:
    table = parse_routes(FILE, source="routes.toml")
    assert table.type_header == "MessageType"
    assert table.routes["CollectionScan"] == Address(exchange="imageviewer", routing_key="collection.scan")
    assert table.routes["LibraryScan"] == Address(exchange="", routing_key="library_scan_queue")
    assert table.redirect == Address(exchange="imageviewer", routing_key="review")


@pytest.mark.parametrize(
    "text",
    [
        b"[routes]\n",
        b"exchange = 1",
        b"nonsense",
        b"\xff",
        b"[routes]\nA = 1\n",
        b"[routes]\nA = ''\n",
        b"unknown = 1\n[routes]\nA = 'a'\n",
        b"[routes]\nA = { exchange = 'x' }\n",
        b"[routes]\nA = '" + b"k" * 300 + b"'\n",
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: bytes) -> None:
    with pytest.raises(Invalid, match="routes file is invalid"):
        parse_routes(text, source="routes.toml")


@pytest.mark.parametrize(
    ("headers", "key", "why"),
    [
        ({"MessageType": "CollectionScan", "x-death": [death("a", "k")]}, "collection.scan", "type"),
        ({"MessageType": "Strange", "x-death": [death("a", "k")]}, None, "type 'Strange' is not in the route table"),
        ({"MessageType": 7}, None, "type '(no text)' is not in the route table"),
        (
            {"x-original-exchange": "e", "x-original-routing-key": "o", "x-death": [death("a", "k")]},
            "o",
            "its original",
        ),
        ({"x-death": [death("q.retry", "no", reason="expired"), death("a", "k")]}, "k", "x-death"),
        ({"x-death": [death(DLQ, "no"), death("a", "k")]}, "k", "x-death"),
        ({"x-death": "nonsense"}, "review", "redirect"),
        ({}, "review", "redirect"),
    ],
)
def test_the_rules_come_in_their_order(headers: dict[str, object], key: str | None, why: str) -> None:
    route = find_route(headers, parse_routes(FILE, source="f"), dead_queue=DLQ)
    assert route.why.startswith(why)
    assert (route.address.routing_key if route.address else None) == key


def test_without_a_table_a_type_means_nothing() -> None:
    route = find_route({"MessageType": "T", "x-death": [death("a", "k")]}, RouteTable(), dead_queue=DLQ)
    assert route.address == Address(exchange="x", routing_key="k")


def test_nothing_known_is_unknown() -> None:
    assert find_route({}, RouteTable(), dead_queue=DLQ).address is None


def test_the_ways_of_a_run() -> None:
    headers = {"x-death": [death("q.orders", "k", exchange="orders")]}
    source = RouteTable(mode=Mode.SOURCE)
    assert find_route(headers, source, dead_queue=DLQ).address == Address(routing_key="q.orders")
    assert find_route({}, source, dead_queue=DLQ).address is None
    wait = find_route(headers, RouteTable(mode=Mode.WAIT), dead_queue=DLQ).address
    assert wait == Address(exchange="retry.q.orders", routing_key="retry")
    exchange = find_route({**headers, "MessageType": "T"}, RouteTable(mode=Mode.EXCHANGE), dead_queue=DLQ).address
    assert exchange == Address(exchange="orders", routing_key="k")
    place = RouteTable(mode=Mode.PLACE, place=parse_place("review"))
    assert find_route({}, place, dead_queue=DLQ).address == Address(routing_key="review")


def test_a_route_into_the_dead_letter_queue_itself_is_none() -> None:
    looping = RouteTable(mode=Mode.PLACE, place=Address(routing_key=DLQ))
    assert find_route({}, looping, dead_queue=DLQ).address is None


def test_a_place() -> None:
    assert parse_place("exchange=a,key=b.c") == Address(exchange="a", routing_key="b.c")
    with pytest.raises(Invalid):
        parse_place("exchange=a")


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text()), st.binary())))
def test_no_header_can_make_it_fail(headers: dict[str, object]) -> None:
    find_route(headers, parse_routes(FILE, source="f"), dead_queue=DLQ)
