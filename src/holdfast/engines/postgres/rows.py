"""What rows of the database are as values."""

from __future__ import annotations

from typing import Any

from holdfast.core.item import Item
from holdfast.core.moments import moment, moment_or_none
from holdfast.engines.postgres.counts import PostgresPartition
from holdfast.ports.queues import DyingItem, LedgerEntry, MoveTarget


def item(stand: PostgresPartition, row: tuple[Any, ...]) -> Item:
    """A row of a listing."""
    number, attempts, created_at, expire_at, lease_deadline, enqueue_at = row[:6]
    kind, encoding, reference, payload, dedupe_key, source_id = row[6:12]
    source_queue, death_reason, death_attempts, died_at, former_key = row[12:]
    return Item(
        id=stand.id_of(number),
        attempts=attempts,
        created_at=moment(created_at),
        expire_deadline=moment(expire_at),
        lease_deadline=moment_or_none(lease_deadline),
        enqueue_at=moment_or_none(enqueue_at),
        is_leased=bool(lease_deadline),
        kind=kind,
        encoding=encoding,
        reference=reference,
        payload=payload,
        dedupe_key=dedupe_key or "",
        source_id=source_id or "",
        source_queue=source_queue or "",
        death_reason=death_reason or "",
        death_attempts=death_attempts or 0,
        died_at=moment_or_none(died_at),
        former_key=former_key or "",
    )


def corpse(stand: PostgresPartition, queue_name: str, row: tuple[Any, ...]) -> DyingItem:
    """An item marked as dying."""
    return DyingItem(
        source_id=stand.id_of(row[0]),
        source_queue=queue_name,
        death_reason=row[1],
        death_attempts=row[2],
        died_at_us=row[3],
        target=MoveTarget(
            queue_name=row[4],
            generation=row[5],
            partition=row[6],
            storage=row[7],
            expire_timeout_us=row[8],
        ),
        kind=row[9],
        encoding=row[10],
        reference=row[11],
        payload=row[12],
        former_key=row[13] or "",
    )


def ledger_entry(row: tuple[Any, ...]) -> LedgerEntry:
    """A row of the ledger."""
    return LedgerEntry(
        at_us=row[0],
        action=row[1],
        queue_name=row[2],
        item_id=row[3],
        reason=row[4],
        count=row[5],
        detail=row[6],
    )
