"""URL → engine, and everything put together by hand. The only module, with `testing`, that imports engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from holdfast.engines.memory.storage import MemoryStorage
from holdfast.engines.sqlite.storage import OPEN_FILES_COUNT_MAX, SqliteStorage
from holdfast.errors import CannotStart
from holdfast.ports.broker import Broker
from holdfast.ports.clock import Clock, Timer
from holdfast.ports.queues import Storage
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.changes import places_by
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.methods import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.queue.sharing import keep_up

if TYPE_CHECKING:
    from holdfast.services.topology import Topologies


class SystemClock:
    """The machine's clock. `HOLDFAST_CLOCK_OFFSET_S` shifts it, to prove that two servers' clocks may differ."""

    def __init__(self) -> None:
        self._offset_us = int(float(os.environ.get("HOLDFAST_CLOCK_OFFSET_S", "0")) * 1_000_000)

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._offset_us

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0, delay_us) / 1_000_000, callback)


def open_storage(url: str, *, name: str, clock: Clock, open_files_max: int) -> Storage:
    """The engine that a URL names; raises CannotStart."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryStorage(clock)
    if parts.scheme == "sqlite":
        if parts.netloc or not parts.path.strip("/"):
            raise CannotStart(
                f"storage URL is invalid; '{url}' names no folder, use sqlite:///relative or sqlite:////absolute"
            )
        # sqlite:///x is relative, sqlite:////x absolute: the first slash only ends the empty host.
        return SqliteStorage(Path(unquote(parts.path[1:])), clock=clock, open_files_max=open_files_max)
    if parts.scheme in {"postgresql", "postgres"}:
        # In earnest deadlines are the database's: several servers, whose clocks differ, must agree on them.
        from holdfast.engines.postgres.storage import PostgresStorage

        return PostgresStorage(url, name=name, clock=None if isinstance(clock, SystemClock) else clock)
    known = "sqlite:///FOLDER, postgresql://…, memory://"
    raise CannotStart(f"storage URL is invalid; '{parts.scheme or url}' is not known here, use one of {known}")


@asynccontextmanager
async def open_service(
    storages: Mapping[str, str],
    *,
    affinities: Mapping[str, float] | None = None,
    clock: Clock | None = None,
    open_files_max: int = OPEN_FILES_COUNT_MAX,
) -> AsyncIterator[QueueService]:
    """The queue service over named storages; the first holds the catalog."""
    time_source = clock or SystemClock()
    engines = {
        name: open_storage(url, name=name, clock=time_source, open_files_max=open_files_max)
        for name, url in storages.items()
    }
    manager = QueueManager(engines, clock=time_source)
    try:
        await manager.open()
    except BaseException:
        await manager.close()
        raise
    service = QueueService(manager, places=places_by(affinities or dict.fromkeys(storages, 1.0)))
    async with keep_up(manager):
        try:
            yield service
        finally:
            await manager.close()


@asynccontextmanager
async def open_queues(url: str = "sqlite:///holdfast-data", *, clock: Clock | None = None) -> AsyncIterator[Queues]:
    """Queues in this process: `async with holdfast.open("sqlite:///work") as queues:`."""
    async with open_service({"default": url}, clock=clock) as service:
        yield Queues(service)


@asynccontextmanager
async def open_queue_broker(url: str, *, clock: Clock | None = None) -> AsyncIterator[QueueBroker]:
    """The embedded queue, for consumers in this process."""
    time_source = clock or SystemClock()
    async with open_queues(url, clock=time_source) as queues:
        yield QueueBroker(queues, clock=time_source)


@asynccontextmanager
async def open_rabbit_broker(url: str, *, clock: Clock, management: str | None) -> AsyncIterator[Broker]:
    """RabbitMQ, for consumers. Raises BrokerError when it cannot be reached."""
    from holdfast.engines.rabbitmq.broker import RabbitBroker

    async with RabbitBroker(url, clock=clock, management=management) as broker:
        yield broker


@asynccontextmanager
async def open_topology(url: str, *, management: str | None = None) -> AsyncIterator[Topologies]:
    """The topology of the virtual host that an amqp:// URL names; `management` is the address of the broker's API."""
    from holdfast.engines.rabbitmq.topology import RabbitTopology
    from holdfast.services.topology import Topologies

    async with RabbitTopology(url, management=management) as broker:
        yield Topologies(broker)
