"""The pages that programs watch: `/health` and `/metrics`.

Both need no token. Whoever has none sees no queue's name, unless the settings say so: queues are then one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.core.requests.declare import Caller
from holdfast.errors import HoldfastError
from holdfast.faces.api.authenticator import Authenticator
from holdfast.services.queue.manager import QueueManager
from holdfast.services.vault.admin import VaultApp
from holdfast.telemetry.events import emit
from holdfast.telemetry.prometheus import OTHERS, CaptureGauge, QueueGauge, Requests, Shown, render, render_vault

NOTES_COUNT_MAX = 20


class Pages:
    """What programs watch of a server."""

    def __init__(
        self,
        manager: QueueManager,
        authenticator: Authenticator,
        requests: Requests,
        *,
        version: str,
        vault_app: VaultApp | None,
        open_names: bool,
    ) -> None:
        self._manager = manager
        self._authenticator = authenticator
        self._requests = requests
        self._version = version
        self._vault_app = vault_app
        self._open_names = open_names

    def routes(self) -> list[Route]:
        """Where they are."""
        return [Route("/health", self._health), Route("/metrics", self._metrics)]

    def _shown(self, caller: Caller | None) -> Shown:
        """By which name a caller is shown a queue."""
        if self._open_names:
            return str
        return lambda queue: queue if caller is not None and caller.may_touch(queue) else OTHERS

    async def _health(self, request: Request) -> Response:
        """200 while requests can be served; a storage that is set aside, and a capture that stands still, are noted."""
        shown = self._shown(self._authenticator.viewer(request.scope))
        manager = self._manager
        failing = [
            f"{shown(record.name)}: storage '{share.storage}' is set aside"
            for record in manager.records()
            if (queue := manager.find(record.name)) is not None
            for share in queue.shares
            if not share.healthy
        ]
        standing = list(self._standing(shown))
        queues = manager.records()
        down = manager.closing or (bool(queues) and len(failing) >= len(queues))
        body = {
            "status": "fail" if down else "warn" if failing or standing else "pass",
            "version": self._version,
            "queues": len(queues),
            "notes": list(dict.fromkeys([*failing, *standing]))[:NOTES_COUNT_MAX],
        }
        return Response(msgspec.json.encode(body), 503 if down else 200, media_type="application/health+json")

    def _standing(self, shown: Shown) -> Iterator[str]:
        """The captures that stand still and what waits for a broker, each with its reason, which has names in it."""
        if self._vault_app is None:
            return
        custody = self._vault_app.custody
        for one in custody.captures():
            if one.state in ("waiting", "failed"):
                name = shown(one.queue)
                yield f"the capture of {name} stands still{'' if name == OTHERS else f': {one.why}'}"
        for broker in custody.brokers:
            if trouble := broker.publisher.trouble:
                yield "redrives wait" if shown("") == OTHERS else f"redrives wait: {trouble}"

    async def _metrics(self, request: Request) -> Response:
        shown = self._shown(self._authenticator.viewer(request.scope))
        page = render(self._requests, gauges(self._manager), shown)
        return Response(page + await self._letters(shown), media_type="text/plain; version=0.0.4")

    async def _letters(self, shown: Shown) -> str:
        """What the vault tells Prometheus; nothing while it cannot be read, and the rest of the page is served."""
        if self._vault_app is None:
            return ""
        vault = self._vault_app.vault
        try:
            tallies = await vault.ledger.tallies()
        except HoldfastError as error:
            emit("vault.failed", error=error)
            return ""
        captures = [
            CaptureGauge(one.queue, one.state == "running", one.lag_s, one.failed_imports)
            for one in self._vault_app.custody.captures()
        ]
        return render_vault({(one.queue, one.state): one.count for one in tallies}, vault.moves, captures, shown)


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
