"""A queue's share of one storage: its partitions, how they stand, and whether the storage can be used at present.

A lane runs one commit at a time. After a failure it is set aside, loads its state anew with back-off, and comes
back. It knows nothing of requests; `logical.py` decides what goes into a batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import Committed, DeathRules, Operation, PartitionState, QueueStore, StorageAbilities

if TYPE_CHECKING:
    from holdfast.services.queue.waiting import WaitingOperation

BACKOFF_US_FIRST = 100_000
BACKOFF_US_MAX = 30_000_000
#: A commit slower than this is not made on the event loop's thread, even for a lone request.
INLINE_COMMIT_US_MAX = 2_000


class StorageShare:
    """The partitions of one queue in one storage."""

    def __init__(
        self, *, storage: str, partitions: Sequence[int], shelves: QueueStore, abilities: StorageAbilities, clock: Clock
    ) -> None:
        self.storage = storage
        self.partitions = tuple(partitions)
        self.shelves = shelves
        self.abilities = abilities
        self.clock = clock
        self.shapes: dict[int, PartitionState] = {partition: PartitionState() for partition in partitions}
        self.bound: list[WaitingOperation] = []
        self.loaded = False
        self.busy = False
        self.failures = 0
        self.retry_at_us = 0
        self.hinted = set(partitions)  # on a shared storage: where others may have added items since our last look
        self.due_more: set[int] = set()
        self.dry: dict[int, int] = {}  # partitions that had so many items and none that could be leased
        self._clock_ahead_us = 0  # the store's clock minus ours
        self._commit_us = 0.0

    @property
    def healthy(self) -> bool:
        """Loaded, and the last commit did not fail."""
        return self.loaded and self.failures == 0

    def commits_inline(self) -> bool:
        """Whether a commit would be made at once, on the calling thread."""
        return self.abilities.inline and self._commit_us < INLINE_COMMIT_US_MAX and self.shelves.can_commit_inline()

    async def load(self) -> None:
        """Read the state from the store; raises StorageFailed or QueueMissing."""
        started_us = self.clock.now_us()
        self._take_over(await self.shelves.load(), started_us)
        self.loaded = True
        self.failures = 0
        self.hinted = set(self.partitions)
        self.due_more = set(self.partitions)

    async def commit(self, operations: Sequence[Operation], *, alone: bool) -> Committed:
        """One commit; raises StorageFailed or QueueMissing."""
        started_us = self.clock.now_us()
        inline = alone and self.commits_inline()
        committed = await self.shelves.commit(operations, inline=inline)
        self._take_over(committed, started_us)
        # A short memory: one slow sync sends the next requests to a thread, quick ones bring them back. A thread also
        # waits for the interpreter: a commit in one was never slower than it seems, and may have been quicker.
        recent_us = 0.7 * self._commit_us + 0.3 * committed.took_us
        self._commit_us = recent_us if inline else min(recent_us, committed.took_us)
        return committed

    def _take_over(self, committed: Committed, started_us: int) -> None:
        """How the partitions stand now."""
        self.shapes.update(committed.shapes)
        now_us, store_us = self.clock.now_us(), committed.now_us
        # The store looked at its clock at some moment since we asked. Only what that cannot explain is a difference:
        # a commit that took a minute must not make every deadline a minute late.
        self._clock_ahead_us = (
            0 if started_us <= store_us <= now_us else max(store_us - now_us, min(0, store_us - started_us))
        )

    def set_aside(self, error: HoldfastError) -> StorageFailed:
        """Use the lane no more until it has been loaded again; returns what its requests are answered with."""
        self.failures += 1
        backoff_us = min(BACKOFF_US_MAX, BACKOFF_US_FIRST * 2 ** min(self.failures - 1, 16))
        self.retry_at_us = self.clock.now_us() + int(backoff_us * random.uniform(0.5, 1.0))  # noqa: S311
        if isinstance(error, StorageFailed):
            return error
        return StorageFailed(f"storage failed; {error.message}")

    def due_partitions(self, mortality: DeathRules) -> list[int]:
        """Partitions with a deadline that has passed by the store's clock."""
        now_us = self.clock.now_us() + self._clock_ahead_us
        due = [p for p, shape in self.shapes.items() if 0 < shape.due_us(mortality) <= now_us]
        if self.due_more:
            due.extend(self.due_more.difference(due))
        return due

    def next_due_us(self, mortality: DeathRules) -> int:
        """Our moment of the next deadline of the lane; 0 if there is none."""
        moments = [due_us for shape in self.shapes.values() if (due_us := shape.due_us(mortality))]
        return min(moments) - self._clock_ahead_us if moments else 0

    def available(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Partitions that may have something to lease. One that gave nothing, though it has items, gives nothing until
        something changes there."""
        return {p: count for p, count in counts.items() if count > 0 and self.dry.get(p) != count}

    def un_leased(self) -> dict[int, int]:
        """Un-leased items by partition."""
        return {partition: shape.queued for partition, shape in self.shapes.items()}
