"""The operations of a SQLite queue, as SQL inside a transaction that somebody else began.

Counts of the partitions are changed in memory beside the rows; `queue_store.py` writes them in the same transaction,
and reads them anew after a failure.

Many items take few statements: Python's lock is let go and taken again for every statement, not for every row. Beside
a busy event loop each taking is a wait, and a row of its own each time made a commit of thousands of items mostly that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import apsw
from msgspec.structs import astuple

from holdfast.core.item import (
    REASON_EXPIRED,
    REASON_MAX_ATTEMPTS,
    REASON_RETENTION,
    SEQUENCE_BITS,
    SEQUENCE_MAX,
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
from holdfast.engines.sqlite.connection import SQL, fetch_all, fetch_one, json_list
from holdfast.engines.sqlite.partition import Moments, SqlitePartition
from holdfast.ports.queue_store import (
    Arrive,
    Clear,
    Complete,
    Counted,
    DeathRules,
    Delete,
    Due,
    DyingItem,
    Ended,
    Extend,
    Forget,
    IdsRefused,
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

#: So many rows have a statement of their own, which stays compiled; any number is a sum of few of these.
ROWS_COUNTS = (500, 200, 100, 50, 20, 10, 5, 2, 1)

#: Of an item outside of its state table: row id, created_at, expire_at, attempts.
State = tuple[int, int, int, int]
#: What takes an item out of each of its states, and what finds those in it.
_STATEMENTS = {
    "queued": ("delete_ready", "select_ready_ids"),
    "leased": ("delete_lease", "select_lease_ids"),
    "scheduled": ("delete_scheduled", "select_scheduled_ids"),
}


class Operations:
    """Carries out operations on one file's connection."""

    def __init__(self, connection: apsw.Connection, partitions: dict[int, SqlitePartition], moments: Moments) -> None:
        self._db = connection
        self._partitions = partitions
        self._moments = moments
        self._now_us = 0
        self._verbs: dict[type, Callable[[Any, SqlitePartition], Result]] = {
            Produce: self._produce,
            LeaseItems: self._lease,
            Release: self._release,
            Complete: self._complete,
            RetryItems: self._retry,
            Extend: self._extend,
            Due: self._due,
            Import: self._import,
            Delete: self._delete,
            Clear: self._clear,
            Arrive: self._arrive,
            Remove: self._remove,
            Revive: self._revive,
            Forget: self._forget,
            SendBack: self._send_back,
        }

    def carry_out(self, operations: Sequence[Operation], now_us: int) -> list[Result]:
        """Every operation in turn; a refused one changes nothing."""
        self._now_us = now_us
        return [self._verbs[type(o)](o, self._partitions[o.partition]) for o in operations]

    # --- produce, import, arrive ------------------------------------------------------------------------------

    def _produce(self, operation: Produce, partition: SqlitePartition) -> list[str]:
        expire_at = self._now_us + operation.expire_timeout_us
        ids: list[str] = []
        plain: list[NewItem] = []
        if not any([item.dedupe_key or item.enqueue_at for item in operation.items]):  # noqa: C419 - a list is quicker
            return self._append(partition, operation.items, expire_at)
        for item in operation.items:
            if not item.dedupe_key and item.enqueue_at is None:
                plain.append(item)
                continue
            # The rare kind goes by itself, in its turn, so that the order of the request is the order of ids.
            ids += self._append(partition, plain, expire_at)
            plain = []
            ids.append(self._produce_one(item, partition, expire_at))
        return ids + self._append(partition, plain, expire_at)

    def _append(self, partition: SqlitePartition, items: Sequence[NewItem], expire_at: int) -> list[str]:
        if not items:
            return []
        row_ids = partition.next_row_ids(self._now_us, len(items))
        _insert_items(self._db, row_ids[0], items)
        if len(items) == 1:
            self._db.execute(SQL["insert_ready"], (row_ids[0], self._now_us, expire_at, 0))
        else:
            self._db.execute(SQL["insert_ready_range"], (row_ids[0], row_ids[-1], self._now_us, expire_at))
        self._moments.expiry_us = min(self._moments.expiry_us, expire_at)
        partition.queued += len(items)
        return partition.ids_of(row_ids)

    def _produce_one(self, item: NewItem, partition: SqlitePartition, expire_at: int) -> str:
        known = self._known(item.dedupe_key)
        if known is not None:
            return known
        row_id = self._insert_with_story(item, partition, (item.dedupe_key or None, *[None] * 6))
        self._add(partition, row_id, microseconds_or_zero(item.enqueue_at), (self._now_us, expire_at, 0))
        return partition.id_of(row_id)

    def _insert_with_story(
        self,
        item: NewItem | ImportedItem | DyingItem,
        partition: SqlitePartition,
        story: tuple[str | int | None, ...],
    ) -> int:
        """Its row id. The story: dedupe key, source's id and queue, reason, attempts and moment of its death, former
        key."""
        row_id = partition.next_row_id(self._now_us)
        row = (row_id, item.kind, item.encoding, item.reference, *story, item.payload)
        self._db.execute(SQL["insert_item_with_story"], row)
        return row_id

    def _known(self, dedupe_key: str) -> str | None:
        """The id of the item that has this key now."""
        if not dedupe_key:
            return None
        row = self._db.execute(SQL["find_dedupe_key"], (dedupe_key,)).fetchone()
        return None if row is None else self._partitions[row[0] >> SEQUENCE_BITS].id_of(row[0])

    def _add(self, partition: SqlitePartition, row_id: int, at_us: int, state: tuple[int, int, int]) -> None:
        """Into the queue, or into the schedule; state is (created_at, expire_at, attempts)."""
        if is_scheduled(at_us, self._now_us):
            self._db.execute(SQL["insert_scheduled"], (row_id, *state, at_us))
            self._moments.due_us = min(self._moments.due_us, at_us)
            partition.scheduled += 1
        else:
            self._db.execute(SQL["insert_ready"], (row_id, *state))
            self._moments.expiry_us = min(self._moments.expiry_us, state[1])
            partition.queued += 1

    def _import(self, operation: Import, partition: SqlitePartition) -> list[Item]:
        # One by one: an item of this request may be the one that a later item repeats.
        return [
            self._import_one(item, partition, operation.expire_timeout_us)
            for item in operation.items
            if self._known(item.dedupe_key) is None and not self._is_source_here(item.source_id)
        ]

    def _is_source_here(self, source_id: str) -> bool:
        return bool(source_id) and self._db.execute(SQL["find_source_id"], (source_id,)).fetchone() is not None

    def _import_one(self, item: ImportedItem, partition: SqlitePartition, expire_timeout_us: int) -> Item:
        created_at = microseconds_or_zero(item.created_at) or self._now_us
        expire_at = microseconds_or_zero(item.expire_deadline) or self._now_us + expire_timeout_us
        enqueue_at = microseconds_or_zero(item.enqueue_at)
        died_at = microseconds_or_zero(item.died_at) or None
        until_us = leased_until_us(item, self._now_us)
        story = (
            item.dedupe_key or None,
            item.source_id or None,
            item.source_queue or None,
            item.death_reason or None,
            item.death_attempts or None,
            died_at,
            item.former_key or None,
        )
        row_id = self._insert_with_story(item, partition, story)
        state = (created_at, expire_at, item.attempts)
        if until_us:
            self._db.execute(SQL["insert_lease"], (row_id, *state, self._now_us, until_us))
            self._moments.due_us = min(self._moments.due_us, until_us)
            partition.leased += 1
        else:
            self._add(partition, row_id, enqueue_at, state)
        self._moments.death_us = min(self._moments.death_us, died_at or NEVER_US)
        return imported_item(
            item,
            partition.id_of(row_id),
            created_at_us=created_at,
            expire_at_us=expire_at,
            scheduled=not until_us and is_scheduled(enqueue_at, self._now_us),
            until_us=until_us,
        )

    def _arrive(self, operation: Arrive, partition: SqlitePartition) -> Counted:
        count = 0
        for item in operation.items:
            # A new arrival is remembered; a repeat, whether its copy is still here or completed, is a no-op.
            self._db.execute(SQL["insert_arrival"], (item.source_id, item.source_queue))
            if not self._db.changes() or self._is_source_here(item.source_id):
                continue
            death: tuple[str | int | None, ...] = (None, None, None, None)
            if not item.is_redrive:
                death = (item.source_queue, item.death_reason, item.death_attempts, item.died_at_us)
                self._moments.death_us = min(self._moments.death_us, item.died_at_us)
            story = (None, item.source_id, *death, item.former_key or None)
            row_id = self._insert_with_story(item, partition, story)
            self._add(partition, row_id, 0, (self._now_us, self._now_us + operation.expire_timeout_us, 0))
            count += 1
        return Counted(count)

    # --- lease and settle -------------------------------------------------------------------------------------

    def _lease(self, operation: LeaseItems, partition: SqlitePartition) -> list[LeasedItem]:
        rules = operation.rules
        now_us, until_us = self._now_us, self._now_us + operation.lease_timeout_us
        floor = -1 if rules.immortal else now_us
        ceiling = NEVER_US if rules.immortal or not rules.max_attempts else rules.max_attempts
        span = (partition.first, partition.last, floor, ceiling, operation.count_max)
        rows: list[Any] = self._db.execute(SQL["select_ready"], span).fetchall()
        if not rows:
            return []
        first, last = rows[0][0], rows[-1][0]
        self._db.execute(SQL["lease_ready"], (first, last, floor, ceiling, now_us, until_us))
        self._db.execute(SQL["delete_leased_from_ready"], (first, last, floor, ceiling))
        self._moments.due_us = min(self._moments.due_us, until_us)
        partition.queued -= len(rows)
        partition.leased += len(rows)
        deadline, suffix, id_of = moment(until_us), partition.suffix, partition.id_of
        return [
            LeasedItem(
                f"{number & SEQUENCE_MAX:014x}{suffix}",
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

    def _release(self, operation: Release, partition: SqlitePartition) -> Counted:
        rows = [row for row in map(partition.number_of, operation.ids) if self._lease_of(row) is not None]
        self._db.executemany(SQL["release_lease"], [(row,) for row in rows])
        self._moments.read(self._db)
        self._db.executemany(SQL["delete_lease"], [(row,) for row in rows])
        partition.leased -= len(rows)
        partition.queued += len(rows)
        return Counted(len(rows))

    def _lease_of(self, row_id: int) -> tuple[int, int, int] | None:
        return self._db.execute(SQL["find_lease"], (row_id,)).fetchone()

    def _complete(self, operation: Complete, partition: SqlitePartition) -> Result:
        if len(operation.ids) == 1:
            return self._complete_one(operation.ids, partition)
        rows = json_list(partition.numbers_of(operation.ids))
        self._db.execute("SAVEPOINT complete")
        self._db.execute(SQL["delete_leases"], (rows,))
        if self._db.changes() != len(operation.ids):
            self._db.execute("ROLLBACK TO complete")
            self._db.execute("RELEASE complete")
            return self._refused(operation.ids, partition)
        self._db.execute(SQL["delete_items"], (rows,))
        self._db.execute("RELEASE complete")
        partition.leased -= len(operation.ids)
        return Counted(len(operation.ids))

    def _complete_one(self, ids: Sequence[str], partition: SqlitePartition) -> Result:
        row = (partition.number_of(ids[0]),)
        self._db.execute(SQL["delete_lease"], row)
        if not self._db.changes():
            return self._refused(ids, partition)
        self._db.execute(SQL["delete_item"], row)
        partition.leased -= 1
        return Counted(1)

    def _refused(self, ids: Sequence[str], partition: SqlitePartition) -> IdsRefused:
        missing: list[str] = []
        unleased: list[str] = []
        for text in ids:
            row_id = partition.number_of(text)
            if self._lease_of(row_id) is None:
                known = self._db.execute(SQL["find_ready"], (row_id,)).fetchone() is not None
                (unleased if known else missing).append(text)
        return IdsRefused(missing, unleased)

    def _extend(self, operation: Extend, partition: SqlitePartition) -> Result:
        rows = [partition.number_of(text) for text in operation.ids]
        if any(self._lease_of(row) is None for row in rows):
            return self._refused(operation.ids, partition)
        until_us = self._now_us + operation.lease_timeout_us
        self._db.executemany(SQL["extend_lease"], [(row, until_us) for row in rows])
        self._moments.due_us = min(self._moments.due_us, until_us)
        return [ExtendedItem(text, moment(until_us)) for text in operation.ids]

    def _retry(self, operation: RetryItems, partition: SqlitePartition) -> Result:
        rules = operation.rules
        rows = [partition.number_of(item.id) for item in operation.items]
        leases = [self._lease_of(row) for row in rows]
        if any(lease is None for lease in leases):
            return self._refused([item.id for item in operation.items], partition)
        dead: dict[str, list[State]] = {}
        for item, row, lease in zip(operation.items, rows, leases, strict=True):
            assert lease is not None  # noqa: S101 - checked for all of them above
            self._db.execute(SQL["delete_lease"], (row,))
            partition.leased -= 1
            reason, at_us = after_retry(
                item, attempts=lease[2], max_attempts=rules.max_attempts, immortal=rules.immortal
            )
            if reason:
                dead.setdefault(reason, []).append((row, *lease))
                continue
            new = partition.next_row_id(self._now_us)
            self._db.execute(SQL["renumber_item"], (row, new))
            self._add(partition, new, at_us, lease)
        ended = [self._die(partition, states, reason, rules) for reason, states in dead.items()]
        return Ended.joined(ended, requeued=len(rows) - sum(map(len, dead.values())))

    # --- deadlines, deaths, deletions: each deletion is in the ledger ------------------------------------------

    def _due(self, operation: Due, partition: SqlitePartition) -> Ended:
        """Everything whose moment has come, at most `count_max` of each kind."""
        rules, most = operation.rules, operation.count_max
        span = (partition.first, partition.last, most)
        late = self._select("select_leases_run_out", self._now_us, *span)
        used_up = [] if rules.immortal else [row for row in late if is_used_up(row[3], rules.max_attempts)]
        back = late if not used_up else [row for row in late if not is_used_up(row[3], rules.max_attempts)]
        self._delete_rows("delete_lease", late)
        partition.leased -= len(late)
        ends = [self._die(partition, used_up, REASON_MAX_ATTEMPTS, rules)]
        self._requeue(partition, back)
        scheduled = self._select("select_schedules_due", self._now_us, *span)
        self._delete_rows("delete_scheduled", scheduled)
        partition.scheduled -= len(scheduled)
        self._requeue(partition, scheduled)
        counts = [len(late), len(scheduled)]
        for reason, rows in self._dying_now(rules, span):
            self._delete_rows("delete_ready", rows)
            partition.queued -= len(rows)
            ends.append(self._die(partition, rows, reason, rules))
            counts.append(len(rows))
        self._moments.read(self._db)
        return Ended.joined(ends, requeued=len(back), enqueued=len(scheduled), more=max(counts) >= most)

    def _dying_now(self, rules: DeathRules, span: tuple[int, int, int]) -> list[tuple[str, list[State]]]:
        """Queued items that these rules let die now, by reason."""
        if rules.immortal:
            if not rules.retention_us:
                return []
            past = self._select("select_past_retention", self._now_us - rules.retention_us, *span)
            return [(REASON_RETENTION, past)]
        expired = self._select("select_expired", self._now_us, *span)
        if not rules.max_attempts:
            return [(REASON_EXPIRED, expired)]
        taken = {row[0] for row in expired}
        used_up = [r for r in self._select("select_used_up", rules.max_attempts, *span) if r[0] not in taken]
        return [(REASON_EXPIRED, expired), (REASON_MAX_ATTEMPTS, used_up)]

    def _select(self, name: str, *bindings: int) -> list[State]:
        return fetch_all(self._db, name, bindings)

    def _find(self, name: str, ids: Sequence[str], partition: SqlitePartition, *bindings: str) -> list[State]:
        """Those of the ids that a statement finds."""
        rows = map(partition.number_of, dict.fromkeys(ids))
        return [(row, *found) for row in rows if (found := fetch_one(self._db, name, (row, *bindings))) is not None]

    def _delete_rows(self, name: str, rows: Sequence[State]) -> None:
        self._db.executemany(SQL[name], [(row[0],) for row in rows])

    def _requeue(self, partition: SqlitePartition, rows: Sequence[State]) -> None:
        """To the tail, each with a new id."""
        new = [partition.next_row_id(self._now_us) for _ in rows]
        self._db.executemany(SQL["renumber_item"], [(row[0], row_id) for row, row_id in zip(rows, new, strict=True)])
        self._db.executemany(SQL["insert_ready"], [(row_id, *row[1:]) for row, row_id in zip(rows, new, strict=True)])
        partition.queued += len(rows)

    def _die(self, partition: SqlitePartition, rows: Sequence[State], reason: str, rules: DeathRules) -> Ended:
        """Mark as dying with the target, or delete where there is none. The rows are in no state table any more."""
        ids, texts = [(row[0],) for row in rows], [partition.id_of(row[0]) for row in rows]
        target = rules.target if reason != REASON_RETENTION else None
        if target is None:
            self._db.executemany(SQL["delete_item"], ids)
            self._note("deleted", texts, reason)
            return Ended(deleted=[(text, reason) for text in texts])
        self._db.executemany(SQL["free_keys"], ids)
        self._mark(partition, rows, reason, target)
        self._note("dead_lettered", texts, reason, detail=target.queue_name)
        return Ended(dying=len(rows))

    def _mark(self, partition: SqlitePartition, rows: Sequence[State], reason: str, target: MoveTarget) -> None:
        story = (reason, self._now_us, *astuple(target))
        self._db.executemany(SQL["insert_dying"], [(*row, *story) for row in rows])
        partition.dying += len(rows)

    def _send_back(self, operation: SendBack, partition: SqlitePartition) -> SentBack:
        """Mark what may go back: without a reason, and with its story, in case it has to stay."""
        rows = self._find("find_redrivable", operation.ids, partition, operation.target.queue_name)
        marked = [partition.id_of(row[0]) for row in rows]
        self._delete_rows("delete_ready", rows)
        partition.queued -= len(rows)
        self._mark(partition, rows, "", operation.target)
        self._note("redriven", marked, "", detail=operation.target.queue_name)
        return SentBack(marked)

    def _note(self, action: str, texts: Sequence[str], reason: str, *, count: int = 1, detail: str = "") -> None:
        """Rows of the ledger, one for each id."""
        rows = [(self._now_us, action, text, reason, count, detail) for text in texts]
        self._db.executemany(SQL["insert_ledger"], rows)

    def _remove(self, operation: Remove, partition: SqlitePartition) -> Counted:
        """The third commit of a death."""
        rows = [(partition.number_of(text),) for text in operation.ids]
        before = self._db.total_changes()
        self._db.executemany(SQL["delete_dying"], rows)
        count = self._db.total_changes() - before
        self._db.executemany(SQL["delete_item"], rows)
        partition.dying -= count
        return Counted(count)

    def _revive(self, operation: Revive, partition: SqlitePartition) -> Counted:
        """Their target is gone for good: back to the tail."""
        rows = self._find("find_dying", operation.ids, partition)
        self._delete_rows("delete_dying", rows)
        partition.dying -= len(rows)
        self._requeue(partition, rows)
        self._moments.read(self._db)
        return Counted(len(rows))

    def _forget(self, operation: Forget, partition: SqlitePartition) -> Counted:
        """The third commit of these deaths is known."""
        self._db.executemany(SQL["delete_arrival"], [(source_id,) for source_id in operation.source_ids])
        return Counted(len(operation.source_ids))

    def _delete(self, operation: Delete, partition: SqlitePartition) -> Counted:
        """By id, wherever in sight; unknown ids are skipped."""
        deleted = []
        for text in operation.ids:
            row_id = partition.number_of(text)
            if any(self._delete_from(state, row_id, partition) for state in _STATEMENTS):
                self._db.execute(SQL["delete_item"], (row_id,))
                deleted.append(text)
        self._note("deleted", deleted, "items.delete")
        return Counted(len(deleted))

    def _delete_from(self, state: str, row_id: int, partition: SqlitePartition) -> bool:
        """Whether it was there."""
        self._db.execute(SQL[_STATEMENTS[state][0]], (row_id,))
        count = self._db.changes()
        setattr(partition, state, getattr(partition, state) - count)
        return bool(count)

    def _clear(self, operation: Clear, partition: SqlitePartition) -> Counted:
        """At most `count_max` items of the chosen kinds, oldest first."""
        left = operation.count_max
        for state, (_, select) in _STATEMENTS.items():
            if getattr(operation, state) and left:
                rows = fetch_all(self._db, select, (partition.first, partition.last, left))
                for (row_id,) in rows:
                    self._delete_from(state, row_id, partition)
                self._db.executemany(SQL["delete_item"], rows)
                left -= len(rows)
        count = operation.count_max - left
        if count:
            self._note("cleared", [""], "queue.clear", count=count)
        return Counted(count, more=not left)


def _insert_items(connection: apsw.Connection, first_row_id: int, items: Sequence[NewItem]) -> None:
    """Insert items that have no story, under row ids that rise by one."""
    if len(items) == 1:
        (one,) = items
        connection.execute(SQL["insert_item"], (first_row_id, one.kind, one.encoding, one.reference, one.payload))
        return
    for item in items:
        if item.kind or item.encoding or item.reference:
            _insert_with_texts(connection, first_row_id, items)
            return
    # Payloads alone are one array, bound as one value: a single statement, however many there are.
    payloads = apsw.carray(tuple([item.payload for item in items]))
    connection.execute(SQL["insert_bare_items"], (first_row_id, payloads))


def _insert_with_texts(connection: apsw.Connection, first_row_id: int, items: Sequence[NewItem]) -> None:
    position, left = 0, len(items)
    for count in ROWS_COUNTS:
        while left >= count:
            values: list[int | str | bytes] = [first_row_id + position]
            for item in items[position : position + count]:
                values += (item.kind, item.encoding, item.reference, item.payload)
            connection.execute(_insert_statement(count), values)
            position += count
            left -= count


@cache
def _insert_statement(count: int) -> str:
    return SQL["insert_items"] + ",".join(f"(?1+{n},?,?,?,?)" for n in range(count))
