"""How many letters the broker may still send, so that it never sends more than are wanted. Pure.

A letter that is delivered and not wanted has to be given back, which counts as a return on a quorum queue, and puts it
behind newer ones on RabbitMQ 3. The broker sends up to the prefetch, and one more for every ack: so near the end acks
wait until the last wanted letter has come. By then nobody consumes any more, and they can go.
"""

from __future__ import annotations


class DeliveryBudget:
    """Of one channel: `capacity_count` is what its consumers may have unacked, `wanted_count` how many are to come."""

    def __init__(self) -> None:
        self.capacity_count = 0
        self.wanted_count: int | None = None  #: beside those that were taken; None: whatever there is

    def need_count(self, ready_count: int) -> int | None:
        """How many more are to be delivered, when so many are here and not taken yet."""
        return None if self.wanted_count is None else max(0, self.wanted_count - ready_count)

    def taken(self, count: int) -> None:
        """So many were taken; whether each was one of those wanted is said later."""
        if self.wanted_count is not None:
            self.wanted_count = max(0, self.wanted_count - count)

    def widened_by(self, capacity_count: int, *, unacked_count: int, ready_count: int) -> int:
        """By how much the prefetch may grow towards `capacity_count`."""
        more = capacity_count - self.capacity_count
        need = self.need_count(ready_count)
        return more if need is None else min(more, need - self._room_count(unacked_count))

    def acks_count_max(self, *, unacked_count: int, ready_count: int) -> int | None:
        """How many acks may be sent now; None: all. `unacked_count` is the broker's: acks that wait are in it."""
        need = self.need_count(ready_count)
        if need is None or not self.capacity_count:
            return None
        return max(0, need - self._room_count(unacked_count))

    def _room_count(self, unacked_count: int) -> int:
        """What the broker may send without another ack."""
        return max(0, self.capacity_count - unacked_count)
