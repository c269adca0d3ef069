"""`holdfast serve`: the HTTP application (verbs, `/admin`, results, the console, what programs watch), and the process
that serves it: it opens the storages, makes the admin token at the first start, and ends with SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import re
import resource
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path
from ssl import SSLContext

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.core.moments import Backoff, BackoffTimer
from holdfast.core.requests.declare import REQUESTS
from holdfast.errors import BadMethod, BrokerError, CannotStart, HoldfastError, NotFound
from holdfast.faces.api.authenticator import Authenticator, link_path, token_hash
from holdfast.faces.api.connection import STRANGER_BODY_BYTES_MAX
from holdfast.faces.api.endpoints import LazyCollector, admin_routes, any_method, document, results_routes
from holdfast.faces.api.head import RequestHead
from holdfast.faces.api.listener import HttpLimits, HttpServer
from holdfast.faces.api.pages import Pages
from holdfast.faces.api.verbs import Verbs, error_body, error_headers
from holdfast.faces.web.console import PAGES, Console, console_routes, error_page, wants_page
from holdfast.ports.queue_store import Catalog
from holdfast.services.changes import Changes
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.recover.service import RecoverySchedule
from holdfast.services.vault.access import SessionLinks
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import ListenAddress, Settings
from holdfast.telemetry.events import emit, set_up_logging
from holdfast.telemetry.prometheus import Requests
from holdfast.wiring import has_collector, made_once, open_app, open_collector, scheduled_recoveries, vault_at_work

#: By what a request is declared with; the first three are settings.
BODY_BYTES_MAX: Mapping[str, int] = {
    "produce": 5_000_000,
    "import": 64_000_000,
    "other": 512_000,
    "ids": 3_000_000,
    "result": 6_000_000,
    "letter": 96 * 1024 * 1024,
}
FILES_COUNT_MAX = 65_536
TOKEN_KEY = "admin_token_sha256"  # noqa: S105 - the name under which the hash is kept
RESUME_TIMEOUT_S = 3
#: One that is shorter can be guessed.
TOKEN_CHARACTERS_MIN = 20
#: A commit in a thread needs the interpreter a few times, and beside a busy event loop it waits for so long each time.
SWITCH_INTERVAL_S = 0.0005


def make_server(
    service: QueueService,
    *,
    admin_token_hash: str | None,
    version: str,
    body_bytes_max: Mapping[str, int] = BODY_BYTES_MAX,
    results: LazyCollector | None = None,
    vault_app: VaultApp | None = None,
    trusted_proxy: str | None = None,
    links: SessionLinks | None = None,
    open_names: bool = False,
    limits: HttpLimits | None = None,
    tls: SSLContext | None = None,
) -> HttpServer:
    """The server over a service; without a token's hash it lets everybody on this machine in."""
    requests = Requests()
    authenticator = Authenticator(admin_token_hash, vault_app, trusted_proxy=trusted_proxy, links=links)
    pages = Pages(service.manager, authenticator, requests, version=version, vault_app=vault_app, open_names=open_names)
    bytes_max = {**BODY_BYTES_MAX, **body_bytes_max}

    async def openapi(request: Request) -> Response:
        authenticator.viewer(request.scope)
        return Response(document(version), media_type="application/json")

    console = _console(vault_app, service, authenticator, results, version)

    async def elsewhere(request: Request) -> Response:
        if request.url.path in [page.path for page in shown]:
            raise BadMethod(request.method, ["GET", "HEAD"])
        raise NotFound(f"path is invalid; there is nothing at '{request.url.path}'")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HoldfastError)  # noqa: S101 - it is registered for nothing else
        await authenticator.slow_down(request.scope, error)
        return error_page(console, request, error) if console and wants_page(request) else error_reply(error)

    verbs = Verbs(service, authenticator=authenticator, body_bytes_max=bytes_max, requests=requests)
    shown = [*pages.routes(), Route("/openapi.json", openapi)]
    app = Starlette(
        routes=[
            *(admin_routes(vault_app, authenticator) if vault_app is not None else ()),
            *(results_routes(results, authenticator) if results is not None else ()),
            *shown,
            *(console_routes(console) if console else ()),
            any_method("/", elsewhere),
            any_method("/{path:any}", elsewhere),
        ],
        exception_handlers={HoldfastError: refused},
    )
    return HttpServer(app, verbs, larger_bodies(authenticator, bytes_max), limits=limits, tls=tls)


def _console(
    vault_app: VaultApp | None,
    service: QueueService,
    authenticator: Authenticator,
    results: LazyCollector | None,
    version: str,
) -> Console | None:
    """What pages are made from, where there is a vault."""
    if vault_app is None:
        return None
    return Console(vault_app, service, authenticator, results, Changes(vault_app, service.manager), version)


def error_reply(error: HoldfastError) -> Response:
    """An error for a program."""
    return Response(error_body(error), error.code, error_headers(error), media_type="application/json")


def larger_bodies(authenticator: Authenticator, bytes_max: Mapping[str, int]) -> Callable[[RequestHead], int]:
    """How large the body of a request to the application may be that is larger than a stranger's: what its endpoint
    needs, for those who may call it."""
    found = [(one.path, one) for one in REQUESTS.values() if one.limit != "other"]
    found += [(one.path, one.form_of.declared) for one in PAGES if one.form_of is not None]
    patterns = [(re.compile(re.sub(r"{\w+}", ".+", path)), one) for path, one in found]

    def limit(head: RequestHead) -> int:
        try:
            caller = authenticator.caller(head.scope)
        except HoldfastError:
            return STRANGER_BODY_BYTES_MAX
        if head.method == "GET":
            return STRANGER_BODY_BYTES_MAX
        for pattern, one in patterns:
            if head.method in (one.method, "POST") and pattern.fullmatch(head.path):
                return bytes_max[one.limit if caller.role >= one.needs(authenticator.redrive_role) else "other"]
        return bytes_max["other"]

    return limit


# --- the process ----------------------------------------------------------------------------------------------


#: What goes on in the process of a server, beside it.
Beside = Callable[[QueueService, VaultApp], AbstractAsyncContextManager[None]]


def run(settings: Settings, *, announce: Callable[[str], None], beside: Beside | None = None) -> None:
    """Serve until told to stop."""
    set_up_logging(level=settings.log_level, form=settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_files_limit()
    uvloop.run(serve(settings, announce=announce, beside=beside))


def raise_files_limit() -> None:
    """As many open files as the system allows without asking anybody: most systems begin with 1024."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_COUNT_MAX if most == resource.RLIM_INFINITY else min(most, FILES_COUNT_MAX)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def serve(settings: Settings, *, announce: Callable[[str], None], beside: Beside | None = None) -> None:
    """Serve until SIGTERM or SIGINT; returns after everything accepted is stored. Raises CannotStart."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = _listen(settings.address)
    try:
        async with open_app(settings, serves=True) as (service, vault_app):
            await _serve(settings, service, vault_app, listener, stop, announce=announce, beside=beside)
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
    beside: Beside | None,
) -> None:
    admin_token_hash = None
    if settings.auth != "none":
        admin_token_hash = await _admin_token(settings, service.manager.catalog, announce)
    links = SessionLinks(clock=vault_app.custody.clock) if settings.address.is_loopback else None
    results = _results(settings, service)
    is_resumed = await _resume(results, settings)
    server = make_server(
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
        trusted_proxy=settings.trusted_proxy,
        links=links,
        open_names=settings.open_names,
        limits=HttpLimits.of(settings),
        tls=_tls(settings),
    )
    recoveries = _recoveries(settings, service, vault_app)
    async with vault_at_work(vault_app, settings), server.serving(listener), AsyncExitStack() as stack:
        address = _address(listener, tls=bool(settings.tls_cert))
        announce(f"Holdfast serves on {address}")
        _announce_link(links, admin_token_hash, address, announce)
        emit("server.started", address=address)
        await stack.enter_async_context(recoveries.at_work())
        if beside is not None:
            await stack.enter_async_context(beside(service, vault_app))
        if not is_resumed:
            stack.callback(asyncio.create_task(_resume_later(results), name="results resume").cancel)
        await stop.wait()
        emit("server.stopping")
        await stack.aclose()
        await results.close()
        await vault_app.close()
        service.manager.stop()


def _announce_link(
    links: SessionLinks | None, token_hash: str | None, address: str, announce: Callable[[str], None]
) -> None:
    if links is not None and token_hash and sys.stdout.isatty():  # never into what may be a log
        secret, _ = links.make(token_hash)
        announce(f"Sign in once, within 5 minutes: {address}{link_path(secret)}")


def _recoveries(settings: Settings, service: QueueService, vault_app: VaultApp) -> RecoverySchedule:
    broker = settings.broker.reveal() if settings.broker else None
    return scheduled_recoveries(
        settings,
        queues=lambda: Queues(service),
        broker=broker,
        vault=lambda: nullcontext(vault_app.vault),
        runs=vault_app.recoveries,
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


async def _resume(results: LazyCollector, settings: Settings) -> bool:
    """Open the collector now where transactions may be waiting for it; false when its broker is away."""
    if settings.blobs or has_collector(settings.storages[0].url):
        try:
            # A broker that takes the connection and says nothing holds nobody up.
            async with asyncio.timeout(None if settings.require_broker else RESUME_TIMEOUT_S):
                await results.results()
        except TimeoutError:
            emit("collect.troubled", error=f"its broker has not answered within {RESUME_TIMEOUT_S} s")
            return False
        except HoldfastError as error:
            is_away = isinstance(error, BrokerError)
            if is_away and settings.require_broker:
                raise
            # Queues are served all the same; whoever asks for a result is told why there is none.
            emit("collect.troubled", error=error.message)
            return not is_away
    return True


async def _resume_later(results: LazyCollector) -> None:
    """As soon as its broker is there."""
    backoff = BackoffTimer(Backoff())
    while True:
        await asyncio.sleep(backoff.delay_s(asyncio.get_running_loop().time()))
        try:
            await results.results()
            return
        except BrokerError:
            continue
        except HoldfastError as error:
            emit("collect.troubled", error=error.message)
            return


def _tls(settings: Settings) -> SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The empty password keeps OpenSSL from asking on the terminal for one.
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    return context


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
        return token_hash(_long_enough(settings.admin_token.reveal(), "HOLDFAST_ADMIN_TOKEN"))
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
    return _long_enough(token, str(path))


def _long_enough(token: str, where: str) -> str:
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise CannotStart(
            f"admin token is too short; {where} has {len(token)} characters, {TOKEN_CHARACTERS_MIN} are the least, "
            "leave it out to have one made"
        )
    return token


def _new_token(path: Path) -> str:
    try:
        return made_once(path, f"hf_{secrets.token_urlsafe(32)}\n").decode()
    except OSError as error:
        raise CannotStart(f"admin token cannot be kept; {path}: {error.strerror}, set HOLDFAST_ADMIN_TOKEN") from error
