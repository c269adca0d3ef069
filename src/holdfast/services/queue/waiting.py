"""Requests that wait for their turn, each with the future that answers it.

`WaitingRequests` knows who waits and for how long; what is done for them, and when, is `logical_queue.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.core.item import LeasedItem, NewItem
from holdfast.errors import Invalid, TryAgain
from holdfast.ports.queue_store import Operation
from holdfast.services.queue.storage_share import StorageShare

LEASES_WAITING_COUNT_MAX = 1_000
PRODUCES_WAITING_COUNT_MAX = 10_000
PRODUCES_WAITING_BYTES_MAX = 256 * 2**20


class Waiting:
    """A request that waits. `taken` while its commit runs: from then on only the commit answers it."""

    __slots__ = ("deadline_us", "future", "taken", "weight")

    def __init__(self, deadline_us: int, weight: int) -> None:
        self.deadline_us = deadline_us
        self.weight = weight  # about how many items it touches
        self.taken = False
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def answer(self, result: object) -> bool:
        """Answer it; false when nobody waits for the answer any more."""
        if self.future.done():
            return False
        self.future.set_result(result)
        return True

    def fail(self, error: BaseException) -> None:
        """Answer it with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class WaitingProduce(Waiting):
    """Items that want a partition."""

    __slots__ = ("byte_count", "items")

    def __init__(self, items: Sequence[NewItem], byte_count: int, deadline_us: int) -> None:
        super().__init__(deadline_us, len(items))
        self.items = items
        self.byte_count = byte_count


class WaitingLease(Waiting):
    """A client that wants items."""

    __slots__ = ("batch_size", "client_id")

    def __init__(self, client_id: str, batch_size: int, deadline_us: int) -> None:
        super().__init__(deadline_us, batch_size)
        self.client_id = client_id
        self.batch_size = batch_size


class WaitingOperation(Waiting):
    """An operation that belongs to one partition; `settles` when it is a client's complete, retry or extend."""

    __slots__ = ("operation", "settles")

    def __init__(self, operation: Operation, weight: int, deadline_us: int, *, settles: bool) -> None:
        super().__init__(deadline_us, weight)
        self.operation = operation
        self.settles = settles


class LeaseAnswer(Struct, frozen=True):
    """What a lease request is answered with."""

    partition: int
    items: list[LeasedItem]


class WaitingRequests:
    """Requests of one queue that wait for their turn."""

    def __init__(self, shares: Iterable[StorageShare]) -> None:
        self.produces: deque[WaitingProduce] = deque()
        self.leases: dict[str, WaitingLease] = {}
        self.operations: dict[StorageShare, list[WaitingOperation]] = {share: [] for share in shares}
        self._produce_bytes = 0

    def add_share(self, share: StorageShare) -> None:
        """The queue has partitions in one more storage."""
        self.operations[share] = []

    # --- coming -----------------------------------------------------------------------------------------------

    def add_produce(self, items: Sequence[NewItem], byte_count: int, deadline_us: int) -> WaitingProduce:
        """Items that want a partition; raises TryAgain when too many wait."""
        if (
            len(self.produces) >= PRODUCES_WAITING_COUNT_MAX
            or self._produce_bytes + byte_count > PRODUCES_WAITING_BYTES_MAX
        ):
            raise TryAgain("queue is overloaded; try again later")
        waiting = WaitingProduce(items, byte_count, deadline_us)
        self.produces.append(waiting)
        self._produce_bytes += byte_count
        return waiting

    def add_lease(self, client_id: str, batch_size: int, deadline_us: int) -> WaitingLease:
        """A client that wants items; raises Invalid when it waits already, TryAgain when too many wait."""
        if client_id in self.leases:
            raise Invalid("duplicate client id; a client cannot make multiple leased requests to the same queue")
        if len(self.leases) >= LEASES_WAITING_COUNT_MAX:
            raise TryAgain("queue is overloaded; try again later")
        waiting = self.leases[client_id] = WaitingLease(client_id, batch_size, deadline_us)
        return waiting

    def add_operation(self, share: StorageShare, waiting: WaitingOperation) -> None:
        """An operation on one partition of a share."""
        self.operations[share].append(waiting)

    # --- looking ----------------------------------------------------------------------------------------------

    def count(self, share: StorageShare) -> int:
        """How many wait that the share could serve now; leases may wait for items."""
        return len(self.produces) + len(self.operations[share])

    def weight(self, share: StorageShare) -> int:
        """About how many items those touch."""
        return sum([one.weight for one in self.produces]) + sum([one.weight for one in self.operations[share]])

    def is_any(self, share: StorageShare) -> bool:
        """Whether anybody waits whom the share might serve."""
        return bool(self.produces or self.leases or self.operations[share])

    def settling_count(self) -> int:
        """How many completes, retries and extends wait."""
        return sum([one.settles for operations in self.operations.values() for one in operations])

    def untaken(self) -> list[Waiting]:
        """Everybody who waits and is in no commit."""
        waiting: list[Waiting] = [*self.produces, *self.leases.values()]
        for operations in self.operations.values():
            waiting.extend(operations)
        return [one for one in waiting if not one.taken and not one.future.done()]

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
        for waiting in [*self.produces, *self.leases.values()]:
            waiting.fail(error)
        for operations in self.operations.values():
            for operation in operations:
                operation.fail(error)
