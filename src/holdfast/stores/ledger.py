"""What every change of the vault goes through, and what is kept of a vault apart from letters and redrives: its ledger,
groups and tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.ledger import FIRST, TEXT_CHARACTERS_MAX, LedgerAct, LedgerRow, covers, mac_of, ranges
from holdfast.core.letter import NOTE_CHARACTERS_MAX, Group, GroupStatus, clip
from holdfast.core.moments import microseconds, moment, moment_or_none
from holdfast.core.requests.declare import Token
from holdfast.ports.clock import Clock
from holdfast.ports.database import Database, Row, Tx
from holdfast.stores import run

T = TypeVar("T")
LEDGER_IDS_CHARACTERS_MAX = 1_000_000

_encode = msgspec.json.Encoder().encode
_token = msgspec.json.Decoder(Token).decode


class QueueTally(Struct, frozen=True):
    """How many letters of a queue are in a state."""

    queue: str
    state: str
    count: int


class Moved(NamedTuple):
    """A letter that goes from one state into another; "" is outside."""

    letter: int
    queue: str
    source: str
    target: str


class LedgerWriter:
    """What every change of one vault goes through: the tallies, and the row in the ledger, chained, in the same commit.

    It has the key of the chain, the clock, and the moves of letters.
    """

    def __init__(self, database: Database, *, key: bytes, clock: Clock) -> None:
        self._database = database
        self.key = key
        self.now_us = clock.now_us
        #: Moves of letters that are committed, by queue, source and target; "" is outside.
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self._moved: list[Moved] = []

    async def read(self, work: Callable[[Tx], T]) -> T:
        """See `Database`."""
        return await self._database.read(work)

    async def write(self, work: Callable[[Tx], T]) -> T:
        """See `Database`. Letters that it moves are counted once they are committed."""
        moved: list[Moved] = []

        def counted(tx: Tx) -> T:
            self._moved = moved  # one writes at a time
            return work(tx)

        result = await self._database.write(counted)
        self.moves.update((one.queue, one.source, one.target) for one in moved)
        return result

    def number(self, tx: Tx, name: str, count: int = 1) -> int:
        """The first of `count` numbers that were never given out."""
        rows = run(tx, "find_counter", name=name)
        last = int(rows[0][0]) if rows else 0
        run(tx, "set_counter", name=name, value=last + count)
        return last + 1

    def record_moves(self, tx: Tx, act: LedgerAct, moved: Sequence[Moved], *, counted_from: str = "") -> None:
        """Letters changed their state: one row per queue and move, and the tallies. `counted_from` stands for their
        old state among the moves of this process."""
        self._moved += [one._replace(source=counted_from) for one in moved] if counted_from else moved
        kinds: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for one in moved:
            kinds[one.queue, one.source, one.target].append(one.letter)
        tallies: Counter[tuple[str, str]] = Counter()
        for (queue, source, target), ids in kinds.items():
            if source:
                tallies[queue, source] -= len(ids)
            tallies[queue, target] += len(ids)
            self.append(tx, act, queue=queue, source=source, target=target, ids=ids)
        for (queue, state), count in tallies.items():
            if count:
                run(tx, "add_tally", queue=queue, state=state, count=count)

    def move(self, tx: Tx, act: LedgerAct, rows: Sequence[Row], target: str, *, counted_from: str = "") -> None:
        """Bring letters (id, queue, state) into a state, with their row."""
        if not rows:
            return
        ids = [row[0] for row in rows]
        run(tx, "set_state", state=target, now=self.now_us(), ids=tx.dialect.ids(ids))
        self.record_moves(tx, act, [Moved(row[0], row[1], row[2], target) for row in rows], counted_from=counted_from)

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
    ) -> LedgerRow:
        """The next row of the chain."""
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
        row = replace(row, mac=mac_of(self.key, previous, row))
        run(
            tx,
            "insert_ledger",
            number=row.number,
            at=microseconds(row.at),
            actor=row.actor,
            action=row.action,
            origin=row.origin,
            outcome=row.outcome,
            queue=row.queue,
            from_state=row.from_state,
            to_state=row.to_state,
            count=row.count,
            letters=row.letters,
            reason=row.reason,
            detail=row.detail,
            mac=row.mac,
            first_letter=min(ids, default=0),
            last_letter=max(ids, default=0),
        )
        return row


class Ledger:
    """The chained record of everything that was done or denied."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def append(
        self, act: LedgerAct, *, outcome: str, queue: str = "", letters: str = "", count: int = 0
    ) -> LedgerRow:
        """A row that goes with no other change."""
        return await self._writer.write(
            lambda tx: self._writer.append(tx, act, outcome=outcome, queue=queue, letters=letters, count=count)
        )

    async def rows(self, *, after: int, count_max: int) -> list[LedgerRow]:
        """Oldest first, those behind `after`."""
        values = {"after": after, "count_max": count_max}
        found = await self._writer.read(lambda tx: run(tx, "select_ledger", **values))
        return [_ledger(row) for row in found]

    async def newest(self) -> LedgerRow | None:
        """The last one."""
        found = await self._writer.read(lambda tx: run(tx, "select_last_ledger"))
        return _ledger(found[0]) if found else None

    async def of_letter(self, letter: int, *, count_max: int) -> list[LedgerRow]:
        """What was done to one letter."""
        values = {"letter": letter, "count_max": count_max}
        found = await self._writer.read(lambda tx: run(tx, "select_ledger_of_letter", **values))
        return [row for row in map(_ledger, found) if covers(row.letters, letter)]

    async def tallies(self) -> list[QueueTally]:
        """Letters by queue and state, as the vault keeps the numbers."""
        rows = await self._writer.read(lambda tx: run(tx, "select_tallies"))
        return [QueueTally(*row) for row in rows]

    async def counted(self) -> tuple[int, list[QueueTally]]:
        """The same, counted one by one; and the number of the newest row at that very moment."""

        def work(tx: Tx) -> tuple[list[Row], list[Row]]:
            counts = run(tx, "count_tallies") + run(tx, "select_deleted_tallies")
            return run(tx, "newest_ledger"), counts

        newest, counts = await self._writer.read(work)
        return int(newest[0][0]) if newest else 0, [QueueTally(*row) for row in counts]


class Groups:
    """Failure groups."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def page(self, *, status: GroupStatus | None, after: int, count_max: int) -> list[tuple[int, Group]]:
        """The ones that got a letter last come first; each with its cursor."""
        values = {"status": status.value if status else "", "before": after, "count_max": count_max}
        rows = await self._writer.read(lambda tx: run(tx, "select_groups", **values))
        return [(row[0], _group(row)) for row in rows]

    async def change(self, key: str, *, status: GroupStatus | None, note: str | None, act: LedgerAct) -> Group | None:
        """Say something of a group. None when there is no such group."""

        def work(tx: Tx) -> Group | None:
            rows = run(tx, "find_group", key=key)
            if not rows:
                return None
            group = _group(rows[0])
            run(
                tx,
                "change_group",
                key=key,
                status=(status or group.status).value,
                note=group.note if note is None else clip(note, NOTE_CHARACTERS_MAX),
            )
            self._writer.append(tx, act)
            return _group(run(tx, "find_group", key=key)[0])

        return await self._writer.write(work)


class Tokens:
    """API tokens."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def put(self, token: Token, act: LedgerAct) -> bool:
        """Keep one; false when the name is taken."""

        def work(tx: Tx) -> bool:
            rows = run(tx, "insert_token", name=token.name, document=_encode(token).decode())
            self._writer.append(tx, act, outcome="done" if rows else "refused")
            return bool(rows)

        return await self._writer.write(work)

    async def all(self) -> list[Token]:
        """All of them."""
        rows = await self._writer.read(lambda tx: run(tx, "select_tokens"))
        return [msgspec.structs.replace(_token(row[0]), revoked_at=moment_or_none(row[1])) for row in rows]

    async def revoke(self, name: str, act: LedgerAct) -> bool:
        """Never let it in again; false when there is none of that name that is valid."""

        def work(tx: Tx) -> bool:
            rows = run(tx, "revoke_token", name=name, now=self._writer.now_us())
            self._writer.append(tx, act, outcome="done" if rows else "refused")
            return bool(rows)

        return await self._writer.write(work)


def _group(row: Row) -> Group:
    return Group(
        sample=row[0],
        key=row[1],
        title=row[2],
        count=row[3],
        first_at=moment(row[4]),
        last_at=moment(row[5]),
        status=GroupStatus(row[6]),
        note=row[7],
    )


def _ledger(row: Row) -> LedgerRow:
    return LedgerRow(
        number=row[0],
        at=moment(row[1]),
        actor=row[2],
        action=row[3],
        origin=row[4],
        outcome=row[5],
        queue=row[6],
        from_state=row[7],
        to_state=row[8],
        count=row[9],
        letters=row[10],
        reason=row[11],
        detail=row[12],
        mac=bytes(row[13]),
    )
