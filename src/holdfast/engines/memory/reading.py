"""What can be seen of a queue in memory, without changing it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.item import Item, QueueRecord, is_used_up
from holdfast.engines.memory.partition import MemoryItem, MemoryPartition
from holdfast.errors import Invalid, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import DeathRules, DyingItem, LedgerEntry, Tally


class QueueMemory:
    """What is kept of one queue; outlives the stores that work on it."""

    def __init__(self, record: QueueRecord) -> None:
        self.generation = record.generation
        self.name = record.name
        self.partitions: dict[int, MemoryPartition] = {}
        self.dedupe: dict[str, tuple[MemoryPartition, MemoryItem]] = {}
        self.sources: set[str] = set()
        self.arrivals: dict[str, str] = {}
        self.ledger: list[LedgerEntry] = []


class MemoryReading:
    """The reading half of the store."""

    def __init__(self, memory: QueueMemory, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock

    def _partition(self, number: int) -> MemoryPartition:
        """A partition that has been loaded; raises StorageFailed."""
        partition = self._memory.partitions.get(number)
        if partition is None:
            raise StorageFailed(f"storage failed; partition {number} of '{self._memory.name}' is not loaded, try again")
        return partition

    async def dying_items(self, partition: int, *, count_max: int) -> Sequence[DyingItem]:
        shelf = self._partition(partition)
        return [
            DyingItem(
                source_id=shelf.id_of(entry),
                source_queue=self._memory.name,
                target=entry.target,
                kind=entry.kind,
                encoding=entry.encoding,
                reference=entry.reference,
                payload=entry.payload,
                death_reason="" if entry.is_redriven else entry.death_reason,
                death_attempts=entry.death_attempts,
                died_at_us=entry.died_at_us,
                former_key=entry.former_key,
            )
            for entry in list(shelf.dying.values())[:count_max]
            if entry.target is not None
        ]

    async def arrivals(self, *, source_queue: str, count_max: int) -> Sequence[str]:
        return [s for s, queue in self._memory.arrivals.items() if queue == source_queue][:count_max]

    async def list_items(self, partition: int, *, pivot: str, count_max: int, scheduled: bool) -> Sequence[Item]:
        shelf = self._partition(partition)
        first = shelf.sequence_of(pivot) if pivot else 0
        if first < 0:
            raise Invalid(f"invalid storage id; '{pivot}' is not an id of this partition")
        entries = shelf.scheduled if scheduled else {**shelf.queued, **shelf.leased}
        chosen = sorted(sequence for sequence in entries if sequence >= first)[:count_max]
        return [shelf.show(entries[sequence]) for sequence in chosen]

    async def tally(self, partition: int, *, rules: DeathRules) -> Tally:
        shelf, now_us = self._partition(partition), self._clock.now_us()
        present = [*shelf.queued.values(), *shelf.leased.values()]
        overdue = [
            entry
            for entry in shelf.queued.values()
            if rules.immortal and (entry.expire_at_us <= now_us or is_used_up(entry.attempts, rules.max_attempts))
        ]
        return Tally(
            partition=partition,
            queued=len(shelf.queued),
            leased=len(shelf.leased),
            scheduled=len(shelf.scheduled),
            dying=len(shelf.dying),
            overdue=len(overdue),
            average_age_us=_average([now_us - entry.created_at_us for entry in present]),
            average_leased_age_us=_average([now_us - entry.leased_at_us for entry in shelf.leased.values()]),
        )

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerEntry]:
        return self._memory.ledger[after : after + count_max]


def _average(numbers: list[int]) -> int:
    return sum(numbers) // len(numbers) if numbers else 0
