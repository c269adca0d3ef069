"""When a channel on which letters are held is left for a fresh one."""

from __future__ import annotations

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.connection import Channel
from holdfast.engines.rabbitmq.consumer_channel import WALKED_COUNT_MAX, ConsumerChannel
from holdfast.engines.rabbitmq.wire.events import Event


def line_with(count: int) -> tuple[ConsumerChannel, list[bytes]]:
    """A line on which so many letters came, and what is written to it."""
    written: list[bytes] = []
    line = ConsumerChannel(7, on_arrived=lambda deliveries: None, on_lost=lambda error: None)
    line.opened(Channel(1, line, write=written.append, release=lambda number: None))
    events: list[Event] = [Delivery(1, tag, False, "", "q", "ctag", b"", b"") for tag in range(1, count + 1)]
    line.on_events(events)
    return line, written


def test_acks_in_order_cost_nothing_however_many() -> None:
    line, written = line_with(10_000)
    line.held_count = 1  # somewhere behind
    assert line.books.ack_all(range(1, 10_000)) == []
    line.flush()
    assert len(written) == 1
    assert not line.is_slow


def test_acks_behind_many_letters_that_are_held_make_it_slow() -> None:
    held = 500
    line, _ = line_with(held + WALKED_COUNT_MAX // held)
    line.held_count = held
    line.books.ack_all(range(held + 1, held + WALKED_COUNT_MAX // held))
    line.flush()
    assert not line.is_slow
    line.books.ack_all([held + WALKED_COUNT_MAX // held])
    line.flush()
    assert line.is_slow


def test_deliveries_carry_the_number_of_their_line_until_it_is_left() -> None:
    came: list[Delivery] = []
    line = ConsumerChannel(8, on_arrived=came.extend, on_lost=lambda error: None)
    line.opened(Channel(1, line, write=lambda data: None, release=lambda number: None))
    line.on_events([Delivery(1, 1, False, "", "q", "ctag", b"", b"")])
    assert [delivery.channel for delivery in came] == [8]
    line.leave()
    line.on_events([Delivery(1, 2, False, "", "q", "ctag", b"", b"")])
    assert len(came) == 1
