"""Plans, and tasks that carry them out: each letter has its redrive id from the start, whoever publishes it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content, Origin, clip
from holdfast.core.message import Address
from holdfast.core.moments import microseconds, moment, moment_or_none
from holdfast.core.plan import Plan, PlanOptions, RedriveState, RedriveTask
from holdfast.core.requests.vault import ReasonView, RedriveLetterView, RedriveOutcome
from holdfast.core.states import LetterState
from holdfast.ports.database import Row, Tx
from holdfast.proof import crash_point
from holdfast.stores import SQL, reader, run, run_many
from holdfast.stores.ledger import VaultPart, one_commit, one_look
from holdfast.stores.letters import content_of

WHY_CHARACTERS_MAX = 500
SEPARATOR = "\x1f"
#: How many bytes of bodies are leased at once.
LEASE_BYTES_MAX = 64 * 1024 * 1024

_encode = msgspec.json.Encoder().encode
_plan = msgspec.json.Decoder(Plan).decode
_wish = msgspec.json.Decoder(PlanOptions).decode
_task = reader(
    RedriveTask,
    state=RedriveState,
    wish=_wish,
    started_at=moment,
    held_until=moment_or_none,
    changed_at=moment_or_none,
    watched_until=moment_or_none,
)
#: What a task's letters are called to those who ask, and in which status they are then.
OUTCOMES: Mapping[RedriveOutcome, tuple[str, ...]] = {
    "waiting": ("waiting",),
    "under_way": ("leased",),
    "redriven": ("redriven",),
    "failed": ("failed",),
    "skipped": ("skipped",),
    "unknown": ("unknown", "released"),
}
TOLD = {status: outcome for outcome, found in OUTCOMES.items() for status in found}
#: So many letters are looked at for the reasons of an outcome, and so many reasons are told.
REASONS_LOOKED_MAX = 10_000
REASONS_COUNT_MAX = 20


def pack(address: Address) -> str:
    """An address in one text, for the task's table."""
    return f"{address.exchange}{SEPARATOR}{address.routing_key}"


def unpack(text: str) -> Address:
    """The address again."""
    exchange, _, key = text.partition(SEPARATOR)
    return Address(exchange=exchange, routing_key=key)


class LeasedLetter(Struct, frozen=True):
    """A letter that is ours to publish, with the id under which every copy of it is recognisable."""

    letter: int
    redrive_id: str
    address: str
    body_bytes: int = 0
    queue: str = ""
    origin: Origin = "rabbitmq"
    revision: int = 0


class Settled(Struct, frozen=True):
    """What became of a publish."""

    letter: int
    kind: Literal["redriven", "failed", "unknown"]
    why: str = ""


class RedriveStore(VaultPart):
    """Plans and tasks."""

    @one_commit
    def keep_plan(self, tx: Tx, plan: Plan) -> None:
        """Keep a plan."""
        run(tx, "put_plan", hash=plan.hash, document=_encode(plan).decode(), now=self.writer.now_us())

    @one_look
    def plan(self, tx: Tx, found: str) -> Plan | None:
        """A plan by its hash."""
        rows = run(tx, "find_plan", hash=found)
        return _plan(rows[0][0]) if rows else None

    @one_commit
    def start(
        self,
        tx: Tx,
        *,
        plan: Plan,
        letters: Sequence[tuple[int, str]],
        wish: PlanOptions,
        name: str,
        operation: str,
        act: LedgerAct,
    ) -> tuple[RedriveTask, bool]:
        """A task over these letters, each with its address, or the one that this operation id started before."""
        started = self._tasks(tx, "WHERE operation = :operation", operation=operation) if operation else []
        if started:
            return started[0], False
        number = self.writer.number(tx, "redrives")
        run(
            tx,
            "insert_redrive",
            id=number,
            operation=operation or uuid.uuid4().hex,
            name=name,
            reason=act.reason,
            plan=plan.hash,
            wish=_encode(wish).decode(),
            total=len(letters),
            now=self.writer.now_us(),
            actor=act.actor,
        )
        # The id is made here, once: whoever publishes the letter again does so under the same one.
        values = [
            {"redrive": number, "letter": letter, "redrive_id": str(uuid.uuid4()), "address": address}
            for letter, address in letters
        ]
        run_many(tx, "insert_redrive_letter", values)
        self.writer.append(tx, act, ids=[letter for letter, _ in letters])
        return self._tasks(tx, "WHERE id = :redrive", redrive=number)[0], True

    @one_look
    def find(self, tx: Tx, redrive: int) -> RedriveTask | None:
        """One task."""
        return next(iter(self._tasks(tx, "WHERE id = :redrive", redrive=redrive)), None)

    @one_look
    def by_operation(self, tx: Tx, operation: str) -> RedriveTask | None:
        """The task that an operation id started."""
        return next(iter(self._tasks(tx, "WHERE operation = :operation", operation=operation)), None)

    @one_look
    def page(
        self, tx: Tx, *, before: int, count_max: int, states: Sequence[RedriveState] = (), plan: str = ""
    ) -> list[RedriveTask]:
        """Newest first; those of some states, or of a plan, where they are named."""
        of_states = "".join(f" AND state <> '{one.value}'" for one in RedriveState if states and one not in states)
        of_plan = " AND plan = :plan" if plan else ""
        where = f"WHERE id < :before{of_states}{of_plan} ORDER BY id DESC LIMIT :count_max"
        more = {"plan": plan} if plan else {}
        return self._tasks(tx, where, by_tallies=True, before=before, count_max=count_max, **more)

    @one_look
    def letters(
        self, tx: Tx, redrive: int, outcome: RedriveOutcome | None, *, after: int, count_max: int
    ) -> list[RedriveLetterView]:
        """Letters of a task and what became of each, by their ids; those with one outcome, where it is named."""
        values = {"redrive": redrive, "after": after, "count_max": count_max}
        if outcome == "came_back":
            return [_view(row) for row in run(tx, "select_redrive_returns", **values)]
        of_status = f" AND r.status IN {_listed(OUTCOMES[outcome])}" if outcome else ""
        where = f"WHERE r.redrive = :redrive AND r.letter > :after{of_status} ORDER BY r.letter LIMIT :count_max"
        return [_view(row) for row in tx.rows(f"{SQL['select_redrive_letters']} {where}", **values)]

    @one_look
    def reasons(self, tx: Tx, redrive: int, outcome: RedriveOutcome) -> list[ReasonView]:
        """Why letters of a task have an outcome, the most frequent reason first."""
        most = {"looked_max": REASONS_LOOKED_MAX, "count_max": REASONS_COUNT_MAX}
        found = [
            ReasonView(*row)
            for status in OUTCOMES.get(outcome, ())
            for row in run(tx, "count_redrive_reasons", redrive=redrive, status=status, **most)
        ]
        return sorted((one for one in found if one.why), key=lambda one: -one.count)

    @one_commit
    def set_state(
        self, tx: Tx, redrive: int, state: RedriveState, *, sources: Sequence[RedriveState], act: LedgerAct
    ) -> bool:
        """Bring a task into a state; false when it was in none of `sources`."""
        rows = run(tx, "find_redrive", redrive=redrive)
        if not rows or RedriveState(rows[0][0]) not in sources:
            return False
        why = clip(act.detail or act.reason, WHY_CHARACTERS_MAX)
        now, actor = self.writer.now_us(), clip(act.actor, WHY_CHARACTERS_MAX)
        run(tx, "set_redrive_state", redrive=redrive, state=state.value, why=why, now=now, actor=actor)
        self._tally(tx, redrive)
        self.writer.append(tx, act)
        return True

    @one_commit
    def watch(self, tx: Tx, redrive: int, *, until: datetime) -> None:
        """Say until when the canary of a running task waits for what comes back."""
        run(tx, "set_redrive_watch", redrive=redrive, until=microseconds(until))

    @one_commit
    def hold(self, tx: Tx, redrive: int, holder: str, *, until: datetime) -> bool:
        """Say who runs a running task, until a moment; false when another has said so, or it is not running."""
        for state, other, held_until in run(tx, "find_redrive", redrive=redrive):
            is_free = other == holder or held_until <= self.writer.now_us()
            if is_free and state == RedriveState.RUNNING.value:
                run(tx, "set_redrive_hold", redrive=redrive, holder=holder, until=microseconds(until))
                return True
        return False

    @one_commit
    def let_go(self, tx: Tx, redrive: int, holder: str) -> None:
        """Nobody runs it any more, if this one did."""
        for _, other, _ in run(tx, "find_redrive", redrive=redrive):
            if other == holder:
                run(tx, "set_redrive_hold", redrive=redrive, holder="", until=0)

    async def lease(
        self, redrive: int, *, count_max: int, until: datetime, act: LedgerAct, bytes_max: int = LEASE_BYTES_MAX
    ) -> list[LeasedLetter]:
        """Letters to publish: *redriving* from now on. What is no longer *captured* is skipped. Always at least one
        where there is one, whatever its size."""

        def work(tx: Tx) -> list[LeasedLetter]:
            rows = run(tx, "find_redrive", redrive=redrive)
            if not rows or rows[0][0] != RedriveState.RUNNING.value:
                return []
            found = run(tx, "select_to_lease", redrive=redrive, now=self.writer.now_us(), count_max=count_max)
            for row in found:
                if not _is_ours(row):
                    self._pass_over(tx, redrive, row[0], status=row[3], state=row[4])
            ours = _within([row for row in found if _is_ours(row)], bytes_max)
            ids = tx.dialect.ids([row[0] for row in ours])
            run(tx, "set_lease", redrive=redrive, until=microseconds(until), ids=ids)
            fresh = [(row[0], row[6], row[4]) for row in ours if row[4] == LetterState.CAPTURED.value]
            self.writer.move(tx, act, fresh, LetterState.REDRIVING.value)
            return [LeasedLetter(row[0], row[1], row[2], *row[5:]) for row in ours]

        leased = await self.writer.write(work)
        crash_point("vault.after_lease")
        return leased

    @one_look
    def next_origin(self, tx: Tx, redrive: int) -> Origin | None:
        """Where the next letter of a running task came from; none when none is left to be leased now."""
        rows = run(tx, "find_next_origin", redrive=redrive, now=self.writer.now_us())
        return rows[0][0] if rows else None

    @one_look
    def contents(self, tx: Tx, leased: Sequence[LeasedLetter]) -> list[Content]:
        """What is to be published of each, in the same order."""
        rows = run(tx, "select_contents", ids=tx.dialect.ids([one.letter for one in leased]))
        found = {row[0]: row for row in rows}
        return [content_of(tx, found[one.letter], None if one.revision else 0) for one in leased]

    async def settle(self, redrive: int, settled: Sequence[Settled], act: LedgerAct, *, until: datetime) -> None:
        """What became of letters that were leased until a moment. *redriven* counts also when the lease ran out and
        another has the letter; *failed* and *unknown* only from the one who has it. Unknown ones stay *redriving*."""

        def work(tx: Tx) -> None:
            told = {one.letter: one for one in settled}
            rows = run(tx, "select_to_settle", redrive=redrive, ids=tx.dialect.ids(list(told)))
            done = [row for row in rows if told[row[0]].kind == "redriven" and row[3] not in ("redriven", "skipped")]
            self._confirmed(tx, redrive, done, act)
            # What is not confirmed counts only from the one who has the letter: another may have published it.
            ours = [row for row in rows if row[3] in ("leased", "unknown") and row[4] == microseconds(until)]
            for kind, why in {(one.kind, one.why) for one in settled if one.kind != "redriven"}:
                these = [row for row in ours if (told[row[0]].kind, told[row[0]].why) == (kind, why)]
                self._set_status(tx, redrive, these, kind, clip(why, WHY_CHARACTERS_MAX))
                if kind == "failed":
                    back = [row for row in these if row[2] == LetterState.REDRIVING.value]
                    self.writer.move(tx, act, back, LetterState.CAPTURED.value)
            self._tally(tx, redrive)

        await self.writer.write(work)
        crash_point("vault.after_settle")

    @one_commit
    def release(self, tx: Tx, *, count_max: int, act: LedgerAct) -> int:
        """Letters of cancelled tasks whose outcome is unknown, or whose lease has run out, are *captured* again, with
        a note of that in the ledger; how many there were. To the task they stay unknown, and a confirm still counts.
        """
        rows = run(tx, "select_to_release", now=self.writer.now_us(), count_max=count_max)
        for redrive in dict.fromkeys(row[4] for row in rows):
            self._release(tx, redrive, [row for row in rows if row[4] == redrive], act)
            self._tally(tx, redrive)
        return len(rows)

    @one_commit
    def succeeded(self, tx: Tx, redrive_ids: Sequence[str], act: LedgerAct) -> list[str]:
        """A consumer has done what was redriven under these ids: *redriven* becomes *resolved*. Returns those whose
        confirm is not noted yet; ids that nobody knows are let be."""
        early: list[str] = []
        done: dict[int, Row] = {}
        for one in redrive_ids:
            for row in run(tx, "find_came_from", redrive_id=one):
                if row[2] == LetterState.REDRIVEN.value:
                    done[row[0]] = row
                elif row[2] == LetterState.REDRIVING.value:
                    early.append(one)
        self.writer.move(tx, act, list(done.values()), LetterState.RESOLVED.value)
        return early

    # Inside.

    def _confirmed(self, tx: Tx, redrive: int, rows: Sequence[Row], act: LedgerAct) -> None:
        """The broker has them, whoever published them and whatever was thought meanwhile."""
        if not rows:
            return
        writer, redriving = self.writer, LetterState.REDRIVING.value
        self._set_status(tx, redrive, rows, "redriven", "")
        # It was thought to have failed, or nobody knew, and it is captured since: it has gone all the same.
        again = [row for row in rows if row[2] == LetterState.CAPTURED.value]
        writer.move(tx, act, again, redriving)
        mistaken = [row[0] for row in rows if row[3] in ("failed", "released")]
        held = run(tx, "select_held_elsewhere", redrive=redrive, ids=tx.dialect.ids(mistaken))
        elsewhere = {row[0] for row in held} if mistaken else set()
        # One that has come back already stays so: it was published, whatever we heard of it.
        going = [row for row in rows if row[2] in (redriving, LetterState.CAPTURED.value) and row[0] not in elsewhere]
        if going:
            ids = tx.dialect.ids([row[0] for row in going])
            run(tx, "set_redriven", now=writer.now_us(), ids=ids)
            gone = [(row[0], row[1], redriving) for row in going]
            writer.record_moves(tx, act, gone, LetterState.REDRIVEN.value)
        moved = {row[0] for row in going}
        if others := [row[0] for row in rows if row[0] not in moved]:
            run(tx, "add_redriven_count", ids=tx.dialect.ids(others))

    def _release(self, tx: Tx, redrive: int, rows: Sequence[Row], act: LedgerAct) -> None:
        """Letters of a cancelled task whose outcome nobody will tell: an operator's again, with a note."""
        ours = [row for row in rows if row[2] == LetterState.REDRIVING.value]
        self._set_status(tx, redrive, ours, "released", "its redrive was cancelled before the outcome was known")
        why = f"redrive {redrive} was cancelled, nobody knows whether it was published: redriven again, maybe twice"
        noted = replace(act, reason=why, detail=f"redrive {redrive}")
        self.writer.move(tx, noted, ours, LetterState.CAPTURED.value, counted_from="unknown")
        for row in rows:
            if row[2] != LetterState.REDRIVING.value:
                self._pass_over(tx, redrive, row[0], status=row[3], state=row[2])

    def _set_status(self, tx: Tx, redrive: int, rows: Sequence[Row], status: str, why: str) -> None:
        if rows:
            ids = tx.dialect.ids([row[0] for row in rows])
            run(tx, "set_redrive_status", redrive=redrive, status=status, why=why, ids=ids)

    def _pass_over(self, tx: Tx, redrive: int, letter: int, *, status: str, state: str | None) -> None:
        """A letter that is not to be published: it came back, so it was, or somebody did something else with it."""
        came_back = status != "waiting"
        why = "" if came_back else f"it is {state or 'deleted'} now"
        self._set_status(tx, redrive, [(letter,)], "redriven" if came_back else "skipped", why)

    def _tally(self, tx: Tx, redrive: int) -> None:
        """Count the letters of a task that does not run, so that no list has to."""
        if run(tx, "find_redrive", redrive=redrive)[0][0] == RedriveState.RUNNING.value:
            return
        counts = run(tx, "count_redrive_letters", ids=tx.dialect.ids([redrive]))
        run(tx, "delete_redrive_tallies", redrive=redrive)
        run_many(tx, "add_redrive_tally", [{"redrive": redrive, "status": row[1], "count": row[2]} for row in counts])

    def _tasks(self, tx: Tx, where: str, *, by_tallies: bool = False, **values: object) -> list[RedriveTask]:
        """`by_tallies` counts letters of those that run alone; what came back is never less than was ever told."""
        rows = tx.rows(f"{SQL['select_redrive']} {where}", **values)
        if not rows:
            return []
        ids = [row[0] for row in rows]
        told = run(tx, "select_redrive_tallies", ids=tx.dialect.ids(ids))
        kept: dict[tuple[int, str], int] = {(redrive, status): count for redrive, status, count in told}
        tallied = {redrive for redrive, status in kept if status != "came_back"} if by_tallies else set()
        counted = tx.dialect.ids([row[0] for row in rows if row[0] not in tallied or row[4] == "running"])
        # Three counts for all of them, each by an index: a task of a million letters is looked at every second.
        found = {(redrive, status): count for redrive, status, count in run(tx, "count_redrive_letters", ids=counted)}
        back: dict[int, int] = {} if by_tallies else dict(run(tx, "count_came_back", ids=counted))
        repeated: dict[int, int] = dict(run(tx, "count_repeated", ids=tx.dialect.ids(ids)))
        tasks = []
        for row in rows:
            redrive = row[0]
            of = kept if redrive in tallied and row[4] != "running" else found
            known = [of.get((redrive, status), 0) for status in ("redriven", "failed", "skipped")]
            unknown = sum(of.get((redrive, status), 0) for status in ("unknown", "leased", "released"))
            came_back = max(kept.get((redrive, "came_back"), 0), back.get(redrive, 0))
            tasks.append(self._task(row, (*known, unknown, came_back, repeated.get(redrive, 0))))
        return tasks

    def _task(self, row: Row, counts: Sequence[int]) -> RedriveTask:
        *told, why, holder, held_until, changed_at, changed_by, watched_until = row
        held = (holder, held_until) if held_until > self.writer.now_us() else ("", 0)
        return _task((*told, *counts, why, *held, changed_at, changed_by, watched_until))


def _view(row: Row) -> RedriveLetterView:
    """A row of `select_redrive_letters`."""
    letter, status, why, repeated, address, state, came_back_as = row
    has_come_back = state == LetterState.CAME_BACK.value and status not in ("failed", "skipped")
    outcome = "came_back" if has_come_back else TOLD[status]
    to = str(unpack(address))
    return RedriveLetterView(letter, outcome, why, to, bool(repeated), state or "deleted", came_back_as or 0)


def _listed(words: Sequence[str]) -> str:
    """Words of ours as a list of SQL."""
    return f"({', '.join(repr(one) for one in words)})"


def _is_ours(row: Row) -> bool:
    """To publish: it is still captured, or we took it before and do not know what became of it."""
    status, state = row[3], row[4]
    return bool(state == (LetterState.CAPTURED if status == "waiting" else LetterState.REDRIVING).value)


def _within(rows: Sequence[Row], bytes_max: int) -> list[Row]:
    """As many as fit, and always the first."""
    size = 0
    for index, row in enumerate(rows):
        size += row[5]
        if index and size > bytes_max:
            return list(rows[:index])
    return list(rows)
