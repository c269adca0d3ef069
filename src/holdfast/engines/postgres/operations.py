"""The operations of a PostgreSQL queue: how items come in, are leased, settled, come back by themselves, die and are
deleted. Each queues its statements and says how its result is read from their answers after the commit.

A dead queue in the same database takes its letter in the same transaction: there is nothing to resume and nothing to
repeat. One in another storage, or one that has just been deleted, takes the way of three commits. Each deletion is in
the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.core.item import (
    REASON_EXPIRED,
    REASON_MAX_ATTEMPTS,
    REASON_RETENTION,
    SCHEDULE_US_MIN,
    ExtendedItem,
    Item,
    LeasedItem,
    NewItem,
    after_retry,
    is_scheduled,
    is_used_up,
)
from holdfast.core.moments import NEVER_US, microseconds_or_zero, moment
from holdfast.core.requests.queue import ImportedItem, imported_item, leased_until_us
from holdfast.engines.postgres.connection import Rows, bigints, byteas, texts, texts_or_null
from holdfast.engines.postgres.transaction import (
    CountChange,
    Finish,
    OperationBatch,
    PostgresPartition,
    State,
    columns,
    earlier,
    refusal,
)
from holdfast.errors import StorageFailed
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Complete,
    Counted,
    DeathRules,
    Delete,
    Due,
    Ended,
    Extend,
    Forget,
    Import,
    LeaseItems,
    MoveTarget,
    Operation,
    Produce,
    Release,
    Remove,
    Result,
    RetryItems,
    Revive,
    SendBack,
    SentBack,
)

#: A key that is taken when we insert and free when we look is met anew; so often only by a defect.
KEY_TRIES_COUNT_MAX = 10
#: How long the start of a queue may be taken for empty. An item that comes back there, or whose commit was overtaken
#: by another server's, waits so long at the most.
FIRST_ID_BELIEVED_S = 0.1


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


async def _produce(batch: OperationBatch, operation: Produce, partition: PostgresPartition) -> Finish:
    """Append items. Plain ones take one statement and no answer before the commit."""
    items = operation.items
    if any(item.dedupe_key or item.enqueue_at is not None for item in items):
        return await _produce_keyed(batch, operation, partition)
    batch.made_available()
    answer = batch.put(
        "produce_items",
        partition,
        batch.work.now_us,
        operation.expire_timeout_us,
        *_labels(items),
        byteas([item.payload for item in items]),
    )

    def finish() -> list[str]:
        ids = partition.ids_of([number for (number,) in batch.work.rows(answer)])
        batch.change(partition).queue(len(ids), expire_at_us=batch.now_us + operation.expire_timeout_us)
        return ids

    return finish


async def _produce_keyed(batch: OperationBatch, operation: Produce, partition: PostgresPartition) -> Finish:
    change = batch.change(partition)
    ids: dict[int, str] = {}
    left = list(enumerate(operation.items))
    for _ in range(KEY_TRIES_COUNT_MAX):
        items = [item for _, item in left]
        # Those that no key kept out: position, from 1, id, and whether it waits for its moment.
        for position, number, waits in await batch.ask(
            "produce_keyed_items",
            partition,
            batch.work.now_us,
            operation.expire_timeout_us,
            *_labels(items),
            texts_or_null([item.dedupe_key for item in items]),
            bigints([microseconds_or_zero(item.enqueue_at) for item in items]),
            byteas([item.payload for item in items]),
            SCHEDULE_US_MIN,
        ):
            index, item = left[position - 1]
            ids[index] = partition.id_of(number)
            if waits:
                change.schedule(1, at_us=microseconds_or_zero(item.enqueue_at))
            else:
                change.queue(1, expire_at_us=batch.now_us + operation.expire_timeout_us)
                batch.made_available()
        left = [(index, item) for index, item in left if index not in ids]
        if left:
            keys = texts([item.dedupe_key for _, item in left])
            found = await batch.work.ask("find_dedupe_keys", batch.generation, keys)
            known = {key: batch.partition(at).id_of(number) for key, number, at in found}
            ids |= {index: known[item.dedupe_key] for index, item in left if item.dedupe_key in known}
            left = [(index, item) for index, item in left if index not in ids]
        if not left:
            return lambda: [ids[index] for index in range(len(operation.items))]
    raise StorageFailed("storage failed; a dedupe key is taken and freed again and again, try again")


def _labels(items: Sequence[NewItem] | Sequence[ImportedItem]) -> list[bytes]:
    """What every statement takes of items beside their payloads."""
    return [
        texts([item.kind for item in items]),
        texts([item.encoding for item in items]),
        texts([item.reference for item in items]),
    ]


async def _import(batch: OperationBatch, operation: Import, partition: PostgresPartition) -> Finish:
    """Append items with their story; what is here already is left out."""
    change = batch.change(partition)
    stored: list[Item] = []
    for position, number, waits, created_at, expire_at, until_us in await _insert_story(
        batch, partition, operation.items, operation.expire_timeout_us
    ):
        item = operation.items[position - 1]
        if until_us:
            change.lease(1, until_us=until_us)
        elif waits:
            change.schedule(1, at_us=microseconds_or_zero(item.enqueue_at))
        else:
            change.queue(1, expire_at_us=expire_at)
            change.death_us = earlier(change.death_us, microseconds_or_zero(item.died_at))
            batch.made_available()
        stored.append(
            imported_item(
                item,
                partition.id_of(number),
                created_at_us=created_at,
                expire_at_us=expire_at,
                scheduled=waits,
                until_us=until_us,
            )
        )
    return lambda: stored


async def _insert_story(
    batch: OperationBatch, partition: PostgresPartition, items: Sequence[ImportedItem], expire_timeout_us: int
) -> Rows:
    """Those that are new here: position, from 1, id, whether it waits for its moment, created_at, expire_at, and until
    when it is leased, or 0."""
    return await batch.ask(
        "import_items",
        partition,
        batch.work.now_us,
        expire_timeout_us,
        *_labels(items),
        texts_or_null([item.dedupe_key for item in items]),
        texts_or_null([item.source_id for item in items]),
        texts_or_null([item.source_queue for item in items]),
        texts_or_null([item.death_reason for item in items]),
        bigints([item.death_attempts for item in items]),
        bigints([microseconds_or_zero(item.died_at) for item in items]),
        bigints([microseconds_or_zero(item.created_at) for item in items]),
        bigints([microseconds_or_zero(item.expire_deadline) for item in items]),
        bigints([microseconds_or_zero(item.enqueue_at) for item in items]),
        bigints([item.attempts for item in items]),
        byteas([item.payload for item in items]),
        SCHEDULE_US_MIN,
        texts_or_null([item.former_key for item in items]),
        bigints([leased_until_us(item, 0) for item in items]),
    )


async def _arrive(batch: OperationBatch, operation: Arrive, partition: PostgresPartition) -> Finish:
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
    stored = await _insert_story(batch, partition, letters, operation.expire_timeout_us)
    if stored:
        change = batch.change(partition)
        change.queue(len(stored), expire_at_us=min(row[4] for row in stored))
        change.death_us = min((item.died_at_us for item in operation.items if not item.is_redrive), default=0)
        batch.made_available()
    return lambda: Counted(len(stored))


# --- lease and settle ------------------------------------------------------------------------------------------------


async def _lease(batch: OperationBatch, operation: LeaseItems, partition: PostgresPartition) -> Finish:
    """Hand out items in the order of ids; rows that another server is just handing out are passed over."""
    rules = operation.rules
    ceiling = NEVER_US if rules.immortal or not rules.max_attempts else rules.max_attempts
    first_id = _first_id(partition, operation.count_max)
    answer = batch.put(
        "lease_items",
        partition,
        batch.work.now_us,
        operation.count_max,
        first_id,
        operation.lease_timeout_us,
        0 if rules.immortal else 1,
        ceiling,
        -NEVER_US,
    )

    def finish() -> list[LeasedItem]:
        rows = batch.work.rows(answer)
        until_us = batch.now_us + operation.lease_timeout_us
        change = batch.change(partition)
        change.queued -= len(rows)
        change.lease(len(rows), until_us=until_us)
        is_short = len(rows) < operation.count_max
        partition.first_id = 0 if is_short else rows[-1][0] + 1
        if not first_id:
            partition.first_id_until_s = asyncio.get_running_loop().time() + FIRST_ID_BELIEVED_S
        if is_short:
            batch.short[partition] = batch.short.get(partition, False) or first_id > 0
        deadline, suffix, id_of = moment(until_us), partition.suffix, partition.id_of
        return [
            LeasedItem(
                f"{number:014x}{suffix}",
                attempts,
                deadline,
                payload,
                encoding,
                kind,
                reference,
                id_of(first) if first else "",
            )
            for number, attempts, payload, encoding, kind, reference, first in rows
        ]

    return finish


def _first_id(partition: PostgresPartition, count: int) -> int:
    """Where to begin: rows that were leased lie dead at the head of the index until they are vacuumed.

    Only where enough is believed to be behind it; whoever then finds less looks from the start (`_make_up`).
    """
    if partition.queued < count or asyncio.get_running_loop().time() >= partition.first_id_until_s:
        return 0
    return partition.first_id


async def _release(batch: OperationBatch, operation: Release, partition: PostgresPartition) -> Finish:
    """Undo leases: same ids, same places."""
    partition.first_id = 0
    answer = batch.put("release_leases", partition, bigints(partition.in_order(operation.ids)))
    batch.made_available()

    def finish() -> Counted:
        rows, change = batch.work.rows(answer), batch.change(partition)
        change.leased -= len(rows)
        change.queue(len(rows), expire_at_us=min((row[0] for row in rows), default=0))
        return Counted(len(rows))

    return finish


async def _complete(batch: OperationBatch, operation: Complete, partition: PostgresPartition) -> Finish:
    """Remove leased items: all or none, decided by the statement itself."""
    numbers, count = bigints(partition.in_order(operation.ids)), len(set(operation.ids))
    answer = batch.put("complete_items", partition, numbers, count)

    def finish() -> Result:
        whole, leased, queued = batch.work.rows(answer)[0]
        if not whole:
            return refusal(partition, operation.ids, leased=leased, queued=queued)
        batch.change(partition).leased -= count
        return Counted(count)

    return finish


async def _extend(batch: OperationBatch, operation: Extend, partition: PostgresPartition) -> Finish:
    """Let leases run until now + the timeout: all or none."""
    numbers, count = bigints(partition.in_order(operation.ids)), len(set(operation.ids))
    answer = batch.put("extend_leases", partition, numbers, count, batch.work.now_us, operation.lease_timeout_us)

    def finish() -> Result:
        whole, leased, queued = batch.work.rows(answer)[0]
        if not whole:
            return refusal(partition, operation.ids, leased=leased, queued=queued)
        until_us = batch.now_us + operation.lease_timeout_us
        change = batch.change(partition)
        change.due_us = earlier(change.due_us, until_us)
        return [ExtendedItem(text, moment(until_us)) for text in operation.ids]

    return finish


async def _retry(batch: OperationBatch, operation: RetryItems, partition: PostgresPartition) -> Finish:
    """Give leased items back: to the tail, to the schedule, or to death: all or none."""
    rules = operation.rules
    ids = [item.id for item in operation.items]
    numbers = bigints(partition.in_order(ids))
    rows = await batch.ask("take_leases", partition, numbers, len(set(ids)))
    leases: dict[int, State] = {row[1]: (row[1], row[2], row[3], row[4]) for row in rows if row[1] is not None}
    if not rows[0][0]:
        queued = await batch.ask("find_ready", partition, numbers)
        refused = refusal(partition, ids, leased=list(leases), queued=[number for (number,) in queued])
        return lambda: refused
    batch.change(partition).leased -= len(leases)
    back: list[State] = []
    later: list[tuple[State, int]] = []
    dead: dict[str, list[State]] = {}
    for item in operation.items:
        state = leases[partition.number_of(item.id)]
        reason, at_us = after_retry(item, attempts=state[3], max_attempts=rules.max_attempts, immortal=rules.immortal)
        if reason:
            dead.setdefault(reason, []).append(state)
        elif is_scheduled(at_us, batch.now_us):
            later.append((state, at_us))
        else:
            back.append(state)
    _requeue(batch, partition, back)
    if later:
        moments = [at_us for _, at_us in later]
        batch.put("schedule_items", partition, *columns([state for state, _ in later]), bigints(moments))
        batch.change(partition).schedule(len(later), at_us=min(moments))
    ends = [await _die(batch, partition, states, reason, rules) for reason, states in dead.items()]
    ended = Ended.joined(ends, requeued=len(back) + len(later))
    return lambda: ended


# --- deadlines, deaths, deletions ------------------------------------------------------------------------------------


async def _due(batch: OperationBatch, operation: Due, partition: PostgresPartition) -> Finish:
    """Everything whose moment has come, at most `count_max` of each kind."""
    rules, most = operation.rules, operation.count_max
    now_us, change = batch.work.now_us, batch.change(partition)
    batch.looked = True
    first = batch.put("take_leases_run_out", partition, now_us, most)
    second = batch.put("take_schedules_due", partition, now_us, most)
    await batch.work.flush()
    late, scheduled = _states(batch.work.rows(first)), _states(batch.work.rows(second))
    used_up = [] if rules.immortal else [row for row in late if is_used_up(row[3], rules.max_attempts)]
    back = [row for row in late if row not in used_up] if used_up else late
    change.leased -= len(late)
    change.scheduled -= len(scheduled)
    ends = [await _die(batch, partition, used_up, REASON_MAX_ATTEMPTS, rules)]
    _requeue(batch, partition, [*back, *scheduled])
    counts = [len(late), len(scheduled)]
    for reason, states in await _dying_now(batch, operation, partition):
        change.queued -= len(states)
        ends.append(await _die(batch, partition, states, reason, rules))
        counts.append(len(states))
    ended = Ended.joined(ends, requeued=len(back), enqueued=len(scheduled), more=max(counts) >= most)
    return lambda: ended


async def _dying_now(
    batch: OperationBatch, operation: Due, partition: PostgresPartition
) -> list[tuple[str, list[State]]]:
    """Queued items that these rules let die now, by reason; they are in no state table any more."""
    rules, most, now_us = operation.rules, operation.count_max, batch.work.now_us
    if rules.immortal:
        if not rules.retention_us:
            return []
        rows = await batch.ask("take_past_retention", partition, now_us, most, rules.retention_us)
        return [(REASON_RETENTION, _states(rows))]
    answers = [(REASON_EXPIRED, batch.put("take_expired", partition, now_us, most))]
    if rules.max_attempts:
        answers.append((REASON_MAX_ATTEMPTS, batch.put("take_used_up", partition, rules.max_attempts, most)))
    await batch.work.flush()
    return [(reason, _states(batch.work.rows(answer))) for reason, answer in answers]


def _states(rows: Rows) -> list[State]:
    return [(row[0], row[1], row[2], row[3]) for row in rows]


def _requeue(batch: OperationBatch, partition: PostgresPartition, states: Sequence[State]) -> None:
    """To the tail, each with a new id."""
    if states:
        batch.put("requeue_items", partition, *columns(states))
        batch.change(partition).queue(len(states), expire_at_us=min(state[2] for state in states))
        batch.made_available()


async def _die(
    batch: OperationBatch, partition: PostgresPartition, states: Sequence[State], reason: str, rules: DeathRules
) -> Ended:
    """Move to the dead queue, mark as dying, or delete where there is none. The items are in no state table."""
    if not states:
        return Ended()
    numbers = [state[0] for state in states]
    ids = [partition.id_of(number) for number in numbers]
    target = rules.target if reason != REASON_RETENTION else None
    if target is None:
        batch.work.put("delete_items", bigints(numbers))
        batch.note("deleted", ids, reason)
        return Ended(deleted=[(item_id, reason) for item_id in ids])
    batch.note("dead_lettered", ids, reason, detail=target.queue_name)
    if await _is_there(batch, target):
        story = (batch.queue_name, reason, bigints(numbers), texts(ids), bigints([state[3] for state in states]))
        _move(batch, states, "move_to_dead_queue", target, *story).death_us = batch.now_us
        return Ended(moved=len(ids))
    batch.work.put("free_keys", bigints(numbers))
    _mark(batch, partition, states, reason, target)
    return Ended(dying=len(ids))


def _mark(
    batch: OperationBatch, partition: PostgresPartition, states: Sequence[State], reason: str, target: MoveTarget
) -> None:
    batch.put(
        "insert_dying",
        partition,
        batch.work.now_us,
        *columns(states),
        reason,
        *(target.queue_name, target.storage, target.generation, target.partition, target.expire_timeout_us),
    )
    batch.change(partition).dying += len(states)


async def _send_back(batch: OperationBatch, operation: SendBack, partition: PostgresPartition) -> Finish:
    """Back to the queue that they died in, or marked for it: without a reason, and with their story, in case they have
    to stay."""
    target = operation.target
    states = _states(
        await batch.ask("take_redrivable", partition, bigints(partition.in_order(operation.ids)), target.queue_name)
    )
    ids = [partition.id_of(state[0]) for state in states]
    if not states:
        return lambda: SentBack(ids)
    batch.change(partition).queued -= len(states)
    batch.note("redriven", ids, "", detail=target.queue_name)
    if await _is_there(batch, target):
        _move(batch, states, "move_to_source_queue", target, bigints([state[0] for state in states]), texts(ids))
        return lambda: SentBack(ids, moved=True)
    _mark(batch, partition, states, "", target)
    return lambda: SentBack(ids)


async def _is_there(batch: OperationBatch, target: MoveTarget) -> bool:
    """Whether the target is in this database, and not gone."""
    if target.storage != batch.storage.name:
        return False
    known = batch.targets
    if target.generation not in known:
        known[target.generation] = bool(await batch.work.ask("hold_target", target.generation))
    return known[target.generation]


def _move(
    batch: OperationBatch, states: Sequence[State], statement: str, target: MoveTarget, *values: str | bytes
) -> CountChange:
    """Into another queue of this database; returns what that changes there."""
    target_values = (target.generation, target.partition, batch.work.now_us, target.expire_timeout_us)
    batch.work.put(statement, *target_values, *values)
    # What was there already under this source id has arrived: only the old row is left of it.
    batch.work.put("delete_items", bigints([state[0] for state in states]))
    change = batch.change(batch.storage.partition(target.generation, target.partition))
    change.queue(len(states), expire_at_us=batch.now_us + target.expire_timeout_us)
    batch.available.add(target.queue_name)
    return change


async def _remove(batch: OperationBatch, operation: Remove, partition: PostgresPartition) -> Finish:
    """The third commit of a death."""
    taken = await _take_dying(batch, partition, operation.ids)
    batch.work.put("delete_items", bigints([state[0] for state in taken]))
    return lambda: Counted(len(taken))


async def _revive(batch: OperationBatch, operation: Revive, partition: PostgresPartition) -> Finish:
    """Their target is gone for good: back to the tail."""
    taken = await _take_dying(batch, partition, operation.ids)
    _requeue(batch, partition, taken)
    return lambda: Counted(len(taken))


async def _take_dying(batch: OperationBatch, partition: PostgresPartition, ids: Sequence[str]) -> list[State]:
    numbers = bigints(partition.in_order(ids))
    taken = _states(await batch.ask("take_dying", partition, numbers))
    batch.change(partition).dying -= len(taken)
    return taken


async def _forget(batch: OperationBatch, operation: Forget, partition: PostgresPartition) -> Finish:
    """The third commit of these deaths is known."""
    batch.work.put("forget_arrivals", batch.generation, texts(operation.source_ids))
    return lambda: Counted(len(operation.source_ids))


async def _delete(batch: OperationBatch, operation: Delete, partition: PostgresPartition) -> Finish:
    """By id, wherever in sight; unknown ids are skipped."""
    rows = await batch.ask("delete_in_sight", partition, bigints(partition.in_order(operation.ids)))
    change = batch.change(partition)
    states = [state for state, _ in rows]
    change.queued -= states.count("q")
    change.leased -= states.count("l")
    change.scheduled -= states.count("s")
    batch.note("deleted", [partition.id_of(number) for _, number in rows], "items.delete")
    return lambda: Counted(len(rows))


async def _clear(batch: OperationBatch, operation: Clear, partition: PostgresPartition) -> Finish:
    """At most `count_max` items of the chosen kinds, oldest first."""
    left = operation.count_max
    change = batch.change(partition)
    for state, statement in (("queued", "clear_ready"), ("leased", "clear_leases"), ("scheduled", "clear_scheduled")):
        if getattr(operation, state) and left:
            gone = (await batch.ask(statement, partition, left))[0][0]
            setattr(change, state, getattr(change, state) - gone)
            left -= gone
    cleared = operation.count_max - left
    if cleared:
        batch.note("cleared", [""], "queue.clear", count=cleared)
    return lambda: Counted(cleared, more=not left)


_VERBS: dict[type, Callable[[OperationBatch, Any, PostgresPartition], Awaitable[Finish]]] = {
    Produce: _produce,
    Import: _import,
    Arrive: _arrive,
    LeaseItems: _lease,
    Release: _release,
    Complete: _complete,
    Extend: _extend,
    RetryItems: _retry,
    Due: _due,
    Remove: _remove,
    Revive: _revive,
    Forget: _forget,
    SendBack: _send_back,
    Delete: _delete,
    Clear: _clear,
}


async def carry_out(batch: OperationBatch, operation: Operation) -> Finish:
    """Queue what an operation needs; its result is finished after the commit."""
    return await _VERBS[type(operation)](batch, operation, batch.partition(operation.partition))
