"""Where a letter goes back to: one rule after the other, and never a guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import Address
from holdfast.core.routes import Mode, RouteTable, find_route, parse_routes, parse_to
from holdfast.errors import Invalid

DLQ = "imageviewer.dlq"
FOREIGN = {"x-original-exchange": "e", "x-original-routing-key": "o"}
ORIGINAL = {**FOREIGN, "x-original-queue": "q", "x-original-for": DLQ}
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
        ({**ORIGINAL, "x-death": [death("a", "k")]}, "o", "its original"),
        ({**FOREIGN, "x-death": [death("a", "k")]}, "k", "its original"),
        ({"x-death": [death("q.retry", "no", reason="expired"), death("a", "k")]}, "k", "its original"),
        ({"x-death": [death(DLQ, "no"), death("a", "k")]}, "k", "its original"),
        (FOREIGN, "review", "redirect"),
        ({"x-death": "nonsense"}, "review", "redirect"),
        ({}, "review", "redirect"),
    ],
)
def test_the_rules_come_in_their_order(headers: dict[str, object], key: str | None, why: str) -> None:
    route = find_route(headers, parse_routes(FILE, source="f"), dead_queue=DLQ)
    assert route.why.startswith(why)
    assert (route.address.routing_key if route.address else None) == key


def test_without_a_table_each_goes_to_the_queue_that_it_died_in() -> None:
    route = find_route({"MessageType": "T", "x-death": [death("a", "k")]}, RouteTable(), dead_queue=DLQ)
    assert route.address == Address(routing_key="a")
    only_redirect = parse_routes(b"redirect = 'review'", source="f")
    assert find_route(ORIGINAL, only_redirect, dead_queue=DLQ).address == Address(exchange="e", routing_key="o")


def test_a_type_that_no_header_tells_is_that_of_the_message() -> None:
    table = parse_routes(FILE, source="f")
    assert find_route({}, table, dead_queue=DLQ, kind="LibraryScan").why == "type"
    assert find_route({"MessageType": "CollectionScan"}, table, dead_queue=DLQ, kind="Strange").why == "type"
    assert find_route({}, table, dead_queue=DLQ, kind="Strange").address is None


def test_somebody_may_say_where_letters_died_that_do_not_tell() -> None:
    for headers in ({}, {"x-original-queue": "a", "x-original-for": "other.dlq"}):
        assert find_route(headers, RouteTable(source="q"), dead_queue=DLQ).address == Address(routing_key="q")
    told = {"x-death": [death("a", "k")]}
    assert find_route(told, RouteTable(source="q"), dead_queue=DLQ).address == Address(routing_key="a")


def test_the_only_queue_that_leads_here_is_the_source() -> None:
    assert find_route({}, RouteTable(), dead_queue=DLQ, sources=lambda: ["a"]).address == Address(routing_key="a")
    two = find_route({}, RouteTable(), dead_queue=DLQ, sources=lambda: ["a", "b"])
    assert (two.address, two.why) == (None, "nothing says in which queue it died, and 2 queues lead here")
    by_exchange = RouteTable(mode=Mode.EXCHANGE)
    assert find_route({}, by_exchange, dead_queue=DLQ, sources=lambda: ["a"]).address is None


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
    place = RouteTable(mode=Mode.ADDRESS, address=parse_to("review"))
    assert find_route({}, place, dead_queue=DLQ).address == Address(routing_key="review")


def test_a_route_into_the_dead_letter_queue_itself_is_none() -> None:
    looping = RouteTable(mode=Mode.ADDRESS, address=Address(routing_key=DLQ))
    assert find_route({}, looping, dead_queue=DLQ).address is None


def test_a_place() -> None:
    assert parse_to("exchange=a,key=b.c") == Address(exchange="a", routing_key="b.c")
    with pytest.raises(Invalid):
        parse_to("exchange=a")


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text()), st.binary())))
def test_no_header_can_make_it_fail(headers: dict[str, object]) -> None:
    find_route(headers, parse_routes(FILE, source="f"), dead_queue=DLQ)
