"""No more letters come than are wanted, and the last wanted one always can: checked for every order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.engines.rabbitmq.allowance import DeliveryBudget


def test_acks_wait_while_they_would_bring_more_than_is_wanted() -> None:
    allowance = DeliveryBudget()
    allowance.capacity_count, allowance.wanted_count = 4, 10
    assert allowance.acks_count_max(unacked_count=4, ready_count=0) == 10
    allowance.wanted_count = 3
    assert allowance.acks_count_max(unacked_count=4, ready_count=2) == 1
    assert allowance.acks_count_max(unacked_count=4, ready_count=3) == 0


def test_without_a_limit_or_a_consumer_all_acks_go() -> None:
    allowance = DeliveryBudget()
    allowance.capacity_count = 4
    assert allowance.acks_count_max(unacked_count=4, ready_count=4) is None
    allowance.capacity_count, allowance.wanted_count = 0, 5
    assert allowance.acks_count_max(unacked_count=4, ready_count=4) is None


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 60), st.data())
def test_a_broker_that_sends_all_that_it_may_sends_what_is_wanted_and_no_more(
    wanted: int, first: int, wide: int, data: st.DataObject
) -> None:
    allowance = DeliveryBudget()
    allowance.wanted_count, allowance.capacity_count = wanted, min(first, wanted)
    delivered = acked = taken = withheld = 0
    while delivered < wanted:
        delivered = acked + allowance.capacity_count
        assert delivered <= wanted
        ready = delivered - taken
        count = data.draw(st.integers(1, ready)) if ready else 0
        allowance.taken(count)
        taken += count
        more = allowance.widened_by(wide, unacked_count=delivered - acked, ready_count=delivered - taken)
        allowance.capacity_count += max(0, more)
        withheld = taken - acked  # all that are taken are done at once
        most = allowance.acks_count_max(unacked_count=delivered - acked, ready_count=delivered - taken)
        acked += withheld if most is None else min(withheld, most)
