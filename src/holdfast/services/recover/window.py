"""How many letters fit into the window, by their size so far."""

from __future__ import annotations

from holdfast.core.recovery import Limits

#: At first the sizes of the letters are not known: the prefetch is widened when they are.
CAPACITY_COUNT_FIRST = 100


class Window:
    """`came` for every letter."""

    def __init__(self, limits: Limits) -> None:
        self._count_max = limits.window_count_max
        self._bytes_max = limits.window_bytes_max
        self._count = self._bytes = 0

    def came(self, size_bytes: int) -> None:
        """A letter of this size."""
        self._count += 1
        self._bytes += size_bytes

    @property
    def fits_count(self) -> int:
        """At least one, however large."""
        if not self._count:
            return min(CAPACITY_COUNT_FIRST, self._count_max)
        return min(self._count_max, max(1, self._bytes_max * self._count // max(1, self._bytes)))
