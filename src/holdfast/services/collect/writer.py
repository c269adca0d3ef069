"""Index writes that wait at the same time go into one commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from holdfast.core.collect import Part
from holdfast.errors import HoldfastError
from holdfast.ports.collect import Index, PartsStored

BATCH_COUNT_MAX = 256


class _Group:
    """Parts of one caller, until they are committed."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.future: asyncio.Future[tuple[Sequence[Part], PartsStored]] = asyncio.get_running_loop().create_future()


class IndexWriter:
    """Writes the parts of one transaction. The first waiter commits for all who came in the meantime."""

    def __init__(self, index: Index, transaction: str, *, fence: int) -> None:
        self._index = index
        self._transaction = transaction
        self._fence = fence
        self._waiting: deque[_Group] = deque()
        self._busy = asyncio.Lock()

    async def put_all(self, parts: Sequence[Part]) -> tuple[Sequence[Part], PartsStored]:
        """For each the part that counts for its ordinal, and how everything stands. Raises LeaseLost, StorageFailed."""
        group = _Group(parts)
        self._waiting.append(group)
        async with self._busy:
            while not group.future.done():
                await self._commit()
        return group.future.result()

    async def _commit(self) -> None:
        groups = [self._waiting.popleft()]
        count = len(groups[0].parts)
        while self._waiting and count + len(self._waiting[0].parts) <= BATCH_COUNT_MAX:
            groups.append(self._waiting.popleft())
            count += len(groups[-1].parts)
        batch = [part for group in groups for part in group.parts]
        try:
            put = await self._index.put_parts(self._transaction, batch, fence=self._fence)
        except HoldfastError as error:
            for group in groups:
                if not group.future.done():
                    group.future.set_exception(error)
                    group.future.exception()  # seen: whoever waits for it raises it, unless he was cancelled
            return
        except BaseException:
            for group in groups:
                group.future.cancel()
            raise
        winners = iter(put.winners)
        for group in groups:
            own = [next(winners) for _ in group.parts]
            if not group.future.done():
                group.future.set_result((own, put))
