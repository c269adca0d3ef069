"""Quorum queues that were just declared.

A broker of a single node that is killed forgets a quorum queue that is younger than about a second, with everything
that it has confirmed in it (it writes down the names of its queues twice a second). So whoever declares one lets it
grow that old before anybody relies on it.
"""

from __future__ import annotations

import asyncio

GROWN_S = 1.5


class YoungQueues:
    """`born` for each quorum queue that was made; `grown` returns when the youngest is old enough."""

    def __init__(self) -> None:
        self._born_at_s: float | None = None

    def born(self) -> None:
        """A quorum queue was made now."""
        self._born_at_s = asyncio.get_running_loop().time()

    async def grown(self) -> None:
        """Wait, where there is something to wait for."""
        if self._born_at_s is not None:
            await asyncio.sleep(self._born_at_s + GROWN_S - asyncio.get_running_loop().time())
            self._born_at_s = None
