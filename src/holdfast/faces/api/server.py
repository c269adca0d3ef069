"""`holdfast serve`: the HTTP application, with the verbs and the three pages that programs watch, and the process that
serves it: it opens the storages, makes the admin token at the first start, and ends with SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from holdfast.errors import CannotStart, HoldfastError, Invalid
from holdfast.faces.api.authenticator import Authenticator, token_hash
from holdfast.faces.api.endpoints import LazyCollector, admin_routes, document, results_routes
from holdfast.faces.api.verbs import Verbs, error_body
from holdfast.ports.queue_store import Catalog
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.recover.service import RecoverySchedule
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import ListenAddress, Settings
from holdfast.telemetry.events import emit, set_up_logging
from holdfast.telemetry.prometheus import CaptureGauge, QueueGauge, Requests, render, render_vault
from holdfast.wiring import has_collector, made_once, open_app, open_collector, scheduled_recoveries, vault_at_work

BODY_BYTES_MAX: Mapping[str, int] = {"produce": 5_000_000, "import": 64_000_000, "other": 512_000}
TOKEN_KEY = "admin_token_sha256"  # noqa: S105 - the name under which the hash is kept
STOP_TIMEOUT_S = 30
CONNECTIONS_COUNT_MAX = 20_000
#: A commit in a thread needs the interpreter a few times, and beside a busy event loop it waits for so long each time.
SWITCH_INTERVAL_S = 0.0005


def make_app(
    service: QueueService,
    *,
    admin_token_hash: str | None,
    version: str,
    body_bytes_max: Mapping[str, int] = BODY_BYTES_MAX,
    results: LazyCollector | None = None,
    vault_app: VaultApp | None = None,
) -> ASGIApp:
    """The application over a service; without a token's hash it lets everybody on this machine in."""
    manager, requests = service.manager, Requests()
    authenticator = Authenticator(admin_token_hash, vault_app)

    async def health(request: Request) -> Response:
        authenticator.check_page(request.scope)
        status, body = health_of(manager, version, standing=[] if vault_app is None else standing_captures(vault_app))
        return Response(body, status, media_type="application/health+json")

    async def metrics(request: Request) -> Response:
        authenticator.check_page(request.scope)
        vault = await letters_page(vault_app) if vault_app is not None else ""
        return Response(render(requests, gauges(manager)) + vault, media_type="text/plain; version=0.0.4")

    async def openapi(request: Request) -> Response:
        authenticator.caller(request.scope)
        return Response(document(version), media_type="application/json")

    async def elsewhere(request: Request) -> Response:
        raise Invalid(f"path is invalid; there is nothing at '{request.url.path}'")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HoldfastError)  # noqa: S101 - it is registered for nothing else
        return Response(error_body(error), error.code, media_type="application/json")

    verbs = Verbs(service, authenticator=authenticator, body_bytes_max=body_bytes_max, requests=requests)
    return Starlette(
        routes=[
            *(admin_routes(vault_app, authenticator) if vault_app is not None else ()),
            *(results_routes(results, authenticator) if results is not None else ()),
            Mount("/v1", verbs),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/{path:path}", elsewhere, methods=["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
        ],
        exception_handlers={HoldfastError: refused},
    )


async def letters_page(vault_app: VaultApp) -> str:
    """What the vault tells Prometheus; nothing while it cannot be read, and the rest of the page is served."""
    try:
        tallies = await vault_app.vault.ledger.tallies()
    except HoldfastError as error:
        emit("vault.failed", error=error)
        return ""
    captures = [
        CaptureGauge(one.queue, one.state == "running", one.lag_s, one.failed_imports)
        for one in vault_app.custody.captures()
    ]
    return render_vault({(one.queue, one.state): one.count for one in tallies}, vault_app.vault.moves, captures)


def standing_captures(vault_app: VaultApp) -> list[str]:
    """The captures that stand still, each with its reason."""
    found = [one for one in vault_app.custody.captures() if one.state in ("waiting", "failed")]
    return [f"the capture of {one.queue} stands still: {one.why}" for one in found]


def health_of(manager: QueueManager, version: str, *, standing: Sequence[str] = ()) -> tuple[int, bytes]:
    """200 while requests can be served; a storage that is set aside, and a capture that stands still, are named."""
    failing = [
        f"{record.name}: storage '{share.storage}' is set aside"
        for record in manager.records()
        if (queue := manager.find(record.name)) is not None
        for share in queue.shares
        if not share.healthy
    ]
    queues = manager.records()
    down = manager.closing or (bool(queues) and len(failing) >= len(queues))
    status = "fail" if down else "warn" if failing or standing else "pass"
    body = {"status": status, "version": version, "queues": len(queues), "notes": [*failing, *standing][:20]}
    return (503 if down else 200), msgspec.json.encode(body)


def gauges(manager: QueueManager) -> Iterator[QueueGauge]:
    """How every queue stands."""
    for record in manager.records():
        queue = manager.find(record.name)
        if queue is None:
            continue
        states = [state for share in queue.shares for state in share.states.values()]
        yield QueueGauge(record.name, "queued", sum(state.queued for state in states))
        yield QueueGauge(record.name, "leased", sum(state.leased for state in states))
        yield QueueGauge(record.name, "scheduled", sum(state.scheduled for state in states))
        yield QueueGauge(record.name, "dying", sum(state.dying for state in states))
        yield QueueGauge(record.name, "leases_waiting", len(queue.waiting.leases))
        yield QueueGauge(record.name, "produces_waiting", len(queue.waiting.produces))
        yield QueueGauge(record.name, "storages_failing", sum(not share.healthy for share in queue.shares))


# --- the process ----------------------------------------------------------------------------------------------


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
    try:
        return made_once(path, f"hf_{secrets.token_urlsafe(32)}\n").decode()
    except OSError as error:
        raise CannotStart(f"admin token cannot be kept; {path}: {error.strerror}, set HOLDFAST_ADMIN_TOKEN") from error
