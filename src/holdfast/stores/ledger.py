"""Groups, ledger and tokens in a SQL database.

What every change of the vault goes through: the tallies, and the row in the ledger, chained, in the same commit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.core.ledger import FIRST, TEXT_CHARACTERS_MAX, LedgerAct, LedgerRow, covers, mac_of, ranges
from holdfast.core.letter import NOTE_CHARACTERS_MAX, Group, GroupStatus, clip
from holdfast.core.moments import microseconds, moment, moment_or_none
from holdfast.core.requests.roles import Token
from holdfast.ports.clock import Clock
from holdfast.ports.database import Database, Row, Tx
from holdfast.ports.vault import QueueTally
from holdfast.stores import statement

T = TypeVar("T")
LEDGER_IDS_CHARACTERS_MAX = 1_000_000


class Moved(NamedTuple):
    """A letter that goes from one state into another; "" is outside."""

    letter: int
    queue: str
    source: str
    target: str


class CountedMoves:
    """A database that counts the moves of letters, once they are committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.dialect = database.dialect
        #: By queue, source and target; "" is outside.
        self.moves: Counter[tuple[str, str, str]] = Counter()

    async def write(self, work: Callable[[Tx], T]) -> T:
        moved: list[Moved] = []

        def run(at_work: Tx) -> T:
            at_work.moved = moved
            return work(at_work)

        result = await self._database.write(run)
        self.moves.update((one.queue, one.source, one.target) for one in moved)
        return result

    async def read(self, work: Callable[[Tx], T]) -> T:
        return await self._database.read(work)


class LedgerWriter:
    """The key of the chain and the clock, shared by all parts of one vault."""

    def __init__(self, database: Database, *, key: bytes, clock: Clock) -> None:
        self.database = CountedMoves(database)
        self.key = key
        self._clock = clock

    def now_us(self) -> int:
        return self._clock.now_us()

    def run(self, work: Tx, name: str, /, **values: Any) -> list[Row]:
        """A statement of `sql/`."""
        return work.rows(statement(name, work.dialect), **values)

    def number(self, work: Tx, name: str, count: int = 1) -> int:
        """The first of `count` numbers that were never given out."""
        rows = self.run(work, "find_counter", name=name)
        last = int(rows[0][0]) if rows else 0
        self.run(work, "set_counter", name=name, value=last + count)
        return last + 1

    def book(self, work: Tx, act: LedgerAct, moved: Sequence[Moved], *, counted_from: str = "") -> None:
        """Letters changed their state: one row per queue and move, and the tallies. `counted_from` stands for their
        old state among the moves of this process."""
        work.moved += [one._replace(source=counted_from) for one in moved] if counted_from else moved
        kinds: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for one in moved:
            kinds[one.queue, one.source, one.target].append(one.letter)
        tallies: Counter[tuple[str, str]] = Counter()
        for (queue, source, target), ids in kinds.items():
            if source:
                tallies[queue, source] -= len(ids)
            tallies[queue, target] += len(ids)
            self.append(work, act, queue=queue, source=source, target=target, ids=ids)
        for (queue, state), count in tallies.items():
            if count:
                self.run(work, "add_tally", queue=queue, state=state, count=count)

    def move(self, work: Tx, act: LedgerAct, rows: Sequence[Row], target: str, *, counted_from: str = "") -> None:
        """Bring letters (id, queue, state) into a state, with their row."""
        if not rows:
            return
        ids = [row[0] for row in rows]
        self.run(work, "set_state", state=target, now=self.now_us(), ids=work.dialect.ids(ids))
        self.book(work, act, [Moved(row[0], row[1], row[2], target) for row in rows], counted_from=counted_from)

    def append(
        self,
        work: Tx,
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
        newest = self.run(work, "newest_ledger")
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
        self.run(
            work,
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


_encode = msgspec.json.Encoder().encode
_token = msgspec.json.Decoder(Token).decode


class SqlGroups:
    """Failure groups."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def page(self, *, status: GroupStatus | None, after: int, count_max: int) -> list[tuple[int, Group]]:
        values = {"status": status.value if status else "", "before": after, "count_max": count_max}
        rows = await self._books.database.read(lambda work: self._books.run(work, "select_groups", **values))
        return [(row[0], _group(row)) for row in rows]

    async def change(self, key: str, *, status: GroupStatus | None, note: str | None, act: LedgerAct) -> Group | None:
        def work(work: Tx) -> Group | None:
            rows = self._books.run(work, "find_group", key=key)
            if not rows:
                return None
            group = _group(rows[0])
            self._books.run(
                work,
                "change_group",
                key=key,
                status=(status or group.status).value,
                note=group.note if note is None else clip(note, NOTE_CHARACTERS_MAX),
            )
            self._books.append(work, act)
            return _group(self._books.run(work, "find_group", key=key)[0])

        return await self._books.database.write(work)


class SqlLedger:
    """The chain."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def append(
        self, act: LedgerAct, *, outcome: str, queue: str = "", letters: str = "", count: int = 0
    ) -> LedgerRow:
        return await self._books.database.write(
            lambda work: self._books.append(work, act, outcome=outcome, queue=queue, letters=letters, count=count)
        )

    async def rows(self, *, after: int, count_max: int) -> list[LedgerRow]:
        values = {"after": after, "count_max": count_max}
        found = await self._books.database.read(lambda work: self._books.run(work, "select_ledger", **values))
        return [_ledger(row) for row in found]

    async def newest(self) -> LedgerRow | None:
        found = await self._books.database.read(lambda work: self._books.run(work, "select_last_ledger"))
        return _ledger(found[0]) if found else None

    async def of_letter(self, letter: int, *, count_max: int) -> list[LedgerRow]:
        values = {"letter": letter, "count_max": count_max}
        found = await self._books.database.read(lambda work: self._books.run(work, "select_ledger_of_letter", **values))
        return [row for row in map(_ledger, found) if covers(row.letters, letter)]

    async def tallies(self) -> list[QueueTally]:
        rows = await self._books.database.read(lambda work: self._books.run(work, "select_tallies"))
        return [QueueTally(*row) for row in rows]

    async def counted(self) -> tuple[int, list[QueueTally]]:
        def work(work: Tx) -> tuple[list[Row], list[Row]]:
            counts = self._books.run(work, "count_tallies") + self._books.run(work, "select_deleted_tallies")
            return self._books.run(work, "newest_ledger"), counts

        newest, counts = await self._books.database.read(work)
        return int(newest[0][0]) if newest else 0, [QueueTally(*row) for row in counts]


class SqlTokens:
    """API tokens."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def put(self, token: Token, act: LedgerAct) -> bool:
        def work(work: Tx) -> bool:
            rows = self._books.run(work, "insert_token", name=token.name, document=_encode(token).decode())
            self._books.append(work, act, outcome="done" if rows else "refused")
            return bool(rows)

        return await self._books.database.write(work)

    async def all(self) -> list[Token]:
        rows = await self._books.database.read(lambda work: self._books.run(work, "select_tokens"))
        return [msgspec.structs.replace(_token(row[0]), revoked_at=moment_or_none(row[1])) for row in rows]

    async def revoke(self, name: str, act: LedgerAct) -> bool:
        def work(work: Tx) -> bool:
            rows = self._books.run(work, "revoke_token", name=name, now=self._books.now_us())
            self._books.append(work, act, outcome="done" if rows else "refused")
            return bool(rows)

        return await self._books.database.write(work)


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
