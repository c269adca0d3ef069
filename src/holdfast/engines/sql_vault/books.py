"""What every change of the vault goes through: the tallies, and the row in the ledger, chained, in the same commit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast.core.ledger import FIRST, TEXT_CHARACTERS_MAX, LedgerAct, LedgerRow, mac_of, ranges
from holdfast.core.letter import clip
from holdfast.core.moments import microseconds, moment
from holdfast.engines.sql_vault.database import Database, Row, Tx, statement
from holdfast.ports.clock import Clock

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
