"""What a recovery counts: names that strangers choose have a limit, and nothing is left out of the sums."""

from __future__ import annotations

from holdfast.core.message import Address
from holdfast.core.recovery import NAMES_COUNT_MAX, OTHERS, Summary, add_planned

COUNT = NAMES_COUNT_MAX + 500


def test_names_have_a_limit() -> None:
    summary = Summary()
    for number in range(COUNT):
        summary.went(f"queue-{number}", 2)
        summary.failed_at(f"queue-{number}")
    summary.went("queue-0", 2)
    assert len(summary.by_queue) == len(summary.failed_by_queue) == NAMES_COUNT_MAX + 1
    assert (summary.by_queue["queue-0"], summary.by_queue[OTHERS], summary.by_queue.total()) == (
        4,
        1_000,
        2 * COUNT + 2,
    )
    assert (summary.failed_by_queue[OTHERS], summary.failed) == (500, COUNT)


def test_a_plan_has_a_limit() -> None:
    summary = Summary()
    for number in range(COUNT):
        address = Address(routing_key=f"queue-{number % 700}")
        add_planned(summary, f"type-{number}", address)
    add_planned(summary, "type-0", Address(routing_key="queue-0"))
    assert len(summary.planned) == NAMES_COUNT_MAX + 1
    assert summary.planned[OTHERS] == {OTHERS: 500}
    assert summary.planned["type-0"].total() == 2
