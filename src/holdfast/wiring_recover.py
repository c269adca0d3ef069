"""Recoveries put together by hand: a run against a broker or an embedded queue, and those that a server runs itself."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.moments import SECOND_US, parse_duration
from holdfast.core.recovery import Limits, Summary
from holdfast.core.redrive import Redrive
from holdfast.core.routes import FILE_BYTES_MAX, Mode, RouteTable, parse_routes
from holdfast.errors import CannotStart, QueueMissing
from holdfast.ports.clock import Clock
from holdfast.ports.recovery import DeadLetters, End, Journal
from holdfast.services.queue.methods import Queues
from holdfast.services.recover.embedded import EmbeddedRecovery
from holdfast.services.recover.record import Entry, OpenLedger, recorded
from holdfast.services.recover.schedule import Duty, OnBegin, Schedule
from holdfast.services.recover.service import Order, new_run, recover
from holdfast.settings import RecoverSettings, Settings
from holdfast.wiring import SystemClock, open_dead_letters, open_journal, open_queues, recovery_source
from holdfast.wiring_custody import open_ledger

BROKERS = frozenset(("amqp", "amqps"))
MODES = {"routes": Mode.ROUTES, "source": Mode.SOURCE, "exchange": Mode.EXCHANGE, "wait": Mode.WAIT}


def somebody() -> str:
    """Who runs this, for letters and ledger."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def source_of(url: str, dead_queue: str) -> str:
    """A queue and where it is, without any login."""
    parts = urlsplit(url)
    if parts.scheme in BROKERS:
        return recovery_source(url, dead_queue)
    return f"queue '{dead_queue}' in {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def journal_source(url: str, dead_queue: str) -> str:
    """What a journal belongs to: the same for every way to write down where a broker is, as far as that can be seen."""
    what, _, hosts = recovery_source(url, dead_queue).rpartition(" at ")
    same = sorted(re.sub(r"^localhost:", "127.0.0.1:", host) for host in hosts.split(","))
    return f"{what} at {','.join(same)}"


def journal_path(folder: Path, url: str, dead_queue: str) -> Path:
    """Where the journal of a queue is kept."""
    mark = hashlib.sha256(journal_source(url, dead_queue).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return folder / "recover" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', dead_queue)[:80]}-{mark}.journal"


def state_folder(settings: Settings) -> Path:
    """Where the journals of a user are, whichever folder a run is started in and whatever runs it."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if Path(given).is_absolute():
        return Path(given) / "holdfast"
    try:
        return Path.home() / ".local" / "state" / "holdfast"
    except RuntimeError:  # a user without a home
        return settings.data_folder.absolute()


class Journals(Struct, frozen=True, kw_only=True):
    """Where the journals of a queue are."""

    own: Path | None  #: this run's; None: it keeps none
    usual: Path  #: where every run of this user looks
    others: tuple[Path, ...] = ()  #: where a server keeps it that cannot write to the usual place


def journals(
    settings: Settings, url: str, dead_queue: str, *, file: Path | None = None, keeps: bool = True, serves: bool = False
) -> Journals:
    """Those of a run that keeps its journal in `file`, at the usual place, or nowhere."""
    usual = journal_path(state_folder(settings), url, dead_queue)
    spare = journal_path(settings.data_folder.absolute(), url, dead_queue)
    own = file or (spare if serves and not _is_writable(usual.parent) else usual)
    return Journals(own=own if keeps else None, usual=usual, others=(spare,))


def _is_writable(folder: Path) -> bool:
    """A service may have no home of its own, or may not write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


class Keeping:
    """The journals of one run while it runs; it says with `ended` how it leaves its queue."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.end = End.BROKEN

    def ended(self, summary: Summary, letters: DeadLetters) -> Summary:
        """It came to its end."""
        self.end = how_it_ended(summary, has_broker=not letters.trouble, is_lost=letters.is_lost)
        return summary


@contextmanager
def kept_journal(places: Journals | None, url: str, order: Order) -> Iterator[Keeping]:
    """None: a run that takes nothing away. Raises CannotStart."""
    if places is None:
        yield Keeping(None)
        return
    source = journal_source(url, order.dead_queue)
    journal = open_journal(places.own, source=source, run=order.run, usual=places.usual, others=places.others)
    keeping = Keeping(journal)
    try:
        yield keeping
    finally:
        journal.close(keeping.end)


def how_it_ended(summary: Summary, *, has_broker: bool, is_lost: bool) -> End:
    """What a killed run left ends when nothing of it can be in the queue any more; in any doubt it may be."""
    if is_lost:
        return End.LOST
    is_all_seen = summary.recovered + summary.kept >= summary.found and not summary.unseen
    if not is_all_seen or summary.failure or not has_broker or (summary.remaining or 0) > summary.kept:
        # What is left may be letters whose acks were lost with a connection, also when the run went on with another.
        return End.LOST if summary.interruptions else End.PARTLY
    return End.KEPT if summary.remaining or summary.kept else End.WHOLE


def ledger_of(settings: Settings, *, clock: Clock | None = None) -> OpenLedger:
    """The ledger of these settings; in the data folder where they name no place of their own."""
    url = settings.vault.reveal() if settings.vault else settings.storages[0].url
    if urlsplit(url).scheme not in {"sqlite", "postgresql", "postgres"}:
        folder = settings.data_folder
        url = f"sqlite:///{folder}"
    return lambda: open_ledger(settings, url, clock=clock or SystemClock())


async def recover_broker(
    url: str, order: Order, *, by: str, places: Journals, management: str | None, on_begin: OnBegin, clock: Clock
) -> Summary:
    """One run against RabbitMQ. Raises BrokerError, RecoveryRefused or CannotStart when it cannot begin."""
    redrive = Redrive(run=order.run, by=by, dead_queue=order.dead_queue)
    async with AsyncExitStack() as stack:
        letters = await stack.enter_async_context(
            open_dead_letters(
                url,
                redrive,
                order.table,
                clock=clock,
                management=management,
                window_bytes_max=order.limits.window_bytes_max,
            )
        )
        kept = stack.enter_context(kept_journal(places, url, order))
        return kept.ended(await recover(letters, order, clock=clock, journal=kept.journal, on_begin=on_begin), letters)


async def recover_queues(
    queues: Queues, dead_queue: str, *, run: str, limits: Limits, on_begin: OnBegin, clock: Clock
) -> Summary:
    """One run over embedded queues. Raises QueueMissing."""
    recovery = EmbeddedRecovery(queues, dead_queue=dead_queue, run=run, clock=clock, limits=limits)
    on_begin(recovery)
    return await recovery.run()


class Scheduled:
    """The recoveries of a configuration. `queues` are those of this process, when they are open; `broker` is where a
    queue is that is none of them."""

    def __init__(
        self, settings: Settings, *, queues: Callable[[], Queues | None], broker: str | None, ledger: OpenLedger
    ) -> None:
        self._settings = settings
        self._queues = queues
        self._broker = broker
        self._ledger = ledger
        self._clock = SystemClock()
        self._by = f"holdfast@{socket.gethostname()}"

    def schedule(self) -> Schedule:
        """Raises CannotStart when a routes file cannot be used."""
        return Schedule([self._duty(name, wanted) for name, wanted in self._settings.recover.items()])

    def _duty(self, name: str, wanted: RecoverSettings) -> Duty:
        table = _table(wanted)
        limits = Limits(
            limit=wanted.limit,
            rate_per_s=wanted.rate,
            total_timeout_s=parse_duration(wanted.total_timeout, what="total_timeout") / SECOND_US,
        )

        async def run(on_begin: OnBegin) -> Summary:
            order = Order(dead_queue=name, table=table, limits=limits, run=new_run())
            url = await self._place(name, wanted)
            source = source_of(url, name) if url else f"queue '{name}' of this process"
            entry = Entry(run=order.run, by=self._by, dead_queue=name, source=source)
            return await recorded(
                entry, lambda: self._run(url, order, on_begin), ledger=self._ledger, clock=self._clock
            )

        every_s = parse_duration(wanted.every, what="every") / SECOND_US if wanted.every else 0.0
        return Duty(dead_queue=name, run=run, on_start=wanted.on_start, every_s=every_s)

    async def _place(self, name: str, wanted: RecoverSettings) -> str:
        """Where the queue is: what was said, the queues of this process (an empty text), or the broker."""
        if wanted.url is not None:
            return wanted.url.reveal()
        queues = self._queues()
        if queues is not None:
            try:
                await queues.queues_info(name)
                return ""
            except QueueMissing:
                if self._broker is None:
                    raise
        if self._broker is None:
            raise CannotStart(f"queue cannot be recovered; '{name}' has no url, and no broker is set")
        return self._broker

    async def _run(self, url: str, order: Order, on_begin: OnBegin) -> Summary:
        name, limits, clock = order.dead_queue, order.limits, self._clock
        if urlsplit(url).scheme in BROKERS:
            management = self._settings.management.reveal() if self._settings.management else None
            places = journals(self._settings, url, name, serves=True)
            return await recover_broker(
                url, order, by=self._by, places=places, management=management, on_begin=on_begin, clock=clock
            )
        async with _opened(url, self._queues()) as queues:
            return await recover_queues(queues, name, run=order.run, limits=limits, on_begin=on_begin, clock=clock)


@asynccontextmanager
async def _opened(url: str, own: Queues | None) -> AsyncIterator[Queues]:
    if url:
        async with open_queues(url) as queues:
            yield queues
    elif own is not None:
        yield own


def _table(wanted: RecoverSettings) -> RouteTable:
    table = RouteTable()
    if wanted.routes is not None:
        try:
            data = wanted.routes.read_bytes()[: FILE_BYTES_MAX + 1]
        except OSError as error:
            raise CannotStart(f"routes file cannot be read; '{wanted.routes}': {error.strerror}") from error
        if len(data) > FILE_BYTES_MAX:
            raise CannotStart(f"routes file is invalid; '{wanted.routes}' has more than {FILE_BYTES_MAX} bytes")
        table = parse_routes(data, source=str(wanted.routes))
    return replace(table, mode=MODES[wanted.to])
