"""Items that come into a queue in memory, and the three commits that take one from queue to queue."""

from __future__ import annotations

from holdfast.core.item import is_scheduled
from holdfast.engines.memory.partition import MemoryItem, MemoryPartition
from holdfast.engines.memory.reading import MemoryReading, QueueMemory
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import Arrive, Counted, Forget, LedgerEntry, Remove, Revive, SendBack, SentBack


class Moves(MemoryReading):
    """The moving part of the store."""

    def __init__(self, memory: QueueMemory, clock: Clock) -> None:
        super().__init__(memory, clock)
        self._now_us = 0

    def _place(self, partition: MemoryPartition, entry: MemoryItem, at_us: int) -> None:
        if entry.dedupe_key:
            self._memory.dedupe[entry.dedupe_key] = (partition, entry)
        if entry.source_id:
            self._memory.sources.add(entry.source_id)
        if entry.died_at_us:
            partition.holds_dead = True
        if is_scheduled(at_us, self._now_us):
            partition.schedule(entry, at_us, self._now_us)
        else:
            partition.enqueue(entry, self._now_us)

    def _note(self, action: str, item_id: str, reason: str, *, count: int = 1, detail: str = "") -> None:
        self._memory.ledger.append(
            LedgerEntry(
                at_us=self._now_us,
                action=action,
                queue_name=self._memory.name,
                item_id=item_id,
                reason=reason,
                count=count,
                detail=detail,
            )
        )

    def _arrive(self, operation: Arrive) -> Counted:
        partition = self._partition(operation.partition)
        count = 0
        for item in operation.items:
            if item.source_id in self._memory.arrivals:
                continue
            # Remembered also when it was imported before: that copy may be completed before the third commit.
            self._memory.arrivals[item.source_id] = item.source_queue
            if item.source_id in self._memory.sources:
                continue
            entry = MemoryItem(
                payload=item.payload,
                kind=item.kind,
                encoding=item.encoding,
                reference=item.reference,
                created_at_us=self._now_us,
            )
            entry.expire_at_us = self._now_us + operation.expire_timeout_us
            entry.source_id, entry.former_key = item.source_id, item.former_key
            if not item.is_redrive:
                entry.source_queue, entry.died_at_us = item.source_queue, item.died_at_us
                entry.death_reason, entry.death_attempts = item.death_reason, item.death_attempts
            self._place(partition, entry, 0)
            count += 1
        return Counted(count)

    def _redrive(self, operation: SendBack) -> SentBack:
        partition, marked = self._partition(operation.partition), []
        for text in operation.ids:
            entry = partition.queued.get(partition.sequence_of(text))
            if entry is None or entry.source_queue != operation.target.queue_name:
                continue
            partition.mark_redriven(entry, operation.target)
            self._note("redriven", text, "", detail=operation.target.queue_name)
            marked.append(text)
        return SentBack(marked)

    def _remove(self, operation: Remove) -> Counted:
        partition = self._partition(operation.partition)
        removed = [partition.dying.pop(partition.sequence_of(text), None) for text in operation.ids]
        for entry in removed:
            if entry is not None:
                self._memory.sources.discard(entry.source_id)
        return Counted(sum(entry is not None for entry in removed))

    def _revive(self, operation: Revive) -> Counted:
        partition = self._partition(operation.partition)
        for text in operation.ids:
            if (entry := partition.dying.pop(partition.sequence_of(text), None)) is not None:
                if not entry.is_redriven:
                    entry.death_reason, entry.death_attempts, entry.died_at_us = "", 0, 0
                self._place(partition, entry, 0)
        return Counted(len(operation.ids))

    def _forget(self, operation: Forget) -> Counted:
        for source_id in operation.source_ids:
            self._memory.arrivals.pop(source_id, None)
        return Counted(len(operation.source_ids))
