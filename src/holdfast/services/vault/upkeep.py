"""What a vault does by itself as time goes by: redriven letters are resolved, settled ones are deleted when somebody
said so, and blobs that no letter has are removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from holdfast.core.death import REDRIVE_ID
from holdfast.core.ledger import LedgerAct
from holdfast.core.message import Message
from holdfast.core.moments import SECOND_US, Backoff, moment, parse_duration
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import CannotStart, HoldfastError, Invalid, StorageFailed
from holdfast.ports.blobs import Blobs
from holdfast.ports.clock import Clock
from holdfast.services.vault.redrive_tasks import ACTOR
from holdfast.stores.vault import OpenVault, Vault
from holdfast.telemetry.events import emit

FLUSH_S = 1.0
BATCH_COUNT_MAX = 1_000
#: More are let go: time resolves their letters.
NOTED_COUNT_MAX = 100_000
#: How often a letter is looked at whose redrive has not noted the broker's confirm yet.
LOOKS_MAX = 120
WAITS = Backoff(first_s=FLUSH_S, delay_s_max=60.0)
LAST_FLUSH_TIMEOUT_S = 5.0
ID_CHARACTERS_MAX = 200
COUNT_MAX = 1_000


class Successes:
    """When a consumer of ours has done a message that was redriven, its letter is resolved, in batches and beside the
    work: `note(message)` never waits; `at_work()` carries what was noted to the vault.

    A report that is lost does no harm: the letter is resolved when it has not come back for long enough.
    """

    def __init__(self, open_vault: OpenVault, *, actor: str) -> None:
        self._open_vault = open_vault
        self._act = LedgerAct(actor=actor, action="letters.resolved", reason="a consumer has done it")
        self._noted: dict[str, int] = {}

    def note(self, message: Message) -> None:
        """A handler has done this message, and it is acked."""
        found = message.headers.get(REDRIVE_ID)
        if isinstance(found, str) and 0 < len(found) <= ID_CHARACTERS_MAX and len(self._noted) < NOTED_COUNT_MAX:
            self._noted[found] = 0

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """While the block runs; what is left at its end is told once more, within a few seconds."""
        task = asyncio.create_task(self._keep_on(), name="successes for the vault")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if self._noted:
                await self._tell_the_rest()

    async def _tell_the_rest(self) -> None:
        try:
            async with asyncio.timeout(LAST_FLUSH_TIMEOUT_S), self._open_vault() as vault:
                await self._flush(vault)
        except (HoldfastError, TimeoutError) as error:
            emit("vault.failed", error=error)

    async def _keep_on(self) -> None:
        failures = 0
        while True:
            try:
                async with self._open_vault() as vault:
                    while True:
                        await asyncio.sleep(FLUSH_S)
                        await self._flush(vault)
                        failures = 0
            except HoldfastError as error:
                emit("vault.failed", error=error)
                await asyncio.sleep(WAITS.delay_s(failures, spread=1.0))
                failures += 1

    async def _flush(self, vault: Vault) -> None:
        ids = list(self._noted)
        for start in range(0, len(ids), BATCH_COUNT_MAX):
            batch = ids[start : start + BATCH_COUNT_MAX]
            early = set(await vault.redrives.succeeded(batch, self._act))
            for one in batch:
                looks = self._noted.pop(one, 0)
                if one in early and looks < LOOKS_MAX:
                    self._noted[one] = looks + 1


class Retention:
    """The upkeep of one vault."""

    def __init__(self, vault: Vault, *, clock: Clock, blobs: Blobs | None = None) -> None:
        self._vault = vault
        self._clock = clock
        self._blobs = blobs

    async def run(
        self, *, resolve_after_s: float, retention_s: Mapping[LetterState, float], sweeps: bool = True
    ) -> int:
        """Resolve what has not come back, and delete what retention says; returns how many letters changed."""
        now = moment(self._clock.now_us())
        resolving = LedgerAct(actor=ACTOR, action="letters.resolved", reason="not back in time")
        before = now - timedelta(seconds=resolve_after_s)
        changed = await self._vault.letters.resolve_due(before=before, count_max=COUNT_MAX, act=resolving)
        for state, age_s in retention_s.items():
            deleting = LedgerAct(actor=ACTOR, action="letters.deleted", reason="retention")
            changed += await self._vault.letters.expire(
                state, before=now - timedelta(seconds=age_s), count_max=COUNT_MAX, act=deleting
            )
        if sweeps:
            await self.sweep()
            await self._vault.ledger.forget_hours()
        return changed

    async def spare(self, *, resolve_after_s: float, retention_s: Mapping[LetterState, float]) -> int:
        """The same without a deletion; returns how many letters would be deleted."""
        await self.run(resolve_after_s=resolve_after_s, retention_s={}, sweeps=False)
        now = moment(self._clock.now_us())
        counts = [
            await self._vault.letters.count_expired(state, before=now - timedelta(seconds=age_s))
            for state, age_s in retention_s.items()
        ]
        return sum(counts)

    async def sweep(self) -> int:
        """Delete blobs that no letter has; returns how many. One that cannot be deleted now stays on the list."""
        if self._blobs is None:
            return 0
        gone: list[str] = []
        for blob in await self._vault.unclaimed.delete_later(count_max=COUNT_MAX):
            try:
                await self._blobs.delete(blob)
            except StorageFailed as error:
                emit("vault.failed", error=error)
                continue
            gone.append(blob)
        if gone:
            await self._vault.unclaimed.forget(gone)
        return len(gone)


def parse_retention(parts: Sequence[str]) -> dict[LetterState, float]:
    """`discarded=720h`, `resolved=24h`: seconds by state. Raises CannotStart."""
    found: dict[LetterState, float] = {}
    for part in parts:
        name, _, duration = part.partition("=")
        try:
            state = LetterState(name.strip())
            age_us = parse_duration(duration.strip(), what="retention")
        except (ValueError, Invalid) as error:
            raise CannotStart(f"retention is invalid; '{part}' is not STATE=DURATION: {error}") from error
        if (state, LetterState.DELETED) not in LETTER_MOVES or not age_us:
            raise CannotStart(f"retention is invalid; letters that are {state.value} are never deleted")
        found[state] = age_us / SECOND_US
    return found
