"""Requests that wait for their turn, each with the future that answers it, and which of them a share's next commit
serves: deadlines first, then settlements, then new items, then leases.

In this order an item that has just been produced or given back can be leased by the same commit. Who gets what is
decided by pure functions that place produce requests, assign waiting leases and share out items. When a commit is made
is up to `logical_queue.py`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from msgspec import Struct, field

from holdfast.core.item import NewItem, QueueRecord
from holdfast.errors import Invalid, TryAgain
from holdfast.ports.queue_store import DeathRules, Due, LeaseItems, Operation, Produce
from holdfast.services.queue.storage_share import StorageShare

LEASES_WAITING_COUNT_MAX = 1_000
PRODUCES_WAITING_COUNT_MAX = 10_000
PRODUCES_WAITING_BYTES_MAX = 256 * 2**20
DUE_COUNT_MAX = 1_000
COMMIT_ITEMS_COUNT_MAX = 10_000
COMMIT_BYTES_MAX = 64 * 2**20
COMMIT_OPERATIONS_COUNT_MAX = 2_000

T = TypeVar("T")


class Waiting(Struct, eq=False):
    """A request that waits. `taken` while its commit runs: from then on only the commit answers it."""

    deadline_us: int
    taken: bool = False
    future: asyncio.Future[object] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer(self, result: object) -> None:
        """Answer it, if somebody still waits for the answer."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Answer it with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class WaitingProduce(Waiting, eq=False, kw_only=True):
    """Items that want a partition."""

    items: Sequence[NewItem]
    byte_count: int


class WaitingLease(Waiting, eq=False, kw_only=True):
    """A client that wants items."""

    client_id: str
    batch_size: int


class WaitingOperation(Waiting, eq=False, kw_only=True):
    """An operation that belongs to one partition; `settles` when it is a client's complete, retry or extend."""

    operation: Operation
    weight: int  #: about how many items it touches
    settles: bool


class WaitingRequests:
    """Requests of one queue that wait for their turn."""

    def __init__(self) -> None:
        self.produces: deque[WaitingProduce] = deque()
        self.leases: dict[str, WaitingLease] = {}
        self.operations: defaultdict[StorageShare, list[WaitingOperation]] = defaultdict(list)
        self._produce_bytes = 0

    # --- coming -----------------------------------------------------------------------------------------------

    def add_produce(self, items: Sequence[NewItem], byte_count: int, deadline_us: int) -> WaitingProduce:
        """Items that want a partition; raises TryAgain when too many wait."""
        if (
            len(self.produces) >= PRODUCES_WAITING_COUNT_MAX
            or self._produce_bytes + byte_count > PRODUCES_WAITING_BYTES_MAX
        ):
            raise TryAgain("queue is overloaded; try again later")
        waiting = WaitingProduce(deadline_us, items=items, byte_count=byte_count)
        self.produces.append(waiting)
        self._produce_bytes += byte_count
        return waiting

    def add_lease(self, client_id: str, batch_size: int, deadline_us: int) -> WaitingLease:
        """A client that wants items; raises Invalid when it waits already, TryAgain when too many wait."""
        if client_id in self.leases:
            raise Invalid("duplicate client id; a client cannot make multiple leased requests to the same queue")
        if len(self.leases) >= LEASES_WAITING_COUNT_MAX:
            raise TryAgain("queue is overloaded; try again later")
        waiting = self.leases[client_id] = WaitingLease(deadline_us, client_id=client_id, batch_size=batch_size)
        return waiting

    def add_operation(
        self, share: StorageShare, operation: Operation, weight: int, deadline_us: int, *, settles: bool = False
    ) -> WaitingOperation:
        """An operation on one partition of a share."""
        waiting = WaitingOperation(deadline_us, operation=operation, weight=weight, settles=settles)
        self.operations[share].append(waiting)
        return waiting

    # --- looking ----------------------------------------------------------------------------------------------

    def count(self, share: StorageShare) -> int:
        """How many wait that the share could serve now; leases may wait for items."""
        return len(self.produces) + len(self.operations[share])

    def weight(self, share: StorageShare) -> int:
        """About how many items those touch."""
        return sum([len(one.items) for one in self.produces]) + sum([one.weight for one in self.operations[share]])

    def is_any(self, share: StorageShare) -> bool:
        """Whether anybody waits whom the share might serve."""
        return bool(self.produces or self.leases or self.operations[share])

    def settling_count(self) -> int:
        """How many completes, retries and extends wait."""
        return sum([one.settles for one in chain.from_iterable(self.operations.values())])

    def untaken(self) -> list[Waiting]:
        """Everybody who waits and is in no commit."""
        return [one for one in self._everybody() if not one.taken and not one.future.done()]

    def _everybody(self) -> list[Waiting]:
        return [*self.produces, *self.leases.values(), *chain.from_iterable(self.operations.values())]

    # --- going ------------------------------------------------------------------------------------------------

    def next_produce(self) -> WaitingProduce | None:
        """Take the first produce request that somebody still waits for; none when there is none."""
        while self.produces:
            waiting = self.produces.popleft()
            self._produce_bytes -= waiting.byte_count
            if not waiting.future.done():
                return waiting
        return None

    def put_back(self, produces: Sequence[WaitingProduce]) -> None:
        """They were taken in this order and wait on, before all others."""
        self.produces.extendleft(reversed(produces))
        self._produce_bytes += sum([waiting.byte_count for waiting in produces])

    def take_operations(self, share: StorageShare, count_max: int) -> list[WaitingOperation]:
        """Take operations that somebody still waits for; others went away or ran out of time before anything was
        done."""
        waiting = self.operations[share]
        self.operations[share] = waiting[count_max:]
        return [one for one in waiting[:count_max] if not one.future.done()]

    def remove_lease(self, waiting: WaitingLease) -> None:
        """It is given nothing from here on, and its name is free."""
        if self.leases.get(waiting.client_id) is waiting:
            del self.leases[waiting.client_id]

    def fail_operations(self, share: StorageShare, error: Exception) -> None:
        """Answer every operation on a share that cannot be used."""
        for waiting in self.take_operations(share, len(self.operations[share])):
            waiting.fail(error)

    def fail_produces(self, error: Exception) -> None:
        """Answer every produce request: no storage of the queue can be used."""
        while (waiting := self.next_produce()) is not None:
            waiting.fail(error)

    def fail_all(self, error: Exception) -> None:
        """Answer everybody, also who is in a commit that never ended."""
        for waiting in self._everybody():
            waiting.fail(error)


# --- the next commit -------------------------------------------------------------------------------------------------


class CommitBatch(Struct, eq=False):
    """One commit's worth: operations for the store and, beside each, whom its result answers."""

    operations: list[Operation] = []
    weight: int = 0  #: about how many items it touches
    produces: dict[int, list[WaitingProduce]] = {}  #: index of the operation → requests, in order
    leases: dict[int, list[WaitingLease]] = {}
    singles: dict[int, WaitingOperation] = {}
    better: set[int] = set()  #: partitions of idle shares that are better for somebody who waits

    def answer_produces(self, index: int, produced: Sequence[str]) -> None:
        """Give every producer of one operation the ids of its own items."""
        partition, position = self.operations[index].partition, 0
        for waiting in self.produces[index]:
            ids = produced[position : position + len(waiting.items)]
            position += len(waiting.items)
            waiting.answer((ids, partition))

    def requests(self) -> list[Waiting]:
        """Everybody who waits for this commit."""
        produces, leases = chain.from_iterable(self.produces.values()), chain.from_iterable(self.leases.values())
        return [*self.singles.values(), *produces, *leases]


def take(
    waiting: WaitingRequests,
    share: StorageShare,
    *,
    shares: Sequence[StorageShare],
    record: QueueRecord,
    rules: Callable[[], DeathRules],
) -> CommitBatch:
    """The share's next batch; without operations when there is nothing to do. `shares` are all of the queue."""
    batch = CommitBatch()
    due = share.due_partitions(rules)
    if due:
        by = rules()
        for partition in due:
            batch.operations.append(Due(partition, DUE_COUNT_MAX, by))
            share.carries_out_due(partition)
        batch.weight += DUE_COUNT_MAX
    for waiting_operation in waiting.take_operations(share, COMMIT_OPERATIONS_COUNT_MAX):
        batch.singles[len(batch.operations)] = waiting_operation
        batch.operations.append(waiting_operation.operation)
        batch.weight += waiting_operation.weight
    if waiting.produces:
        _take_produces(batch, waiting, share, _open_counts(share, shares), record)
    if waiting.leases and not record.paused:
        counts = _open_counts(share, shares)
        for index, requests in batch.produces.items():
            counts[batch.operations[index].partition] += sum([_known_count(one.items) for one in requests])
        available = share.available(counts)
        if any(partition in share.states for partition in available):
            _take_leases(batch, waiting.leases.values(), share, available, record, rules())
    return batch


def _open_counts(share: StorageShare, shares: Sequence[StorageShare]) -> dict[int, int]:
    """Un-leased items of every partition that could be used right now: this share's, and those of idle ones."""
    counts: dict[int, int] = {}
    for other in shares:
        if other is share or (other.healthy and not other.busy):
            counts.update(other.un_leased())
    return counts


def _known_count(items: Sequence[NewItem]) -> int:
    """How many of them can be leased once they are stored, for all that is known before it. Whoever waits is sent to
    items, never to where some might come from: that is known after the commit."""
    return sum([item.enqueue_at is None and not item.dedupe_key for item in items])


def _take_produces(
    batch: CommitBatch, waiting: WaitingRequests, share: StorageShare, counts: dict[int, int], record: QueueRecord
) -> None:
    placed: dict[int, list[WaitingProduce]] = {}
    left: list[WaitingProduce] = []
    item_count = byte_count = 0
    while item_count < COMMIT_ITEMS_COUNT_MAX and byte_count < COMMIT_BYTES_MAX:
        produce = waiting.next_produce()
        if produce is None:
            break
        partition = place_produce(counts) if len(counts) > 1 else next(iter(counts))
        counts[partition] += len(produce.items)
        if partition not in share.states:
            left.append(produce)  # an idle share has a better place for it
            batch.better.add(partition)
            continue
        placed.setdefault(partition, []).append(produce)
        item_count += len(produce.items)
        byte_count += produce.byte_count
    waiting.put_back(left)
    for partition, requests in placed.items():
        items = requests[0].items if len(requests) == 1 else [item for one in requests for item in one.items]
        batch.produces[len(batch.operations)] = requests
        batch.operations.append(Produce(partition, items, record.expire_timeout_us))
        batch.weight += len(items)


def _take_leases(
    batch: CommitBatch,
    leases: Iterable[WaitingLease],
    share: StorageShare,
    available: Mapping[int, int],
    record: QueueRecord,
    rules: DeathRules,
) -> None:
    waiting = [lease for lease in leases if not lease.taken and not lease.future.done()]
    assigned: dict[int, list[WaitingLease]] = {}
    for lease, partition in zip(waiting, assign_leases([w.batch_size for w in waiting], available), strict=True):
        if partition in share.states:
            assigned.setdefault(partition, []).append(lease)
        else:
            batch.better.add(partition)
    for partition, requests in assigned.items():
        batch.leases[len(batch.operations)] = requests
        count = min(sum(lease.batch_size for lease in requests), COMMIT_ITEMS_COUNT_MAX)
        batch.operations.append(LeaseItems(partition, count, record.lease_timeout_us, rules))
        batch.weight += count
        share.asks(partition)


def place_produce(un_leased: Mapping[int, int]) -> int:
    """The partition with the fewest un-leased items; the lowest number among equals."""
    return min(un_leased, key=lambda partition: (un_leased[partition], partition))


def assign_leases(batch_sizes: Sequence[int], un_leased: Mapping[int, int]) -> list[int]:
    """A partition for each waiting request, in their order: the one that has the most un-leased items for what would be
    asked of it then, so that a crowd spreads over the partitions by what is in them."""
    if len(un_leased) == 1:
        return list(un_leased) * len(batch_sizes)
    asked = dict.fromkeys(un_leased, 0)
    assigned = []
    for size in batch_sizes:
        partition = max(asked, key=lambda one: (un_leased[one] / (asked[one] + size), -one))
        asked[partition] += size
        assigned.append(partition)
    return assigned


def share_out(items: Sequence[T], wanted: Sequence[int]) -> list[list[T]]:
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
