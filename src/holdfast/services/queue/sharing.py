"""Keeping up with other servers on a shared storage: their hints, and a poll behind them that needs no hint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.errors import HoldfastError
from holdfast.ports.queues import Storage
from holdfast.services.queue.manager import QueueManager
from holdfast.telemetry.events import emit

POLL_S = 0.5


@asynccontextmanager
async def keep_up(manager: QueueManager) -> AsyncIterator[None]:
    """While this is open, changes made by other servers arrive here within a second."""
    if not manager.shared:
        yield
        return
    tasks = [asyncio.create_task(_follow_catalog(manager), name="catalog poll")]
    tasks += [
        asyncio.create_task(_follow(manager, storage), name="storage hints")
        for storage in manager.storages.values()
        if storage.abilities.shared
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow_catalog(manager: QueueManager) -> None:
    seen = -1
    stale = manager.hinted_catalog()
    while True:
        try:
            version = await manager.catalog.version()
            if version != seen or stale.is_set():
                stale.clear()
                await manager.refresh()
                seen = version
        except HoldfastError as error:
            emit("catalog.failed", error=error.message)
        manager.poll()
        try:
            await asyncio.wait_for(stale.wait(), POLL_S)
        except TimeoutError:
            continue


async def _follow(manager: QueueManager, storage: Storage) -> None:
    while True:
        try:
            await storage.watch(manager.hint)
        except HoldfastError as error:
            emit("catalog.failed", error=error.message)
        await asyncio.sleep(POLL_S)
