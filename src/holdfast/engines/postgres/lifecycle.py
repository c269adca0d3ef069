"""How items of a PostgreSQL queue come back by themselves, die and are deleted; each deletion is in the ledger.

A dead queue in the same database takes its letter in the same transaction: there is nothing to resume and nothing to
repeat. One in another storage, or one that has just been deleted, takes the way of three commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.item import REASON_EXPIRED, REASON_MAX_ATTEMPTS, REASON_RETENTION, is_used_up
from holdfast.engines.postgres.connection import Rows, bigints, texts
from holdfast.engines.postgres.partition import PostgresPartition
from holdfast.engines.postgres.transaction import Finish, OperationBatch, State, columns
from holdfast.ports.queue_store import (
    Clear,
    Counted,
    DeathRules,
    Delete,
    Due,
    Ended,
    Forget,
    MoveTarget,
    Remove,
    Revive,
    SendBack,
    SentBack,
)


async def due(batch: OperationBatch, operation: Due) -> Finish:
    """Everything whose moment has come, at most `count_max` of each kind."""
    partition, rules, most = batch.partition(operation.partition), operation.rules, operation.count_max
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
    ends = [await die(batch, partition, used_up, REASON_MAX_ATTEMPTS, rules)]
    requeue(batch, partition, [*back, *scheduled])
    counts = [len(late), len(scheduled)]
    for reason, states in await _dying_now(batch, operation):
        change.queued -= len(states)
        ends.append(await die(batch, partition, states, reason, rules))
        counts.append(len(states))
    ended = Ended.joined(ends, requeued=len(back), enqueued=len(scheduled), more=max(counts) >= most)
    return lambda: ended


async def _dying_now(batch: OperationBatch, operation: Due) -> list[tuple[str, list[State]]]:
    """Queued items that these rules let die now, by reason; they are in no state table any more."""
    rules, partition, most = operation.rules, batch.partition(operation.partition), operation.count_max
    now_us = batch.work.now_us
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


def requeue(batch: OperationBatch, partition: PostgresPartition, states: Sequence[State]) -> None:
    """To the tail, each with a new id."""
    if states:
        batch.put("requeue_items", partition, *map(bigints, columns(states, 4)))
        batch.change(partition).queue(len(states), expire_at_us=min(state[2] for state in states))
        batch.made_available()


async def die(
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
    if target.storage == batch.storage and await _is_there(batch, target):
        _move(batch, states, ids, reason, target)
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
        *map(bigints, columns(states, 4)),
        reason,
        *(target.queue_name, target.storage, target.generation, target.partition, target.expire_timeout_us),
    )
    batch.change(partition).dying += len(states)


async def send_back(batch: OperationBatch, operation: SendBack) -> Finish:
    """Back to the queue that they died in, or marked for it: without a reason, and with their story, in case they have
    to stay."""
    partition, target = batch.partition(operation.partition), operation.target
    states = _states(
        await batch.ask("take_redrivable", partition, bigints(partition.numbers_of(operation.ids)), target.queue_name)
    )
    ids = [partition.id_of(state[0]) for state in states]
    if not states:
        return lambda: SentBack(ids)
    batch.change(partition).queued -= len(states)
    batch.note("redriven", ids, "", detail=target.queue_name)
    if target.storage == batch.storage and await _is_there(batch, target):
        _move_back(batch, states, ids, target)
        return lambda: SentBack(ids, moved=True)
    _mark(batch, partition, states, "", target)
    return lambda: SentBack(ids)


def _move_back(batch: OperationBatch, states: Sequence[State], ids: Sequence[str], target: MoveTarget) -> None:
    numbers = bigints([state[0] for state in states])
    place = (target.generation, target.partition, batch.work.now_us, target.expire_timeout_us)
    batch.work.put("move_to_source_queue", *place, numbers, texts(ids))
    batch.work.put("delete_items", numbers)  # as for a death: what was there already
    change = batch.work.change(target.generation, target.partition)
    change.queue(len(states), expire_at_us=batch.now_us + target.expire_timeout_us)
    batch.work.available.add(target.queue_name)


async def _is_there(batch: OperationBatch, target: MoveTarget) -> bool:
    known = batch.work.targets
    if target.generation not in known:
        known[target.generation] = bool(await batch.work.ask("hold_target", target.generation))
    return known[target.generation]


def _move(batch: OperationBatch, states: Sequence[State], ids: Sequence[str], reason: str, target: MoveTarget) -> None:
    numbers = bigints([state[0] for state in states])
    batch.work.put(
        "move_to_dead_queue",
        *(target.generation, target.partition, batch.work.now_us, target.expire_timeout_us),
        *(batch.queue_name, reason, numbers, texts(ids), bigints([state[3] for state in states])),
    )
    # What was there already under this source id has arrived: only the old row is left of it.
    batch.work.put("delete_items", numbers)
    change = batch.work.change(target.generation, target.partition)
    change.queue(len(states), expire_at_us=batch.now_us + target.expire_timeout_us)
    change.death_us = batch.now_us
    batch.work.available.add(target.queue_name)


async def remove(batch: OperationBatch, operation: Remove) -> Finish:
    """The third commit of a death."""
    taken = await _take_dying(batch, batch.partition(operation.partition), operation.ids)
    batch.work.put("delete_items", bigints([state[0] for state in taken]))
    return lambda: Counted(len(taken))


async def revive(batch: OperationBatch, operation: Revive) -> Finish:
    """Their target is gone for good: back to the tail."""
    taken = await _take_dying(batch, batch.partition(operation.partition), operation.ids)
    requeue(batch, batch.partition(operation.partition), taken)
    return lambda: Counted(len(taken))


async def _take_dying(batch: OperationBatch, partition: PostgresPartition, ids: Sequence[str]) -> list[State]:
    numbers = bigints(partition.numbers_of(ids))
    taken = _states(await batch.ask("take_dying", partition, numbers))
    batch.change(partition).dying -= len(taken)
    return taken


async def forget(batch: OperationBatch, operation: Forget) -> Finish:
    """The third commit of these deaths is known."""
    batch.work.put("forget_arrivals", batch.generation, texts(operation.source_ids))
    return lambda: Counted(len(operation.source_ids))


async def delete(batch: OperationBatch, operation: Delete) -> Finish:
    """By id, wherever in sight; unknown ids are skipped."""
    partition = batch.partition(operation.partition)
    rows = await batch.ask("delete_in_sight", partition, bigints(partition.numbers_of(operation.ids)))
    change = batch.change(partition)
    places = [place for place, _ in rows]
    change.queued -= places.count("q")
    change.leased -= places.count("l")
    change.scheduled -= places.count("s")
    batch.note("deleted", [partition.id_of(number) for _, number in rows], "items.delete")
    return lambda: Counted(len(rows))


async def clear(batch: OperationBatch, operation: Clear) -> Finish:
    """At most `count_max` items of the chosen kinds, oldest first."""
    partition, left = batch.partition(operation.partition), operation.count_max
    change = batch.change(partition)
    for chosen, statement, count in (
        (operation.queued, "clear_ready", "queued"),
        (operation.leased, "clear_leases", "leased"),
        (operation.scheduled, "clear_scheduled", "scheduled"),
    ):
        if chosen and left:
            gone = (await batch.ask(statement, partition, left))[0][0]
            setattr(change, count, getattr(change, count) - gone)
            left -= gone
    cleared = operation.count_max - left
    if cleared:
        batch.note("cleared", [""], "queue.clear", count=cleared)
    return lambda: Counted(cleared, more=not left)
