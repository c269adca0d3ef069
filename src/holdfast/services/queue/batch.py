"""What goes into a lane's next commit: deadlines first, then settlements, then new items, then leases.

In this order an item that has just been produced or given back can be leased by the same commit.

Who gets what: pure functions that place produce requests, assign waiting leases and share out items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import TryAgain
from holdfast.ports.queue_store import Complete, DeathRules, Due, Extend, LeaseItems, Produce
from holdfast.services.queue.waiting import CommitBatch, WaitingLease, WaitingProduce

if TYPE_CHECKING:
    from holdfast.services.queue.logical_queue import LogicalQueue
    from holdfast.services.queue.storage_share import StorageShare


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


DUE_COUNT_MAX = 1_000
COMMIT_ITEMS_COUNT_MAX = 10_000
COMMIT_BYTES_MAX = 64 * 2**20
COMMIT_OPERATIONS_COUNT_MAX = 2_000


def take(queue: LogicalQueue, lane: StorageShare) -> CommitBatch:
    """The lane's next batch; empty when there is nothing to do."""
    batch = CommitBatch()
    gains: dict[int, int] = {}  # what this batch adds to the un-leased items of a partition, as far as known
    mortality = queue.hooks.mortality(queue)
    due = lane.due_partitions(mortality)
    if due:
        for partition in due:
            batch.operations.append(Due(partition, DUE_COUNT_MAX, mortality))
            gains[partition] = 1
            lane.dry.pop(partition, None)
        batch.weight += DUE_COUNT_MAX
        lane.due_more.clear()
    if lane.bound:
        _take_bound(lane, batch, gains)
    if queue.produces:
        _take_produces(queue, lane, batch, gains)
    if queue.leases and not queue.record.paused:
        _take_leases(queue, lane, batch, gains, mortality)
    return batch


def _take_bound(lane: StorageShare, batch: CommitBatch, gains: dict[int, int]) -> None:
    taken, lane.bound = lane.bound[:COMMIT_OPERATIONS_COUNT_MAX], lane.bound[COMMIT_OPERATIONS_COUNT_MAX:]
    for waiting in taken:
        if waiting.future.done():
            continue  # its client went away or its time ran out before anything was done
        batch.singles[len(batch.operations)] = waiting
        batch.operations.append(waiting.operation)
        batch.weight += waiting.weight
        if not isinstance(waiting.operation, Complete | Extend):
            gains[waiting.operation.partition] = gains.get(waiting.operation.partition, 0) + 1


def _open_counts(queue: LogicalQueue, lane: StorageShare, gains: dict[int, int]) -> dict[int, int]:
    """Un-leased items of every partition that could be used right now: this lane's, and those of idle ones."""
    counts: dict[int, int] = {}
    for other in queue.lanes:
        if other is lane or (other.healthy and not other.busy):
            counts.update(other.un_leased())
    for partition, gain in gains.items():
        counts[partition] += gain
    return counts


def _take_produces(queue: LogicalQueue, lane: StorageShare, batch: CommitBatch, gains: dict[int, int]) -> None:
    counts = _open_counts(queue, lane, gains)
    placed: dict[int, list[WaitingProduce]] = {}
    left: list[WaitingProduce] = []
    item_count = byte_count = 0
    while queue.produces and item_count < COMMIT_ITEMS_COUNT_MAX and byte_count < COMMIT_BYTES_MAX:
        waiting = queue.produces.popleft()
        if waiting.future.done():
            queue.forget_produce(waiting)
            continue
        partition = place_produce(counts) if len(counts) > 1 else next(iter(counts))
        counts[partition] += len(waiting.items)
        if partition not in lane.shapes:
            left.append(waiting)  # an idle lane has a better place for it
            queue.wake(queue.lane_of(partition))
            continue
        queue.forget_produce(waiting)
        placed.setdefault(partition, []).append(waiting)
        item_count += len(waiting.items)
        byte_count += waiting.byte_count
    queue.produces.extendleft(reversed(left))
    for partition, requests in placed.items():
        items = requests[0].items if len(requests) == 1 else [item for one in requests for item in one.items]
        batch.produces[len(batch.operations)] = requests
        batch.operations.append(Produce(partition, items, queue.record.expire_timeout_us))
        batch.weight += len(items)
        gains[partition] = gains.get(partition, 0) + len(items)


def _take_leases(
    queue: LogicalQueue, lane: StorageShare, batch: CommitBatch, gains: dict[int, int], mortality: DeathRules
) -> None:
    counts = _open_counts(queue, lane, gains)
    if lane.abilities.shared:
        for partition in lane.hinted:
            counts[partition] = max(1, counts[partition])
    available = lane.available(counts)
    if not any(partition in lane.shapes for partition in available):
        return
    waiting = [lease for lease in queue.leases.values() if not lease.taken and not lease.future.done()]
    assigned: dict[int, list[WaitingLease]] = {}
    for lease, partition in zip(waiting, assign_leases([w.batch_size for w in waiting], available), strict=True):
        if partition in lane.shapes:
            assigned.setdefault(partition, []).append(lease)
        else:
            queue.wake(queue.lane_of(partition))
    for partition, leases in assigned.items():
        batch.leases[len(batch.operations)] = leases
        count = min(sum(lease.batch_size for lease in leases), COMMIT_ITEMS_COUNT_MAX)
        batch.operations.append(LeaseItems(partition, count, queue.record.lease_timeout_us, mortality))
        batch.weight += count
        lane.hinted.discard(partition)  # the others are asked next, if somebody still waits


def refuse_all(queue: LogicalQueue, error: TryAgain) -> None:
    """Answer every produce request that waits: no storage of the queue can be used."""
    while queue.produces:
        waiting = queue.produces.popleft()
        queue.forget_produce(waiting)
        waiting.fail(error)
