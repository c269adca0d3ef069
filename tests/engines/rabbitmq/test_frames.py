"""The reader: whatever way the bytes are cut, the same events come out; nothing that is not AMQP gets far."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.wire.commands import PublishEncoder, Unsendable
from holdfast.engines.rabbitmq.wire.events import Confirmed, Event, Returned
from holdfast.engines.rabbitmq.wire.frames import FRAME_SLACK_BYTES, FrameReader, ProtocolBroken
from tests.engines.rabbitmq.raw import ack, content, deliver, frame, returned

messages = st.lists(
    st.tuples(st.integers(1, 3), st.binary(min_size=2, max_size=20), st.binary(max_size=350)), min_size=1, max_size=6
)


def fed(data: bytes, cuts: list[int]) -> list[Event]:
    reader = FrameReader()
    events: list[Event] = []
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        events += reader.feed(data[start:end])
    return events


def shown(events: list[Event]) -> list[str]:
    return [repr(event) for event in events]


@given(sent=messages, cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_any_split_gives_the_same_events(sent: list[tuple[int, bytes, bytes]], cuts: list[int]) -> None:
    frames = [deliver(ch, tag, props, body) for tag, (ch, props, body) in enumerate(sent, 1)]
    data = b"".join(b"".join(one) for one in frames) + ack(1, 7, multiple=True) + frame(8, 0, b"")
    events = fed(data, cuts)
    deliveries = [event for event in events if isinstance(event, Delivery)]
    assert [(d.channel, d.properties, d.body) for d in deliveries] == sent
    assert events[-1] == Confirmed(1, 7, True, True)
    assert shown(fed(data, list(range(len(data))))) == shown(events)


@given(sent=messages, data=st.data())
def test_any_interleaving_of_channels_gives_each_its_own(
    sent: list[tuple[int, bytes, bytes]], data: st.DataObject
) -> None:
    queues: dict[int, list[bytes]] = {}
    for tag, (channel, props, body) in enumerate(sent, 1):
        queues.setdefault(channel, []).extend(deliver(channel, tag, props, body))
    stream = []
    while queues:
        channel = data.draw(st.sampled_from(sorted(queues)))
        stream.append(queues[channel].pop(0))
        if not queues[channel]:
            del queues[channel]
    events = fed(b"".join(stream), [])
    for channel in {one[0] for one in sent}:
        got = [(d.properties, d.body) for d in events if isinstance(d, Delivery) and d.channel == channel]
        assert got == [(props, body) for number, props, body in sent if number == channel]


@given(junk=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_fuzzed_input_is_events_or_an_error(junk: bytes, cuts: list[int]) -> None:
    for data in (junk, b"".join(deliver(1, 1, b"\0\0", b"body"))[:30] + junk, frame(1, 1, junk), frame(2, 1, junk)):
        try:
            fed(data, cuts)
        except ProtocolBroken:
            continue


@given(data=st.data())
def test_one_flipped_byte_never_hangs_or_crashes(data: st.DataObject) -> None:
    stream = bytearray(b"".join(deliver(1, 1, b"\0\0", b"x" * 300)) + b"".join(returned(1, b"\0\0", b"y")) + ack(1, 1))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] = data.draw(st.integers(0, 255))
    try:
        fed(bytes(stream), [])
    except ProtocolBroken:
        return


@pytest.mark.parametrize("data", [b"H", b"HTTP/1.1 400 Bad Request", b"\x15\x03\x03\0\2", b"\0" * 8])
def test_what_is_no_frame_is_said_at_the_first_byte(data: bytes) -> None:
    with pytest.raises(ProtocolBroken, match="not a frame"):
        FrameReader().feed(data)


def test_a_frame_is_limited_before_it_arrives() -> None:
    reader = FrameReader(frame_bytes_max=1000)
    with pytest.raises(ProtocolBroken, match="at most"):
        reader.feed(b"\3\0\1" + (1001 + FRAME_SLACK_BYTES).to_bytes(4, "big"))


def test_a_body_is_limited_before_it_arrives() -> None:
    reader = FrameReader(body_bytes_max=1000)
    frames = deliver(1, 1, b"\0\0", b"x" * 1001)
    with pytest.raises(ProtocolBroken, match="at most 1000"):
        reader.feed(b"".join(frames))


def test_memory_stays_bounded_when_empty_frames_come_for_ever() -> None:
    reader = FrameReader()
    reader.feed(b"".join(deliver(1, 1, b"\0\0", b"x" * 50)[:2]))
    empty = frame(3, 1, b"") * 1000
    tracemalloc.start()
    try:
        for _ in range(100):
            reader.feed(empty)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "frames",
    [
        content(1, b"\0\0", b"body"),
        [frame(3, 1, b"body")],
        [deliver(1, 1, b"\0\0", b"body")[0], ack(1, 1)],
        [*deliver(1, 1, b"\0\0", b"body")[:2], frame(3, 1, b"body and more")],
        [deliver(1, 1, b"\0\0", b"body")[0], frame(2, 1, b"short")],
        [frame(1, 1, b"\0\x3c\0\x50\0")],
        [frame(1, 0, b"\x99\x99\x99\x99")],
        [frame(1, 1, b"\0\x0a\0\x1e")[:-1] + b"\0"],
    ],
)
def test_frames_out_of_place_are_an_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolBroken):
        FrameReader().feed(b"".join(frames))


def test_a_nack_of_the_broker_has_the_requeue_bit_and_is_not_multiple() -> None:
    (event,) = FrameReader().feed(frame(1, 1, b"\0\x3c\0\x78" + (7).to_bytes(8, "big") + b"\2"))
    assert event == Confirmed(1, 7, False, False)


def test_names_that_are_not_utf8_survive_the_way_back() -> None:
    method = b"\0\x3c\0\x3c" + b"\1c" + bytes(9) + b"\2\xff\xfe" + b"\1\x80"
    (delivery,) = FrameReader().feed(frame(1, 1, method) + b"".join(content(1, b"\0\0", b"")))
    assert isinstance(delivery, Delivery)
    packed = b"".join(
        PublishEncoder(1, frame_bytes_max=1000).pieces(delivery.exchange, delivery.routing_key, b"\0\0", b"")
    )
    assert b"\2\xff\xfe\1\x80\1\xce" in packed


@given(props=st.binary(min_size=2, max_size=80), body=st.binary(max_size=500), size=st.integers(120, 400))
def test_what_we_publish_reads_back_within_the_frame_size(props: bytes, body: bytes, size: int) -> None:
    data = b"".join(PublishEncoder(5, frame_bytes_max=size).pieces("ex", "key", props, body))
    position, frames = 0, []
    while position < len(data):
        length = int.from_bytes(data[position + 3 : position + 7], "big") + 8
        assert length <= size
        assert data[position + length - 1] == 0xCE
        frames.append(data[position : position + length])
        position += length
    # As a return, the same content frames must give back exactly what went in.
    method = returned(5, b"", b"", exchange="ex", key="key")[0]
    (event,) = FrameReader().feed(method + b"".join(frames[1:]))
    assert isinstance(event, Returned)
    assert (event.properties, event.body) == (props, body)
    assert frames[0][-2] == 1  # mandatory


@pytest.mark.parametrize(("exchange", "key", "size"), [("e" * 256, "k", 2), ("e", "ü" * 128, 2), ("e", "k", 5000)])
def test_what_no_broker_would_take_is_refused_before_it_is_sent(exchange: str, key: str, size: int) -> None:
    with pytest.raises(Unsendable):
        PublishEncoder(1, frame_bytes_max=4096).pieces(exchange, key, bytes(size), b"")
