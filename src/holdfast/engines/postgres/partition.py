"""What this process believes of the partitions of its queues: counts and deadlines.

Exact while no other server works on the queue. Beside others the counts are estimates, which is all that placing and
leasing need: whoever finds less than it thought counts again, and `stats` reads the database. Deadlines are lower
bounds: looking once too early costs one look, and every look at what is due brings the exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.item import PartitionIds
from holdfast.ports.queue_store import PartitionState


class CountChange:
    """What a transaction changes; takes effect when it has committed."""

    __slots__ = ("death_us", "due_us", "dying", "expiry_us", "leased", "queued", "scheduled")

    def __init__(self) -> None:
        self.queued = self.leased = self.scheduled = self.dying = 0
        self.due_us = self.expiry_us = self.death_us = 0

    def queue(self, count: int, *, expire_at_us: int) -> None:
        """So many more are queued; the first expires then."""
        if count:
            self.queued += count
            self.expiry_us = earlier(self.expiry_us, expire_at_us)

    def schedule(self, count: int, *, at_us: int) -> None:
        """So many more are scheduled; the first for then."""
        if count:
            self.scheduled += count
            self.due_us = earlier(self.due_us, at_us)

    def lease(self, count: int, *, until_us: int) -> None:
        """So many more are leased until then."""
        if count:
            self.leased += count
            self.due_us = earlier(self.due_us, until_us)


class PostgresPartition(PartitionIds):
    """One partition, as this process knows it."""

    __slots__ = (
        "death_us",
        "due_us",
        "dying",
        "expiry_us",
        "first_id",
        "first_id_until_s",
        "generation",
        "leased",
        "number",
        "queued",
        "scheduled",
    )

    def __init__(self, generation: int, number: int) -> None:
        super().__init__(generation, number)
        self.generation = generation
        self.number = number
        self.queued = self.leased = self.scheduled = self.dying = 0
        self.due_us = self.expiry_us = self.death_us = 0
        self.first_id = 0  # no item that can be leased is known below this id…
        self.first_id_until_s = 0.0  # …and until when that may be believed

    def ids_of(self, numbers: Sequence[int]) -> list[str]:
        """The texts of ids."""
        suffix = self.suffix
        return [f"{number:014x}{suffix}" for number in numbers]

    def in_order(self, texts: Sequence[str]) -> list[int]:
        """The numbers of ids that are ours in one order, so that two servers lock them in one order."""
        return sorted({number for number in self.numbers_of(texts) if number >= 0})

    def apply(self, change: CountChange) -> None:
        """A transaction has committed."""
        self.queued = max(0, self.queued + change.queued)
        self.leased = max(0, self.leased + change.leased)
        self.scheduled = max(0, self.scheduled + change.scheduled)
        self.dying = max(0, self.dying + change.dying)
        self.due_us = earlier(self.due_us, change.due_us)
        self.expiry_us = earlier(self.expiry_us, change.expiry_us)
        self.death_us = earlier(self.death_us, change.death_us)

    def load(self, counts: Sequence[int], moments: tuple[Any, ...]) -> None:
        """Everything, as the database has it."""
        self.read(moments)
        self.queued, self.leased, self.scheduled, self.dying = counts
        self.first_id = 0

    def read(self, row: tuple[Any, ...]) -> None:
        """The exact deadlines and what is dying, from the database."""
        self.due_us, self.expiry_us, self.death_us, self.dying = (number or 0 for number in row)

    def state(self) -> PartitionState:
        """How it stands."""
        if not self.leased and not self.scheduled:
            self.due_us = 0
        if not self.queued:
            self.expiry_us = self.death_us = 0
        return PartitionState(
            self.queued,
            self.leased,
            self.scheduled,
            self.dying,
            self.due_us,
            self.expiry_us,
            self.death_us,
        )


def earlier(one_us: int, other_us: int) -> int:
    """The earlier of two moments; 0 is none."""
    return min(one_us, other_us) if one_us and other_us else one_us or other_us
