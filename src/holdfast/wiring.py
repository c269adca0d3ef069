"""URL → engine, and everything put together by hand. The only module, with `testing`, that imports engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from holdfast.core.moments import format_duration, moment
from holdfast.engines.memory.storage import MemoryStorage
from holdfast.engines.sqlite.storage import OPEN_FILES_COUNT_MAX, SqliteStorage
from holdfast.errors import BadUrl, CannotStart
from holdfast.ports.blobs import Blobs
from holdfast.ports.broker import Broker
from holdfast.ports.clock import Clock, Timer
from holdfast.ports.collect import CollectStore, Transport
from holdfast.ports.queues import Storage
from holdfast.ports.starts import Starts
from holdfast.services.collect.embedded import QueueTransport
from holdfast.services.collect.limits import CollectLimits
from holdfast.services.collect.service import CollectService
from holdfast.services.collect.work import CollectContext
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.changes import places_by
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.methods import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.queue.sharing import keep_up
from holdfast.settings.values import masked

if TYPE_CHECKING:
    from holdfast.core.redrive import RedriveStamp
    from holdfast.core.routes import RouteTable
    from holdfast.core.topology_file import TopologyFile
    from holdfast.engines.folder.backup import FileBackup
    from holdfast.engines.folder.journal import FileJournal
    from holdfast.ports.recovery import DeadLetters, Exported
    from holdfast.services.topology import Topologies

#: Where a SQLite storage keeps what the collector knows.
COLLECT_FOLDER = "collect"


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
            raise BadUrl(
                f"storage URL is invalid; '{url}' names no folder, use sqlite:///relative or sqlite:////absolute"
            )
        # sqlite:///x is relative, sqlite:////x absolute: the first slash only ends the empty host.
        return SqliteStorage(Path(unquote(parts.path[1:])), clock=clock, open_files_max=open_files_max)
    if parts.scheme in {"postgresql", "postgres"}:
        # In earnest deadlines are the database's: several servers, whose clocks differ, must agree on them.
        from holdfast.engines.postgres.storage import PostgresStorage

        return PostgresStorage(url, name=name, clock=None if isinstance(clock, SystemClock) else clock)
    known = "sqlite:///FOLDER, postgresql://…, memory://"
    raise BadUrl(f"storage URL is invalid; '{parts.scheme or url}' is not known here, use one of {known}")


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
async def open_rabbit_broker(
    url: str, *, clock: Clock, management: str | None, topology: TopologyFile | None = None, store: str | None = None
) -> AsyncIterator[Broker]:
    """RabbitMQ, for consumers; `store` is a folder (sqlite:///…) that keeps which messages were begun.

    Raises BrokerError when it cannot be reached, CannotStart when the store cannot be opened.
    """
    from holdfast.engines.rabbitmq.broker import RabbitBroker

    starts = open_starts(store, clock=clock) if store else None
    try:
        async with RabbitBroker(url, clock=clock, management=management, topology=topology, starts=starts) as broker:
            yield broker
    finally:
        if starts is not None:
            starts.close()


def open_starts(url: str, *, clock: Clock) -> Starts:
    """Which messages were begun and not settled, in a folder of this machine. Raises CannotStart."""
    from holdfast.engines.sqlite.starts import SqliteStarts

    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        raise CannotStart(f"store of starts is invalid; '{masked(url)}' is not sqlite:///FOLDER")
    return SqliteStarts(Path(unquote(parts.path[1:])), clock=clock)


@asynccontextmanager
async def open_topology(url: str, *, management: str | None = None) -> AsyncIterator[Topologies]:
    """The topology of the virtual host that an amqp:// URL names; `management` is the address of the broker's API."""
    from holdfast.engines.rabbitmq.topology import RabbitTopology
    from holdfast.services.topology import Topologies

    async with RabbitTopology(url, management=management) as broker:
        yield Topologies(broker)


def open_collect_store(url: str, *, clock: Clock) -> CollectStore:
    """State and index of collected results: in the folder of a SQLite storage, in PostgreSQL, or in memory."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.strip("/"):
        from holdfast.engines.sqlite.collect import SqliteCollectStore

        return SqliteCollectStore(Path(unquote(parts.path[1:])) / COLLECT_FOLDER, clock=clock)
    if parts.scheme in {"postgresql", "postgres"}:
        from holdfast.engines.postgres.collect import PostgresCollectStore

        return PostgresCollectStore(url)
    if parts.scheme == "memory":
        from holdfast.engines.memory.collect import MemoryCollectStore

        return MemoryCollectStore(clock=clock)
    raise BadUrl(f"collector URL is invalid; '{masked(url)}' is not sqlite:///FOLDER, postgresql://… or memory://")


@asynccontextmanager
async def open_blobs(url: str) -> AsyncIterator[Blobs]:
    """A folder (a path, or file:///…), or a bucket: s3://, az://, gs:// with an optional prefix. Raises CannotStart."""
    scheme = urlsplit(url).scheme
    if scheme in {"s3", "az", "gs"}:
        from holdfast.engines.objects.blobs import open_object_blobs

        async with open_object_blobs(url) as objects:
            yield objects
        return
    if scheme not in {"", "file"}:
        raise BadUrl(f"blob URL is invalid; '{scheme}' is not known here, use a folder, s3://, az:// or gs://")
    from holdfast.engines.folder.blobs import open_folder_blobs

    async with open_folder_blobs(Path(unquote(urlsplit(url).path) if scheme else url)) as folder:
        yield folder


def default_blobs(url: str) -> str | None:
    """Beside the queues of a SQLite storage; elsewhere it has to be said."""
    parts = urlsplit(url)
    return str(Path(unquote(parts.path[1:])) / "blobs") if parts.scheme == "sqlite" else None


def has_collector(url: str) -> bool:
    """Whether a SQLite storage has collected before: then there may be something to resume."""
    parts = urlsplit(url)
    return parts.scheme == "sqlite" and (Path(unquote(parts.path[1:])) / COLLECT_FOLDER / "collect.db").exists()


@asynccontextmanager
async def open_collector(
    url: str,
    *,
    blobs: str | None = None,
    broker: str | None = None,
    queues: Queues | None = None,
    limits: CollectLimits | None = None,
    clock: Clock | None = None,
    quorum: bool = False,
) -> AsyncIterator[CollectService]:
    """The collector: state in `url`, bytes in `blobs`, messages over `broker` (amqp://…) or the embedded queue.

    `queues` are the queues of a service that is open already. Raises CannotStart.
    """
    place = blobs or default_blobs(url)
    if place is None:
        raise CannotStart(f"blobs are not configured; with '{masked(url)}' say where: a folder, s3://, az:// or gs://")
    time_source, settings = clock or SystemClock(), limits or CollectLimits()
    async with AsyncExitStack() as stack:
        if broker is not None:
            from holdfast.engines.rabbitmq.collect import RabbitTransport

            transport: Transport = await stack.enter_async_context(
                RabbitTransport(broker, clock=time_source, quorum=quorum)
            )
        else:
            if queues is None:
                queues = await stack.enter_async_context(open_queues(url, clock=time_source))
            lease_timeout = format_duration(settings.lease_us)
            transport = QueueTransport(queues, clock=time_source, lease_timeout=lease_timeout)
        store = open_collect_store(url, clock=time_source)
        await store.open()
        stack.push_async_callback(store.close)
        tools = CollectContext(store, transport, await stack.enter_async_context(open_blobs(place)), limits=settings)
        yield await stack.enter_async_context(CollectService(tools).running())


@asynccontextmanager
async def open_dead_letters(
    url: str,
    redrive: RedriveStamp,
    table: RouteTable,
    *,
    clock: Clock | None = None,
    management: str | None = None,
    window_bytes_max: int,
) -> AsyncIterator[DeadLetters]:
    """A dead-letter queue of RabbitMQ, for a recovery. Raises BrokerError when the broker cannot be reached."""
    from msgspec.structs import replace

    from holdfast.engines.rabbitmq.address import BrokerUrl
    from holdfast.engines.rabbitmq.dead_letters import RabbitDeadLetters
    from holdfast.engines.rabbitmq.recovery_lock import default_management
    from holdfast.engines.rabbitmq.redriver import Redriver

    time_source = clock or SystemClock()
    address = BrokerUrl.parse(url)
    known = replace(redrive, user=address.login.user, is_wait_queue=table.is_wait_queue)
    redriver = Redriver(known, table, now=lambda: moment(time_source.now_us()))
    letters = RabbitDeadLetters(
        address,
        redrive.dead_queue,
        redriver,
        management=management or default_management(address),
        window_bytes_max=window_bytes_max,
    )
    try:
        await letters.connect()
        yield letters
    finally:
        await letters.close()


def recovery_source(url: str, dead_queue: str) -> str:
    """A queue of a broker in words, without any login: what a journal belongs to."""
    from holdfast.engines.rabbitmq.address import BrokerUrl

    address = BrokerUrl.parse(url)
    hosts = ",".join(f"{host}:{port}" for host, port in address.hosts)
    return f"queue '{dead_queue}' in '{address.login.vhost}' at {hosts}"


def open_journal(path: Path | None, *, source: str, run: str, usual: Path, others: Sequence[Path]) -> FileJournal:
    """The journal of a recovery, which also ends what killed runs left at other places. Raises CannotStart."""
    from holdfast.engines.folder.journal import FileJournal

    return FileJournal.open(path, source=source, run=run, usual=usual, others=others)


@contextmanager
def open_backup(path: Path) -> Iterator[FileBackup]:
    """A backup to write letters to. Raises CannotStart."""
    from holdfast.engines.folder.backup import FileBackup

    backup = FileBackup(path)
    try:
        yield backup
    finally:
        backup.close()


def backup_letters(path: Path) -> Iterator[Exported]:
    """The letters of a backup. Raises CannotStart, and Invalid at a damaged line."""
    from holdfast.engines.folder.backup import read_backup

    return read_backup(path)
