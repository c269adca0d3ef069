"""`holdfast serve`: opens the storages, makes the admin token at the first start, serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from holdfast.errors import CannotStart, HoldfastError
from holdfast.faces.api.app import make_app
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.endpoints import LazyCollector
from holdfast.ports.queue_store import Catalog
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.recover.service import RecoverySchedule
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import ListenAddress, Settings
from holdfast.telemetry.events import emit, set_up_logging
from holdfast.wiring import has_collector, open_app, open_collector, scheduled_recoveries, vault_at_work

TOKEN_KEY = "admin_token_sha256"  # noqa: S105 - the name under which the hash is kept
STOP_TIMEOUT_S = 30
CONNECTIONS_COUNT_MAX = 20_000
#: A commit in a thread needs the interpreter a few times, and beside a busy event loop it waits for so long each time.
SWITCH_INTERVAL_S = 0.0005


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: waiting requests have to be answered before it stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Serve until told to stop."""
    set_up_logging(level=settings.log_level, form=settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(serve(settings, announce=announce))


async def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; returns after everything accepted is stored. Raises CannotStart."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = _listen(settings.address)
    try:
        async with open_app(settings) as (service, vault_app):
            await _serve(settings, service, vault_app, listener, stop, announce=announce)
    finally:
        listener.close()
    emit("server.stopped")


async def _serve(
    settings: Settings,
    service: QueueService,
    vault_app: VaultApp,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    announce: Callable[[str], None],
) -> None:
    admin_token_hash = None
    if settings.auth != "none":
        admin_token_hash = await _admin_token(settings, service.manager.catalog, announce)
    results = _results(settings, service)
    await _resume(results, settings)
    app = make_app(
        service,
        admin_token_hash=admin_token_hash,
        version=version("holdfast"),
        body_bytes_max={
            "produce": settings.produce_body_bytes_max,
            "import": settings.import_body_bytes_max,
            "other": settings.other_body_bytes_max,
        },
        results=results,
        vault_app=vault_app,
    )
    recoveries = _recoveries(settings, service, vault_app)
    async with vault_at_work(vault_app, settings), _serving(app, listener, settings), AsyncExitStack() as stack:
        address = _address(listener, tls=bool(settings.tls_cert))
        announce(f"Holdfast serves on {address}")
        emit("server.started", address=address)
        await stack.enter_async_context(recoveries.at_work())
        await stop.wait()
        emit("server.stopping")
        await stack.aclose()
        await results.close()
        await vault_app.close()
        service.manager.stop()


def _recoveries(settings: Settings, service: QueueService, vault_app: VaultApp) -> RecoverySchedule:
    broker = settings.broker.reveal() if settings.broker else None
    return scheduled_recoveries(
        settings, queues=lambda: Queues(service), broker=broker, vault=lambda: nullcontext(vault_app.vault)
    )


def _results(settings: Settings, service: QueueService) -> LazyCollector:
    return LazyCollector(
        lambda: open_collector(
            settings.storages[0].url,
            blobs=settings.blobs,
            broker=settings.collect_broker.reveal() if settings.collect_broker else None,
            queues=Queues(service),
        )
    )


async def _resume(results: LazyCollector, settings: Settings) -> None:
    """Open the collector now where transactions may be waiting for it."""
    if settings.blobs or has_collector(settings.storages[0].url):
        try:
            await results.results()
        except HoldfastError as error:
            # Queues are served all the same; whoever asks for a result is told why there is none.
            emit("collect.troubled", error=error.message)


@asynccontextmanager
async def _serving(app: ASGIApp, listener: socket.socket, settings: Settings) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_COUNT_MAX,
            date_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    try:
        if serving.done():
            raise CannotStart("server cannot start; see the log")
        yield
    finally:
        server.should_exit = True
        await serving


def _listen(address: ListenAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        raise CannotStart(
            f"address cannot be used; {address.host}:{address.port}: {error.strerror}, choose another with --listen"
        ) from error
    return listener


def _address(listener: socket.socket, *, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


async def _admin_token(settings: Settings, catalog: Catalog, announce: Callable[[str], None]) -> str:
    """The hash of the admin token. The token is made once, and only ever shown here and in a file that only we read."""
    if settings.admin_token:
        return token_hash(settings.admin_token.reveal())
    path = settings.admin_token_file
    made = not path.exists()
    token = _new_token(path) if made else _read_token(path)
    kept = await catalog.keep(TOKEN_KEY, token_hash(token))
    if kept != token_hash(token):
        if made:
            path.unlink()
        announce("The admin token was made at the first start of this installation; HOLDFAST_ADMIN_TOKEN sets another")
    elif made and sys.stdout.isatty():  # what is not a terminal may be a log, where a token has no business
        announce(f"Admin token: {token}\n(also in {path}, readable by you alone)")
    else:
        announce(f"Admin token: in {path}")
    return kept


def _read_token(path: Path) -> str:
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(
            f"admin token cannot be read; {path}: {error}, mend it or set HOLDFAST_ADMIN_TOKEN"
        ) from error
    if not token:
        raise CannotStart(f"admin token is empty; remove {path} to have one made, or set HOLDFAST_ADMIN_TOKEN")
    return token


def _new_token(path: Path) -> str:
    token = f"hf_{secrets.token_urlsafe(32)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise CannotStart(f"admin token cannot be kept; {path}: {error.strerror}, set HOLDFAST_ADMIN_TOKEN") from error
    return token
