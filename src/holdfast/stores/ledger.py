"""What every change of the vault goes through, and what is kept of a vault apart from letters and redrives: its ledger,
groups and tokens.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from holdfast.core.ledger import (
    FIRST,
    TEXT_CHARACTERS_MAX,
    LedgerAct,
    LedgerKey,
    LedgerRow,
    Link,
    covers,
    ends,
    ranges,
    verify,
)
from holdfast.core.letter import NOTE_CHARACTERS_MAX, GroupStatus, clip
from holdfast.core.moments import GAP_US, GAP_WAIT_US, NEVER_US, microseconds, moment, moment_or_none
from holdfast.core.requests.declare import Token
from holdfast.core.requests.vault import BalanceRow, GroupView, LedgerFilter, OverviewHistory, QueueHistory
from holdfast.core.selection import ID_MAX
from holdfast.errors import CannotStart, Invalid
from holdfast.ports.clock import Clock
from holdfast.ports.database import Database, Row, Tx
from holdfast.stores import SQL, reader, run, within
from holdfast.stores.files import made_once

T = TypeVar("T")
P = ParamSpec("P")
LEDGER_IDS_CHARACTERS_MAX = 1_000_000
#: A row names each of so many letters, however long their ids are.
MOVED_COUNT_MAX = 50_000
#: A letter is looked for in so many rows at a time, and so often for one page.
LOOK_COUNT, LOOKS_COUNT_MAX = 500, 40
#: So many rows are looked at for a gap: more in ten minutes hide it.
MOMENTS_COUNT_MAX = 100_000
KEY_BYTES = 32
HOUR_US = 3_600_000_000
#: So many hours are kept for charts.
HOURS_COUNT_MAX = 15 * 24
#: What is counted of a queue in each hour.
HOUR_KINDS = ("arrived", "redriven", "came_back")

_encode = msgspec.json.Encoder().encode
_token = msgspec.json.Decoder(Token).decode
_row = reader(LedgerRow, at=moment, mac=bytes)
_group = reader(GroupView, first_at=moment, last_at=moment, status=GroupStatus)
#: Captured letters of a group are counted up to here.
CAPTURED_COUNT_MAX = 10_000


class QueueTally(Struct, frozen=True):
    """How many letters of a queue are in a state."""

    queue: str
    state: str
    count: int


class LedgerPage(Struct, frozen=True):
    """Some rows. `after` is where the next page begins, 0 at the end."""

    rows: list[LedgerRow]
    after: int = 0


class LedgerWriter:
    """What every change of one vault goes through: the tallies, and the row in the ledger, chained, in the same commit.

    It has the key of the chain, the clock, and the moves of letters.
    """

    def __init__(self, database: Database, *, key: bytes, clock: Clock) -> None:
        self.key = LedgerKey(key)
        self.look = database.look
        self.now_us = clock.now_us
        #: Moves of letters that are committed, by queue, source and target; "" is outside.
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self.read = database.read
        self._write = database.write
        self._moved: Counter[tuple[str, str, str]] = Counter()

    async def write(self, work: Callable[[Tx], T]) -> T:
        """See `Database`. Letters that it moves are counted once they are committed."""
        moved: Counter[tuple[str, str, str]] = Counter()

        def counted(tx: Tx) -> T:
            self._moved = moved  # one writes at a time
            return work(tx)

        result = await self._write(counted)
        self.moves.update(moved)
        return result

    def number(self, tx: Tx, name: str, count: int = 1) -> int:
        """The first of `count` numbers that were never given out."""
        rows = run(tx, "find_counter", name=name)
        last = int(rows[0][0]) if rows else 0
        run(tx, "set_counter", name=name, value=last + count)
        return last + 1

    def record_moves(
        self, tx: Tx, act: LedgerAct, rows: Sequence[Row], target: str, *, counted_from: str = "", folded: int = 0
    ) -> None:
        """Letters (id, queue, state; "" is outside) came into a state: one row for each queue and old state, and the
        tallies. `counted_from` stands for their old state among the moves of this process; the first row vouches for
        what is `folded`."""
        kinds: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for letter, queue, source, *_ in rows:
            kinds[queue, source].append(letter)
        for (queue, source), ids in kinds.items():
            self._moved[queue, counted_from or source, target] += len(ids)
            for start in range(0, len(ids), MOVED_COUNT_MAX):
                these = ids[start : start + MOVED_COUNT_MAX]
                self.append(tx, act, queue=queue, source=source, target=target, ids=these, folded=folded)
                folded = 0
            self._note_hour(tx, queue, source, target, len(ids))
            run(tx, "add_tally", queue=queue, state=target, count=len(ids))
            if source:
                run(tx, "add_tally", queue=queue, state=source, count=-len(ids))

    def _note_hour(self, tx: Tx, queue: str, source: str, target: str, count: int) -> None:
        """What charts show of a move."""
        kind = target if source else "arrived"
        if kind in HOUR_KINDS:
            counts = {one: count if one == kind else 0 for one in HOUR_KINDS}
            run(tx, "add_queue_hour", hour=self.hour, queue=queue, **counts)

    @property
    def hour(self) -> int:
        """The hour of now, counted from the epoch."""
        return self.now_us() // HOUR_US

    def move(self, tx: Tx, act: LedgerAct, rows: Sequence[Row], target: str, *, counted_from: str = "") -> None:
        """Bring letters (id, queue, state) into a state, with their row."""
        if rows:
            ids = tx.dialect.ids([row[0] for row in rows])
            run(tx, "set_state", state=target, now=self.now_us(), ids=ids)
            self.record_moves(tx, act, rows, target, counted_from=counted_from)

    def append(
        self,
        tx: Tx,
        act: LedgerAct,
        *,
        outcome: str = "done",
        queue: str = "",
        source: str = "",
        target: str = "",
        ids: Sequence[int] = (),
        letters: str = "",
        count: int = 0,
        folded: int = 0,
    ) -> LedgerRow:
        """The next row of the chain. `folded` are the seals that come, or go, with it."""
        newest = run(tx, "newest_ledger")
        number, previous = (int(newest[0][0]), bytes(newest[0][1])) if newest else (0, FIRST)
        text = ranges(ids) if ids else letters
        if len(text) > LEDGER_IDS_CHARACTERS_MAX:
            text = f"{min(ids)}-{max(ids)}"
        row = LedgerRow(
            number=number + 1,
            at=moment(self.now_us()),
            actor=clip(act.actor, TEXT_CHARACTERS_MAX),
            action=act.action,
            origin=clip(act.origin, TEXT_CHARACTERS_MAX),
            outcome=outcome,
            queue=queue,
            from_state=source,
            to_state=target,
            count=len(ids) or count,
            letters=text,
            reason=clip(act.reason, TEXT_CHARACTERS_MAX),
            detail=clip(act.detail, TEXT_CHARACTERS_MAX),
        )
        link = Link(row, *ends(row), digest=self.key.digest(row.number, folded))
        row = replace(row, mac=self.key.mac_of(previous, link))
        run(tx, "insert_ledger", **asdict(link) | asdict(row) | {"at": microseconds(row.at)})
        return row


class VaultPart:
    """Something that is kept in a vault."""

    def __init__(self, writer: LedgerWriter) -> None:
        self.writer = writer


V = TypeVar("V", bound=VaultPart)


def one_commit(method: Callable[Concatenate[V, Tx, P], T]) -> Callable[Concatenate[V, P], Coroutine[Any, Any, T]]:
    """All that the method does is one commit; it is called without the transaction, and awaited."""

    @wraps(method)
    async def written(part: V, /, *args: P.args, **more: P.kwargs) -> T:
        return await part.writer.write(lambda tx: method(part, tx, *args, **more))

    return written


def one_look(method: Callable[Concatenate[V, Tx, P], T]) -> Callable[Concatenate[V, P], Coroutine[Any, Any, T]]:
    """All that the method reads is of one moment; it is called without the transaction, and awaited."""

    @wraps(method)
    async def seen(part: V, /, *args: P.args, **more: P.kwargs) -> T:
        return await part.writer.read(lambda tx: method(part, tx, *args, **more))

    return seen


class Ledger(VaultPart):
    """The chained record of everything that was done or denied."""

    @one_commit
    def append(
        self, tx: Tx, act: LedgerAct, *, outcome: str, queue: str = "", letters: str = "", count: int = 0
    ) -> LedgerRow:
        """A row that goes with no other change."""
        return self.writer.append(tx, act, outcome=outcome, queue=queue, letters=letters, count=count)

    @one_look
    def rows(self, tx: Tx, *, after: int, count_max: int) -> list[LedgerRow]:
        """Oldest first, those behind `after`."""
        where = "WHERE number > :after ORDER BY number LIMIT :count_max"
        return _rows(tx, where, after=after, count_max=count_max)

    @one_look
    def find(self, tx: Tx, wanted: LedgerFilter, *, after: int, newest_first: bool, count_max: int) -> LedgerPage:
        """Rows that fit, those behind `after`; 0 is the beginning. A page may have fewer and not be the last: a letter
        is looked for in so many rows at a time."""
        where, values = _condition(wanted)
        order = "number < :after {} ORDER BY number DESC" if newest_first else "number > :after {} ORDER BY number"
        step = count_max if wanted.letter is None else max(count_max, LOOK_COUNT)
        found: list[LedgerRow] = []
        after = after or (ID_MAX if newest_first else 0)
        for _ in range(LOOKS_COUNT_MAX):
            sql = f"WHERE {order.format(where)} LIMIT :step"
            rows = _rows(tx, sql, **values, after=after, step=step)
            found += [row for row in rows if wanted.letter is None or covers(row.letters, wanted.letter)]
            if len(found) > count_max or (len(found) == count_max and len(rows) == step):
                return LedgerPage(found[:count_max], after=found[count_max - 1].number)
            if len(rows) < step:
                return LedgerPage(found)
            after = rows[-1].number
        return LedgerPage(found, after=after)

    @one_look
    def of_letter(self, tx: Tx, letter: int, *, count_max: int) -> list[LedgerRow]:
        """What was done to one letter."""
        where = "WHERE first_letter > 0 AND first_letter <= :letter AND last_letter >= :letter"
        found = _rows(tx, f"{where} ORDER BY number LIMIT :count_max", letter=letter, count_max=count_max)
        return [row for row in found if covers(row.letters, letter)]

    @one_look
    def tallies(self, tx: Tx) -> list[QueueTally]:
        """Letters by queue and state, as the vault keeps the numbers."""
        return [QueueTally(*row) for row in run(tx, "select_tallies")]

    @one_look
    def hours(self, tx: Tx, count: int) -> OverviewHistory:
        """What happened in each of the last hours, by queue; the last one is not over."""
        until = self.writer.hour
        found: dict[str, QueueHistory] = {}
        for queue, hour, *counts in run(tx, "select_queue_hours", after=until - count):
            one = found.setdefault(queue, QueueHistory(queue, *([0] * count for _ in HOUR_KINDS)))
            if (index := count - 1 - (until - hour)) < count:  # another server's clock may be ahead
                for kind, value in zip(HOUR_KINDS, counts, strict=True):
                    getattr(one, kind)[index] = value
        return OverviewHistory(until=moment((until + 1) * HOUR_US), queues=list(found.values()))

    @one_commit
    def forget_hours(self, tx: Tx) -> None:
        """Those that no chart shows any more."""
        for name in ("delete_queue_hours", "delete_group_hours"):
            run(tx, name, before=self.writer.hour - HOURS_COUNT_MAX)

    @one_look
    def acts_since(self, tx: Tx, after: int) -> tuple[int, list[tuple[str, str, str]]]:
        """The number of the newest row; and of those behind `after` action, old and new state, each kind once. Before
        row 0 there is nothing to be told."""
        newest = run(tx, "newest_ledger")
        number = int(newest[0][0]) if newest else 0
        return number, [tuple(row) for row in run(tx, "select_acts", after=after)] if 0 <= after < number else []

    @one_look
    def head(self, tx: Tx) -> str:
        """The anchor: noted elsewhere, it makes a tail that was cut off visible."""
        newest = run(tx, "newest_ledger")
        return head_of(*newest[0][:2]) if newest else head_of(0, FIRST)

    @one_look
    def spared_until_us(self, tx: Tx) -> int:
        """Until when nothing is to be deleted by time: a while ago somebody wrote again after a long gap, or nobody
        has written since; 0 without one."""
        now_us = later_us = self.writer.now_us()
        for (at_us,) in run(tx, "newest_moments", count_max=MOMENTS_COUNT_MAX):
            if later_us < now_us - GAP_WAIT_US:
                break
            if later_us - at_us > GAP_US:
                return later_us + GAP_WAIT_US
            later_us = at_us
        return 0

    async def unlock(self, *, given: str | None, file: Path | None) -> None:
        """Find the key of the chain: the given one, or that in a file, made once; without a file, one for now.

        Raises CannotStart when the chain was begun with another one: it would break at the next row. The first row
        tells, whatever happened to the others.
        """
        first = await self._first()
        if given is not None:
            key = given.encode()
        elif file is None:
            key = secrets.token_bytes(KEY_BYTES)
        elif first and not await asyncio.to_thread(file.exists):
            # A new one would only be in the way of the right one.
            raise CannotStart(
                f"key of the ledger is missing; the vault's chain was begun with a key and {file} is not there, bring "
                "back the file ledger-key or set HOLDFAST_LEDGER_KEY"
            )
        else:
            try:
                key = await asyncio.to_thread(made_once, file, secrets.token_hex(KEY_BYTES))
            except OSError as error:
                raise CannotStart(
                    f"key of the ledger cannot be kept; {file}: {error.strerror}, set HOLDFAST_LEDGER_KEY"
                ) from error
        if not key.strip():
            raise CannotStart(f"key of the ledger is empty; bring back {file}, or set HOLDFAST_LEDGER_KEY")
        self.writer.key = LedgerKey(key)
        if first and verify(self.writer.key, first, previous=FIRST) is not None and first[0].row.number == 1:
            raise CannotStart(
                "key of the ledger is another one; the vault's chain was begun with another key, or its first row was "
                "changed, bring back the file ledger-key or set HOLDFAST_LEDGER_KEY"
            )

    @one_look
    def _first(self, tx: Tx) -> list[Link]:
        return links(tx, after=0, count_max=1)

    @one_look
    def balance(self, tx: Tx) -> list[BalanceRow]:
        """For each queue, captured ever is the sum over all states, from two sides; both as of one moment, so that
        letters which arrive meanwhile make no difference."""
        counted: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for queue, state, count in run(tx, "count_tallies") + run(tx, "select_deleted_tallies"):
            counted[queue][state] = count
        told: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for queue, source, target, count in run(tx, "sum_ledger"):
            told[queue][target] += count
            told[queue][source] -= count  # "" is outside: as many as ever came in
        return [
            BalanceRow(
                queue=queue,
                captured_ever=-told[queue].pop("", 0),
                ledger={state: count for state, count in sorted(told[queue].items()) if count},
                vault=dict(sorted(counted[queue].items())),
            )
            for queue in sorted({*told, *counted})
        ]


def links(tx: Tx, *, after: int, count_max: int) -> list[Link]:
    """Rows as they are chained, those behind `after`."""
    found = run(tx, "select_links", after=after, count_max=count_max)
    return [Link(_row(row[:-3]), row[-3], row[-2], bytes(row[-1])) for row in found]


def _rows(tx: Tx, where: str, **values: object) -> list[LedgerRow]:
    return [_row(row) for row in tx.rows(f"{SQL['select_ledger']} {where}", **values)]


def _condition(wanted: LedgerFilter) -> tuple[str, dict[str, object]]:
    """The SQL of a filter, beginning with AND, and its values. Raises Invalid."""
    parts: list[str] = []
    values: dict[str, object] = {}
    for column in ("actor", "action", "outcome", "queue"):
        if text := getattr(wanted, column):
            if "\x00" in text or any("\ud800" <= one <= "\udfff" for one in text):
                raise Invalid(f"filter is invalid; {column} holds a character that is nowhere in the ledger")
            parts.append(f"{column} = :{column}")
            values[column] = text
    if wanted.letter is not None:
        parts.append("first_letter > 0 AND first_letter <= :letter AND last_letter >= :letter")
        values["letter"] = wanted.letter
    # A clock may have been set back: rows of a time are between two numbers, and not all that are between them fit.
    for name, edge, fits in (("done_after", "min", "at >= :done_after"), ("done_before", "max", "at < :done_before")):
        if (at := getattr(wanted, name)) is not None:
            bound = ">=" if edge == "min" else "<="
            parts.append(f"+{fits} AND number {bound} (SELECT {edge}(number) FROM ledger WHERE {fits})")  # noqa: S608
            values[name] = microseconds(at)
    return "".join(f" AND {part}" for part in parts), values


def head_of(number: int, mac: bytes) -> str:
    """A row's number and hash, as they are noted elsewhere."""
    return f"{number}:{mac.hex()}"


class Groups(VaultPart):
    """Failure groups."""

    @one_look
    def page(
        self,
        tx: Tx,
        *,
        status: GroupStatus | None,
        after: int,
        count_max: int,
        text: str = "",
        first_after: datetime | None = None,
        first_before: datetime | None = None,
    ) -> list[GroupView]:
        """The ones that got a letter last come first; `after` is the sample of the last of the page before."""
        where = (
            "WHERE sample < :after AND (:status = '' OR status = :status) AND first_at >= :since AND first_at < :until"
        )
        values: dict[str, object] = {"after": after, "status": status.value if status else "", "count_max": count_max}
        values["since"] = microseconds(first_after) if first_after else 0
        values["until"] = microseconds(first_before) if first_before else NEVER_US
        if text:
            where += " AND lower(title || ' ' || note) LIKE :text ESCAPE '\\'"
            values["text"] = within(text)
        return _groups(tx, f"{where} ORDER BY sample DESC LIMIT :count_max", **values)

    @one_look
    def find(self, tx: Tx, key: str) -> GroupView | None:
        """One group."""
        return next(iter(_groups(tx, "WHERE key = :key", key=key)), None)

    @one_look
    def hours(self, tx: Tx, keys: Sequence[str], count: int) -> dict[str, list[int]]:
        """How many letters came to each in each of the last hours; the last one is not over."""
        until = self.writer.hour
        found = {key: [0] * count for key in keys}
        given = _encode([[key] for key in keys]).decode()
        for key, hour, arrived in run(tx, "select_group_hours", given=given, after=until - count):
            if hour <= until:  # another server's clock may be ahead
                found[key][count - 1 - (until - hour)] = arrived
        return found

    @one_commit
    def change(
        self, tx: Tx, key: str, *, status: GroupStatus | None, note: str | None, act: LedgerAct
    ) -> GroupView | None:
        """Say something of a group. None when there is no such group."""
        for group in _groups(tx, "WHERE key = :key", key=key):
            text = group.note if note is None else clip(note, NOTE_CHARACTERS_MAX)
            changed = replace(group, status=status or group.status, note=text)
            run(tx, "change_group", key=key, status=changed.status.value, note=text)
            self.writer.append(tx, act)
            return changed
        return None


def _groups(tx: Tx, where: str, **values: object) -> list[GroupView]:
    rows = tx.rows(f"{SQL['select_group']} {where}", **values, counted_max=CAPTURED_COUNT_MAX + 1)
    return [_group((*row[:-1], min(row[-1], CAPTURED_COUNT_MAX), row[-1] <= CAPTURED_COUNT_MAX)) for row in rows]


class Tokens(VaultPart):
    """API tokens."""

    @one_commit
    def put(self, tx: Tx, token: Token, act: LedgerAct) -> bool:
        """Keep one; false when the name is taken."""
        key, document = self.writer.key, _encode(token).decode()
        seal = key.seal("token", (token.name, document, 0))
        rows = run(tx, "insert_token", name=token.name, document=document, seal=seal)
        folded = key.fold("token", [seal] if rows else [])
        self.writer.append(tx, act, outcome="done" if rows else "refused", folded=folded)
        return bool(rows)

    @one_look
    def all(self, tx: Tx) -> list[Token]:
        """All of them."""
        return [replace(_token(row[0]), revoked_at=moment_or_none(row[1])) for row in run(tx, "select_tokens")]

    @one_commit
    def revoke(self, tx: Tx, name: str, act: LedgerAct) -> bool:
        """Never let it in again; false when there is none of that name that is valid."""
        key, now = self.writer.key, self.writer.now_us()
        rows = run(tx, "revoke_token", name=name, now=now)
        seals: list[bytes] = []
        for document, former in rows:
            seals = [bytes(former), key.seal("token", (name, document, now))]
            run(tx, "seal_token", key=name, seal=seals[1])
        self.writer.append(tx, act, outcome="done" if rows else "refused", folded=key.fold("token", seals))
        return bool(rows)
