"""Who gets what: nothing is lost on the way, and everybody gets a fair share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.services.queue.service import spread
from holdfast.services.queue.waiting import assign_leases, place_produce, share_out


@pytest.mark.parametrize(
    ("item_count", "wanted", "given"),
    [
        (23, [20, 6, 1], [16, 6, 1]),
        (10, [10] * 5, [2] * 5),
        (11, [10] * 5, [3, 2, 2, 2, 2]),
        (0, [1, 2], [0, 0]),
        (5, [], []),
        (5, [0, 3], [0, 3]),
        (1, [1, 1], [1, 0]),
    ],
)
def test_items_are_dealt_one_at_a_time(item_count: int, wanted: list[int], given: list[int]) -> None:
    assert [len(items) for items in share_out(range(item_count), wanted)] == given


@given(st.integers(0, 200), st.lists(st.integers(0, 50), max_size=20))
def test_every_item_is_dealt_once_in_order_and_nobody_gets_more_than_wanted(item_count: int, wanted: list[int]) -> None:
    shares = share_out(range(item_count), wanted)
    dealt = [item for items in shares for item in items]
    assert sorted(dealt) == list(range(min(item_count, sum(wanted))))
    assert all(items == sorted(items) and len(items) <= want for items, want in zip(shares, wanted, strict=True))


@given(st.integers(0, 200), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_who_got_less_than_another_wanted_no_more_or_came_later(item_count: int, wanted: list[int]) -> None:
    shares = [len(items) for items in share_out(range(item_count), wanted)]
    for mine, want in zip(shares, wanted, strict=True):
        if mine < want:
            assert max(shares) <= mine + 1


@given(st.dictionaries(st.integers(0, 999), st.integers(0, 1000), min_size=1))
def test_a_produce_goes_to_the_emptiest_partition(un_leased: dict[int, int]) -> None:
    chosen = place_produce(un_leased)
    assert un_leased[chosen] == min(un_leased.values())
    assert chosen == min(p for p, count in un_leased.items() if count == un_leased[chosen])


@given(st.lists(st.integers(1, 100), max_size=20), st.dictionaries(st.integers(0, 99), st.integers(1, 99), min_size=1))
def test_the_first_lease_goes_to_the_fullest_partition(sizes: list[int], un_leased: dict[int, int]) -> None:
    assigned = assign_leases(sizes, un_leased)
    assert len(assigned) == len(sizes)
    assert set(assigned) <= set(un_leased)
    if sizes:
        assert un_leased[assigned[0]] == max(un_leased.values())


@given(st.integers(0, 300), st.dictionaries(st.text(min_size=1), st.floats(0.1, 10), min_size=1, max_size=6))
def test_partitions_are_spread_in_proportion_to_affinity(count: int, affinities: dict[str, float]) -> None:
    places = [place.storage for place in spread(count, affinities)]
    assert len(places) == count
    total = sum(affinities.values())
    for name, placed in Counter(places).items():
        assert abs(placed - count * affinities[name] / total) <= len(affinities)


@given(st.integers(0, 100), st.integers(0, 100))
def test_adding_partitions_moves_none(fewer: int, more: int) -> None:
    affinities = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert spread(fewer + more, affinities)[:fewer] == spread(fewer, affinities)
