"""Every recovery leaves a row in the ledger: who, which queue, where, how many, from when to when, and why it ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime

from msgspec import Struct, json

from holdfast.core.ledger import LedgerAct
from holdfast.core.moments import moment
from holdfast.core.recovery import Summary
from holdfast.errors import HoldfastError
from holdfast.ports.clock import Clock
from holdfast.ports.vault import Ledger
from holdfast.telemetry.events import emit

ACTION = "recovery"
OpenLedger = Callable[[], AbstractAsyncContextManager[Ledger]]


class RunRecord(Struct, frozen=True, kw_only=True):
    """What is known of a run before it begins. `source` is the broker or the storage, without any login."""

    run: str
    by: str
    dead_queue: str
    source: str


class _Detail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    run: str
    began_at: datetime
    ended_at: datetime
    dry_run: bool = False
    found: int = 0
    recovered: int = 0
    failed: int = 0
    skipped: int = 0
    filtered: int = 0
    possible_duplicates: int = 0
    remaining: int | None = 0


async def recorded(
    entry: RunRecord, run: Callable[[], Awaitable[Summary]], *, ledger: OpenLedger, clock: Clock
) -> Summary:
    """Run it and record it, also when it raises. A row that cannot be written does not undo what was recovered: it is
    logged, and the summary says so."""
    began_us = clock.now_us()
    summary: Summary | None = None
    reason, outcome = "ended by an error of its own", "failed"
    try:
        summary = await run()
        reason, outcome = summary.stopped_by.value, "done" if summary.is_complete else "partly_done"
        return summary
    except HoldfastError as error:
        reason = error.message
        raise
    finally:
        try:
            async with ledger() as opened:
                await record_run(
                    opened, entry, summary, reason=reason, outcome=outcome, began_us=began_us, ended_us=clock.now_us()
                )
        except HoldfastError as error:
            emit("recovery.unrecorded", queue=entry.dead_queue, error=error.message)
            if summary is not None:
                summary.notes.append(f"this run is not in the ledger; {error.message}")


async def record_run(
    ledger: Ledger,
    entry: RunRecord,
    summary: Summary | None,
    *,
    reason: str,
    outcome: str,
    began_us: int,
    ended_us: int,
) -> None:
    """Append the row of a run. Raises what the ledger raises; then there is no row."""
    told = summary or Summary()
    detail = _Detail(
        run=entry.run,
        began_at=moment(began_us),
        ended_at=moment(ended_us),
        dry_run=told.dry_run,
        found=told.found,
        recovered=told.recovered,
        failed=told.failed,
        skipped=told.skipped,
        filtered=told.filtered,
        possible_duplicates=told.possible_duplicates,
        remaining=told.remaining,
    )
    act = LedgerAct(
        actor=entry.by, action=ACTION, origin=entry.source, reason=reason, detail=json.encode(detail).decode()
    )
    await ledger.append(act, outcome=outcome, queue=entry.dead_queue, count=told.recovered)
