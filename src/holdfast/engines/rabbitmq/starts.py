"""The starts of one queue's messages: which attempts ended with their process, or with their connection.

A message is told by its bytes. Of twins it cannot be said which of them was begun, so each start is charged to one.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.message import Delivery
from holdfast.engines.rabbitmq.letters import digest
from holdfast.ports.starts import Starts


class AttemptLog:
    """`charge` when a message came again, `begin` before its handler runs, `end` when it is settled."""

    def __init__(self, starts: Starts, queue: str, *, holds: Callable[[Delivery], bool]) -> None:
        self._starts = starts
        self._queue = queue
        self._holds = holds
        self._of: dict[Delivery, list[int]] = {}

    def charge(self, delivery: Delivery) -> int:
        """How many starts of it nobody has settled; they are its own from now on. Raises StorageFailed."""
        left = self._starts.left(self._queue, digest(delivery.properties, delivery.body))
        # What came on a channel that has ended is the broker's again, and this may be it.
        self._of = {other: numbers for other, numbers in self._of.items() if self._holds(other)}
        taken = {number for numbers in self._of.values() for number in numbers}
        own = [number for number in left if number not in taken]
        if own:
            self._of[delivery] = own
        return len(own)

    def begin(self, delivery: Delivery) -> None:
        """Its handler is about to run. Raises StorageFailed."""
        number = self._starts.begin(self._queue, digest(delivery.properties, delivery.body))
        self._of.setdefault(delivery, []).append(number)

    def leave(self, delivery: Delivery) -> None:
        """It goes back to the queue: what was begun stays written down for whoever gets it next."""
        self._of.pop(delivery, None)

    def end(self, delivery: Delivery) -> None:
        """It is settled."""
        if numbers := self._of.pop(delivery, None):
            self._starts.end(numbers)
