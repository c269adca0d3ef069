"""A queue's partitions in memory. A commit cannot fail half way: every operation checks before it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from holdfast.core.item import (
    REASON_EXPIRED,
    REASON_MAX_ATTEMPTS,
    REASON_REJECTED,
    REASON_RETENTION,
    ExtendedItem,
    LeasedItem,
    NewItem,
    is_scheduled,
    is_used_up,
)
from holdfast.core.moments import microseconds, moment
from holdfast.core.requests.queue import ImportedItem
from holdfast.engines.memory.moves import Moves
from holdfast.engines.memory.partition import MemoryItem, MemoryPartition
from holdfast.engines.memory.reading import QueueMemory
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Committed,
    Complete,
    Counted,
    DeathRules,
    Delete,
    Due,
    Ended,
    Extend,
    Extended,
    Forget,
    IdsRefused,
    Import,
    Imported,
    LeasedItems,
    LeaseItems,
    Operation,
    Produce,
    Produced,
    Release,
    Remove,
    Result,
    RetryItems,
    Revive,
    SendBack,
)


class MemoryQueueStore(Moves):
    """The reference store."""

    def __init__(self, memory: QueueMemory, partitions: Sequence[int], clock: Clock) -> None:
        super().__init__(memory, clock)
        self._numbers = tuple(partitions)
        self._carry_out: dict[type, Callable[[Any], Result]] = {
            Produce: self._produce,
            LeaseItems: self._lease,
            Release: self._release,
            Complete: self._complete,
            RetryItems: self._retry,
            Extend: self._extend,
            Due: self._due,
            Import: self._import,
            Delete: self._delete,
            Clear: self._clear,
            Arrive: self._arrive,
            Remove: self._remove,
            Revive: self._revive,
            Forget: self._forget,
            SendBack: self._redrive,
        }

    async def commit(self, operations: Sequence[Operation], *, inline: bool = False) -> Committed:
        self._now_us = self._clock.now_us()
        results = [self._carry_out[type(operation)](operation) for operation in operations]
        touched = {operation.partition for operation in operations}
        states = {number: self._memory.partitions[number].state() for number in touched}
        return Committed(results, states, self._now_us)

    def can_commit_inline(self) -> bool:
        return True

    async def load(self) -> Committed:
        for number in self._numbers:
            if number not in self._memory.partitions:
                self._memory.partitions[number] = MemoryPartition(generation=self._memory.generation, number=number)
        states = {number: self._memory.partitions[number].state() for number in self._numbers}
        return Committed([], states, self._clock.now_us())

    async def close(self) -> None:
        """Nothing to let go of."""

    # --- produce, import --------------------------------------------------------------------------------

    def _produce(self, operation: Produce) -> Produced:
        partition = self._partition(operation.partition)
        return Produced([self._produce_one(partition, item, operation.expire_timeout_us) for item in operation.items])

    def _produce_one(self, partition: MemoryPartition, item: NewItem, expire_timeout_us: int) -> str:
        if item.dedupe_key and (known := self._memory.dedupe.get(item.dedupe_key)) is not None:
            return known[0].id_of(known[1])
        entry = MemoryItem(
            payload=item.payload,
            kind=item.kind,
            encoding=item.encoding,
            reference=item.reference,
            created_at_us=self._now_us,
        )
        entry.expire_at_us = self._now_us + expire_timeout_us
        entry.dedupe_key = item.dedupe_key
        self._place(partition, entry, microseconds(item.enqueue_at) if item.enqueue_at else 0)
        return partition.id_of(entry)

    def _import(self, operation: Import) -> Imported:
        partition = self._partition(operation.partition)
        stored = []
        for item in operation.items:
            known = self._memory.dedupe.get(item.dedupe_key) if item.dedupe_key else None
            if known is not None or (item.source_id and item.source_id in self._memory.sources):
                continue
            entry = self._imported(item, operation.expire_timeout_us)
            self._place(partition, entry, microseconds(item.enqueue_at) if item.enqueue_at else 0)
            stored.append(partition.show(entry))
        return Imported(stored)

    def _imported(self, item: ImportedItem, expire_timeout_us: int) -> MemoryItem:
        entry = MemoryItem(
            payload=item.payload,
            kind=item.kind,
            encoding=item.encoding,
            reference=item.reference,
            created_at_us=microseconds(item.created_at) if item.created_at else self._now_us,
        )
        entry.expire_at_us = (
            microseconds(item.expire_deadline) if item.expire_deadline else self._now_us + expire_timeout_us
        )
        entry.attempts = item.attempts
        entry.dedupe_key = item.dedupe_key
        entry.former_key = item.former_key
        entry.source_id, entry.source_queue = item.source_id, item.source_queue
        entry.death_reason, entry.death_attempts = item.death_reason, item.death_attempts
        entry.died_at_us = microseconds(item.died_at) if item.died_at else 0
        return entry

    # --- lease and settle ---------------------------------------------------------------------------------------

    def _lease(self, operation: LeaseItems) -> LeasedItems:
        partition = self._partition(operation.partition)
        until_us = self._now_us + operation.lease_timeout_us
        chosen: list[MemoryItem] = []
        for entry in partition.queued.values():
            if len(chosen) == operation.count_max:
                break
            if operation.rules.immortal or not (
                entry.expire_at_us <= self._now_us or is_used_up(entry.attempts, operation.rules.max_attempts)
            ):
                chosen.append(entry)
        deadline = moment(until_us)
        leased = []
        for entry in chosen:
            partition.lease(entry, until_us, self._now_us)
            leased.append(
                LeasedItem(
                    partition.id_of(entry),
                    entry.attempts,
                    deadline,
                    entry.payload,
                    entry.encoding,
                    entry.kind,
                    entry.reference,
                )
            )
        return LeasedItems(leased)

    def _release(self, operation: Release) -> Counted:
        partition = self._partition(operation.partition)
        released = [s for s in map(partition.sequence_of, operation.ids) if s in partition.leased]
        for sequence in released:
            partition.release(sequence)
        return Counted(len(released))

    def _refused(self, partition: MemoryPartition, ids: Sequence[str]) -> IdsRefused | None:
        missing, unleased = [], []
        for text in ids:
            sequence = partition.sequence_of(text)
            if sequence in partition.queued:
                unleased.append(text)
            elif sequence not in partition.leased:
                missing.append(text)
        return IdsRefused(missing, unleased) if missing or unleased else None

    def _complete(self, operation: Complete) -> Result:
        partition = self._partition(operation.partition)
        if (refused := self._refused(partition, operation.ids)) is not None:
            return refused
        for text in operation.ids:
            self._free(partition.leased.pop(partition.sequence_of(text)))
        return Counted(len(operation.ids))

    def _free(self, entry: MemoryItem) -> None:
        """Its keys can be used again, and are not its own any more."""
        self._memory.dedupe.pop(entry.dedupe_key, None)
        self._memory.sources.discard(entry.source_id)
        entry.former_key = entry.dedupe_key or entry.former_key
        entry.dedupe_key = entry.source_id = ""

    def _extend(self, operation: Extend) -> Result:
        partition = self._partition(operation.partition)
        if (refused := self._refused(partition, operation.ids)) is not None:
            return refused
        until_us = self._now_us + operation.lease_timeout_us
        for text in operation.ids:
            partition.extend(partition.leased[partition.sequence_of(text)], until_us)
        return Extended([ExtendedItem(text, moment(until_us)) for text in operation.ids])

    def _retry(self, operation: RetryItems) -> Result:
        partition = self._partition(operation.partition)
        if (refused := self._refused(partition, [item.id for item in operation.items])) is not None:
            return refused
        requeued = dying = 0
        deleted: list[tuple[str, str]] = []
        for item in operation.items:
            entry = partition.leased.pop(partition.sequence_of(item.id))
            reason = item.reason or REASON_REJECTED if item.dead else ""
            if not reason and is_used_up(entry.attempts, operation.rules.max_attempts):
                reason = REASON_MAX_ATTEMPTS
            if reason and not operation.rules.immortal:
                died, gone = self._die(partition, entry, reason, operation.rules)
                dying += died
                deleted += gone
                continue
            requeued += 1
            at_us = microseconds(item.retry_at) if item.retry_at and not item.dead else 0
            if is_scheduled(at_us, self._now_us):
                partition.schedule(entry, at_us, self._now_us)
            else:
                partition.enqueue(entry, self._now_us)
        return Ended(requeued=requeued, dying=dying, deleted=deleted)

    # --- deadlines and death --------------------------------------------------------------------------------------

    def _die(
        self, partition: MemoryPartition, entry: MemoryItem, reason: str, rules: DeathRules
    ) -> tuple[int, list[tuple[str, str]]]:
        """Mark it as dying, or delete it where there is no dead queue; either way it is in the ledger."""
        item_id = partition.id_of(entry)
        self._free(entry)
        if rules.target is None:
            self._note("deleted", item_id, reason)
            return 0, [(item_id, reason)]
        partition.mark_dying(entry, rules.target, reason, self._now_us)
        self._note("dead_lettered", item_id, reason, detail=rules.target.queue_name)
        return 1, []

    def _due(self, operation: Due) -> Ended:
        partition, rules = self._partition(operation.partition), operation.rules
        requeued = enqueued = dying = 0
        deleted: list[tuple[str, str]] = []
        more = False

        def die(entry: MemoryItem, reason: str) -> None:
            nonlocal dying
            died, gone = self._die(partition, entry, reason, rules)
            dying += died
            deleted.extend(gone)

        for count, entry in enumerate(partition.leases_run_out(self._now_us)):
            if more := count >= operation.count_max:
                break
            del partition.leased[entry.sequence]
            if is_used_up(entry.attempts, rules.max_attempts) and not rules.immortal:
                die(entry, REASON_MAX_ATTEMPTS)
            else:
                partition.enqueue(entry, self._now_us)
                requeued += 1
        for count, entry in enumerate(partition.schedules_due(self._now_us)):
            if count >= operation.count_max:
                more = True
                break
            del partition.scheduled[entry.sequence]
            partition.enqueue(entry, self._now_us)
            enqueued += 1
        mortals = self._mortals(partition, rules, operation.count_max)
        for entry, reason in mortals:
            del partition.queued[entry.sequence]
            die(entry, reason)
        more = more or len(mortals) >= operation.count_max
        return Ended(requeued=requeued, enqueued=enqueued, dying=dying, deleted=deleted, more=more)

    def _mortals(self, partition: MemoryPartition, rules: DeathRules, count_max: int) -> list[tuple[MemoryItem, str]]:
        """Queued items that these rules let die now."""
        if rules.immortal:
            if not (rules.retention_us and partition.holds_dead):
                return []
            before_us = self._now_us - rules.retention_us
            old = (entry for entry in partition.queued.values() if 0 < entry.died_at_us <= before_us)
            return [(entry, REASON_RETENTION) for entry in islice(old, count_max)]
        late = islice(partition.expired(self._now_us), count_max)
        expired = {entry.sequence: (entry, REASON_EXPIRED) for entry in late}
        if rules.max_attempts:
            for entry in partition.queued.values():
                if len(expired) < count_max and is_used_up(entry.attempts, rules.max_attempts):
                    expired.setdefault(entry.sequence, (entry, REASON_MAX_ATTEMPTS))
        return list(expired.values())

    # --- delete and clear -----------------------------------------------------------------------------------------

    def _delete(self, operation: Delete) -> Counted:
        partition = self._partition(operation.partition)
        count = 0
        for text in operation.ids:
            if (entry := partition.remove(partition.sequence_of(text))) is not None:
                self._free(entry)
                self._note("deleted", text, "items.delete")
                count += 1
        return Counted(count)

    def _clear(self, operation: Clear) -> Counted:
        partition = self._partition(operation.partition)
        places: list[dict[int, MemoryItem]] = []
        places += [partition.queued] if operation.queued else []
        places += [partition.leased] if operation.leased else []
        places += [partition.scheduled] if operation.scheduled else []
        chosen = [(place, sequence) for place in places for sequence in place][: operation.count_max]
        for place, sequence in chosen:
            self._free(place.pop(sequence))
        if chosen:
            self._note("cleared", "", "queue.clear", count=len(chosen))
        return Counted(len(chosen), any(places))
