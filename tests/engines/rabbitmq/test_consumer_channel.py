"""One channel that is consumed on: the frames that settle mean exactly what was asked for, a prefix takes one, and a
channel on which letters are held is left for a fresh one in time."""

from __future__ import annotations

import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.connection import Channel
from holdfast.engines.rabbitmq.consumer_channel import WALKED_COUNT_MAX, AckTracker, ConsumerChannel
from holdfast.engines.rabbitmq.wire.events import Event

FRAME_BYTES = 21


def apply(data: bytes, open_tags: dict[int, str]) -> int:
    """What the broker understands: writes the fate of each tag, answers the number of frames."""
    count = 0
    for at in range(0, len(data), FRAME_BYTES):
        _, _, _, _, method, tag, bits, end = struct.unpack(">BHIHHQBB", data[at : at + FRAME_BYTES])
        assert end == 0xCE
        fate = "acked" if method == 80 else "requeued" if bits & 2 else "dead"
        hit = [one for one in open_tags if one <= tag] if bits & 1 else [tag]
        for one in hit:
            if open_tags[one] == "open":
                open_tags[one] = fate
        count += 1
    return count


@given(data=st.data())
def test_every_message_gets_what_was_asked_for(data: st.DataObject) -> None:
    books = AckTracker(1)
    broker: dict[int, str] = {}
    asked: dict[int, str] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["deliver", "settle", "settle", "flush"]))
        if step == "deliver":
            for _ in range(data.draw(st.integers(1, 4))):
                tag = len(broker) + 1
                broker[tag], asked[tag] = "open", "open"
                books.delivered([tag])
        elif step == "settle" and asked:
            tag = data.draw(st.sampled_from(sorted(asked)))
            fate = data.draw(st.sampled_from(["acked", "requeued", "dead"]))
            took = not books.ack([tag]) if fate == "acked" else books.nack(tag, requeue=fate == "requeued")
            assert took == (asked[tag] == "open")
            asked[tag] = fate if took else asked[tag]
        elif step == "flush":
            apply(books.flush(), broker)
            assert broker == asked
    apply(books.flush(), broker)
    assert broker == asked
    assert len(books) == sum(fate == "open" for fate in asked.values())
    assert not books.pending


def test_a_settled_prefix_is_one_frame() -> None:
    books = AckTracker(1)
    books.delivered(range(1, 1001))
    books.ack(range(1, 501))
    books.ack([700])
    assert len(books.flush()) == 2 * FRAME_BYTES


def test_everything_goes_back_by_one_frame() -> None:
    books = AckTracker(1)
    books.delivered(range(1, 1001))
    books.ack([500])
    books.flush()
    for tag in (*range(1, 500), *range(501, 1001)):
        books.nack(tag, requeue=True)
    assert len(books.flush()) == FRAME_BYTES


@given(
    tags=st.sets(st.integers(1, 30), min_size=1).map(sorted),
    joints=st.lists(st.integers(0, 30), unique=True).map(sorted),
)
def test_parts_end_at_joints(tags: list[int], joints: list[int]) -> None:
    books = AckTracker(1)
    books.delivered(tags)
    ends = [*books.parts(joints), tags[-1]]
    assert ends == sorted(set(ends))
    assert set(ends) <= set(tags)
    for tag, following in pairwise(tags):
        assert (tag in ends) == any(tag <= joint < following for joint in joints)


def channel_with(count: int) -> tuple[ConsumerChannel, list[bytes]]:
    """A channel on which so many letters came, and what is written to it."""
    written: list[bytes] = []
    consuming = ConsumerChannel(7, on_arrived=lambda deliveries: None, on_lost=lambda error: None)
    consuming.opened(Channel(1, consuming, write=written.append, release=lambda number: None))
    events: list[Event] = [Delivery(1, tag, False, "", "q", "ctag", b"", b"") for tag in range(1, count + 1)]
    consuming.on_events(events)
    return consuming, written


def test_acks_in_order_cost_nothing_however_many() -> None:
    consuming, written = channel_with(10_000)
    consuming.held_count = 1  # somewhere behind
    assert consuming.tracker.ack(range(1, 10_000)) == []
    consuming.flush()
    assert len(written) == 1
    assert not consuming.is_slow


def test_acks_behind_many_letters_that_are_held_make_it_slow() -> None:
    held = 500
    consuming, _ = channel_with(held + WALKED_COUNT_MAX // held)
    consuming.held_count = held
    consuming.tracker.ack(range(held + 1, held + WALKED_COUNT_MAX // held))
    consuming.flush()
    assert not consuming.is_slow
    consuming.tracker.ack([held + WALKED_COUNT_MAX // held])
    consuming.flush()
    assert consuming.is_slow


def test_deliveries_carry_the_number_of_their_channel_until_it_is_left() -> None:
    came: list[Delivery] = []
    consuming = ConsumerChannel(8, on_arrived=came.extend, on_lost=lambda error: None)
    consuming.opened(Channel(1, consuming, write=lambda data: None, release=lambda number: None))
    consuming.on_events([Delivery(1, 1, False, "", "q", "ctag", b"", b"")])
    assert [delivery.channel for delivery in came] == [8]
    consuming.leave()
    consuming.on_events([Delivery(1, 2, False, "", "q", "ctag", b"", b"")])
    assert len(came) == 1
