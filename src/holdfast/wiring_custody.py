"""Custody put together by hand: the vault that a URL names, the brokers, the tasks. It imports engines."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.core.groups import Fingerprinter
from holdfast.core.ledger import FIRST, verify
from holdfast.core.moments import parse_duration
from holdfast.core.redrive_task import Retries
from holdfast.core.roles import Caller, Role, needs
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.engines.sql_vault.database import Database
from holdfast.engines.sql_vault.vault import SqlVault
from holdfast.engines.sqlite.vault import SqliteDatabase
from holdfast.errors import BadUrl, CannotStart, HoldfastError, Invalid
from holdfast.ports.blobs import Blobs
from holdfast.ports.clock import Clock
from holdfast.ports.custody import Post
from holdfast.ports.vault import Ledger, Vault
from holdfast.services.fingerprints import load_fingerprint
from holdfast.services.ledger import LedgerService
from holdfast.services.queue.methods import Queues
from holdfast.services.retention import Retention
from holdfast.services.tokens import TokenService
from holdfast.services.vault.custody import Custody
from holdfast.services.vault.plans import Planner
from holdfast.services.vault.queues import QueuePost
from holdfast.services.vault.redrive import RedriveRunner
from holdfast.services.vault.successes import Successes
from holdfast.settings import Settings, load_settings
from holdfast.telemetry.events import emit
from holdfast.wiring import SystemClock, open_blobs

UPKEEP_S = 30.0
KEY_BYTES = 32
SERVER = Caller(name="holdfast", role=Role.ADMIN, origin="server")


class VaultApp:
    """Everything that the faces need of custody."""

    def __init__(
        self, custody: Custody, *, key: bytes, blobs: Blobs | None = None, redrive_role: Role = Role.OPERATOR
    ) -> None:
        self.custody = custody
        self.needs = needs(redrive_role)
        self.retention = Retention(custody.vault, clock=custody.clock, blobs=blobs)
        self.vault: Vault = custody.vault
        self.planner = Planner(custody)
        self.redrives = RedriveRunner(custody)
        self.ledgers = LedgerService(custody.vault, key=key)
        self.tokens = TokenService(custody.vault, clock=custody.clock)

    async def close(self) -> None:
        """End what runs, after the batch that it has in hand."""
        await self.custody.close()
        await self.redrives.close()


@asynccontextmanager
async def open_office(
    settings: Settings, queues: Queues | None, *, clock: Clock | None = None
) -> AsyncIterator[VaultApp]:
    """The vault and the brokers of these settings. Raises CannotStart, or BrokerError when RabbitMQ is not there."""
    time_source = clock or SystemClock()
    url = settings.vault.reveal() if settings.vault else settings.storages[0].url
    async with AsyncExitStack() as stack:
        database, beside = _database(url)
        grouped = load_fingerprint(settings.fingerprint)
        key = await _chain_key(settings, url, time_source)
        vault = SqlVault(database, key=key, clock=time_source)
        await _open(vault)
        stack.push_async_callback(vault.close)
        await _check_key(vault, key)
        blobs: Blobs | None = None
        if place := settings.vault_blobs or beside:
            blobs = await stack.enter_async_context(open_blobs(place))
        posts: list[Post] = []
        if settings.broker is not None:
            posts.append(await stack.enter_async_context(_rabbit(settings, time_source, grouped)))
        if queues is not None:
            posts.append(QueuePost(queues, grouped=grouped, retries=_retries(settings)))
        custody = Custody(vault, posts, clock=time_source, blobs=blobs)
        office = VaultApp(custody, key=key, blobs=blobs, redrive_role=Role[settings.redrive_role.upper()])
        await office.tokens.load()
        stack.push_async_callback(office.close)
        yield office


@asynccontextmanager
async def open_ledger(settings: Settings, url: str, *, clock: Clock) -> AsyncIterator[Ledger]:
    """The ledger of the vault at a URL, for a row that goes with no letter. Raises CannotStart."""
    async with open_vault(settings, url, clock=clock) as vault:
        yield vault.ledger


@asynccontextmanager
async def open_vault(settings: Settings, url: str, *, clock: Clock) -> AsyncIterator[Vault]:
    """The vault at a URL, without brokers. Raises CannotStart."""
    database, _ = _database(url)
    key = await _chain_key(settings, url, clock)
    vault = SqlVault(database, key=key, clock=clock)
    await _open(vault)
    try:
        await _check_key(vault, key)
        yield vault
    finally:
        await vault.close()


def successes(url: str, *, actor: str, clock: Clock) -> Successes:
    """What consumers tell the vault at a URL. Raises CannotStart for settings that cannot be read."""
    settings = load_settings(serving=False)
    return Successes(lambda: open_vault(settings, url, clock=clock), actor=actor)


@asynccontextmanager
async def office_at_work(office: VaultApp, settings: Settings) -> AsyncIterator[None]:
    """What a server does by itself: captures, tasks that go on, letters that are resolved or past their retention."""
    retention = parse_retention(settings.retention)
    resolve_after_s = parse_duration(settings.resolve_after, what="resolve_after") / 1_000_000
    for queue in listed(settings.capture):
        office.custody.keep_capturing(queue, SERVER)
    await office.redrives.resume_all()
    upkeep = asyncio.create_task(_upkeep(office, resolve_after_s, retention), name="upkeep of the vault")
    try:
        yield
    finally:
        upkeep.cancel()
        await asyncio.wait([upkeep])


async def _upkeep(office: VaultApp, resolve_after_s: float, retention: Mapping[LetterState, float]) -> None:
    while True:
        try:
            await office.redrives.release()
            await office.retention.run(resolve_after_s=resolve_after_s, retention_s=retention)
            await office.tokens.load()
        except HoldfastError as error:
            emit("vault.failed", error=error)
        await asyncio.sleep(UPKEEP_S)


def parse_retention(text: str | None) -> dict[LetterState, float]:
    """`discarded=720h,resolved=24h`. Raises CannotStart."""
    found: dict[LetterState, float] = {}
    for part in listed(text):
        name, _, duration = part.partition("=")
        try:
            state = LetterState(name.strip())
            age_us = parse_duration(duration.strip(), what="retention")
        except (ValueError, Invalid) as error:
            raise CannotStart(f"retention is invalid; '{part}' is not STATE=DURATION: {error}") from error
        if (state, LetterState.DELETED) not in LETTER_MOVES or not age_us:
            raise CannotStart(f"retention is invalid; letters that are {state.value} are never deleted")
        found[state] = age_us / 1_000_000
    return found


def listed(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _database(url: str) -> tuple[Database, str | None]:
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return SqliteDatabase(None), None
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.strip("/"):
        folder = Path(unquote(parts.path[1:]))
        return SqliteDatabase(folder / "vault.db"), str(folder / "vault-blobs")
    if parts.scheme in {"postgresql", "postgres"}:
        from holdfast.engines.postgres.vault import PostgresDatabase

        return PostgresDatabase(url), None
    raise BadUrl("vault URL is invalid; use sqlite:///FOLDER, postgresql://… or memory://")


async def _open(vault: SqlVault) -> None:
    try:
        await vault.open()
    except CannotStart:
        raise
    except HoldfastError as error:
        raise CannotStart(f"vault cannot be opened; {error.message}") from error


@asynccontextmanager
async def _rabbit(settings: Settings, clock: Clock, grouped: Fingerprinter) -> AsyncIterator[Post]:
    from holdfast.engines.rabbitmq.custody import RabbitCustody

    names = listed(settings.dead_queues)
    async with RabbitCustody(
        settings.broker.reveal() if settings.broker else "",
        clock=clock,
        management=settings.management.reveal() if settings.management else None,
        known=[name for name in (*names, *listed(settings.capture)) if "*" not in name],
        patterns=[name for name in names if "*" in name],
        retries=_retries(settings),
        grouped=grouped,
    ) as post:
        yield post


def _retries(settings: Settings) -> Retries:
    """How consumers try again, for a canary that finds no wait queue. Raises CannotStart."""
    try:
        delays = [parse_duration(part, what="retry_delay") / 1_000_000 for part in listed(settings.retry_delay)]
    except Invalid as error:
        raise CannotStart(error.message) from error
    return Retries(attempts=settings.retry_attempts, delays_s=tuple(delays))


async def _chain_key(settings: Settings, url: str, clock: Clock) -> bytes:
    """The key of the chain: given, or made once and kept in a file. Raises CannotStart."""
    if settings.ledger_key is not None:
        return settings.ledger_key.reveal().encode()
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return secrets.token_bytes(KEY_BYTES)
    folder = Path(unquote(parts.path[1:])) if parts.scheme == "sqlite" else settings.data_folder
    path = folder / "ledger-key"
    if not await asyncio.to_thread(path.exists) and await _has_rows(url, clock):
        # A new one would only be in the way of the right one.
        raise CannotStart(
            f"key of the ledger is missing; the vault's chain was begun with a key and {path} is not there, bring back "
            "the file ledger-key or set HOLDFAST_LEDGER_KEY"
        )
    return await asyncio.to_thread(_key, path)


async def _has_rows(url: str, clock: Clock) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and not await asyncio.to_thread((Path(unquote(parts.path[1:])) / "vault.db").exists):
        return False
    vault = SqlVault(_database(url)[0], key=b"", clock=clock)  # it writes nothing
    await _open(vault)
    try:
        return bool(await vault.ledger.rows(after=0, count_max=1))
    finally:
        await vault.close()


def _key(path: Path) -> bytes:
    """The key in a file that only we read, made now if there is none."""
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(KEY_BYTES).encode())
                file.flush()
                os.fsync(descriptor)
        return path.read_bytes().strip()
    except OSError as error:
        raise CannotStart(
            f"key of the ledger cannot be kept; {path}: {error.strerror}, set HOLDFAST_LEDGER_KEY"
        ) from error


async def _check_key(vault: Vault, key: bytes) -> None:
    """With another key the chain would break at the next row. The first row tells, whatever happened to the others."""
    first = await vault.ledger.rows(after=0, count_max=1)
    if first and verify(key, first, previous=FIRST) is not None and first[0].number == 1:
        raise CannotStart(
            "key of the ledger is another one; the vault's chain was begun with another key, or its first row was "
            "changed, bring back the file ledger-key or set HOLDFAST_LEDGER_KEY"
        )
