"""Doing a thing until it works: what fails for now is tried again, with growing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.errors import BrokerError, NotOurs, ShuttingDown, TryAgain, Unreachable
from holdfast.services.collect.limits import CollectLimits
from holdfast.telemetry.events import emit

T = TypeVar("T")

#: What another attempt may cure.
FOR_NOW = (TryAgain, Unreachable, BrokerError, ShuttingDown)


class Retrier:
    """The waits of one transaction."""

    def __init__(self, transaction: str, limits: CollectLimits) -> None:
        self._transaction = transaction
        self._limits = limits

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat while it fails for now; everything else is raised."""
        failures = 0
        while True:
            try:
                return await work()
            except FOR_NOW as error:
                failures += 1
                await self.wait(error, failures)

    async def wait(self, error: Exception, failures: int) -> None:
        """Say what is wrong and wait, the longer the more often it was."""
        emit("collect.waits", transaction=self._transaction, error=str(error))
        await asyncio.sleep(min(self._limits.backoff_s_max, self._limits.backoff_s_first * 2 ** min(failures, 16)))

    async def settle(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Settle a message; false when it is the broker's again and comes a second time."""
        try:
            await self.until_done(work)
        except NotOurs:
            return False
        return True
