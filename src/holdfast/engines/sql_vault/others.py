"""Groups, ledger and tokens in a SQL database."""

from __future__ import annotations

import msgspec

from holdfast.core.groups import NOTE_CHARACTERS_MAX, Group, GroupStatus
from holdfast.core.ledger import LedgerAct, LedgerRow, covers
from holdfast.core.letter import clip
from holdfast.core.moments import moment, moment_or_none
from holdfast.core.roles import Token
from holdfast.engines.sql_vault.books import LedgerWriter
from holdfast.engines.sql_vault.database import Row, Tx
from holdfast.ports.vault import QueueTally

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
