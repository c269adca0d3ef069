"""A bounded number of connections, shared by all queues of a storage. A connection that failed is never used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.engines.postgres.link import PipelineConnection
from holdfast.errors import StorageFailed


class Pool:
    """Connections to one database, made when they are needed."""

    def __init__(self, url: str, *, place: str, connections_max: int) -> None:
        self._url = url
        self._place = place
        self._free = asyncio.Semaphore(connections_max)
        self._idle: list[PipelineConnection] = []
        self._closed = False

    @asynccontextmanager
    async def link(self) -> AsyncIterator[PipelineConnection]:
        """A connection for this caller alone; raises StorageFailed. Whatever is raised inside, it is closed."""
        async with self._free:
            link = await self._take()
            try:
                yield link
            except BaseException:
                # Its state is unknown, and its idle sisters may have lost the same server.
                await link.close()
                await self._close_unusable()
                raise
            if self._closed or not link.usable:
                await link.close()
            else:
                self._idle.append(link)

    async def _take(self) -> PipelineConnection:
        if self._closed:
            raise StorageFailed(f"storage failed; {self._place} is closed")
        while self._idle:
            link = self._idle.pop()
            if link.usable:
                return link
            await link.close()
        return await PipelineConnection.open(self._url, place=self._place)

    async def _close_unusable(self) -> None:
        for link in [link for link in self._idle if not link.usable]:
            self._idle.remove(link)
            await link.close()

    def open(self) -> None:
        """Give out connections (again)."""
        self._closed = False

    async def close(self) -> None:
        """Close what is idle; what is in use is closed by its user."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()
