"""Any storage, with a switch: fail before a commit, or after it took effect and the answer was lost.

`FlakyStorage(storage)` behaves as the storage does until `faults` says otherwise. Whatever it reports as failed is
StorageFailed, as from a disk. It also counts the calls, so that a test can wait until a store is at rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from holdfast.core.item import Item, QueueRecord
from holdfast.core.requests.queue import PartitionStats
from holdfast.errors import StorageFailed
from holdfast.ports.queue_store import (
    Catalog,
    Committed,
    DeathRules,
    DyingItem,
    LedgerEntry,
    Operation,
    QueueStore,
    RelatedQueues,
    Storage,
)

T = TypeVar("T")
When = Literal["before", "after"]
CATALOG = " catalog"  # the catalog as a fault names it; no queue name has a blank

CALLS_COUNT_MAX = 1_000


@dataclass
class Fault:
    """One failure to come: at the next commit of this queue that has such an operation (any, when none is named)."""

    when: When
    queue_name: str
    operation: type | tuple[type, ...] | None = None

    def matches(self, queue_name: str, operations: Sequence[object]) -> bool:
        """Whether this commit is the one."""
        if queue_name != self.queue_name:
            return False
        return self.operation is None or any(isinstance(one, self.operation) for one in operations)


@dataclass
class Faults:
    """What is to fail, what has failed, and whether anything runs at this moment."""

    armed: list[Fault] = field(default_factory=list)
    down: set[str] = field(default_factory=set)  # queues whose store refuses everything
    storages_down: set[str] = field(default_factory=set)  # storages that refuse everything, by their names
    reads_down: set[str] = field(default_factory=set)  # queues of which dying items and arrivals cannot be read
    lost_answers: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)  # took effect, reported as failed
    lost_results: list[object] = field(default_factory=list)  # beside each of them, what was not told
    gate: Callable[[str, Sequence[object]], Awaitable[None]] | None = None  # called before each commit
    calls_count: int = 0
    running_count: int = 0

    def arm(self, when: When, queue_name: str, operation: type | tuple[type, ...] | None = None) -> Fault:
        """Let one commit fail."""
        fault = Fault(when, queue_name, operation)
        self.armed.append(fault)
        return fault

    async def around(
        self, queue_name: str, operations: Sequence[object], call: Callable[[], Awaitable[T]], *, storage: str = ""
    ) -> T:
        """Make a call that may fail on either side of its effect."""
        if self.gate is not None:
            await self.gate(queue_name, operations)
        self.calls_count += 1
        self.running_count += 1
        try:
            unreadable = queue_name in self.reads_down and "read" in operations
            if unreadable or queue_name in self.down or storage in self.storages_down:
                raise StorageFailed(f"storage failed; {queue_name} is down, try again")
            fault = next((one for one in self.armed if one.matches(queue_name, operations)), None)
            if fault is not None:
                self.armed.remove(fault)
                if fault.when == "before":
                    raise StorageFailed(f"storage failed; {queue_name} failed before the commit, try again")
            result = await call()
            if fault is not None:
                self.lost_answers.append((queue_name, tuple(operations)))
                self.lost_results.append(result)
                raise StorageFailed(f"storage failed; {queue_name} took effect, the answer was lost, try again")
            return result
        finally:
            self.running_count -= 1

    async def rest(self, *, rounds: int = 25) -> None:
        """Wait until no call runs and none begins for so many rounds of the event loop."""
        quiet, first = 0, self.calls_count
        while quiet < rounds:
            before = self.calls_count
            assert before - first < CALLS_COUNT_MAX, "the store is called without end"
            await asyncio.sleep(0)
            if self.running_count:
                # A thread works on it, and nothing but time can be waited for from here.
                await asyncio.sleep(0.0005)
            quiet = quiet + 1 if before == self.calls_count and not self.running_count else 0


class FlakyQueueStore:
    """Shelves whose commits and loads can fail."""

    def __init__(self, real: QueueStore, queue_name: str, faults: Faults, storage: str = "") -> None:
        self.real = real
        self._name = queue_name
        self._faults = faults
        self._storage = storage

    async def _around(self, operations: Sequence[object], call: Callable[[], Awaitable[T]]) -> T:
        return await self._faults.around(self._name, operations, call, storage=self._storage)

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        return await self._around(operations, lambda: self.real.commit(operations, inline=inline))

    def can_commit_inline(self) -> bool:
        return self._faults.gate is None and self.real.can_commit_inline()

    async def load(self) -> Committed:
        return await self._around(("load",), self.real.load)

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        return await self._faults.around(
            self._name, ("read",), lambda: self.real.dying_items(partition, count_max=count_max)
        )

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        return await self._faults.around(
            self._name, ("read",), lambda: self.real.arrivals(source_queue=source_queue, count_max=count_max)
        )

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        return await self.real.list_items(partition, pivot=pivot, count_max=count_max, scheduled=scheduled)

    async def tally(self, partition: int, *, rules: DeathRules) -> PartitionStats:
        return await self.real.tally(partition, rules=rules)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        return await self.real.ledger(after=after, count_max=count_max)

    async def close(self) -> None:
        await self.real.close()


class FlakyCatalog:
    """A catalog whose changes can fail."""

    def __init__(self, real: Catalog, faults: Faults) -> None:
        self._real = real
        self._faults = faults

    async def queues(self) -> Sequence[QueueRecord]:
        return await self._real.queues()

    async def version(self) -> int:
        return await self._real.version()

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        return await self._faults.around(
            CATALOG, (name,), lambda: self._real.change(name, dead_queue=dead_queue, decide=decide)
        )

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        return await self._faults.around(CATALOG, (name,), lambda: self._real.delete(name, decide=decide, count=count))

    async def keep(self, key: str, value: str) -> str:
        return await self._real.keep(key, value)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        return await self._real.ledger(after=after, count_max=count_max)


class FlakyStorage:
    """Any storage, with the switch."""

    def __init__(self, real: Storage, faults: Faults | None = None, *, name: str = "") -> None:
        self.real = real
        self._name = name
        self.faults = faults or Faults()
        self.abilities = real.abilities

    async def open(self) -> None:
        await self.real.open()

    async def close(self) -> None:
        await self.real.close()

    def catalog(self) -> FlakyCatalog:
        return FlakyCatalog(self.real.catalog(), self.faults)

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> FlakyQueueStore:
        return FlakyQueueStore(self.real.queue_store(record, partitions), record.name, self.faults, self._name)

    async def drop(self, record: QueueRecord) -> None:
        await self.real.drop(record)

    async def watch(self, hint: Callable[[str], None]) -> None:
        await self.real.watch(hint)
