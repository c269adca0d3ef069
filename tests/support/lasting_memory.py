"""Queues in memory that outlive the service over them, as a folder would."""

from __future__ import annotations

from holdfast.engines.sqlite.storage import SqliteStorage
from holdfast.ports.clock import Clock


class LastingMemory(SqliteStorage):
    """Opened again after it was closed, it has the same data; `forget` ends that."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock=clock)
        self._is_begun = False

    async def open(self) -> None:
        if not self._is_begun:
            await super().open()
            self._is_begun = True

    async def close(self) -> None:
        for store in list(self._open):
            await store.close()

    async def forget(self) -> None:
        """Its data are gone."""
        await super().close()
