"""How items of a PostgreSQL queue are leased, and how leases end: completed, extended, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.core.item import ExtendedItem, LeasedItem, after_retry, is_scheduled
from holdfast.core.moments import moment
from holdfast.engines.postgres.connection import bigints
from holdfast.engines.postgres.lifecycle import die, requeue
from holdfast.engines.postgres.partition import PostgresPartition, earlier
from holdfast.engines.postgres.transaction import Finish, OperationBatch, State, columns, refusal
from holdfast.ports.queue_store import (
    Complete,
    Counted,
    Ended,
    Extend,
    Extended,
    LeasedItems,
    LeaseItems,
    Release,
    Result,
    RetryItems,
)

NEVER = 1 << 62
#: How long the start of a queue may be taken for empty. An item that comes back there, or whose commit was overtaken
#: by another server's, waits so long at the most.
FIRST_ID_BELIEVED_S = 0.1


async def lease(batch: OperationBatch, operation: LeaseItems) -> Finish:
    """Hand out items in the order of ids; rows that another server is just handing out are passed over."""
    rules, partition = operation.rules, batch.partition(operation.partition)
    ceiling = NEVER if rules.immortal or not rules.max_attempts else rules.max_attempts
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
        -NEVER,
    )

    def finish() -> LeasedItems:
        rows = batch.work.rows(answer)
        until_us = batch.now_us + operation.lease_timeout_us
        change = batch.change(partition)
        change.queued -= len(rows)
        change.lease(len(rows), until_us=until_us)
        _remember(partition, first_id, rows[-1][0] + 1 if len(rows) == operation.count_max else 0)
        if len(rows) < operation.count_max:
            batch.short[partition] = batch.short.get(partition, False) or first_id > 0
        deadline, suffix = moment(until_us), partition.suffix
        return LeasedItems([LeasedItem(f"{row[0]:014x}{suffix}", row[1], deadline, *row[2:]) for row in rows])

    return finish


def _first_id(partition: PostgresPartition, count: int) -> int:
    """Where to begin: rows that were leased lie dead at the head of the index until they are vacuumed.

    Only where enough is believed to be behind it; whoever then finds less looks from the start (`_make_up`).
    """
    if partition.queued < count or asyncio.get_running_loop().time() >= partition.first_id_until_s:
        return 0
    return partition.first_id


def _remember(partition: PostgresPartition, first_id: int, next_id: int) -> None:
    partition.first_id = next_id
    if not first_id:
        partition.first_id_until_s = asyncio.get_running_loop().time() + FIRST_ID_BELIEVED_S


async def release(batch: OperationBatch, operation: Release) -> Finish:
    """Undo leases: same ids, same places."""
    partition = batch.partition(operation.partition)
    partition.first_id = 0
    answer = batch.put("release_leases", partition, bigints(partition.numbers_of(operation.ids)))
    batch.made_available()

    def finish() -> Counted:
        rows, change = batch.work.rows(answer), batch.change(partition)
        change.leased -= len(rows)
        change.queue(len(rows), expire_at_us=min((row[0] for row in rows), default=0))
        return Counted(len(rows))

    return finish


async def complete(batch: OperationBatch, operation: Complete) -> Finish:
    """Remove leased items: all or none, decided by the statement itself."""
    partition = batch.partition(operation.partition)
    numbers, count = bigints(partition.numbers_of(operation.ids)), len(set(operation.ids))
    answer = batch.put("complete_items", partition, numbers, count)

    def finish() -> Result:
        whole, leased, queued = batch.work.rows(answer)[0]
        if not whole:
            return refusal(partition, operation.ids, leased=leased, queued=queued)
        batch.change(partition).leased -= count
        return Counted(count)

    return finish


async def extend(batch: OperationBatch, operation: Extend) -> Finish:
    """Let leases run until now + the timeout: all or none."""
    partition = batch.partition(operation.partition)
    numbers, count = bigints(partition.numbers_of(operation.ids)), len(set(operation.ids))
    answer = batch.put("extend_leases", partition, numbers, count, batch.work.now_us, operation.lease_timeout_us)

    def finish() -> Result:
        whole, leased, queued = batch.work.rows(answer)[0]
        if not whole:
            return refusal(partition, operation.ids, leased=leased, queued=queued)
        until_us = batch.now_us + operation.lease_timeout_us
        change = batch.change(partition)
        change.due_us = earlier(change.due_us, until_us)
        return Extended([ExtendedItem(text, moment(until_us)) for text in operation.ids])

    return finish


async def retry(batch: OperationBatch, operation: RetryItems) -> Finish:
    """Give leased items back: to the tail, to the schedule, or to death: all or none."""
    partition, rules = batch.partition(operation.partition), operation.rules
    ids = [item.id for item in operation.items]
    numbers = bigints(partition.numbers_of(ids))
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
    requeue(batch, partition, back)
    _schedule(batch, partition, later)
    ends = [await die(batch, partition, states, reason, rules) for reason, states in dead.items()]
    ended = Ended.joined(ends, requeued=len(back) + len(later))
    return lambda: ended


def _schedule(batch: OperationBatch, partition: PostgresPartition, later: Sequence[tuple[State, int]]) -> None:
    if later:
        states = columns([state for state, _ in later], 4)
        moments = [at_us for _, at_us in later]
        batch.put("schedule_items", partition, *map(bigints, states), bigints(moments))
        batch.change(partition).schedule(len(later), at_us=min(moments))
