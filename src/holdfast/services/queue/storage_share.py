"""A queue's share of one storage: its partitions, how they stand, and whether the storage can be used at present.

A share runs one commit at a time. After a failure it is set aside, loads its state anew with back-off, and comes
back. It knows nothing of requests; `waiting.py` decides what goes into a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.core.moments import NEVER_US, SECOND_US, Backoff
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.queue_store import Committed, DeathRules, Operation, PartitionState, QueueStore, StorageAbilities

BACKOFF = Backoff(first_s=0.1, delay_s_max=30.0)
#: A commit slower than this is not made on the event loop's thread, even for a lone request.
INLINE_COMMIT_US_MAX = 2_000


class StorageShare:
    """The partitions of one queue in one storage."""

    def __init__(
        self, *, storage: str, partitions: Sequence[int], store: QueueStore, abilities: StorageAbilities, clock: Clock
    ) -> None:
        self.storage = storage
        self.partitions = tuple(partitions)
        self.store = store
        self.abilities = abilities
        self.clock = clock
        self.states: dict[int, PartitionState] = {partition: PartitionState() for partition in partitions}
        self.loaded = False
        self.healthy = False  # loaded, and the last commit did not fail
        self.busy = False  # a commit or a load runs
        self.failures = 0
        self.retry_at_us = 0
        #: Partitions whose deadlines are looked at with the next commit: more may be due there than they say.
        self.due_again: set[int] = set()
        #: Nothing is due before this moment of ours, by whatever rules; NEVER_US when there is no deadline.
        self.soonest_us = NEVER_US
        self._hinted = set(partitions)  # on a shared storage: where others may have added items since our last look
        self._dry: dict[int, int] = {}  # partitions that had so many items and none that could be leased
        self._clock_ahead_us = 0  # the store's clock minus ours; a storage that nobody shares goes by ours
        self._commit_us = 0.0
        self._is_quick = abilities.inline

    # --- the store --------------------------------------------------------------------------------------------

    def commits_inline(self) -> bool:
        """Whether a commit would be made at once, on the calling thread."""
        return self._is_quick and self.store.can_commit_inline()

    def serves_inline(self, rules: Callable[[], DeathRules]) -> bool:
        """Whether the same is true of a request, because nothing is due before it."""
        return self._is_quick and not self.due_partitions(rules) and self.store.can_commit_inline()

    async def load(self) -> None:
        """Read the state from the store; raises StorageFailed or QueueMissing."""
        started_us = self.clock.now_us() if self.abilities.shared else 0
        self.busy = True
        try:
            committed = await self.store.load()
        finally:
            self.busy = False
        self._learn(committed, started_us)
        self.loaded = self.healthy = True
        self.failures = 0
        self.look_again()

    async def commit(self, operations: Sequence[Operation], *, alone: bool) -> Committed:
        """One commit; raises StorageFailed or QueueMissing."""
        inline = alone and self._is_quick
        started_us = self.clock.now_us() if self.abilities.shared else 0
        self.busy = True
        try:
            committed = await self.store.commit(operations, inline=inline)
        finally:
            self.busy = False
        self._learn(committed, started_us)
        # A short memory: one slow sync sends the next requests to a thread, quick ones bring them back. A thread also
        # waits for the interpreter: a commit in one was never slower than it seems, and may have been quicker.
        recent_us = 0.7 * self._commit_us + 0.3 * committed.took_us
        self._commit_us = recent_us if inline else min(recent_us, committed.took_us)
        self._is_quick = self.abilities.inline and self._commit_us < INLINE_COMMIT_US_MAX
        return committed

    def _learn(self, committed: Committed, started_us: int) -> None:
        """How the partitions stand now."""
        self.states.update(committed.states)
        if started_us:
            # The store looked at its clock at some moment since we asked. Only what that cannot explain is a
            # difference: a commit that took a minute must not make every deadline a minute late.
            now_us, store_us = self.clock.now_us(), committed.now_us
            self._clock_ahead_us = max(store_us - now_us, min(0, store_us - started_us))
        soonest_us = NEVER_US
        for state in self.states.values():
            for moment_us in (state.next_due_us, state.next_expiry_us, state.oldest_death_us):
                if 0 < moment_us < soonest_us:
                    soonest_us = moment_us
        self.soonest_us = soonest_us - self._clock_ahead_us

    def set_aside(self, error: HoldfastError) -> StorageFailed:
        """Use the share no more until it has been loaded again; returns what its requests are answered with."""
        self.healthy = False
        self.failures += 1
        self.retry_at_us = self.clock.now_us() + int(BACKOFF.delay_s(self.failures - 1) * SECOND_US)
        if isinstance(error, StorageFailed):
            return error
        return StorageFailed(f"storage failed; {error.message}")

    # --- deadlines --------------------------------------------------------------------------------------------

    def due_partitions(self, rules: Callable[[], DeathRules]) -> list[int]:
        """Partitions with a deadline that has passed by the store's clock, or that are to be looked at again."""
        now_us = self.clock.now_us()
        if now_us < self.soonest_us and not self.due_again:
            return []
        now_us, by = now_us + self._clock_ahead_us, rules()
        due = [p for p, state in self.states.items() if 0 < _due_us(state, by) <= now_us]
        due.extend(self.due_again.difference(due))
        return due

    def next_due_us(self, rules: DeathRules) -> int:
        """Our moment of the next deadline of the share; 0 if there is none."""
        moments = [due_us for state in self.states.values() if (due_us := _due_us(state, rules))]
        return min(moments) - self._clock_ahead_us if moments else 0

    def look_again(self) -> None:
        """Look at deadlines and items anew: something changed of which nobody was told."""
        self.hint(self.partitions)
        self.due_again.update(self.partitions)

    def carries_out_due(self, partition: int) -> None:
        """The next commit carries out what is due there; items that it brings can be leased after it."""
        self._dry.pop(partition, None)
        self.due_again.discard(partition)

    # --- leases -----------------------------------------------------------------------------------------------

    def hint(self, partitions: Iterable[int]) -> None:
        """Others may have added items there: the next lease asks the store, whatever was counted here."""
        self._hinted.update(partitions)

    def asks(self, partition: int) -> None:
        """The next commit leases there; the other hinted ones are asked next, if somebody still waits."""
        self._hinted.discard(partition)

    def gave_nothing(self, partition: int) -> None:
        """A lease found nothing there that could be leased."""
        self._dry[partition] = self.states[partition].queued

    def available(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Partitions that have something to lease, or else those that may have. One that gave nothing, though it has
        items, gives nothing until something changes there."""
        known = {p: count for p, count in counts.items() if count > 0 and self._dry.get(p) != count}
        if known or not self.abilities.shared:
            return known
        return {p: 1 for p, count in counts.items() if count <= 0 and p in self._hinted}

    def un_leased(self) -> dict[int, int]:
        """Un-leased items by partition."""
        return {partition: state.queued for partition, state in self.states.items()}


def _due_us(state: PartitionState, rules: DeathRules) -> int:
    """The nearest moment at which something is to be done by these rules; 0 if there is none."""
    other_us = 0
    if not rules.immortal:
        other_us = state.next_expiry_us
    elif rules.retention_us and state.oldest_death_us:
        other_us = state.oldest_death_us + rules.retention_us
    if state.next_due_us and other_us:
        return min(state.next_due_us, other_us)
    return state.next_due_us or other_us
