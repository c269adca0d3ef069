"""Any storage, with a switch: fail before a commit, or after it took effect and the answer was lost.

`flaky(storage)` behaves as the storage does until `faults` says otherwise. Whatever it reports as failed is
StorageFailed, as from a disk. It also counts the calls, so that a test can wait until a store is at rest. And queues in
memory that outlive the service over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

from holdfast.core.item import QueueRecord
from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.errors import StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import Committed, DyingItem, Operation, QueueStore, Storage

T = TypeVar("T")
When = Literal["before", "after"]
CATALOG = " catalog"  # the catalog as a fault names it; no queue name has a blank

CALLS_COUNT_MAX = 1_000
QUIET_ROUNDS = 25


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

    async def rest(self) -> None:
        """Wait until no call runs and none begins for some rounds of the event loop."""
        quiet, first = 0, self.calls_count
        while quiet < QUIET_ROUNDS:
            before = self.calls_count
            assert before - first < CALLS_COUNT_MAX, "the store is called without end"
            await asyncio.sleep(0)
            if self.running_count:
                # A thread works on it, and nothing but time can be waited for from here.
                await asyncio.sleep(0.0005)
            quiet = quiet + 1 if before == self.calls_count and not self.running_count else 0


class Around:
    """All that it has around it, but for what a subclass does otherwise."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self.real = real
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class FlakyQueueStore(Around):
    """A queue's store whose commits and reads can fail."""

    def __init__(self, real: QueueStore, faults: Faults, queue_name: str, storage: str) -> None:
        super().__init__(real, faults)
        self._name = queue_name
        self._storage = storage

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        call = partial(self.real.commit, operations, inline=inline)
        return await self.faults.around(self._name, operations, call, storage=self._storage)

    def can_commit_inline(self) -> bool:
        return self.faults.gate is None and self.real.can_commit_inline()

    async def load(self) -> Committed:
        return await self.faults.around(self._name, ("load",), self.real.load, storage=self._storage)

    async def dying_items(self, *partition: int, **how: int) -> Sequence[DyingItem]:
        return await self.faults.around(self._name, ("read",), partial(self.real.dying_items, *partition, **how))

    async def arrivals(self, **how: Any) -> Sequence[str]:
        return await self.faults.around(self._name, ("read",), partial(self.real.arrivals, **how))


class FlakyCatalog(Around):
    """A catalog whose changes can fail."""

    async def change(self, name: str, **how: Any) -> QueueRecord:
        return await self.faults.around(CATALOG, (name,), partial(self.real.change, name, **how))

    async def delete(self, name: str, **how: Any) -> QueueRecord:
        return await self.faults.around(CATALOG, (name,), partial(self.real.delete, name, **how))


class _FlakyStorage(Around):
    """Any storage, with the switch."""

    def __init__(self, real: Storage, faults: Faults, name: str) -> None:
        super().__init__(real, faults)
        self._name = name

    def catalog(self) -> FlakyCatalog:
        return FlakyCatalog(self.real.catalog(), self.faults)

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> FlakyQueueStore:
        return FlakyQueueStore(self.real.queue_store(record, partitions), self.faults, record.name, self._name)


def flaky(storage: Storage, faults: Faults | None = None, *, name: str = "") -> Storage:
    """The storage, with the switch."""
    return cast(Storage, _FlakyStorage(storage, faults or Faults(), name))


class LastingMemory(SqliteStorage):
    """Opened again after it was closed, it has the same data; `forget` ends that."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock=clock)
        self._is_begun = False

    async def open(self) -> None:
        if not self._is_begun:
            await super().open()
            self._is_begun = True

    async def close(self) -> None:
        for store in list(self.open_stores):
            await store.close()

    async def forget(self) -> None:
        """Its data are gone."""
        await super().close()
