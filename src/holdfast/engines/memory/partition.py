"""One partition in memory: every item is in exactly one of four places, and deadlines are heaps.

This is the reference: what the other stores do in SQL is written here in plain Python.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from holdfast.core.item import Item, format_id, id_suffix, parse_id
from holdfast.core.moments import moment, moment_or_none
from holdfast.ports.queue_store import MoveTarget, PartitionState


class MemoryItem:
    """An item and where it is in its life."""

    __slots__ = (
        "attempts",
        "created_at_us",
        "death_attempts",
        "death_reason",
        "dedupe_key",
        "died_at_us",
        "encoding",
        "enqueue_at_us",
        "expire_at_us",
        "former_key",
        "is_redriven",
        "kind",
        "lease_deadline_us",
        "leased_at_us",
        "payload",
        "reference",
        "sequence",
        "source_id",
        "source_queue",
        "target",
    )

    def __init__(self, *, payload: bytes, kind: str, encoding: str, reference: str, created_at_us: int) -> None:
        self.payload = payload
        self.kind = kind
        self.encoding = encoding
        self.reference = reference
        self.created_at_us = created_at_us
        self.sequence = self.attempts = self.expire_at_us = self.enqueue_at_us = 0
        self.leased_at_us = self.lease_deadline_us = 0
        self.dedupe_key = self.source_id = self.source_queue = self.death_reason = ""
        self.former_key = ""
        self.death_attempts = self.died_at_us = 0
        self.target: MoveTarget | None = None
        self.is_redriven = False  # on its way back to the queue that it died in


class MemoryPartition:
    """Queued, leased, scheduled and dying items of one partition."""

    def __init__(self, *, generation: int, number: int) -> None:
        self.number = number
        self.suffix = id_suffix(generation, number)
        self.queued: OrderedDict[int, MemoryItem] = OrderedDict()
        self.leased: dict[int, MemoryItem] = {}
        self.scheduled: dict[int, MemoryItem] = {}
        self.dying: OrderedDict[int, MemoryItem] = OrderedDict()
        self.holds_dead = False  # whether a dead letter has ever been here
        self._last_sequence = 0
        self._leases: list[tuple[int, int]] = []
        self._schedules: list[tuple[int, int]] = []
        self._expiries: list[tuple[int, int]] = []

    # --- ids --------------------------------------------------------------------------------------------------

    def number_anew(self, entry: MemoryItem, now_us: int) -> None:
        """A new id, after every other: a requeued item goes to the tail and its old id is stale."""
        self._last_sequence = max(self._last_sequence + 1, now_us)
        entry.sequence = self._last_sequence

    def id_of(self, entry: MemoryItem) -> str:
        """The text of its id."""
        return format_id(entry.sequence, self.suffix)

    def sequence_of(self, text: str) -> int:
        """The sequence of an id; -1 when it cannot be one of ours."""
        sequence = parse_id(text, self.suffix)
        return -1 if sequence is None else sequence

    # --- places -----------------------------------------------------------------------------------------------

    def enqueue(self, entry: MemoryItem, now_us: int) -> None:
        """To the tail, with a new id."""
        self.number_anew(entry, now_us)
        entry.enqueue_at_us = entry.leased_at_us = entry.lease_deadline_us = 0
        entry.target, entry.is_redriven = None, False
        self.queued[entry.sequence] = entry
        heapq.heappush(self._expiries, (entry.expire_at_us, entry.sequence))

    def schedule(self, entry: MemoryItem, at_us: int, now_us: int) -> None:
        """To the schedule, with a new id."""
        self.number_anew(entry, now_us)
        entry.leased_at_us = entry.lease_deadline_us = 0
        entry.enqueue_at_us = at_us
        self.scheduled[entry.sequence] = entry
        heapq.heappush(self._schedules, (at_us, entry.sequence))

    def lease(self, entry: MemoryItem, until_us: int, now_us: int) -> None:
        """From the queue to a holder; the id stays."""
        del self.queued[entry.sequence]
        entry.attempts += 1
        entry.leased_at_us = now_us
        self.leased[entry.sequence] = entry
        self.extend(entry, until_us)

    def extend(self, entry: MemoryItem, until_us: int) -> None:
        """The lease runs until then."""
        entry.lease_deadline_us = until_us
        heapq.heappush(self._leases, (until_us, entry.sequence))

    def release(self, sequence: int) -> None:
        """Undo a lease: same id, same place."""
        entry = self.leased.pop(sequence)
        entry.attempts -= 1
        entry.leased_at_us = entry.lease_deadline_us = 0
        self.queued[sequence] = entry
        heapq.heappush(self._expiries, (entry.expire_at_us, sequence))
        if next(reversed(self.queued)) == sequence and len(self.queued) > 1:
            self.queued = OrderedDict(sorted(self.queued.items()))

    def mark_dying(self, entry: MemoryItem, target: MoveTarget, reason: str, now_us: int) -> None:
        """Keep it, out of everybody's sight, until it has arrived."""
        entry.target = target
        entry.death_reason, entry.death_attempts, entry.died_at_us = reason, entry.attempts, now_us
        self.dying[entry.sequence] = entry

    def mark_redriven(self, entry: MemoryItem, target: MoveTarget) -> None:
        """The same, on its way back. Its story stays: it is needed if there is no way."""
        del self.queued[entry.sequence]
        entry.target, entry.is_redriven = target, True
        self.dying[entry.sequence] = entry

    def remove(self, sequence: int) -> MemoryItem | None:
        """Take an item out of wherever it is in sight."""
        for place in (self.queued, self.leased, self.scheduled):
            if (entry := place.pop(sequence, None)) is not None:
                return entry
        return None

    # --- deadlines --------------------------------------------------------------------------------------------

    def leases_run_out(self, now_us: int) -> Iterator[MemoryItem]:
        """Leases past their deadline, first come first; the caller takes each out of `leased`."""
        while self._leases and self._leases[0][0] <= now_us:
            deadline_us, sequence = self._leases[0]
            entry = self.leased.get(sequence)
            if entry is not None and entry.lease_deadline_us == deadline_us:
                yield entry
            heapq.heappop(self._leases)

    def schedules_due(self, now_us: int) -> Iterator[MemoryItem]:
        """Scheduled items whose moment has come."""
        while self._schedules and self._schedules[0][0] <= now_us:
            entry = self.scheduled.get(self._schedules[0][1])
            if entry is not None:
                yield entry
            heapq.heappop(self._schedules)

    def expired(self, now_us: int) -> Iterator[MemoryItem]:
        """Queued items past their expiry."""
        while self._expiries and self._expiries[0][0] <= now_us:
            entry = self.queued.get(self._expiries[0][1])
            if entry is not None:
                yield entry
            heapq.heappop(self._expiries)

    def _drop_stale_deadlines(self) -> None:
        while self._leases and not self._is_live_lease(*self._leases[0]):
            heapq.heappop(self._leases)
        while self._schedules and self._schedules[0][1] not in self.scheduled:
            heapq.heappop(self._schedules)
        while self._expiries and self._expiries[0][1] not in self.queued:
            heapq.heappop(self._expiries)

    def _is_live_lease(self, deadline_us: int, sequence: int) -> bool:
        entry = self.leased.get(sequence)
        return entry is not None and entry.lease_deadline_us == deadline_us

    def state(self) -> PartitionState:
        """How it stands."""
        self._drop_stale_deadlines()
        return PartitionState(
            queued=len(self.queued),
            leased=len(self.leased),
            scheduled=len(self.scheduled),
            dying=len(self.dying),
            next_due_us=min((heap[0][0] for heap in (self._leases, self._schedules) if heap), default=0),
            next_expiry_us=self._expiries[0][0] if self._expiries else 0,
            oldest_death_us=min((e.died_at_us for e in self.queued.values() if e.died_at_us), default=0)
            if self.holds_dead
            else 0,
        )

    def show(self, entry: MemoryItem) -> Item:
        """An entry as a listing shows it."""
        return Item(
            id=self.id_of(entry),
            source_id=entry.source_id,
            attempts=entry.attempts,
            created_at=moment(entry.created_at_us),
            enqueue_at=moment_or_none(entry.enqueue_at_us),
            lease_deadline=moment_or_none(entry.lease_deadline_us),
            expire_deadline=moment(entry.expire_at_us),
            is_leased=entry.lease_deadline_us > 0,
            reference=entry.reference,
            encoding=entry.encoding,
            kind=entry.kind,
            payload=entry.payload,
            dedupe_key=entry.dedupe_key,
            source_queue=entry.source_queue,
            death_reason=entry.death_reason,
            death_attempts=entry.death_attempts,
            died_at=moment_or_none(entry.died_at_us),
            former_key=entry.former_key,
        )
