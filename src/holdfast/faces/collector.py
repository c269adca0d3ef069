"""`holdfast.Collector`: gather a large result that arrives as numbered messages, in your own program.

```python
async with holdfast.Collector("sqlite:///work") as collector:
    result = await collector.start(b"all orders of May", producer="reports", notify="done", series=["orders"])
    await collector.wait(result.id)
    async for part in collector.parts(result.id, "orders"): ...
```
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

from holdfast.core.collect import SeriesState, Transaction
from holdfast.core.policy import delay_us
from holdfast.core.requests.results import GapView
from holdfast.errors import Invalid
from holdfast.ports.clock import Clock
from holdfast.services.collect.completion import StoredPart
from holdfast.services.collect.service import CollectService
from holdfast.services.collect.transaction import CollectLimits
from holdfast.services.queue.queues import Queues
from holdfast.wiring import open_collector

UPLOADS_COUNT_MAX = 256


@dataclass(eq=False, repr=False)  # a URL may hold a password
class Collector:
    """State in `url` (sqlite:///…, postgresql://…, memory://), bytes in `blobs` (a folder, s3://…, az://…, gs://…),
    messages over `broker` (amqp://…) or over the embedded queue of `url`; `queues` is one that is open already.

    `quorum` makes quorum queues on RabbitMQ: only for a cluster of three nodes or more.

    Opening it resumes every transaction that was left unfinished. See docs/collector.md for the durations.
    """

    url: str = "sqlite:///holdfast-data"
    _: KW_ONLY
    blobs: str | None = None
    broker: str | None = None
    queues: Queues | None = None
    uploads_max: int = 16
    uploads_bytes_max: int = 64 * 2**20
    lease_timeout: str | float = "30s"
    abandon_after: str | float = "24h"
    gap_after: str | float = "5m"
    keep_blobs: bool = False
    quorum: bool = False
    clock: Clock | None = None

    def __post_init__(self) -> None:
        self._service: CollectService | None = None
        self._opening: AbstractAsyncContextManager[CollectService] = open_collector(
            self.url,
            blobs=self.blobs,
            broker=self.broker,
            queues=self.queues,
            limits=self._limits(),
            clock=self.clock,
            quorum=self.quorum,
        )

    def _limits(self) -> CollectLimits:
        if not 1 <= self.uploads_max <= UPLOADS_COUNT_MAX:
            raise Invalid(f"uploads_max is invalid; {self.uploads_max} is not from 1 to {UPLOADS_COUNT_MAX}")
        abandon_after_us = delay_us(self.abandon_after, what="abandon_after")
        return CollectLimits(
            uploads_max=self.uploads_max,
            uploads_bytes_max=self.uploads_bytes_max,
            lease_us=delay_us(self.lease_timeout, what="lease_timeout"),
            abandon_after_us=abandon_after_us,
            abandon_check_us=max(1, min(60_000_000, abandon_after_us // 4)),
            gap_after_us=delay_us(self.gap_after, what="gap_after"),
            keep_blobs=self.keep_blobs,
        )

    @property
    def service(self) -> CollectService:
        """What runs inside. Raises Invalid while the collector is not open."""
        if self._service is None:
            raise Invalid("collector is not open; use it with 'async with'")
        return self._service

    async def __aenter__(self) -> Self:
        self._service = await self._opening.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._service = None
        await self._opening.__aexit__(*error)

    async def start(
        self,
        request: bytes,
        *,
        producer: str,
        notify: str = "",
        transaction_id: str | None = None,
        series: Sequence[str] | None = None,
    ) -> Transaction:
        """Forward a request and collect its result; the same id again is the same transaction. Raises Invalid."""
        return await self.service.start(
            request, producer=producer, notify=notify, transaction_id=transaction_id, series=series
        )

    async def wait(self, transaction_id: str, *, timeout_s: float | None = None) -> Transaction:
        """Wait until it is completed, failed or abandoned. Raises TryAgain when the time is up first."""
        return await self.service.wait(transaction_id, timeout_s=timeout_s)

    async def find(self, transaction_id: str) -> Transaction:
        """One transaction as it stands. Raises Invalid when there is none."""
        return await self.service.find(transaction_id)

    async def progress(self, transaction_id: str) -> Sequence[SeriesState]:
        """How its series stand."""
        return await self.service.stand(transaction_id)

    async def gaps(self, transaction_id: str) -> Sequence[GapView]:
        """Which ordinals are missing, as ranges, series by series."""
        return await self.service.gaps(transaction_id)

    async def request_missing(self, transaction_id: str) -> int:
        """Ask the producer for what is missing; returns how many ranges."""
        return await self.service.request_missing(transaction_id)

    def parts(self, transaction_id: str, series: str) -> AsyncIterator[StoredPart]:
        """The parts of a series in order, digests verified, up to the first gap."""
        return self.service.parts(transaction_id, series)

    async def abandon(self, transaction_id: str, *, reason: str = "by hand") -> Transaction:
        """Give it up; its queues and index rows go, its blobs too unless `keep_blobs`."""
        return await self.service.abandon(transaction_id, reason=reason)
