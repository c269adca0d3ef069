"""How many letters fit into the window, by their size so far."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.recovery import RunLimits
from holdfast.ports.recovery import RunLetter

#: At first the sizes of the letters are not known: the prefetch is widened when they are.
CAPACITY_COUNT_FIRST = 100


class Window:
    """`came` for all letters."""

    def __init__(self, limits: RunLimits) -> None:
        self._count_max = limits.window_count_max
        self._bytes_max = limits.window_bytes_max
        self._count = self._bytes = 0

    def came(self, letters: Sequence[RunLetter]) -> None:
        """These came."""
        self._count += len(letters)
        self._bytes += sum([letter.size_bytes for letter in letters])

    @property
    def fits_count(self) -> int:
        """At least one, however large."""
        if not self._count:
            return min(CAPACITY_COUNT_FIRST, self._count_max)
        return min(self._count_max, max(1, self._bytes_max * self._count // max(1, self._bytes)))
