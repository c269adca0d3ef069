"""What must be true of an installation: the rules of the queue service in a few lines of plain Python.

An item is known by its payload. The model says in which queue and place each one is, with which attempts, keys and
deadlines. What the service alone decides (a new id, the partition of a death) is filled in from what is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SECOND_US = 1_000_000
SCHEDULE_US_MIN = 100_000

BY_POLICY = {"max_attempts", "expired"}


def policy(reason: str) -> str:
    """The two reasons of which both can be true, as one; any other as it is."""
    return "by policy" if reason in BY_POLICY else reason


@dataclass
class Entry:
    """An item in sight. `id` is None while its new id has not been seen yet; `old_id` is then the one before."""

    token: bytes
    partition: int
    place: str  # queued, leased, scheduled
    expire_us: int
    id: str | None = None
    old_id: str = ""
    attempts: int = 0
    lease_us: int | None = 0  # None: leased, and until when nobody was told
    enqueue_us: int = 0
    dedupe_key: str = ""
    source_id: str | None = ""  # None: whatever it is
    source_queue: str = ""
    death_reason: str = ""
    death_attempts: int = 0

    def renumber(self) -> None:
        """It will have a new id."""
        self.old_id, self.id = self.id or self.old_id, None


@dataclass
class Dying:
    """An item between its queue and its dead queue."""

    entry: Entry
    target: str
    generation: int
    reasons: frozenset[str]
    source_id: str | None
    arrived: bool = False


@dataclass
class Queue:
    """A queue and what is in it."""

    name: str
    generation: int
    lease_us: int
    expire_us: int
    max_attempts: int
    dead_queue: str
    partitions: int = 1
    paused: bool = False
    entries: dict[bytes, Entry] = field(default_factory=dict)
    dying: dict[bytes, Dying] = field(default_factory=dict)
    ledger: Counter[tuple[str, str]] = field(default_factory=Counter)

    def at(self, place: str) -> list[Entry]:
        """Entries of a place by id."""
        return sorted((e for e in self.entries.values() if e.place == place), key=lambda e: e.id or "~")

    def un_leased(self) -> dict[int, int]:
        """How many queued items each partition has."""
        counts = Counter(entry.partition for entry in self.at("queued"))
        return {partition: counts[partition] for partition in range(self.partitions)}

    def by_key(self, dedupe_key: str) -> Entry | None:
        """The item that has this key now."""
        return next((e for e in self.entries.values() if dedupe_key and e.dedupe_key == dedupe_key), None)


class QueueModel:
    """Every queue of the installation."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self._generation = 0

    def create(self, queue: Queue) -> None:
        """A queue made anew is another queue."""
        self._generation += 1
        queue.generation = self._generation
        self.queues[queue.name] = queue

    def is_immortal(self, name: str) -> bool:
        """Nothing dies by itself in a queue that is some queue's dead queue."""
        return any(queue.dead_queue == name for queue in self.queues.values())

    # --- entries ----------------------------------------------------------------------------------------------

    def enqueue(self, queue: Queue, entry: Entry, *, at_us: int, now_us: int) -> None:
        """A new item, or one that is given back."""
        entry.lease_us = 0
        entry.place = "scheduled" if at_us >= now_us + SCHEDULE_US_MIN else "queued"
        entry.enqueue_us = at_us if entry.place == "scheduled" else 0
        queue.entries[entry.token] = entry

    def lease(self, queue: Queue, entry: Entry, *, until_us: int | None) -> None:
        """Somebody has it, whether he was told or not."""
        entry.place, entry.lease_us = "leased", until_us
        entry.attempts += 1

    def retry(self, queue: Queue, entry: Entry, *, at_us: int, dead: bool, reason: str, now_us: int) -> None:
        """A leased item is given back, or dies."""
        why = (reason or "rejected") if dead else ""
        if not why and self._is_used_up(queue, entry):
            why = "max_attempts"
        if why and not self.is_immortal(queue.name):
            self.die(queue, entry, why)
            return
        entry.renumber()
        self.enqueue(queue, entry, at_us=0 if dead else at_us, now_us=now_us)

    def _is_used_up(self, queue: Queue, entry: Entry) -> bool:
        return 0 < queue.max_attempts <= entry.attempts

    def die(self, queue: Queue, entry: Entry, reason: str) -> None:
        """To the dead queue, or deleted where there is none."""
        del queue.entries[entry.token]
        reasons = {reason}
        if reason in BY_POLICY and self._is_used_up(queue, entry):
            # Which came first depends on when the store could look: both are true.
            reasons = BY_POLICY
        target = self.queues.get(queue.dead_queue)
        if target is None:
            queue.ledger["deleted", policy(reason)] += 1
            return
        queue.ledger["dead_lettered", policy(reason)] += 1
        queue.dying[entry.token] = Dying(entry, target.name, target.generation, frozenset(reasons), entry.id)

    def revive(self, queue: Queue, dying: Dying, now_us: int) -> None:
        """Its target is gone: it lives, or dies, by today's rules."""
        del queue.dying[dying.entry.token]
        entry = dying.entry
        entry.dedupe_key, entry.source_id = "", ""
        entry.source_queue, entry.death_reason, entry.death_attempts = "", "", 0
        entry.renumber()
        self.enqueue(queue, entry, at_us=0, now_us=now_us)

    def is_target_gone(self, dying: Dying) -> bool:
        """Deleted, or made anew."""
        target = self.queues.get(dying.target)
        return target is None or target.generation != dying.generation

    # --- time -------------------------------------------------------------------------------------------------

    def due(self, queue: Queue, now_us: int, *, only: set[bytes] | None = None) -> None:
        """Everything whose moment has come, or `only` these."""
        immortal = self.is_immortal(queue.name)
        chosen = [entry for entry in queue.entries.values() if only is None or entry.token in only]
        for entry in chosen:
            if entry.place == "leased" and entry.lease_us is not None and entry.lease_us <= now_us:
                if self._is_used_up(queue, entry) and not immortal:
                    self.die(queue, entry, "max_attempts")
                    continue
                entry.renumber()
                self.enqueue(queue, entry, at_us=0, now_us=now_us)
            if entry.place == "scheduled" and entry.enqueue_us <= now_us:
                entry.renumber()
                self.enqueue(queue, entry, at_us=0, now_us=now_us)
        if immortal:
            return
        for entry in chosen:
            if entry.place != "queued" or entry.token not in queue.entries:
                continue
            if entry.expire_us <= now_us:
                self.die(queue, entry, "expired")
            elif self._is_used_up(queue, entry):
                self.die(queue, entry, "max_attempts")
