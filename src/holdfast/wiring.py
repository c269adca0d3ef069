"""Puts everything together by hand: a URL names an engine, settings name all that a server or a command works with.

Only this module and `testing` import engines. Each `open_…` is a context that closes what it opened; whoever asks for
one is told by CannotStart, BadUrl or BrokerError why it cannot be had. What is seldom needed is imported when it is.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.checks import unclear_url
from holdfast.core.death import QueueNames, RedriveStamp
from holdfast.core.moments import SECOND_US, format_duration, moment, parse_duration
from holdfast.core.requests.declare import Role
from holdfast.errors import BadUrl, CannotStart, HoldfastError, Invalid, QueueMissing
from holdfast.ports.broker import Broker, RecoveryBroker, Starts
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.settings import RecoverSettings, Settings, explain, listed, load_settings, masked
from holdfast.stores.files import made_once as made_once  # noqa: PLC0414  for the faces
from holdfast.telemetry.events import emit

if TYPE_CHECKING:
    from holdfast.core.letter import Fingerprinter, Origin
    from holdfast.core.plan import Retries
    from holdfast.core.recovery import Preflight, RecoveryOrder, Summary
    from holdfast.core.requests.declare import Caller
    from holdfast.core.topology.layouts import TopologyFile
    from holdfast.ports.blobs import Blobs
    from holdfast.ports.clock import Clock, Timer
    from holdfast.ports.database import Database
    from holdfast.ports.queue_store import Storage
    from holdfast.services.collect.service import CollectService
    from holdfast.services.collect.transaction import CollectLimits
    from holdfast.services.recover.report import Notices
    from holdfast.services.recover.server_runs import ServerRuns
    from holdfast.services.recover.service import OnBegin, RecoverySchedule, ScheduledRecovery
    from holdfast.services.topology import Topologies
    from holdfast.services.topology_watch import TopologyWatch
    from holdfast.services.vault.admin import VaultApp
    from holdfast.services.vault.custody import Custody
    from holdfast.services.vault.upkeep import Successes
    from holdfast.stores.collect import CollectStore
    from holdfast.stores.journal import FileJournal, JournalPaths
    from holdfast.stores.vault import OpenVault, Vault

#: Where a SQLite storage keeps what the collector knows.
COLLECT_FILE = "collect/collect.db"
VAULT_FILE = "vault.db"
PUBLISH_WINDOW_BYTES = 8 * 2**20
#: Schemes that name what another word names too.
KINDS = {
    "": "folder",
    "file": "folder",
    "postgres": "postgresql",
    "amqps": "amqp",
    "https": "http",
    "s3": "bucket",
    "az": "bucket",
    "gs": "bucket",
}


class SystemClock:
    """The machine's clock. `HOLDFAST_CLOCK_OFFSET_S` shifts it, to prove that two servers' clocks may differ."""

    def __init__(self) -> None:
        self._offset_us = int(float(os.environ.get("HOLDFAST_CLOCK_OFFSET_S", "0")) * 1_000_000)

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._offset_us

    def call_later(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0, delay_us) / 1_000_000, callback)


class Location(Struct, frozen=True, kw_only=True):
    """What a URL or a path names: which engine, and for what is on this machine, the folder."""

    url: str
    kind: str  #: sqlite, postgresql, memory, amqp, http, bucket or folder; anything else is a scheme that is not known
    folder: Path | None = None  #: of sqlite and folder; None where the URL names none

    @classmethod
    def parse(cls, url: str) -> Location:
        """Read it. Whoever wants an engine says what is wrong with a kind that has none. Raises BadUrl for one whose
        password might be shown as something else."""
        if why := unclear_url(url):
            raise BadUrl(f"URL is invalid; {masked(url)}: {why}")
        parts = urlsplit(url)
        kind = KINDS.get(parts.scheme, parts.scheme)
        if kind == "sqlite" and not parts.netloc and parts.path.strip("/"):
            # sqlite:///x is relative, sqlite:////x absolute: the first slash only ends the empty host.
            return cls(url=url, kind=kind, folder=Path(unquote(parts.path[1:])))
        if kind == "folder":
            return cls(url=url, kind=kind, folder=Path(unquote(parts.path) if parts.scheme else url))
        return cls(url=url, kind=kind)


@asynccontextmanager
async def open_app(settings: Settings, *, serves: bool = False) -> AsyncIterator[tuple[QueueService, VaultApp]]:
    """What these settings name: the queues, and the vault with its brokers. One that `serves` waits for a RabbitMQ that
    is away, unless it is required, and runs code that a file names which lay there. Raises CannotStart, BrokerError."""
    async with open_storages(settings) as service, open_vault_app(settings, Queues(service), serves=serves) as vault:
        yield service, vault


def open_storages(settings: Settings) -> AbstractAsyncContextManager[QueueService]:
    """The queue service over the storages of these settings."""
    return open_service(
        {storage.name: storage.url for storage in settings.storages},
        affinities={storage.name: storage.affinity for storage in settings.storages},
        open_files_max=settings.open_files_max,
        accept_clock=settings.accept_clock,
    )


@asynccontextmanager
async def open_service(
    storages: Mapping[str, str],
    *,
    affinities: Mapping[str, float] | None = None,
    clock: Clock | None = None,
    open_files_max: int | None = None,
    accept_clock: bool = False,
) -> AsyncIterator[QueueService]:
    """The queue service over named storages; the first holds the catalog. After a long gap nothing is deleted by time
    for a while, unless the machine's clock is accepted."""
    time_source = clock or SystemClock()
    engines = {
        name: open_storage(url, name=name, clock=time_source, open_files_max=open_files_max)
        for name, url in storages.items()
    }
    manager = QueueManager(engines, clock=time_source)
    try:
        await manager.open(doubts_clock=clock is None and not accept_clock)
    except BaseException:
        await manager.close()
        raise
    service = QueueService(manager, affinities=affinities or dict.fromkeys(storages, 1.0))
    async with manager.keep_up():
        try:
            yield service
        finally:
            await manager.close()


@asynccontextmanager
async def open_queues(url: str = "sqlite:///holdfast-data", *, clock: Clock | None = None) -> AsyncIterator[Queues]:
    """Queues in this process: `async with holdfast.open("sqlite:///work") as queues:`."""
    async with open_service({"default": url}, clock=clock) as service:
        yield Queues(service)


def open_storage(url: str, *, name: str, clock: Clock, open_files_max: int | None = None) -> Storage:
    """The engine that a URL names; raises CannotStart."""
    from holdfast.engines.sqlite.storage import OPEN_FILES_COUNT_MAX, SqliteStorage

    location = Location.parse(url)
    if location.kind == "memory":
        return SqliteStorage(None, clock=clock)
    if location.kind == "sqlite":
        if location.folder is None:
            raise BadUrl(
                f"storage URL is invalid; '{masked(url)}' names no folder, use sqlite:///relative or sqlite:////absolute"
            )
        return SqliteStorage(location.folder, clock=clock, open_files_max=open_files_max or OPEN_FILES_COUNT_MAX)
    if location.kind == "postgresql":
        # In earnest deadlines are the database's: several servers, whose clocks differ, must agree on them.
        from holdfast.engines.postgres.storage import PostgresStorage

        return PostgresStorage(url, name=name, clock=None if isinstance(clock, SystemClock) else clock)
    known = "sqlite:///FOLDER, postgresql://…, memory://"
    raise BadUrl(
        f"storage URL is invalid; '{urlsplit(url).scheme or masked(url)}' is not known here, use one of {known}"
    )


@asynccontextmanager
async def open_rabbit_broker(
    url: str, *, clock: Clock, management: str | None, topology: TopologyFile | None = None, store: str | None = None
) -> AsyncIterator[Broker]:
    """RabbitMQ, for consumers; `store` is a folder (sqlite:///…) that keeps which messages were begun.

    Raises BrokerError when it cannot be reached, CannotStart when the store cannot be opened.
    """
    with closing(open_starts(store, clock=clock)) if store else nullcontext() as starts:
        told = {"management": management, "topology": topology, "starts": starts}
        async with _rabbit(url, clock, insists=True, **told) as broker:
            yield broker


def _rabbit(url: str, clock: Clock, **options: Any) -> AbstractAsyncContextManager[Broker]:
    """RabbitMQ; see `RabbitOptions`."""
    from holdfast.engines.rabbitmq.broker import RabbitBroker, RabbitOptions

    return RabbitBroker(url, clock=clock, options=RabbitOptions(**options))


def open_starts(url: str, *, clock: Clock) -> Starts:
    """Which messages were begun and not settled, in a folder of this machine. Raises CannotStart."""
    from holdfast.engines.sqlite.starts import SqliteStarts

    location = Location.parse(url)
    if location.kind != "sqlite" or location.folder is None:
        raise CannotStart(f"store of starts is invalid; '{masked(url)}' is not sqlite:///FOLDER")
    return SqliteStarts(location.folder, clock=clock)


@asynccontextmanager
async def open_topology(url: str, *, management: str | None = None) -> AsyncIterator[Topologies]:
    """The topology of the virtual host that an amqp:// URL names; `management` is the address of the broker's API."""
    from holdfast.engines.rabbitmq.topology import RabbitTopology
    from holdfast.services.topology import Topologies

    async with RabbitTopology(url, management=management) as broker:
        yield Topologies(broker)


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
    from holdfast.services.collect.service import CollectService
    from holdfast.services.collect.transaction import CollectContext, CollectLimits

    blobs_url = blobs or default_blobs(url)
    if blobs_url is None:
        raise CannotStart(f"blobs are not configured; with '{masked(url)}' say where: a folder, s3://, az:// or gs://")
    time_source, settings = clock or SystemClock(), limits or CollectLimits()
    async with AsyncExitStack() as stack:
        if broker is not None:
            messages = await stack.enter_async_context(_rabbit(broker, time_source, quorum=quorum))
        else:
            if queues is None:
                queues = await stack.enter_async_context(open_queues(url, clock=time_source))
            lease_timeout = format_duration(settings.lease_us)
            messages = QueueBroker(queues, clock=time_source, lease_timeout=lease_timeout)
        store = open_collect_store(url, clock=time_source)
        await store.open()
        stack.push_async_callback(store.close)
        context = CollectContext(
            store, messages, await stack.enter_async_context(open_blobs(blobs_url)), limits=settings
        )
        yield await stack.enter_async_context(CollectService(context).running())


def open_collect_store(url: str, *, clock: Clock) -> CollectStore:
    """State and index of collected results: in the folder of a SQLite storage, in PostgreSQL, or in memory."""
    from holdfast.stores.collect import CollectStore

    wrong = f"collector URL is invalid; '{masked(url)}' is not sqlite:///FOLDER, postgresql://… or memory://"
    return CollectStore(_database(url, COLLECT_FILE, clock, kind="collect", serial=False, wrong=wrong))


def has_collector(url: str) -> bool:
    """Whether a SQLite storage has collected before: then there may be something to resume."""
    location = Location.parse(url)
    return location.kind == "sqlite" and ((location.folder or Path()) / COLLECT_FILE).exists()


def default_blobs(url: str) -> str | None:
    """Beside the queues of a SQLite storage; elsewhere it has to be said."""
    location = Location.parse(url)
    return str((location.folder or Path()) / "blobs") if location.kind == "sqlite" else None


def open_blobs(url: str) -> AbstractAsyncContextManager[Blobs]:
    """A folder (a path, or file:///…), or a bucket: s3://, az://, gs:// with an optional prefix. Raises CannotStart."""
    location = Location.parse(url)
    if location.kind == "bucket":
        from holdfast.engines.objects import open_object_blobs

        return open_object_blobs(url)
    if location.kind != "folder" or location.folder is None:
        scheme = urlsplit(url).scheme
        raise BadUrl(f"blob URL is invalid; '{scheme}' is not known here, use a folder, s3://, az:// or gs://")
    from holdfast.engines.folder import open_folder_blobs

    return open_folder_blobs(location.folder)


@asynccontextmanager
async def open_vault_app(
    settings: Settings, queues: Queues | None, *, clock: Clock | None = None, serves: bool = False
) -> AsyncIterator[VaultApp]:
    """The vault and the brokers of these settings. See `open_app`."""
    from holdfast.core.requests.vault import SettingView
    from holdfast.services.vault.admin import VaultApp
    from holdfast.services.vault.capture import load_fingerprint
    from holdfast.services.vault.custody import Custody

    time_source = clock or SystemClock()
    url = settings.vault_url
    async with AsyncExitStack() as stack:
        location, found_code = Location.parse(url), "" if serves else settings.found_code
        grouped = load_fingerprint(None if found_code else settings.fingerprint)
        vault = await stack.enter_async_context(open_vault(settings, url, clock=time_source))
        blobs: Blobs | None = None
        if beside := settings.vault_blobs or (str(location.folder / "vault-blobs") if location.folder else None):
            blobs = await stack.enter_async_context(open_blobs(beside))
        brokers: list[Broker] = []
        waits = serves and not settings.require_broker
        if settings.broker is not None:
            brokers.append(await stack.enter_async_context(_rabbit_of(settings, time_source, grouped, waits=waits)))
        if queues is not None:
            brokers.append(QueueBroker(queues, clock=time_source, grouped=grouped, retries=_retries(settings)))
        custody = Custody(
            vault, brokers, clock=time_source, blobs=blobs, names=queue_names(settings), found_code=found_code
        )
        shown = [
            SettingView(key=one.key, value=one.plain, text=one.value, source=one.source, meaning=one.meaning)
            for one in explain(settings)
        ]
        app = VaultApp(
            custody,
            make_runs=lambda: _server_runs(settings, custody, queues),
            make_watch=lambda: _topology_watch(settings, time_source),
            blobs=blobs,
            redrive_role=Role[settings.redrive_role.upper()],
            settings=shown,
        )
        await app.tokens.load()
        stack.push_async_callback(app.close)
        yield app


def _server_runs(settings: Settings, custody: Custody, queues: Queues | None) -> ServerRuns:
    """The recoveries that a server runs: over its broker, and over the queues of this process."""
    from holdfast.core.recovery import Depth, Preflight
    from holdfast.services.recover.server_runs import ServerRuns

    url, management = (one.reveal() if one else "" for one in (settings.broker, settings.management))
    vault = custody.vault

    async def find(name: str, caller: Caller) -> Origin:
        broker, _ = await custody.known(name, caller)
        return broker.origin

    async def look(origin: Origin, order: RecoveryOrder) -> Preflight:
        if origin == "rabbitmq":
            this = replace(order, table=replace(order.table, names=queue_names(settings, order.table.names)))
            async with open_recovery(url, this, management=management or None) as broker:
                return await broker.inspector.preflight(this.table)
        assert queues is not None  # noqa: S101  or none of them would have been found
        stats = await queues.queue_stats(order.dead_queue)
        count = sum(one.total for logical in stats.logical_queues for one in logical.partitions)
        return Preflight(broker="the queues of this server", depth=Depth(ready=count))

    async def run(origin: Origin, order: RecoveryOrder, on_begin: OnBegin, notices: Notices) -> Summary:
        own = queues if origin == "queue" else None
        return await _serve_run(settings, url, own, order, lambda: nullcontext(vault), on_begin, notices)

    return ServerRuns(vault, find=find, look=look, run=run, clock=custody.clock)


def _topology_watch(settings: Settings, clock: Clock) -> TopologyWatch:
    """The topology of the broker of these settings, as far as its management API is known."""
    from holdfast.engines.rabbitmq.topology import RabbitTopology
    from holdfast.services.topology_watch import TopologyWatch

    broker, management = settings.broker, settings.management
    can_ask = broker is not None and management is not None
    return TopologyWatch(
        (lambda: RabbitTopology(broker.reveal(), management=management.reveal())) if broker and management else None,
        without="" if can_ask else "no_management" if broker else "no_broker",
        file=settings.topology,
        patterns=listed(settings.dead_queues),
        clock=clock,
    )


def vault_at_work(app: VaultApp, settings: Settings) -> AbstractAsyncContextManager[None]:
    """What a server does by itself, as these settings say. Raises CannotStart."""
    from holdfast.services.vault.upkeep import parse_retention

    location = Location.parse(settings.vault_url)
    file = _ledger_key_file(settings, location)
    if file and location.folder and file.resolve().parent == location.folder.resolve():
        emit("ledger.key_beside", file=file)
    return app.at_work(
        captures=listed(settings.capture),
        resolve_after_s=parse_duration(settings.resolve_after, what="resolve_after") / SECOND_US,
        retention_s=parse_retention(listed(settings.retention)),
        accept_clock=settings.accept_clock,
    )


def successes(url: str, *, actor: str, clock: Clock) -> Successes:
    """What consumers tell the vault at a URL. Raises CannotStart for settings that cannot be read."""
    from holdfast.services.vault.upkeep import Successes

    settings = load_settings(serving=False)
    return Successes(lambda: open_vault(settings, url, clock=clock), actor=actor)


@asynccontextmanager
async def open_vault(settings: Settings, url: str, *, clock: Clock) -> AsyncIterator[Vault]:
    """The vault at a URL, without brokers. Raises CannotStart."""
    from holdfast.stores.vault import Vault

    wrong = "vault URL is invalid; use sqlite:///FOLDER, postgresql://… or memory://"
    vault = Vault(_database(url, VAULT_FILE, clock, kind="vault", serial=True, wrong=wrong), clock=clock)
    location = Location.parse(url)
    try:
        await vault.open()
    except CannotStart:
        raise
    except HoldfastError as error:
        raise CannotStart(f"vault cannot be opened; {error.message}") from error
    try:
        given = settings.ledger_key.reveal() if settings.ledger_key else None
        await vault.ledger.unlock(given=given, file=_ledger_key_file(settings, location))
        await vault.seals.upgrade()
        yield vault
    finally:
        await vault.close()


def _ledger_key_file(settings: Settings, location: Location) -> Path | None:
    """Where the key of the ledger is kept; nowhere when it was given, or for a vault in memory."""
    if settings.ledger_key or (location.kind == "memory" and not settings.ledger_key_file):
        return None
    return settings.ledger_key_file or (location.folder or settings.data_folder) / "ledger-key"


def _database(url: str, file: str, clock: Clock, *, kind: str, serial: bool, wrong: str) -> Database:
    """`file` is its name in the folder of a SQLite storage. Raises BadUrl, saying what is wrong with the URL."""
    from holdfast.engines.sqlite.database import SqliteDatabase

    location = Location.parse(url)
    if location.kind == "memory":
        return SqliteDatabase(None, kind=kind, clock=clock)
    if location.kind == "sqlite" and location.folder is not None:
        return SqliteDatabase(location.folder / file, kind=kind, clock=clock)
    if location.kind == "postgresql":
        from holdfast.engines.postgres.database import PostgresDatabase

        return PostgresDatabase(url, kind=kind, serial=serial)
    raise BadUrl(wrong)


def _rabbit_of(
    settings: Settings, clock: Clock, grouped: Fingerprinter, *, waits: bool
) -> AbstractAsyncContextManager[Broker]:
    names = listed(settings.dead_queues)
    return _rabbit(
        settings.broker.reveal() if settings.broker else "",
        clock,
        management=settings.management.reveal() if settings.management else None,
        known=[name for name in (*names, *listed(settings.capture)) if "*" not in name],
        patterns=[name for name in names if "*" in name],
        names=queue_names(settings),
        retries=_retries(settings),
        grouped=grouped,
        waits=waits,
    )


def queue_names(settings: Settings, given: QueueNames | None = None) -> QueueNames:
    """With the dead-letter queues of the settings; not by a pattern that main queues may fit as well, as `orders*`."""
    names = given or QueueNames()
    told = [name for name in listed(settings.dead_queues) if not name.endswith("*")]
    return replace(names, dead_queues=(*names.dead_queues, *told))


def _retries(settings: Settings) -> Retries:
    """How consumers try again, for a canary that finds no wait queue. Raises CannotStart."""
    from holdfast.core.plan import Retries

    try:
        delays = [parse_duration(part, what="retry_delay") / 1_000_000 for part in listed(settings.retry_delay)]
    except Invalid as error:
        raise CannotStart(error.message) from error
    return Retries(attempts=settings.retry_attempts, delays_s=tuple(delays))


@asynccontextmanager
async def open_recovery(
    url: str, order: RecoveryOrder, *, clock: Clock | None = None, management: str | None = None
) -> AsyncIterator[RecoveryBroker]:
    """RabbitMQ for a recovery of one of its dead-letter queues. Raises BrokerError when it cannot be reached.

    Whoever is cancelled ends one connection at once and the other when it is closed, within a limit.
    """
    from holdfast.engines.rabbitmq.drain import RabbitDrain
    from holdfast.engines.rabbitmq.inspector import RabbitRunInspector
    from holdfast.engines.rabbitmq.publisher import RabbitPublisher
    from holdfast.engines.rabbitmq.redriver import RabbitRedriver
    from holdfast.engines.rabbitmq.url import BrokerUrl

    time_source = clock or SystemClock()
    broker_url, name, table, limits = BrokerUrl.parse(url), order.dead_queue, order.table, order.limits
    user = broker_url.login.user
    stamp = RedriveStamp(run=order.run, by=order.by, dead_queue=name, user=user, names=table.names)
    # The copies on their way wait for their confirms there as well; more than this only costs memory.
    publisher = RabbitPublisher(broker_url, window_bytes=min(limits.window_bytes_max, PUBLISH_WINDOW_BYTES))
    drain = RabbitDrain(broker_url, name, limits, on_pace=publisher.pause_between_reads)
    try:
        connection = await drain.connect()
        await publisher.__aenter__()
        queue = "" if order.from_backup else name
        inspector = RabbitRunInspector(connection, publisher, queue, management=management, names=table.names)
        redriver = RabbitRedriver(
            stamp,
            table,
            now=lambda: moment(time_source.now_us()),
            blocked=inspector.blocked,
            receivers=inspector.receivers,
            sources=inspector.sources,
        )
        try:
            yield RecoveryBroker(drain=drain, publisher=publisher, redriver=redriver, inspector=inspector)
        except asyncio.CancelledError:
            await drain.abandon()
            raise
    finally:
        await publisher.close()
        await drain.close()


async def run_recovery(
    settings: Settings,
    url: str,
    order: RecoveryOrder,
    *,
    vault: OpenVault,
    hearing: AbstractContextManager[OnBegin],
    journal: AbstractContextManager[FileJournal | None],
    queues: AbstractAsyncContextManager[Queues] | None = None,
    notices: Notices | None = None,
) -> Summary:
    """One recovery, of a broker's queue, of a backup or of an embedded dead queue, with its row in the ledger.

    `hearing` is there from the first connection on, and is told of the run when that begins. `queues` are those where
    an embedded dead queue is, when nobody but the caller can open them.
    """
    from holdfast.services.recover.embedded import EmbeddedRecovery
    from holdfast.services.recover.service import recorded, recover
    from holdfast.stores.files import FileBackup

    clock = SystemClock()

    async def run() -> Summary:
        with hearing as on_begin:
            if Location.parse(url).kind != "amqp":
                async with queues or open_queues(url) as opened:
                    embedded = EmbeddedRecovery(opened, order, clock=clock, notices=notices)
                    on_begin(embedded)
                    return await embedded.run()
            management = settings.management.reveal() if settings.management else None
            table = replace(order.table, names=queue_names(settings, order.table.names))
            this = replace(order, table=table)
            async with open_recovery(url, this, clock=clock, management=management) as broker:
                path = order.backup_file
                with journal as kept, closing(FileBackup(Path(path))) if path else nullcontext() as backup:
                    return await recover(
                        broker, this, clock=clock, journal=kept, backup=backup, notices=notices, on_begin=on_begin
                    )

    return await recorded(order, run, vault=vault, clock=clock)


async def _serve_run(
    settings: Settings,
    url: str,
    own: Queues | None,
    order: RecoveryOrder,
    vault: OpenVault,
    on_begin: OnBegin,
    notices: Notices | None,
) -> Summary:
    """A recovery inside a server: of its `own` queues, or of what is at the URL."""
    name = order.dead_queue
    has_journal = own is None and Location.parse(url).kind == "amqp" and not order.dry_run
    return await run_recovery(
        settings,
        url,
        replace(order, origin=f"queue '{name}' of this process" if own else origin_of(url, name)),
        vault=vault,
        hearing=nullcontext(on_begin),
        journal=journals(settings, url, name, serves=True).kept(order.run) if has_journal else nullcontext(),
        queues=nullcontext(own) if own else None,
        notices=notices,
    )


def vault_of(settings: Settings) -> OpenVault:
    """The vault of these settings; in the data folder where they name no place of their own."""
    url = settings.vault_url
    if Location.parse(url).kind not in {"sqlite", "postgresql"}:
        url = f"sqlite:///{settings.data_folder}"
    return lambda: open_vault(settings, url, clock=SystemClock())


def scheduled_recoveries(
    settings: Settings,
    *,
    queues: Callable[[], Queues | None],
    broker: str | None,
    vault: OpenVault,
    runs: ServerRuns | None = None,
) -> RecoverySchedule:
    """The recoveries of a configuration. `queues` are those of this process, when they are open; `broker` is where a
    queue is that is none of them; among `runs` they are seen. Raises CannotStart when a routes file cannot be used."""
    from holdfast.services.recover.service import RecoverySchedule, ScheduledRecovery, new_run

    async def find(name: str, wanted: RecoverSettings) -> tuple[str, Queues | None]:
        """Where the queue is: at what was said, in the queues of this process, or at the broker."""
        if wanted.url is not None:
            return wanted.url.reveal(), None
        if (own := queues()) is not None:
            try:
                await own.queues_info(name)
                return "", own
            except QueueMissing:
                if broker is None:
                    raise
        if broker is None:
            raise CannotStart(f"queue cannot be recovered; '{name}' has no url, and no broker is set")
        return broker, None

    def scheduled(name: str, wanted: RecoverSettings) -> ScheduledRecovery:
        order = _order(name, wanted)

        async def run(on_begin: OnBegin) -> Summary:
            url, own = await find(name, wanted)
            this = replace(order, run=new_run())
            with runs.following(this, on_begin) if runs else nullcontext((on_begin, None)) as (begin, notices):
                return await _serve_run(settings, url, own, this, vault, begin, notices)

        every_s = parse_duration(wanted.every, what="every") / SECOND_US if wanted.every else 0.0
        return ScheduledRecovery(dead_queue=name, run=run, on_start=wanted.on_start, every_s=every_s)

    return RecoverySchedule([scheduled(name, wanted) for name, wanted in settings.recover.items()])


def _order(name: str, wanted: RecoverSettings) -> RecoveryOrder:
    from holdfast.core.recovery import RecoveryOrder, RunLimits
    from holdfast.core.routes import Mode, RouteTable
    from holdfast.services.recover.service import read_routes

    table = read_routes(wanted.routes) if wanted.routes else RouteTable()
    limits = RunLimits(
        limit=wanted.limit,
        rate_per_s=wanted.rate,
        total_timeout_s=parse_duration(wanted.total_timeout, what="total_timeout") / SECOND_US,
    )
    by = f"holdfast@{socket.gethostname()}"
    table = replace(table, mode=Mode(wanted.to), source=wanted.source, allow_copies=wanted.allow_copies)
    return RecoveryOrder(dead_queue=name, table=table, limits=limits, by=by)


def journals(
    settings: Settings, url: str, dead_queue: str, *, file: Path | None = None, keeps: bool = True, serves: bool = False
) -> JournalPaths:
    """Those of a run that keeps its journal in `file`, at the usual place, or nowhere.

    A journal belongs to the same queue for every way to write down where its broker is, as far as that can be seen.
    """
    from holdfast.stores.journal import journal_paths

    what, _, hosts = origin_of(url, dead_queue).rpartition(" at ")
    same = sorted(re.sub(r"^localhost:", "127.0.0.1:", host) for host in hosts.split(","))
    origin, data_folder = f"{what} at {','.join(same)}", settings.data_folder.absolute()
    return journal_paths(origin, dead_queue, data_folder, file=file, keeps=keeps, serves=serves)


def origin_of(url: str, dead_queue: str) -> str:
    """A queue and where it is, without any login."""
    if Location.parse(url).kind != "amqp":
        parts = urlsplit(url)
        return f"queue '{dead_queue}' in {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    from holdfast.engines.rabbitmq.url import BrokerUrl

    broker_url = BrokerUrl.parse(url)
    hosts = ",".join(f"{host}:{port}" for host, port in broker_url.hosts)
    return f"queue '{dead_queue}' in '{broker_url.login.vhost}' at {hosts}"


def somebody() -> str:
    """Who runs this, for letters and ledger."""
    import getpass

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
