"""What everybody who works on one transaction shares."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from holdfast.core.collect import SeriesState, Transaction, queue_names
from holdfast.ports.blobs import Blobs
from holdfast.ports.collect import CollectStore, Transport
from holdfast.services.collect.limits import CollectLimits
from holdfast.services.collect.patience import Retrier
from holdfast.telemetry.events import emit


class UploadSlots:
    """So many at a time, taken several at once; whoever came first is served first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Hold so many until the end of the block; at most as many as there are."""
        if self._waiting or self._free < count:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give(count)  # it was our turn already
                self._serve()
                raise
        else:
            self._free -= count
        try:
            yield
        finally:
            self._give(count)

    def _give(self, count: int) -> None:
        self._free += count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()  # cancelled
                continue
            if count > self._free:
                return
            self._waiting.popleft()
            self._free -= count
            turn.set_result(None)


class CollectContext:
    """The collector's means; `uploads` is shared by all its transactions."""

    def __init__(self, store: CollectStore, transport: Transport, blobs: Blobs, *, limits: CollectLimits) -> None:
        self.store = store
        self.transport = transport
        self.blobs = blobs
        self.limits = limits
        self.uploads = UploadSlots(limits.uploads_max)


class OwnedTransaction:
    """One transaction that is ours, under one fence."""

    def __init__(
        self, tools: CollectContext, transaction: Transaction, *, on_move: Callable[[], None] = lambda: None
    ) -> None:
        self.on_move = on_move
        self.tools = tools
        self.transaction = transaction
        self.id = transaction.id
        self.fence = transaction.fence
        self.header_queue, self.payload_queue = queue_names(transaction.id)
        self.patience = Retrier(transaction.id, tools.limits)
        self.stand: Mapping[str, SeriesState] = {}
        self.progress_s = time.monotonic()

    def learn(self, stand: Mapping[str, SeriesState]) -> None:
        """How the series stand as of a commit. Commits are answered in order, so the last one is the newest."""
        self.stand = stand
        self.progress_s = time.monotonic()

    def count_of(self, series: str) -> int | None:
        """How many ordinals a series has, as far as is known."""
        known = self.stand.get(series)
        return None if known is None else known.count

    def parked(self, reason: str) -> None:
        """A message was parked."""
        emit("collect.parked", transaction=self.id, reason=reason)
