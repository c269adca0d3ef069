"""What goes into a lane's next commit: deadlines first, then settlements, then new items, then leases.

In this order an item that has just been produced or given back can be leased by the same commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import TryAgain
from holdfast.ports.queues import Complete, DeathRules, Due, Extend, LeaseItems, Produce
from holdfast.services.queue.distribution import assign_leases, place_produce
from holdfast.services.queue.waiting import CommitBatch, WaitingLease, WaitingProduce

if TYPE_CHECKING:
    from holdfast.services.queue.lane import StorageShare
    from holdfast.services.queue.logical import LogicalQueue

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
