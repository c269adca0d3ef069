"""The topology file: what a mistake in it is told, and that nothing unsafe can be written in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.topology.layouts import FILE_BYTES_MAX, design, parse_file
from holdfast.core.topology.model import Design, Version
from holdfast.errors import Invalid

V3, V4 = Version(3, 10), Version(4, 0)
PIECES = [b"max_length = 5\n", b"[", b'"', b"{queue}", b"\n[queues.x]\n", b"1h", b"= []", b"amq.", b"\xff"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "topologies"


def made(text: str, version: Version = V3) -> Design:
    return design(parse_file(text.encode(), source="t.toml"), version)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[queues.q\n", r"t\.toml is not TOML: .*line 1"),
        ('[queue.q]\nlayout = "quorum"', "'queue', did you mean 'queues'"),
        ('[queues.q]\nretry_delays = "1s"', "'queues.\"q\".retry_delays', did you mean 'retry_delay'"),
        ("[queues.q]\nmax_lenght = 5", "did you mean 'max_length'"),
        ('[queues.q]\nbindings = [{exchange = "x", kye = "a"}]', r"bindings\[1\]\.kye', did you mean 'key'"),
        ('[queues.q]\nnames = {dead = "x"}', "names.dead', did you mean 'dead_"),
        ('[queues.q]\nlayout = "quorums"', "quorums"),
        ("[queues.q]\nretry_delay = 5", "not a whole number"),
        ('[queues.q]\nretry_delay = "5 fortnights"', "retry_delay of 'q' is invalid"),
        ('[queues.q]\nretry_delay = "60d"', "retry_delay of 'q' is invalid"),
        ('[queues.q]\nretry_delay = "9000h"', "49 days"),
        ('[queues.q]\nretry_delay = "1us"', "whole number of milliseconds"),
        ("[queues.q]\nretry_delay = []", "1 to 32 steps"),
        ('[queues.q]\nlayout = "plain"\nretry_delay = "1s"', "has no wait queues"),
        ('[queues.q]\nbindings = [{exchange = "x"}]', r'exchange is missing; .*\[exchanges\."x"\]'),
        ('[queues.q]\nbindings = [{exchange = ""}]', "default exchange"),
        ('[queues.q]\nbindings = [{exchange = "x", key = "a", keys = ["b"]}]', "'key' and 'keys'"),
        ('[exchanges.x]\ntype = "topics"', "exchange type is unknown"),
        ('[queues."amq.q"]', "reserved"),
        ('[queues.q]\narguments = {x-message-ttl = "1h"}', "x-message-ttl of queue 'q' is to be a whole number"),
        ("[queues.q]\narguments = {x-dead-letter-exchange = 5}", "to be a text, not 5"),
        ("[queues.q]\narguments = {x-odd = [1, nan]}", "x-odd of queue 'q' cannot be"),
        ("[queues.q]\narguments = {x-odd = 9999999999999999999}", "x-odd of queue 'q' cannot be"),
        ('[queues.q]\narguments = {x-queue-type = "stream"}', "x-queue-type of queue 'q' is said by its type"),
        ('[queues.""]', "it is empty"),
        (f'[queues."{"é" * 128}"]', "too long"),
        (f'[queues."{"q" * 252}"]', "too long; .*258 bytes"),
        ('[queues.q]\nnames = {wait_queue = "{que}.w"}', r"'\{que\}', known are '\{queue\}'"),
        ('[queues.q]\nnames = {wait_queue = "{queue"}', "name is invalid"),
        ('[queues.q]\nnames = {wait_queue = "{queue}"}', "defined twice"),
        ('[queues.a]\n[queues.b]\n[defaults]\nnames = {wait_queue = "wait"}', "defined twice; 'wait'"),
    ],
)
def test_a_mistake_is_told_in_a_line(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said) as caught:
        made(text)
    assert "\n" not in caught.value.message.replace("\\n", "")


def test_what_is_no_text_or_too_large_is_refused() -> None:
    with pytest.raises(Invalid, match="not UTF-8 at byte 2"):
        parse_file(b"a=\xff", source="t.toml")
    with pytest.raises(Invalid, match="larger than"):
        parse_file(b"#" * (FILE_BYTES_MAX + 1), source="t.toml")


@pytest.mark.parametrize("layout", ["per-consumer", "quorum"])
@pytest.mark.parametrize("version", [V3, V4])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("max_length = 5", "wait cycle"),
        ("max_length_bytes = 5", "wait cycle"),
        ("arguments = {x-max-length = 5}", "wait cycle"),
        ('message_timeout = "1h"', "every queue of the cycle"),
        ("arguments = {x-expires = 1000}", "x-expires deletes the queue"),
    ],
)
def test_what_would_stand_still_or_lose_in_a_wait_cycle_is_refused(
    layout: str, version: Version, line: str, reason: str
) -> None:
    with pytest.raises(Invalid, match=f"topology is unsafe; 'q.*{reason}"):
        made(f'[queues.q]\nlayout = "{layout}"\n{line}', version)


@pytest.mark.parametrize("version", [V3, V4])
def test_a_delivery_limit_has_no_place_in_a_wait_cycle(version: Version) -> None:
    with pytest.raises(Invalid, match="drops the message at the second round"):
        made('[queues.q]\nlayout = "quorum"\ndelivery_limit = 5', version)
    with pytest.raises(Invalid, match="is for quorum queues"):
        made("[queues.q]\ndelivery_limit = 5", version)
    text = '[queues.q]\nlayout = "shared-dlq"\ntype = "quorum"\ndelivery_limit = 5'
    queue = made(text, version).topology.queue("q")
    assert queue is not None
    assert queue.arguments["x-delivery-limit"] == 5


def test_minus_one_is_never_written_for_3_and_refused_when_asked_for() -> None:
    with pytest.raises(Invalid, match=r"first requeue on 3\.10"):
        made('[queues.q]\nlayout = "quorum"\ndelivery_limit = -1', V3)
    for queue in made('[queues.q]\nlayout = "quorum"', V3).topology.queues:
        assert "x-delivery-limit" not in queue.arguments
    for queue in made('[queues.q]\nlayout = "quorum"\n[exchanges.x]', V4).topology.queues:
        assert queue.arguments["x-delivery-limit"] == -1


def test_a_quorum_source_is_at_least_once_and_needs_a_broker_that_can() -> None:
    for version in (V3, V4):
        for queue in made('[queues.q]\nlayout = "quorum"', version).topology.queues:
            if queue.dead_exchange is not None:
                assert queue.arguments["x-dead-letter-strategy"] == "at-least-once"
                assert queue.arguments["x-overflow"] == "reject-publish"
    with pytest.raises(Invalid, match="broker is too old"):
        made('[queues.q]\nlayout = "quorum"', Version(3, 9))
    with pytest.raises(Invalid, match="at most once"):
        made('[queues.q]\nlayout = "quorum"\narguments = {x-overflow = "drop-head"}')


def test_a_plain_queue_may_be_full_but_may_not_forget() -> None:
    queue = made('[queues.q]\nlayout = "plain"\nmax_length = 5').topology.queue("q")
    assert queue is not None
    assert queue.arguments == {"x-max-length": 5, "x-overflow": "reject-publish"}
    with pytest.raises(Invalid, match="what expires in it is deleted"):
        made('[queues.q]\nlayout = "plain"\nmessage_timeout = "1h"')
    with pytest.raises(Invalid, match="oldest message is deleted"):
        made('[queues.q]\nlayout = "plain"\narguments = {x-max-length = 5}')
    plain = made('[queues.q]\nlayout = "plain"\ntype = "quorum"', V4).topology.queue("q")
    assert plain is not None
    assert plain.arguments == {"x-delivery-limit": -1}


def test_the_length_of_a_queue_that_a_consumer_retries_is_not_limited_either() -> None:
    with pytest.raises(Invalid, match="wait cycle"):
        made('[queues.q]\nlayout = "shared-dlq"\nretry_delay = "1s"\nmax_length = 5')
    made('[queues.q]\nlayout = "shared-dlq"\nmax_length = 5')


@pytest.mark.parametrize("version", [V3, V4])
@pytest.mark.parametrize("name", ["media", "quorum", "shared-dlq"])
def test_the_examples_can_be_used(name: str, version: Version) -> None:
    file = parse_file((EXAMPLES / f"{name}.toml").read_bytes(), source=name)
    assert design(file, version).families


@settings(max_examples=80)
@given(st.sampled_from(["media", "quorum", "shared-dlq"]), st.data())
def test_a_damaged_file_is_refused_or_means_something(name: str, data: st.DataObject) -> None:
    text = bytearray((EXAMPLES / f"{name}.toml").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text) - 1))
        text[start : start + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=4) | st.sampled_from(PIECES))
    version = data.draw(st.sampled_from([V3, V4]))
    with suppress(Invalid):
        design(parse_file(bytes(text), source=name), version)


@pytest.mark.parametrize("value", ['"x"', "5", "true", "[]", "{}", "1979-05-27", "[[1]]", "nan", '["x", 5]'])
def test_no_value_of_any_key_is_more_than_a_mistake(value: str) -> None:
    for place, keys in (
        ("", ("owns", "defaults", "unroutable", "queues", "exchanges")),
        ("[defaults]\n", ("layout", "type", "retry_delay", "message_timeout", "names")),
        ("[queues.q]\n", ("max_length", "delivery_limit", "bindings", "arguments", "names", "retry_delay", "type")),
        ("[exchanges.x]\n", ("type", "internal", "alternate_exchange", "bindings", "arguments")),
        ("[queues.q]\nnames.", ("wait_queue", "step_suffix", "dead_queue", "dead_exchange", "retry_key")),
        ("[unroutable]\n", ("enabled", "exchange", "queue", "type")),
        ("[queues.q]\narguments.", ("x-message-ttl", "x-max-length", "x-delivery-limit", "x-dead-letter-exchange")),
    ):
        for key in keys:
            with suppress(Invalid):
                made(f"{place}{key} = {value}\n", V4)
