"""Queues in memory: for tests and for what may be lost with the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.core.item import QueueRecord
from holdfast.engines.memory.reading import QueueMemory
from holdfast.engines.memory.shelves import MemoryQueueStore
from holdfast.errors import QueueMissing
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import LedgerEntry, RelatedQueues, StorageAbilities


class MemoryCatalog:
    """The queues, in a dictionary."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, QueueRecord] = {}
        self._kept: dict[str, str] = {}
        self._ledger: list[LedgerEntry] = []
        self._generation = 0
        self._version = 0

    async def queues(self) -> Sequence[QueueRecord]:
        return list(self._records.values())

    async def version(self) -> int:
        return self._version

    def _neighbours(self, name: str, dead_queue: str) -> RelatedQueues:
        sources = [record.name for record in self._records.values() if record.dead_queue == name]
        return RelatedQueues(self._records.get(name), self._records.get(dead_queue), sources)

    async def change(
        self, name: str, *, dead_queue: str, decide: Callable[[RelatedQueues, int], QueueRecord]
    ) -> QueueRecord:
        record = decide(self._neighbours(name, dead_queue), self._clock.now_us())
        if not record.generation:
            self._generation += 1
            record = replace(record, generation=self._generation)
        self._records[name] = record
        self._version += 1
        return record

    async def delete(self, name: str, *, decide: Callable[[RelatedQueues], QueueRecord], count: int) -> QueueRecord:
        record = decide(self._neighbours(name, ""))
        if self._records.pop(name, None) is None:
            raise QueueMissing(name)
        self._ledger.append(
            LedgerEntry(
                at_us=self._clock.now_us(),
                action="queue_deleted",
                queue_name=name,
                reason="queues.delete",
                count=count,
            )
        )
        self._version += 1
        return record

    async def keep(self, key: str, value: str) -> str:
        return self._kept.setdefault(key, value)

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        return self._ledger[after : after + count_max]


class MemoryStorage:
    """One process's memory as a storage."""

    abilities = StorageAbilities(shared=False, moves_in_one_commit=False, inline=True)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._catalog = MemoryCatalog(clock)
        self._queues: dict[int, QueueMemory] = {}

    async def open(self) -> None:
        """Always open."""

    async def close(self) -> None:
        """What is in memory stays until the process ends."""

    def catalog(self) -> MemoryCatalog:
        return self._catalog

    def queue_store(self, record: QueueRecord, partitions: Sequence[int]) -> MemoryQueueStore:
        memory = self._queues.setdefault(record.generation, QueueMemory(record))
        return MemoryQueueStore(memory, partitions, self._clock)

    async def drop(self, record: QueueRecord) -> None:
        self._queues.pop(record.generation, None)

    async def watch(self, hint: Callable[[str], None]) -> None:
        """Nobody else can change anything here."""
