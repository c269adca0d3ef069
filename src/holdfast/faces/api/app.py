"""The HTTP application: the verbs, and the three pages that programs watch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.api.authenticator import NAME_HERE, Authenticator
from holdfast.faces.api.endpoints import LazyCollector, admin_routes, results_routes
from holdfast.faces.api.openapi import document
from holdfast.faces.api.verbs import Verbs, error_body
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.service import QueueService
from holdfast.services.vault.access import Sessions
from holdfast.services.vault.admin import VaultApp
from holdfast.telemetry.events import emit
from holdfast.telemetry.prometheus import CaptureGauge, QueueGauge, Requests, render, render_vault

BODY_BYTES_MAX: Mapping[str, int] = {"produce": 5_000_000, "import": 64_000_000, "other": 512_000}


def make_app(
    service: QueueService,
    *,
    admin_token_hash: str | None,
    version: str,
    body_bytes_max: Mapping[str, int] = BODY_BYTES_MAX,
    results: LazyCollector | None = None,
    vault_app: VaultApp | None = None,
    name_here: str = NAME_HERE,
) -> ASGIApp:
    """The application over a service; without a token's hash it lets everybody on this machine in."""
    manager, requests = service.manager, Requests()
    authenticator = (
        Authenticator(admin_token_hash, name_here=name_here)
        if vault_app is None
        else vault_authenticator(vault_app, admin_token_hash, name_here)
    )

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


def vault_authenticator(vault_app: VaultApp, admin_token_hash: str | None, name_here: str) -> Authenticator:
    """The authenticator of a server with a vault: its tokens, its sessions and its table of roles."""
    return Authenticator(
        admin_token_hash,
        tokens=vault_app.tokens,
        sessions=Sessions(clock=vault_app.custody.clock),
        redrive_role=vault_app.redrive_role,
        name_here=name_here,
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
