"""How items come into a PostgreSQL queue: produced, imported, or arrived dead from another storage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from holdfast.core.item import SCHEDULE_US_MIN, Item, NewItem, format_id, id_suffix
from holdfast.core.moments import microseconds, moment
from holdfast.core.requests.queue import ImportedItem
from holdfast.engines.postgres.connection import bigints, byteas, texts, texts_or_null
from holdfast.engines.postgres.partition import PostgresPartition
from holdfast.engines.postgres.transaction import Finish, OperationBatch
from holdfast.errors import StorageFailed
from holdfast.ports.queue_store import Arrive, Counted, Import, Imported, Operation, Produce, Produced, imported_item

#: A key that is taken when we insert and free when we look is met anew; so often only by a defect.
KEY_TRIES_COUNT_MAX = 10


def has_keys(operation: Operation) -> bool:
    """Whether an operation can meet a key that another server is just writing."""
    match operation:
        case Produce(items=items):
            return any(item.dedupe_key for item in items)
        case Import(items=imported):
            return any(item.dedupe_key or item.source_id for item in imported)
        case Arrive():
            return True
    return False


async def produce(batch: OperationBatch, operation: Produce) -> Finish:
    """Append items. Plain ones take one statement and no answer before the commit."""
    items, partition = operation.items, batch.partition(operation.partition)
    if any(item.dedupe_key or item.enqueue_at is not None for item in items):
        return await _produce_keyed(batch, operation)
    batch.made_available()
    answer = batch.put(
        "produce_items",
        partition,
        batch.work.now_us,
        operation.expire_timeout_us,
        texts([item.kind for item in items]),
        texts([item.encoding for item in items]),
        texts([item.reference for item in items]),
        byteas([item.payload for item in items]),
    )

    def finish() -> Produced:
        ids = partition.ids_of([number for (number,) in batch.work.rows(answer)])
        batch.change(partition).queue(len(ids), expire_at_us=batch.now_us + operation.expire_timeout_us)
        return Produced(ids)

    return finish


async def _produce_keyed(batch: OperationBatch, operation: Produce) -> Finish:
    partition = batch.partition(operation.partition)
    change = batch.change(partition)
    ids: dict[int, str] = {}
    left = list(enumerate(operation.items))
    for _ in range(KEY_TRIES_COUNT_MAX):
        for position, number, is_scheduled in await _insert_keyed(batch, operation, [item for _, item in left]):
            index, item = left[position - 1]
            ids[index] = partition.id_of(number)
            if is_scheduled:
                change.schedule(1, at_us=_us(item.enqueue_at))
            else:
                change.queue(1, expire_at_us=batch.now_us + operation.expire_timeout_us)
                batch.made_available()
        left = [(index, item) for index, item in left if index not in ids]
        if not left:
            return lambda: Produced([ids[index] for index in range(len(operation.items))])
        keys = texts([item.dedupe_key for _, item in left])
        known = {
            key: (number, at) for key, number, at in await batch.work.ask("find_dedupe_keys", batch.generation, keys)
        }
        for index, item in left:
            if item.dedupe_key in known:
                number, at = known[item.dedupe_key]
                ids[index] = format_id(number, id_suffix(batch.generation, at))
        left = [(index, item) for index, item in left if index not in ids]
        if not left:
            return lambda: Produced([ids[index] for index in range(len(operation.items))])
    raise StorageFailed("storage failed; a dedupe key is taken and freed again and again, try again")


async def _insert_keyed(
    batch: OperationBatch, operation: Produce, items: Sequence[NewItem]
) -> list[tuple[int, int, bool]]:
    rows = await batch.ask(
        "produce_keyed_items",
        batch.partition(operation.partition),
        batch.work.now_us,
        operation.expire_timeout_us,
        texts([item.kind for item in items]),
        texts([item.encoding for item in items]),
        texts([item.reference for item in items]),
        texts_or_null([item.dedupe_key for item in items]),
        bigints([_us(item.enqueue_at) for item in items]),
        byteas([item.payload for item in items]),
        SCHEDULE_US_MIN,
    )
    return [(position, number, is_scheduled) for position, number, is_scheduled in rows]


def _us(at: datetime | None) -> int:
    return microseconds(at) if at else 0


async def import_items(batch: OperationBatch, operation: Import) -> Finish:
    """Append items with their story; what is here already is left out."""
    partition = batch.partition(operation.partition)
    change = batch.change(partition)
    stored: list[Item] = []
    for position, number, is_scheduled, created_at, expire_at in await _insert_story(
        batch, partition, operation.items, operation.expire_timeout_us
    ):
        item = operation.items[position - 1]
        if is_scheduled:
            change.schedule(1, at_us=_us(item.enqueue_at))
        else:
            change.queue(1, expire_at_us=expire_at)
            if item.died_at:
                change.death_us = min(change.death_us or _us(item.died_at), _us(item.died_at))
            batch.made_available()
        stored.append(
            imported_item(
                item,
                partition.id_of(number),
                created_at_us=created_at,
                expire_at_us=expire_at,
                scheduled=is_scheduled,
            )
        )
    return lambda: Imported(stored)


async def _insert_story(
    batch: OperationBatch, partition: PostgresPartition, items: Sequence[ImportedItem], expire_timeout_us: int
) -> list[tuple[int, int, bool, int, int]]:
    rows = await batch.ask(
        "import_items",
        partition,
        batch.work.now_us,
        expire_timeout_us,
        texts([item.kind for item in items]),
        texts([item.encoding for item in items]),
        texts([item.reference for item in items]),
        texts_or_null([item.dedupe_key for item in items]),
        texts_or_null([item.source_id for item in items]),
        texts_or_null([item.source_queue for item in items]),
        texts_or_null([item.death_reason for item in items]),
        bigints([item.death_attempts for item in items]),
        bigints([_us(item.died_at) for item in items]),
        bigints([_us(item.created_at) for item in items]),
        bigints([_us(item.expire_deadline) for item in items]),
        bigints([_us(item.enqueue_at) for item in items]),
        bigints([item.attempts for item in items]),
        byteas([item.payload for item in items]),
        SCHEDULE_US_MIN,
        texts_or_null([item.former_key for item in items]),
    )
    return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


async def arrive(batch: OperationBatch, operation: Arrive) -> Finish:
    """The second commit of a death: insert what is neither here nor remembered as arrived."""
    dying = {item.source_id: item for item in operation.items}
    remembered = await batch.work.ask(
        "remember_arrivals",
        batch.generation,
        texts(list(dying)),
        texts([item.source_queue for item in dying.values()]),
    )
    new = {source_id for (source_id,) in remembered}
    letters = [
        ImportedItem(
            source_id=item.source_id,
            source_queue="" if item.is_redrive else item.source_queue,
            kind=item.kind,
            encoding=item.encoding,
            reference=item.reference,
            payload=item.payload,
            death_reason=item.death_reason,
            death_attempts=0 if item.is_redrive else item.death_attempts,
            died_at=None if item.is_redrive else moment(item.died_at_us),
            former_key=item.former_key,
        )
        for item in dying.values()
        if item.source_id in new
    ]
    partition = batch.partition(operation.partition)
    stored = await _insert_story(batch, partition, letters, operation.expire_timeout_us)
    if stored:
        change = batch.change(partition)
        change.queue(len(stored), expire_at_us=min(row[4] for row in stored))
        change.death_us = min((item.died_at_us for item in operation.items if not item.is_redrive), default=0)
        batch.made_available()
    return lambda: Counted(len(stored))
