"""Requests that wait for their turn, each with the future that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.core.item import LeasedItem, NewItem, PlacedItem
from holdfast.core.item_id import partition_of
from holdfast.ports.queues import Operation, Produced


class Waiting:
    """A request in line. `taken` while its commit runs: from then on only the commit answers it."""

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

    def __init__(self, operation: Operation, deadline_us: int, *, settles: bool) -> None:
        super().__init__(deadline_us, weight_of(operation))
        self.operation = operation
        self.settles = settles


class LeaseAnswer:
    """What a lease request is answered with."""

    __slots__ = ("items", "partition")

    def __init__(self, partition: int, items: list[LeasedItem]) -> None:
        self.partition = partition
        self.items = items


class CommitBatch:
    """One commit's worth: operations for the store and, beside each, whom its result answers."""

    __slots__ = ("leases", "operations", "produces", "singles", "weight")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.weight = 0  # about how many items it touches
        self.produces: dict[int, list[WaitingProduce]] = {}  # index of the operation → requests, in order
        self.leases: dict[int, list[WaitingLease]] = {}
        self.singles: dict[int, WaitingOperation] = {}

    def answer_produces(self, index: int, produced: Produced) -> None:
        """Give every producer of one operation the ids of its own items."""
        partition, position = self.operations[index].partition, 0
        for waiting in self.produces[index]:
            ids = produced.ids[position : position + len(waiting.items)]
            position += len(waiting.items)
            waiting.answer((ids, partition))

    def requests(self) -> list[Waiting]:
        """Everybody who waits for this commit."""
        everybody: list[Waiting] = list(self.singles.values())
        for produces in self.produces.values():
            everybody.extend(produces)
        for leases in self.leases.values():
            everybody.extend(leases)
        return everybody


def weight_of(operation: Operation) -> int:
    """About how many items an operation touches."""
    things = getattr(operation, "ids", None) or getattr(operation, "items", None) or ()
    return len(things) or getattr(operation, "count_max", 0)


def placed(ids: Sequence[str], items: Sequence[NewItem], partition: int) -> list[PlacedItem]:
    """Where produced items are. A dedupe key that is there already may be in another partition: the id says where."""
    return [
        PlacedItem(item_id, partition_of(item_id) if item.dedupe_key else partition)
        for item_id, item in zip(ids, items, strict=True)
    ]
