"""Plans, and tasks that carry them out: each letter has its redrive id from the start, whoever publishes it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content, clip
from holdfast.core.moments import microseconds, moment
from holdfast.core.plan import LeasedLetter, Plan, PlanOptions, RedriveState, RedriveTask, Settled
from holdfast.core.states import LetterState
from holdfast.ports.database import Row, Tx
from holdfast.ports.vault import LEASE_BYTES_MAX
from holdfast.proof import crash_point
from holdfast.stores import SQL, statement
from holdfast.stores.ledger import LedgerWriter, Moved
from holdfast.stores.letter_search import content_of

WHY_CHARACTERS_MAX = 500

_encode = msgspec.json.Encoder().encode
_plan = msgspec.json.Decoder(Plan).decode
_wish = msgspec.json.Decoder(PlanOptions).decode


class SqlRedrives:
    """Plans and redrives in a SQL database."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def keep_plan(self, plan: Plan) -> None:
        def work(work: Tx) -> None:
            self._books.run(work, "put_plan", hash=plan.hash, document=_encode(plan).decode(), now=self._books.now_us())

        await self._books.database.write(work)

    async def plan(self, found: str) -> Plan | None:
        rows = await self._books.database.read(lambda work: self._books.run(work, "find_plan", hash=found))
        return _plan(rows[0][0]) if rows else None

    async def start(
        self,
        *,
        plan: Plan,
        letters: Sequence[tuple[int, str]],
        wish: PlanOptions,
        name: str,
        operation: str,
        act: LedgerAct,
    ) -> tuple[RedriveTask, bool]:
        books = self._books

        def work(work: Tx) -> tuple[RedriveTask, bool]:
            rows = books.run(work, "find_redrive_by_operation", operation=operation) if operation else []
            if rows:
                return self._found(work, rows[0][0]), False
            number = books.number(work, "redrives")
            books.run(
                work,
                "insert_redrive",
                id=number,
                operation=operation or uuid.uuid4().hex,
                name=name,
                reason=act.reason,
                plan=plan.hash,
                wish=_encode(wish).decode(),
                total=len(letters),
                now=books.now_us(),
                actor=act.actor,
            )
            # The id is made here, once: whoever publishes the letter again does so under the same one.
            values = [
                {"redrive": number, "letter": letter, "redrive_id": str(uuid.uuid4()), "address": address}
                for letter, address in letters
            ]
            work.many(statement("insert_redrive_letter", work.dialect), values)
            books.append(work, act, ids=[letter for letter, _ in letters])
            return self._found(work, number), True

        return await books.database.write(work)

    async def find(self, redrive: int) -> RedriveTask | None:
        def work(work: Tx) -> RedriveTask | None:
            return self._found(work, redrive) if self._exists(work, redrive) else None

        return await self._books.database.read(work)

    async def by_operation(self, operation: str) -> RedriveTask | None:
        def work(work: Tx) -> RedriveTask | None:
            rows = self._books.run(work, "find_redrive_by_operation", operation=operation)
            return self._found(work, rows[0][0]) if rows else None

        return await self._books.database.read(work)

    async def page(self, *, before: int, count_max: int) -> list[RedriveTask]:
        return await self._books.database.read(
            lambda work: self._read(
                work, "WHERE id < :before ORDER BY id DESC LIMIT :count_max", before=before, count_max=count_max
            )
        )

    async def set_state(
        self, redrive: int, state: RedriveState, *, sources: Sequence[RedriveState], act: LedgerAct
    ) -> bool:
        def work(work: Tx) -> bool:
            rows = self._books.run(work, "find_redrive_state", redrive=redrive)
            if not rows or RedriveState(rows[0][0]) not in sources:
                return False
            why = clip(act.detail or act.reason, WHY_CHARACTERS_MAX)
            self._books.run(work, "set_redrive_state", redrive=redrive, state=state.value, why=why)
            self._books.append(work, act)
            return True

        return await self._books.database.write(work)

    async def hold(self, redrive: int, holder: str, *, until: datetime) -> bool:
        def work(work: Tx) -> bool:
            rows = self._books.run(work, "find_redrive_hold", redrive=redrive)
            if not rows or rows[0][0] != RedriveState.RUNNING.value:
                return False
            _, other, held_until = rows[0]
            if other != holder and held_until > self._books.now_us():
                return False
            self._books.run(work, "set_redrive_hold", redrive=redrive, holder=holder, until=microseconds(until))
            return True

        return await self._books.database.write(work)

    async def let_go(self, redrive: int, holder: str) -> None:
        def work(work: Tx) -> None:
            rows = self._books.run(work, "find_redrive_hold", redrive=redrive)
            if rows and rows[0][1] == holder:
                self._books.run(work, "set_redrive_hold", redrive=redrive, holder="", until=0)

        await self._books.database.write(work)

    async def lease(
        self, redrive: int, *, count_max: int, until: datetime, act: LedgerAct, bytes_max: int = LEASE_BYTES_MAX
    ) -> list[LeasedLetter]:
        books = self._books

        def work(work: Tx) -> list[LeasedLetter]:
            rows = books.run(work, "find_redrive_state", redrive=redrive)
            if not rows or rows[0][0] != RedriveState.RUNNING.value:
                return []
            found = books.run(work, "select_to_lease", redrive=redrive, now=books.now_us(), count_max=count_max)
            for row in found:
                if not _is_ours(row):
                    self._pass_over(work, redrive, row[0], status=row[3], state=row[4])
            ours = _within([row for row in found if _is_ours(row)], bytes_max)
            if not ours:
                return []
            ids = work.dialect.ids([row[0] for row in ours])
            books.run(work, "set_lease", redrive=redrive, until=microseconds(until), ids=ids)
            fresh = [(row[0], row[6], row[4]) for row in ours if row[4] == LetterState.CAPTURED.value]
            books.move(work, act, fresh, LetterState.REDRIVING.value)
            return [LeasedLetter(row[0], row[1], row[2], *row[5:]) for row in ours]

        leased = await books.database.write(work)
        crash_point("vault.after_lease")
        return leased

    async def contents(self, leased: Sequence[LeasedLetter]) -> list[Content]:
        def work(work: Tx) -> list[Content]:
            rows = self._books.run(work, "select_contents", ids=work.dialect.ids([one.letter for one in leased]))
            found = {row[0]: row for row in rows}
            return [content_of(self._books, work, found[one.letter], None if one.revision else 0) for one in leased]

        return await self._books.database.read(work)

    async def settle(self, redrive: int, settled: Sequence[Settled], act: LedgerAct, *, until: datetime) -> None:
        books = self._books

        def work(work: Tx) -> None:
            told = {one.letter: one for one in settled}
            rows = books.run(work, "select_to_settle", redrive=redrive, ids=work.dialect.ids(list(told)))
            done = [row for row in rows if told[row[0]].kind == "redriven" and row[3] not in ("redriven", "skipped")]
            self._confirmed(work, redrive, done, act)
            # What is not confirmed counts only from the one who has the letter: another may have published it.
            ours = [row for row in rows if row[3] in ("leased", "unknown") and row[4] == microseconds(until)]
            for kind, why in {(one.kind, one.why) for one in settled if one.kind != "redriven"}:
                these = [row for row in ours if (told[row[0]].kind, told[row[0]].why) == (kind, why)]
                self._set_status(work, redrive, these, kind, clip(why, WHY_CHARACTERS_MAX))
                if kind == "failed":
                    back = [row[:3] for row in these if row[2] == LetterState.REDRIVING.value]
                    books.move(work, act, back, LetterState.CAPTURED.value)

        await books.database.write(work)
        crash_point("vault.after_settle")

    async def release(self, *, count_max: int, act: LedgerAct) -> int:
        books = self._books

        def work(work: Tx) -> int:
            rows = books.run(work, "select_to_release", now=books.now_us(), count_max=count_max)
            for redrive in dict.fromkeys(row[4] for row in rows):
                self._release(work, redrive, [row for row in rows if row[4] == redrive], act)
            return len(rows)

        return await books.database.write(work)

    async def succeeded(self, redrive_ids: Sequence[str], act: LedgerAct) -> list[str]:
        books = self._books

        def work(work: Tx) -> list[str]:
            early: list[str] = []
            done: dict[int, Row] = {}
            for one in redrive_ids:
                for row in books.run(work, "find_came_from", redrive_id=one):
                    if row[2] == LetterState.REDRIVEN.value:
                        done[row[0]] = row[:3]
                    elif row[2] == LetterState.REDRIVING.value:
                        early.append(one)
            books.move(work, act, list(done.values()), LetterState.RESOLVED.value)
            return early

        return await books.database.write(work) if redrive_ids else []

    # Inside.

    def _confirmed(self, work: Tx, redrive: int, rows: Sequence[Row], act: LedgerAct) -> None:
        """The broker has them, whoever published them and whatever was thought meanwhile."""
        if not rows:
            return
        books, redriving = self._books, LetterState.REDRIVING.value
        self._set_status(work, redrive, rows, "redriven", "")
        # It was thought to have failed, or nobody knew, and it is captured since: it has gone all the same.
        again = [row[:3] for row in rows if row[2] == LetterState.CAPTURED.value]
        books.move(work, act, again, redriving)
        mistaken = [row[0] for row in rows if row[3] in ("failed", "released")]
        held = books.run(work, "select_held_elsewhere", redrive=redrive, ids=work.dialect.ids(mistaken))
        elsewhere = {row[0] for row in held} if mistaken else set()
        # One that has come back already stays so: it was published, whatever we heard of it.
        going = [row for row in rows if row[2] in (redriving, LetterState.CAPTURED.value) and row[0] not in elsewhere]
        if going:
            ids = work.dialect.ids([row[0] for row in going])
            books.run(work, "set_redriven", now=books.now_us(), ids=ids)
            books.book(work, act, [Moved(row[0], row[1], redriving, LetterState.REDRIVEN.value) for row in going])
        moved = {row[0] for row in going}
        if others := [row[0] for row in rows if row[0] not in moved]:
            books.run(work, "add_redriven_count", ids=work.dialect.ids(others))

    def _release(self, work: Tx, redrive: int, rows: Sequence[Row], act: LedgerAct) -> None:
        """Letters of a cancelled task whose outcome nobody will tell: an operator's again, with a note."""
        ours = [row[:3] for row in rows if row[2] == LetterState.REDRIVING.value]
        self._set_status(work, redrive, ours, "released", "its redrive was cancelled before the outcome was known")
        why = f"redrive {redrive} was cancelled, nobody knows whether it was published: redriven again, maybe twice"
        noted = replace(act, reason=why, detail=f"redrive {redrive}")
        self._books.move(work, noted, ours, LetterState.CAPTURED.value, counted_from="unknown")
        for row in rows:
            if row[2] != LetterState.REDRIVING.value:
                self._pass_over(work, redrive, row[0], status=row[3], state=row[2])

    def _set_status(self, work: Tx, redrive: int, rows: Sequence[Row], status: str, why: str) -> None:
        if rows:
            ids = work.dialect.ids([row[0] for row in rows])
            self._books.run(work, "set_redrive_status", redrive=redrive, status=status, why=why, ids=ids)

    def _pass_over(self, work: Tx, redrive: int, letter: int, *, status: str, state: str | None) -> None:
        """A letter that is not to be published: it came back, so it was, or somebody did something else with it."""
        came_back = status != "waiting"
        why = "" if came_back else f"it is {state or 'deleted'} now"
        self._set_status(work, redrive, [(letter,)], "redriven" if came_back else "skipped", why)

    def _exists(self, work: Tx, redrive: int) -> bool:
        return bool(self._books.run(work, "find_redrive_state", redrive=redrive))

    def _found(self, work: Tx, redrive: int) -> RedriveTask:
        return self._read(work, "WHERE id = :redrive", redrive=redrive)[0]

    def _read(self, work: Tx, where: str, **values: object) -> list[RedriveTask]:
        return [self._redrive(work, row) for row in work.rows(f"{SQL['select_redrive']} {where}", **values)]

    def _redrive(self, work: Tx, row: Row) -> RedriveTask:
        # Three counts, each by an index: a task of a million letters is looked at several times a second.
        counts: dict[str, int] = dict(self._books.run(work, "count_redrive_letters", redrive=row[0]))
        ((came_back,),) = self._books.run(work, "count_came_back", redrive=row[0])
        ((repeated,),) = self._books.run(work, "count_repeated", redrive=row[0])
        is_held = row[12] > self._books.now_us()
        return RedriveTask(
            id=row[0],
            name=row[1],
            reason=row[2],
            plan=row[3],
            state=RedriveState(row[4]),
            wish=_wish(row[5]),
            total=row[6],
            operation=row[7],
            started_at=moment(row[8]),
            started_by=row[9],
            why=row[10],
            redriven=counts.get("redriven", 0),
            failed=counts.get("failed", 0),
            skipped=counts.get("skipped", 0),
            unknown=sum(counts.get(status, 0) for status in ("unknown", "leased", "released")),
            came_back=came_back,
            possible_duplicates=repeated,
            held_by=row[11] if is_held else "",
            held_until=moment(row[12]) if is_held else None,
        )


def _is_ours(row: Row) -> bool:
    """To publish: it is still captured, or we took it before and do not know what became of it."""
    status, state = row[3], row[4]
    if status == "waiting":
        return bool(state == LetterState.CAPTURED.value)
    return bool(state == LetterState.REDRIVING.value)


def _within(rows: Sequence[Row], bytes_max: int) -> list[Row]:
    """As many as fit, and always the first."""
    size = 0
    for place, row in enumerate(rows):
        size += row[5]
        if place and size > bytes_max:
            return list(rows[:place])
    return list(rows)
