"""Which messages a handler has begun and nobody has settled, kept where the end of a process does not reach.

A classic queue of RabbitMQ says that a message came before, and neither how often nor whether a handler ever saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Starts(Protocol):
    """One entry for each start. Several processes of one machine may share it."""

    def begin(self, queue: str, key: bytes) -> int:
        """A handler is about to run; the number of this start. Raises StorageFailed: then it must not run."""

    def end(self, numbers: Iterable[int]) -> None:
        """Their message is settled: they are forgotten, soon."""

    def left(self, queue: str, key: bytes) -> Sequence[int]:
        """The starts of such a message that were not ended, oldest first. Raises StorageFailed."""

    def close(self) -> None:
        """Forget what was ended, and let go of the store."""
