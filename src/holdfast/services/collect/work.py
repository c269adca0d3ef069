"""What everybody who works on one transaction shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from holdfast.core.collect import SeriesStand, Transaction, queue_names
from holdfast.ports.blobs import Blobs
from holdfast.ports.collect import CollectStore, Transport
from holdfast.services.collect.limits import Limits
from holdfast.services.collect.patience import Patience
from holdfast.telemetry.events import emit


class Tools:
    """The collector's means; `uploads` is shared by all its transactions."""

    def __init__(self, store: CollectStore, transport: Transport, blobs: Blobs, *, limits: Limits) -> None:
        self.store = store
        self.transport = transport
        self.blobs = blobs
        self.limits = limits
        self.uploads = asyncio.Semaphore(limits.uploads_max)


class Work:
    """One transaction that is ours, under one fence."""

    def __init__(self, tools: Tools, transaction: Transaction, *, on_move: Callable[[], None] = lambda: None) -> None:
        self.on_move = on_move
        self.tools = tools
        self.transaction = transaction
        self.id = transaction.id
        self.fence = transaction.fence
        self.header_queue, self.payload_queue = queue_names(transaction.id)
        self.patience = Patience(transaction.id, tools.limits)
        self.stand: Mapping[str, SeriesStand] = {}
        self.progress_s = time.monotonic()

    def learn(self, stand: Mapping[str, SeriesStand]) -> None:
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
