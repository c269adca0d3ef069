"""The model: round trips through definitions.json, differences, what is dangerous in a foreign topology, pictures."""

from __future__ import annotations

import json
import re
import time
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.topology.definitions import from_definitions, to_definitions
from holdfast.core.topology.diff import DifferenceKind, diff
from holdfast.core.topology.model import (
    Binding,
    Design,
    Exchange,
    Policy,
    Queue,
    Topology,
    Version,
    effective,
    topology,
)
from holdfast.core.topology.routing import Graph, topic_matches
from holdfast.core.topology.rules import hazards
from holdfast.errors import Invalid
from holdfast.faces.draw import edges, mermaid, svg

V3, V4 = Version(3, 10), Version(4, 0)

#: Few letters, so that names meet, and those that a format may stumble over.
letters = st.sampled_from([*"ab.#*-", "é", "\0", "\n", '"', "<", "{", "\\", "\U0001f41f"])
names = st.text(letters, min_size=1, max_size=6)
values: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.text(letters, max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=3,
)
arguments = st.dictionaries(names, values, max_size=2)
exchanges = st.builds(
    Exchange,
    name=names,
    type=st.sampled_from(["direct", "fanout", "topic", "headers"]),
    durable=st.booleans(),
    auto_delete=st.booleans(),
    internal=st.booleans(),
    arguments=arguments,
)
queues = st.builds(
    Queue,
    name=names,
    type=st.sampled_from(["classic", "quorum", "stream"]),
    durable=st.booleans(),
    auto_delete=st.booleans(),
    arguments=arguments,
)
bindings = st.builds(
    Binding,
    source=names,
    destination=names,
    destination_type=st.sampled_from(["queue", "exchange"]),
    key=st.text(letters, max_size=5),
    arguments=arguments,
)
policies = st.builds(
    Policy,
    name=names,
    pattern=names,
    definition=arguments,
    priority=st.integers(0, 100),
    apply_to=st.sampled_from(["all", "queues", "exchanges"]),
)


def by_name(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(kind, max_size=3, unique_by=lambda thing: thing.name)


topologies = st.builds(
    lambda e, q, b, p: topology(exchanges=e, queues=q, bindings=b, policies=p),
    by_name(exchanges),
    by_name(queues),
    st.lists(bindings, max_size=3),
    by_name(policies),
)


@settings(max_examples=60)
@given(topologies, st.sampled_from([None, "/", "größe"]))
def test_a_topology_comes_back_from_definitions_as_it_was(found: Topology, vhost: str | None) -> None:
    data = msgspec.json.encode(to_definitions(found, vhost=vhost))
    back = from_definitions(data, vhost=vhost or "/", source="x")
    assert back.topology == found
    assert back.left_out == ()
    assert diff(found, back.topology) == []


@settings(max_examples=60)
@given(topologies, st.randoms())
def test_the_order_in_a_file_means_nothing(found: Topology, random: Any) -> None:
    document = to_definitions(found)
    for section in document.values():
        assert isinstance(section, list)
        random.shuffle(section)
    assert from_definitions(json.dumps(document).encode(), vhost="/", source="x").topology == found


@settings(max_examples=60)
@given(topologies, topologies)
def test_a_difference_is_found_in_both_directions_or_in_none(one: Topology, other: Topology) -> None:
    missing = {(d.what, d.name) for d in diff(one, other) if d.kind is DifferenceKind.MISSING}
    expected = {("queue", q.name) for q in one.queues if other.queue(q.name) is None}
    assert {each for each in missing if each[0] == "queue"} == expected
    assert (diff(one, other, owns=["*"]) == []) == (
        (one.exchanges, one.queues, one.bindings) == (other.exchanges, other.queues, _of(other, one))
        and all(policy in other.policies for policy in one.policies)
    )


def _of(other: Topology, one: Topology) -> tuple[Binding, ...]:
    """The bindings of the other that count: those into things that are wanted."""
    ends = {("queue", q.name) for q in one.queues} | {("exchange", e.name) for e in one.exchanges}
    return tuple(b for b in other.bindings if (b.destination_type, b.destination) in ends or b in one.bindings)


@settings(max_examples=60)
@given(topologies)
def test_pictures_of_any_topology_are_well_formed(found: Topology) -> None:
    design = Design(topology=found)
    root = ET.fromstring(svg(design))  # noqa: S314 - made by us
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == len(found.queues) + len(found.exchanges)
    lines = mermaid(design).split("\n")
    assert lines[0] == "flowchart LR"
    assert sum(":::" in line and line.startswith("    n") for line in lines) == len(found.queues) + len(found.exchanges)


def test_queue_types_are_the_same_wherever_they_are_written() -> None:
    as_argument = b'{"queues": [{"name": "q", "arguments": {"x-queue-type": "classic"}}]}'
    left_out = b'{"queues": [{"name": "q", "durable": true, "auto_delete": false, "arguments": {}}]}'
    assert from_definitions(as_argument, vhost="/", source="a") == from_definitions(left_out, vhost="/", source="b")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[]", "definitions are invalid; f: "),
        (b'{"queues": [{}]}', "definitions are invalid; f: .*name"),
        (b"{", "definitions are invalid"),
        (b'{"queues": [{"name": "q", "durable": 1}]}', "definitions are invalid"),
        (b'{"queues": [{"name": "q"}, {"name": "q", "durable": false}]}', "queue is defined twice; 'q'"),
        (b'{"bindings": [{"source": "x", "destination": "q", "destination_type": "star"}]}', "neither queue nor"),
        (
            b'{"queues": [{"name": "a", "vhost": "v"}, {"name": "b", "vhost": "w"}]}',
            "several .* f has v, w",
        ),
    ],
)
def test_bad_definitions_are_told(data: bytes, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        from_definitions(data, vhost="/", source="f")


def test_what_is_no_topology_is_left_out_and_said() -> None:
    data = b'{"rabbit_version": "3", "users": [], "queues": [{"name": "a", "vhost": "v"}, {"name": "b", "vhost": "w"}]}'
    found = from_definitions(data, vhost="v", source="f")
    assert [queue.name for queue in found.topology.queues] == ["a"]
    assert found.left_out == ("users", "virtual host 'w'")


def test_what_amqp_cannot_change_has_a_way_out() -> None:
    wanted = topology(queues=[Queue(name="q.a", arguments={"x-message-ttl": 5, "x-dead-letter-exchange": "d"})])
    bare = topology(queues=[Queue(name="q.a")])
    (difference,) = diff(wanted, bare)
    assert difference.kind is DifferenceKind.DIFFERENT
    assert str(difference.aspects[0]) == "x-dead-letter-exchange is (none), wanted 'd'"
    assert difference.way_out == (
        r'a policy can add it: pattern ^q\.a$, definition {"dead-letter-exchange": "d", "message-ttl": 5}'
    )
    (difference,) = diff(wanted, topology(queues=[Queue(name="q.a", type="quorum", arguments={"x-message-ttl": 6})]))
    assert [aspect.name for aspect in difference.aspects] == ["type", "x-dead-letter-exchange", "x-message-ttl"]
    assert "--delete makes it anew" in difference.way_out
    exchange = topology(exchanges=[Exchange(name="x", type="topic")])
    (difference,) = diff(exchange, topology(exchanges=[Exchange(name="x", type="direct")]))
    assert "another name" in difference.way_out


def test_only_what_is_ours_can_be_superfluous() -> None:
    wanted = topology(queues=[Queue(name="q.a")])
    extra = Binding(source="x", destination="q.a", key="k")
    found = topology(
        exchanges=[Exchange(name="x"), Exchange(name="q.old")],
        queues=[Queue(name="q.a"), Queue(name="q.b"), Queue(name="theirs")],
        bindings=[extra, Binding(source="x", destination="theirs")],
    )
    assert [d.thing for d in diff(wanted, found)] == [extra]
    assert [(d.what, d.name) for d in diff(wanted, found, owns=["q.*"])][1:] == [
        ("queue", "q.b"),
        ("exchange", "q.old"),
    ]


def test_nets_are_made_before_what_feeds_the_queues() -> None:
    wanted = topology(
        queues=[
            Queue(name="m", arguments={"x-dead-letter-exchange": "r"}),
            Queue(name="w", arguments={"x-dead-letter-exchange": ""}),
            Queue(name="d"),
        ],
        bindings=[
            Binding(source="a", destination="m"),
            Binding(source="z", destination="d"),
            Binding(source="r", destination="w"),
        ],
    )
    order = [d.thing.destination for d in diff(wanted, Topology()) if isinstance(d.thing, Binding)]
    assert order == ["w", "d", "m"]


@pytest.mark.parametrize(
    ("arguments", "policy", "holds"),
    [
        ({}, {"message-ttl": 5}, {"x-message-ttl": 5}),
        ({"x-message-ttl": 3}, {"message-ttl": 5}, {"x-message-ttl": 3}),
        ({"x-message-ttl": 7}, {"message-ttl": 5}, {"x-message-ttl": 5}),
        ({"x-delivery-limit": -1}, {"delivery-limit": 3}, {"x-delivery-limit": 3}),
        ({"x-delivery-limit": 3}, {"delivery-limit": -1}, {"x-delivery-limit": 3}),
        ({"x-dead-letter-exchange": "a"}, {"dead-letter-exchange": "b"}, {"x-dead-letter-exchange": "a"}),
        ({}, {"ha-mode": "all"}, {}),
    ],
)
def test_arguments_and_policies_together_are_what_the_broker_makes_of_them(
    arguments: dict[str, Any], policy: dict[str, Any], holds: dict[str, Any]
) -> None:
    assert effective(arguments, policy) == holds


@pytest.mark.parametrize(
    ("pattern", "key", "takes"),
    [
        ("#", "", True), ("#", "a.b", True), ("a.#", "a", True), ("a.#", "a.b.c", True), ("a.*", "a", False),
        ("a.*", "a.b", True), ("a.*", "a.b.c", False), ("*", "a", True), ("*.b", "a.b", True), ("a.b", "a.b", True),
        ("a.b", "axb", False), ("#.z", "z", True), ("#.z", "a.z", True), ("", "", True), ("a.#.z", "a.z", True),
        ("*", "", False), ("*.c", "a.b.c", False), ("#.#.#.#.x", "a.b.c", False),
    ],
)  # fmt: skip
def test_topic_patterns(pattern: str, key: str, takes: bool) -> None:
    assert topic_matches(pattern, key) is takes


LONG_WORDS_COUNT = 20_000


@pytest.mark.parametrize("pattern", ["#.", "*.#.", "#.a.", "a."])
def test_a_long_pattern_takes_no_longer_than_its_length(pattern: str) -> None:
    """Pattern and key are a stranger's. Word by word each would be looked at for each part: 400 million looks."""
    began_s = time.process_time()
    assert not topic_matches(pattern * LONG_WORDS_COUNT + "x", "a." * LONG_WORDS_COUNT + "b")
    assert time.process_time() - began_s < 5


@given(
    st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=6), st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)
)
def test_a_topic_pattern_means_what_its_words_mean(parts: list[str], words: list[str]) -> None:
    def takes(parts: list[str], words: list[str]) -> bool:
        if not parts or (parts[0] != "#" and not words):
            return not parts and not words
        if parts[0] == "#":
            return any(takes(parts[1:], words[count:]) for count in range(len(words) + 1))
        return parts[0] in ("*", words[0]) and takes(parts[1:], words[1:])

    assert topic_matches(".".join(parts), ".".join(words)) is takes(parts, words)


def test_a_path_goes_through_exchanges_and_ends_where_nothing_is_bound() -> None:
    graph = Graph(
        topology(
            exchanges=[
                Exchange(name="in", type="topic", arguments={"alternate-exchange": "net"}),
                Exchange(name="next", type="direct"),
                Exchange(name="net", type="fanout"),
            ],
            queues=[Queue(name="q"), Queue(name="lost")],
            bindings=[
                Binding(source="in", destination="next", destination_type="exchange", key="a.*"),
                Binding(source="next", destination="in", destination_type="exchange", key="a.x"),
                Binding(source="next", destination="q", key="a.x"),
                Binding(source="net", destination="lost"),
            ],
        )
    )
    assert graph.possible("in", "a.x") == {"q"}
    assert graph.possible("in", "b") == {"lost"}
    assert graph.possible("in", None) == {"q", "lost"}
    assert graph.possible("", "q") == {"q"}
    assert graph.possible("", "nobody") == frozenset()


def test_the_brokers_own_exchanges_are_of_the_kind_that_their_names_say() -> None:
    bindings = [
        Binding(source="amq.topic", destination="q", key="order.#"),
        Binding(source="amq.fanout", destination="q", key="any"),
        Binding(source="amq.direct", destination="q", key="order.#"),
        Binding(source="amq.match", destination="q"),
    ]
    graph = Graph(topology(queues=[Queue(name="q")], bindings=bindings))
    assert graph.reached("amq.topic", "order.new") == {"q"}
    assert graph.reached("amq.fanout", "order.new") == {"q"}
    assert graph.reached("amq.direct", "order.new") == set()
    assert graph.reached("amq.match", "order.new") is None
    assert graph.reached("amq.gone", "order.new") == set()


@pytest.mark.parametrize(
    ("exchange", "said"),
    [("amq.topic", ""), ("amq.fanout", ""), ("amq.direct", "it is a direct exchange: to '#' only messages go")],
)
def test_dead_letters_by_one_of_the_brokers_own_exchanges_are_judged_alike(exchange: str, said: str) -> None:
    dead = {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": "#" if said else "dead.q"}
    found = topology(
        queues=[Queue(name="q", arguments=dead), Queue(name="q.dlq")],
        bindings=[Binding(source=exchange, destination="q.dlq", key="#")],
    )
    design = Design(topology=found, version=V4)
    fatal = [hazard.reason for hazard in hazards(design) if hazard.fatal]
    assert [said in reason for reason in fatal] == [True] * bool(said)
    assert [edge.style for edge in edges(design)] == ["solid", "dashed"]


def dead_to(name: str, **more: Any) -> dict[str, Any]:
    words = {key.replace("_", "-"): value for key, value in more.items()}
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name, **words}


@pytest.mark.parametrize(
    ("queues", "version", "said"),
    [
        ([Queue(name="a", arguments=dead_to("b"))], V3, "leads to no queue"),
        ([Queue(name="a", arguments={"x-dead-letter-exchange": "gone"})], V3, "exchange 'gone', which is not there"),
        ([Queue(name="a", arguments=dead_to("a", x_message_ttl=5))], V3, "every queue of the cycle"),
        (
            [
                Queue(name="a", arguments=dead_to("b", x_message_ttl=5)),
                Queue(name="b", arguments=dead_to("a", x_message_ttl=5)),
            ],
            V4,
            "every queue of the cycle",
        ),
        ([Queue(name="a", arguments=dead_to("d")), Queue(name="d", arguments={"x-message-ttl": 5})], V3, "nobody came"),
        (
            [Queue(name="a", arguments=dead_to("d")), Queue(name="d", arguments={"x-max-length": 5})],
            V3,
            "letters are lost",
        ),
        (
            [Queue(name="a", arguments=dead_to("d")), Queue(name="d", arguments={"x-expires": 5})],
            V3,
            "everything in it",
        ),
        ([Queue(name="a", arguments=dead_to("d")), Queue(name="d", type="quorum")], V4, "limit .20. on a dead queue"),
        ([Queue(name="q", type="quorum")], V4, "without a dead-letter exchange"),
        ([Queue(name="q", type="quorum", arguments={"x-delivery-limit": -1})], V3, "first requeue"),
        ([Queue(name="q", durable=False)], V3, "not durable"),
        ([Queue(name="q", type="quorum", arguments=dead_to("d")), Queue(name="d")], V3, "at most once"),
        (
            [
                Queue(name="q", type="quorum", arguments=dead_to("d", x_dead_letter_strategy="at-least-once")),
                Queue(name="d"),
            ],
            V3,
            "does not say so",
        ),
    ],
)
def test_what_loses_messages_in_a_foreign_topology_is_named(queues: list[Queue], version: Version, said: str) -> None:
    found = [hazard for hazard in hazards(Design(topology=topology(queues=queues), version=version)) if hazard.fatal]
    assert any(re.search(said, hazard.reason) for hazard in found), found


def test_a_version_is_read_and_nonsense_is_refused() -> None:
    assert Version.parse("3.10.8") == V3
    assert Version.parse("4.0.0-rc.1") == V4
    with pytest.raises(Invalid, match="'four' is not a version"):
        Version.parse("four")
