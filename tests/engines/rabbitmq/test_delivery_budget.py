"""No more letters come than are wanted, and the last wanted one always can: checked for every order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.recovery import RunLimits
from holdfast.engines.rabbitmq.drain import DeliveryBudget


def test_acks_wait_while_they_would_bring_more_than_is_wanted() -> None:
    budget = DeliveryBudget(RunLimits())
    budget.capacity_count, budget.wanted_count = 4, 10
    assert budget.acks_count_max(4) == 10
    budget.wanted_count, budget.ready = 3, range(2)
    assert budget.acks_count_max(4) == 1
    budget.ready = range(3)
    assert budget.acks_count_max(4) == 0


def test_without_a_limit_or_a_consumer_all_acks_go() -> None:
    budget = DeliveryBudget(RunLimits())
    budget.capacity_count, budget.ready = 4, range(4)
    assert budget.acks_count_max(4) is None
    budget.capacity_count, budget.wanted_count = 0, 5
    assert budget.acks_count_max(4) is None


def test_what_fits_follows_the_sizes_that_came() -> None:
    budget = DeliveryBudget(RunLimits(window_count_max=4_000, window_bytes_max=1_000_000))
    assert budget.fits_count == 100  # nothing is known yet
    budget.came(100, 100_000)
    assert budget.fits_count == 1_000
    budget.came(1, 10**9)
    assert budget.fits_count == 1
    assert DeliveryBudget(RunLimits(window_count_max=7)).fits_count == 7


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 60), st.data())
def test_a_broker_that_sends_all_that_it_may_sends_what_is_wanted_and_no_more(
    wanted: int, first: int, wide: int, data: st.DataObject
) -> None:
    budget = DeliveryBudget(RunLimits())
    budget.wanted_count, budget.capacity_count = wanted, min(first, wanted)
    delivered = acked = taken = withheld = 0
    while delivered < wanted:
        delivered = acked + budget.capacity_count
        assert delivered <= wanted
        ready = delivered - taken
        count = data.draw(st.integers(1, ready)) if ready else 0
        budget.taken(count)
        taken += count
        budget.ready = range(delivered - taken)
        more = budget.widened_by(wide, unacked_count=delivered - acked)
        budget.capacity_count += max(0, more)
        withheld = taken - acked  # all that are taken are done at once
        most = budget.acks_count_max(delivered - acked)
        acked += withheld if most is None else min(withheld, most)
