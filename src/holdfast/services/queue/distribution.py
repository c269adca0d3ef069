"""Who gets what: pure functions that place produce requests, assign waiting leases and share out items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def place_produce(un_leased: Mapping[int, int]) -> int:
    """The partition with the fewest un-leased items; the lowest number among equals."""
    return min(un_leased, key=lambda partition: (un_leased[partition], partition))


def assign_leases(batch_sizes: Sequence[int], un_leased: Mapping[int, int]) -> list[int]:
    """A partition for each waiting request, in their order: the one with the most un-leased items.

    What earlier requests asked for is taken off, so that a crowd spreads over the partitions.
    """
    left = dict(un_leased)
    assigned = []
    for size in batch_sizes:
        partition = max(left, key=lambda candidate: (left[candidate], -candidate))
        left[partition] -= size
        assigned.append(partition)
    return assigned


def share(items: Sequence[T], wanted: Sequence[int]) -> list[list[T]]:
    """Deal items one at a time, round robin, to requests that want that many.

    23 items for 20, 6 and 1 give 16, 6 and 1. What nobody wants is left out.
    """
    if len(wanted) == 1:
        return [list(items[: wanted[0]])]
    shares: list[list[T]] = [[] for _ in wanted]
    open_requests = [index for index, want in enumerate(wanted) if want > 0]
    position = 0
    while open_requests and position < len(items):
        still_open = []
        for index in open_requests:
            if position == len(items):
                return shares
            shares[index].append(items[position])
            position += 1
            if len(shares[index]) < wanted[index]:
                still_open.append(index)
        open_requests = still_open
    return shares


def spread(partition_count: int, affinities: Mapping[str, float]) -> list[str]:
    """A storage for each partition, in proportion to the storages' affinities and interleaved."""
    total = sum(affinities.values())
    debt = dict.fromkeys(affinities, 0.0)
    places = []
    for _ in range(partition_count):
        for name, affinity in affinities.items():
            debt[name] += affinity / total
        chosen = max(debt, key=lambda name: debt[name])
        debt[chosen] -= 1.0
        places.append(chosen)
    return places
