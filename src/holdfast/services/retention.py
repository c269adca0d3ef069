"""Retention: what a vault does by itself as time goes by. Redriven letters are resolved, settled ones are deleted when
somebody said so, and blobs that no letter has are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from holdfast.core.ledger import LedgerAct
from holdfast.core.moments import moment
from holdfast.core.states import LetterState
from holdfast.errors import StorageFailed
from holdfast.ports.blobs import Blobs
from holdfast.ports.clock import Clock
from holdfast.ports.vault import Vault
from holdfast.telemetry.events import emit

COUNT_MAX = 1_000


class Retention:
    """The upkeep of one vault."""

    def __init__(self, vault: Vault, *, clock: Clock, blobs: Blobs | None = None, actor: str = "holdfast") -> None:
        self._vault = vault
        self._clock = clock
        self._blobs = blobs
        self._actor = actor

    async def run(self, *, resolve_after_s: float, retention_s: Mapping[LetterState, float]) -> int:
        """Resolve what has not come back, and delete what retention says; returns how many letters changed."""
        now = moment(self._clock.now_us())
        resolving = LedgerAct(actor=self._actor, action="letters.resolved", reason="not back in time")
        before = now - timedelta(seconds=resolve_after_s)
        changed = await self._vault.letters.resolve_due(before=before, count_max=COUNT_MAX, act=resolving)
        for state, age_s in retention_s.items():
            deleting = LedgerAct(actor=self._actor, action="letters.deleted", reason="retention")
            changed += await self._vault.letters.expire(
                state, before=now - timedelta(seconds=age_s), count_max=COUNT_MAX, act=deleting
            )
        await self.sweep()
        return changed

    async def sweep(self) -> int:
        """Delete blobs that no letter has; returns how many. One that cannot be deleted now stays on the list."""
        if self._blobs is None:
            return 0
        gone: list[str] = []
        for blob in await self._vault.loose.doom(count_max=COUNT_MAX):
            try:
                await self._blobs.delete(blob)
            except StorageFailed as error:
                emit("vault.failed", error=error)
                continue
            gone.append(blob)
        if gone:
            await self._vault.loose.forget(gone)
        return len(gone)
