"""How items of a SQLite queue come back by themselves, die, and are deleted; each deletion is in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from holdfast.core.item import REASON_EXPIRED, REASON_MAX_ATTEMPTS, REASON_RETENTION, is_used_up
from holdfast.engines.sqlite.connection import SQL
from holdfast.engines.sqlite.partition import Moments, SqlitePartition
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

#: Of an item outside of its state table: row id, created_at, expire_at, attempts.
State = tuple[int, int, int, int]


class Deaths:
    """Deadlines and deletions on one file's connection."""

    def __init__(self, connection: apsw.Connection, moments: Moments) -> None:
        self._db = connection
        self._moments = moments
        self.now_us = 0

    def due(self, operation: Due, partition: SqlitePartition) -> Ended:
        """Everything whose moment has come, at most `count_max` of each kind."""
        rules, most = operation.rules, operation.count_max
        span = (partition.first, partition.last, most)
        late = self._select("select_leases_run_out", self.now_us, *span)
        used_up = [] if rules.immortal else [row for row in late if is_used_up(row[3], rules.max_attempts)]
        back = late if not used_up else [row for row in late if not is_used_up(row[3], rules.max_attempts)]
        self._delete_rows("delete_lease", late)
        partition.leased -= len(late)
        ends = [self.die(partition, used_up, REASON_MAX_ATTEMPTS, rules)]
        self._requeue(partition, back)
        scheduled = self._select("select_schedules_due", self.now_us, *span)
        self._delete_rows("delete_scheduled", scheduled)
        partition.scheduled -= len(scheduled)
        self._requeue(partition, scheduled)
        counts = [len(late), len(scheduled)]
        for reason, rows in self._dying_now(rules, span):
            self._delete_rows("delete_ready", rows)
            partition.queued -= len(rows)
            ends.append(self.die(partition, rows, reason, rules))
            counts.append(len(rows))
        self._moments.read(self._db)
        return Ended.joined(ends, requeued=len(back), enqueued=len(scheduled), more=max(counts) >= most)

    def _dying_now(self, rules: DeathRules, span: tuple[int, int, int]) -> list[tuple[str, list[State]]]:
        """Queued items that these rules let die now, by reason."""
        if rules.immortal:
            if not rules.retention_us:
                return []
            past = self._select("select_past_retention", self.now_us - rules.retention_us, *span)
            return [(REASON_RETENTION, past)]
        expired = self._select("select_expired", self.now_us, *span)
        if not rules.max_attempts:
            return [(REASON_EXPIRED, expired)]
        taken = {row[0] for row in expired}
        used_up = [r for r in self._select("select_used_up", rules.max_attempts, *span) if r[0] not in taken]
        return [(REASON_EXPIRED, expired), (REASON_MAX_ATTEMPTS, used_up)]

    def _select(self, name: str, *bindings: int) -> list[State]:
        rows: list[Any] = self._db.execute(SQL[name], bindings).fetchall()
        return rows

    def _delete_rows(self, name: str, rows: Sequence[State]) -> None:
        self._db.executemany(SQL[name], [(row[0],) for row in rows])

    def _requeue(self, partition: SqlitePartition, rows: Sequence[State]) -> None:
        """To the tail, each with a new id."""
        new = [partition.next_row_id(self.now_us) for _ in rows]
        self._db.executemany(SQL["renumber_item"], [(row[0], row_id) for row, row_id in zip(rows, new, strict=True)])
        self._db.executemany(SQL["insert_ready"], [(row_id, *row[1:]) for row, row_id in zip(rows, new, strict=True)])
        partition.queued += len(rows)

    def die(self, partition: SqlitePartition, rows: Sequence[State], reason: str, rules: DeathRules) -> Ended:
        """Mark as dying with the target, or delete where there is none. The rows are in no state table any more."""
        ids = [(row[0],) for row in rows]
        target = rules.target if reason != REASON_RETENTION else None
        if target is None:
            self._db.executemany(SQL["delete_item"], ids)
            deleted = [(partition.id_of(row[0]), reason) for row in rows]
            self._note([("deleted", item_id, reason, 1, "") for item_id, reason in deleted])
            return Ended(deleted=deleted)
        self._db.executemany(SQL["free_keys"], ids)
        self._mark(partition, rows, reason, target)
        self._note([("dead_lettered", partition.id_of(row[0]), reason, 1, target.queue_name) for row in rows])
        return Ended(dying=len(rows))

    def _mark(self, partition: SqlitePartition, rows: Sequence[State], reason: str, target: MoveTarget) -> None:
        name, generation, number = target.queue_name, target.generation, target.partition
        place = (name, generation, number, target.storage, target.expire_timeout_us)
        self._db.executemany(SQL["insert_dying"], [(*row, reason, self.now_us, *place) for row in rows])
        partition.dying += len(rows)

    def send_back(self, operation: SendBack, partition: SqlitePartition) -> SentBack:
        """Mark what may go back: without a reason, and with its story, in case it has to stay."""
        rows: list[State] = []
        marked: list[str] = []
        for text in operation.ids:
            row_id = partition.row_of(text)
            found = self._db.execute(SQL["find_redrivable"], (row_id, operation.target.queue_name)).fetchone()
            if found is not None:
                self._db.execute(SQL["delete_ready"], (row_id,))
                rows.append((row_id, *found))
                marked.append(text)
        partition.queued -= len(rows)
        self._mark(partition, rows, "", operation.target)
        self._note([("redriven", text, "", 1, operation.target.queue_name) for text in marked])
        return SentBack(marked)

    def _note(self, entries: Sequence[tuple[str, str, str, int, str]]) -> None:
        self._db.executemany(SQL["insert_ledger"], [(self.now_us, *entry) for entry in entries])

    def remove(self, operation: Remove, partition: SqlitePartition) -> Counted:
        """The third commit of a death."""
        rows = [(partition.row_of(text),) for text in operation.ids]
        before = self._db.total_changes()
        self._db.executemany(SQL["delete_dying"], rows)
        count = self._db.total_changes() - before
        self._db.executemany(SQL["delete_item"], rows)
        partition.dying -= count
        return Counted(count)

    def revive(self, operation: Revive, partition: SqlitePartition) -> Counted:
        """Their target is gone for good: back to the tail."""
        rows: list[State] = []
        for text in operation.ids:
            row_id = partition.row_of(text)
            found = self._db.execute(SQL["find_dying"], (row_id,)).fetchone()
            if found is not None:
                rows.append((row_id, *found))
        self._delete_rows("delete_dying", rows)
        partition.dying -= len(rows)
        self._requeue(partition, rows)
        self._moments.read(self._db)
        return Counted(len(rows))

    def forget(self, operation: Forget, partition: SqlitePartition) -> Counted:
        """The third commit of these deaths is known."""
        self._db.executemany(SQL["delete_arrival"], [(source_id,) for source_id in operation.source_ids])
        return Counted(len(operation.source_ids))

    def delete(self, operation: Delete, partition: SqlitePartition) -> Counted:
        """By id, wherever in sight; unknown ids are skipped."""
        deleted = []
        for text in operation.ids:
            row_id = partition.row_of(text)
            for table in ("ready", "leases", "scheduled"):
                if self._deleted_from(table, row_id, partition):
                    self._db.execute(SQL["delete_item"], (row_id,))
                    deleted.append(text)
                    break
        self._note([("deleted", text, "items.delete", 1, "") for text in deleted])
        return Counted(len(deleted))

    def _deleted_from(self, table: str, row_id: int, partition: SqlitePartition) -> bool:
        statement = {"ready": "delete_ready", "leases": "delete_lease", "scheduled": "delete_scheduled"}[table]
        self._db.execute(SQL[statement], (row_id,))
        if not self._db.changes():
            return False
        count = {"ready": "queued", "leases": "leased", "scheduled": "scheduled"}[table]
        setattr(partition, count, getattr(partition, count) - 1)
        return True

    def clear(self, operation: Clear, partition: SqlitePartition) -> Counted:
        """At most `count_max` items of the chosen kinds, oldest first."""
        left = operation.count_max
        for chosen, select, table in (
            (operation.queued, "select_ready_ids", "ready"),
            (operation.leased, "select_lease_ids", "leases"),
            (operation.scheduled, "select_scheduled_ids", "scheduled"),
        ):
            if not chosen or not left:
                continue
            rows: list[Any] = self._db.execute(SQL[select], (partition.first, partition.last, left)).fetchall()
            for (row_id,) in rows:
                self._deleted_from(table, row_id, partition)
            self._db.executemany(SQL["delete_item"], rows)
            left -= len(rows)
        count = operation.count_max - left
        if count:
            self._note([("cleared", "", "queue.clear", count, "")])
        return Counted(count, more=not left)
