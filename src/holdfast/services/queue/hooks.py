"""What a queue and its manager tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ports.queues import DeathRules, Ended, MoveTarget, SentBack

if TYPE_CHECKING:
    from holdfast.services.queue.logical import LogicalQueue


class Hooks:
    """What a queue tells its manager. Replaced by the manager; alone, a queue tells nobody."""

    def mortality(self, queue: LogicalQueue) -> DeathRules:
        """By which rules its items die now."""
        return DeathRules(max_attempts=queue.record.max_attempts)

    def ended(self, queue: LogicalQueue, ended: Ended) -> None:
        """Items were marked as dying, moved or deleted."""

    def redriven(self, queue: LogicalQueue, target: MoveTarget, redriven: SentBack) -> None:
        """Items go back to the queue that they died in."""

    def loaded(self, queue: LogicalQueue) -> None:
        """A storage was read anew: items may be dying of which nobody was told."""

    def failed(self, queue: LogicalQueue) -> None:
        """A commit failed, as far as is known: on a shared storage it may have moved items to other queues."""

    def missing(self, queue: LogicalQueue) -> None:
        """The store says that the queue is gone or was made anew."""


class InFlight:
    """How many requests are being served in the whole process: alone, one is served without a thread."""

    def __init__(self) -> None:
        self.count = 0
        self.lone_count = 0  # requests in a row that had no company
