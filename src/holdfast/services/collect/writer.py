"""Index writes that wait at the same time go into one commit."""

from __future__ import annotations

import asyncio
from collections import deque

from holdfast.core.collect import Part
from holdfast.errors import HoldfastError
from holdfast.ports.collect import Index, Put

BATCH_COUNT_MAX = 256


class IndexWriter:
    """Writes the parts of one transaction. The first waiter commits for all who came in the meantime."""

    def __init__(self, index: Index, transaction: str, *, fence: int) -> None:
        self._index = index
        self._transaction = transaction
        self._fence = fence
        self._waiting: deque[tuple[Part, asyncio.Future[tuple[Part, Put]]]] = deque()
        self._busy = asyncio.Lock()

    async def put(self, part: Part) -> tuple[Part, Put]:
        """The part that counts for this ordinal, and how everything stands. Raises LeaseLost and StorageFailed."""
        future: asyncio.Future[tuple[Part, Put]] = asyncio.get_running_loop().create_future()
        self._waiting.append((part, future))
        async with self._busy:
            while not future.done():
                await self._commit()
        return future.result()

    async def _commit(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH_COUNT_MAX, len(self._waiting)))]
        try:
            put = await self._index.put_parts(self._transaction, [part for part, _ in batch], fence=self._fence)
        except HoldfastError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # seen: whoever waits for it raises it, unless he was cancelled
            return
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), winner in zip(batch, put.winners, strict=True):
            if not future.done():
                future.set_result((winner, put))
