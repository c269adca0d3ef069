"""Letters: taken in, moved between states, edited, deleted by retention. Reading them is `letter_search.py`.

Blobs that no letter has: put and not yet claimed, or left behind by retention. Each is deleted once, and never one
that a letter has: a claim and a deletion exclude each other by the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content, JsonValue, Letter, NewLetter, Revision, clip, searched_text
from holdfast.core.moments import microseconds, moment
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict, Invalid, StorageFailed
from holdfast.ports.database import Tx
from holdfast.ports.vault import FailedImport, Stored
from holdfast.proof import crash_point
from holdfast.stores import SQL, statement
from holdfast.stores.ledger import LedgerWriter, Moved
from holdfast.stores.letter_search import LetterReading, content_of, letter_of

TEXT_CHARACTERS_MAX = 1_000
RETURNING = ("redriving", "redriven", "resolved")  #: states in which a letter can come back

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class SqlUnclaimedBlobs:
    """Loose blobs in a SQL database."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def announce(self, blobs: Sequence[str], *, for_s: float) -> None:
        due_at = self._books.now_us() + round(for_s * 1_000_000)
        values = [{"blob": blob, "due_at": due_at} for blob in blobs]
        await self._books.database.write(lambda work: work.many(statement("insert_loose_blob", work.dialect), values))

    async def doom(self, *, count_max: int) -> list[str]:
        values = {"now": self._books.now_us(), "count_max": count_max}
        rows = await self._books.database.write(lambda work: self._books.run(work, "doom_loose_blobs", **values))
        return [row[0] for row in rows]

    async def forget(self, blobs: Sequence[str]) -> None:
        values = [{"blob": blob} for blob in blobs]
        await self._books.database.write(lambda work: work.many(statement("delete_loose_blob", work.dialect), values))


def claim(books: LedgerWriter, work: Tx, blob: str) -> None:
    """A letter has it now. Raises StorageFailed when it took too long: it is being deleted, or is."""
    if not books.run(work, "claim_loose_blob", blob=blob):
        raise StorageFailed(f"storage failed; the blob {blob} was not claimed in time and is deleted, put it again")


def free(books: LedgerWriter, work: Tx, blobs: Sequence[str]) -> None:
    """The letters that had them are gone; those that another letter has stay."""
    for blob in blobs:
        books.run(work, "free_blob", blob=blob, due_at=0)


class SqlLetters(LetterReading):
    """Letters in a SQL database."""

    async def put(self, letters: Sequence[NewLetter], act: LedgerAct) -> list[Stored]:
        def work(work: Tx) -> list[Stored]:
            return _Taking(self._books, work, act).take(letters)

        stored = await self._books.database.write(work)
        crash_point("vault.after_put")
        return stored

    async def acking(self, ids: Sequence[int], *, sent: bool = True) -> None:
        await self._books.database.write(
            lambda work: self._run(work, "ack_letters", ids=work.dialect.ids(ids), acked=int(sent))
        )

    async def put_failed(self, queue: str, *, body: bytes, properties: bytes, reason: str, act: LedgerAct) -> int:
        def work(work: Tx) -> int:
            number = self._books.number(work, "failed_imports")
            self._run(
                work,
                "insert_failed_import",
                id=number,
                queue=clip(queue, TEXT_CHARACTERS_MAX),
                reason=clip(reason, TEXT_CHARACTERS_MAX),
                now=self._books.now_us(),
                properties=properties,
                body=body,
            )
            self._books.append(work, act, outcome="failed", queue=clip(queue, TEXT_CHARACTERS_MAX), count=1)
            return number

        return await self._books.database.write(work)

    async def failed(self, *, after: int, count_max: int) -> list[FailedImport]:
        rows = await self._books.database.read(
            lambda work: self._run(work, "select_failed_imports", after=after, count_max=count_max)
        )
        return [
            FailedImport(
                id=row[0],
                queue=row[1],
                reason=row[2],
                body=bytes(row[3]),
                properties=bytes(row[4]),
                at=moment(row[5]),
            )
            for row in rows
        ]

    async def move(
        self, ids: Sequence[int], *, source: LetterState, target: LetterState, act: LedgerAct, expected: int
    ) -> int:
        if (source, target) not in LETTER_MOVES:
            raise Invalid(f"state is invalid; a letter cannot go from {source.value} to {target.value}")

        def work(work: Tx) -> int:
            rows = self._run(work, "select_states", ids=work.dialect.ids(ids))
            fit = [row for row in rows if row[2] == source.value]
            if len(fit) != expected or len(rows) != expected:
                other = next((row for row in rows if row[2] != source.value), None)
                why = f"letter {other[0]} is {other[2]}" if other else f"{len(rows)} of {len(ids)} letters exist"
                raise Conflict(
                    f"letters have changed; {expected} in state '{source.value}' were expected and {len(fit)} are, "
                    f"{why}; nothing was done, look again"
                )
            self._books.move(work, act, fit, target.value)
            return len(fit)

        return await self._books.database.write(work)

    async def content(self, letter: int, *, revision: int | None = None) -> Content | None:
        def work(work: Tx) -> Content | None:
            rows = self._run(work, "select_contents", ids=work.dialect.ids([letter]))
            return content_of(self._books, work, rows[0], revision) if rows else None

        return await self._books.database.read(work)

    async def load(self, ids: Sequence[int]) -> list[tuple[Letter, Content]]:
        def work(work: Tx) -> list[tuple[Letter, Content]]:
            wanted = work.dialect.ids(ids)
            found = work.rows(f"{SQL['select_letter']} WHERE l.id {work.dialect.in_ids} ORDER BY l.id", ids=wanted)
            contents = {row[0]: row for row in self._run(work, "select_contents", ids=wanted)}
            letters = [letter_of(row) for row in found]
            return [
                (one, content_of(self._books, work, contents[one.id], None if one.revision else 0)) for one in letters
            ]

        return await self._books.database.read(work)

    async def revise(
        self,
        letter: int,
        *,
        revision: int,
        body: bytes | None,
        put: dict[str, JsonValue],
        drop: Sequence[str],
        act: LedgerAct,
    ) -> int:
        def work(work: Tx) -> int:
            rows = self._run(work, "select_revision_number", letter=letter)
            if not rows:
                raise Invalid(f"letter does not exist; there is no letter {letter}")
            newest, state, queue = rows[0]
            if state != LetterState.CAPTURED.value:
                raise Conflict(f"letter cannot be edited; letter {letter} is {state}, only a captured one can be")
            if newest != revision:
                raise Conflict(f"letter has changed; its newest revision is {newest}, not {revision}, look again")
            self._run(
                work,
                "insert_revision",
                letter=letter,
                number=newest + 1,
                headers=_encode(put).decode(),
                dropped=_encode(list(drop)).decode(),
                now=self._books.now_us(),
                actor=act.actor,
                note=clip(act.reason, TEXT_CHARACTERS_MAX),
                body=body,
            )
            self._run(work, "set_revision", letter=letter, number=newest + 1, now=self._books.now_us())
            self._books.append(work, act, queue=queue, ids=[letter])
            return int(newest) + 1

        return await self._books.database.write(work)

    async def revisions(self, letter: int) -> list[Revision]:
        rows = await self._books.database.read(lambda work: self._run(work, "select_revisions", letter=letter))
        return [
            Revision(
                number=row[0],
                body=None if row[1] is None else bytes(row[1]),
                put=_decode(row[2]),
                drop=tuple(_decode(row[3])),
                at=moment(row[4]),
                by=row[5],
                note=row[6],
            )
            for row in rows
        ]

    async def resolve_due(self, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        def work(work: Tx) -> int:
            due = self._run(work, "select_resolved_due", before=microseconds(before), count_max=count_max)
            rows = self._run(work, "select_states", ids=work.dialect.ids([row[0] for row in due]))
            self._books.move(work, act, rows, LetterState.RESOLVED.value)
            return len(rows)

        return await self._books.database.write(work)

    async def expire(self, state: LetterState, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        if (state, LetterState.DELETED) not in LETTER_MOVES:
            raise Invalid(f"retention is invalid; letters that are {state.value} are never deleted")

        def work(work: Tx) -> int:
            found = self._run(
                work, "select_expired", state=state.value, before=microseconds(before), count_max=count_max
            )
            ids = work.dialect.ids([row[0] for row in found])
            rows = self._run(work, "select_states", ids=ids)
            if not rows:
                return 0
            for key, count in self._run(work, "select_group_counts", ids=ids):
                self._run(work, "shrink_group", key=key, count=count)
            work.rows(work.dialect.delete_text, ids=ids)
            blobs = [row[0] for row in self._run(work, "select_blobs", ids=ids)]
            for name in ("delete_revisions", "delete_contents", "delete_letters"):
                self._run(work, name, ids=ids)
            free(self._books, work, blobs)
            deleted = LetterState.DELETED.value
            self._books.book(work, act, [Moved(row[0], row[1], row[2], deleted) for row in rows])
            return len(rows)

        return await self._books.database.write(work)


class _Taking:
    """One batch of deliveries on its way into the vault."""

    def __init__(self, books: LedgerWriter, work: Tx, act: LedgerAct) -> None:
        self._books = books
        self._work = work
        self._act = act

    def take(self, letters: Sequence[NewLetter]) -> list[Stored]:
        books, work = self._books, self._work
        used: list[int] = []
        stored: list[Stored | None] = []
        for letter in letters:
            rows = (
                books.run(work, "find_unacked", queue=letter.queue, digest=letter.digest) if letter.redelivered else []
            )
            if rows:
                # At once: of two equal deliveries in one batch, each needs a row of its own.
                used.append(rows[0][0])
                books.run(work, "ack_letters", ids=work.dialect.ids([rows[0][0]]), acked=1)
                stored.append(Stored(rows[0][0], matched=True))
            else:
                stored.append(None)
        new = [letter for letter, found in zip(letters, stored, strict=True) if found is None]
        if used:
            books.append(work, LedgerAct(actor=self._act.actor, action="capture.matched"), ids=used)
        ids = iter(self._insert(new))
        return [found or Stored(next(ids), matched=False) for found in stored]

    def _insert(self, letters: Sequence[NewLetter]) -> list[int]:
        if not letters:
            return []
        books, work, dialect = self._books, self._work, self._work.dialect
        first = books.number(work, "letters", len(letters))
        ids = list(range(first, first + len(letters)))
        came_from = [self._came_from(letter) for letter in letters]
        for letter in letters:
            if letter.blob:
                claim(books, work, letter.blob)
        now = books.now_us()
        rows = [
            _row(letter, one, now=now, came_from=old, redriven=redriven)
            for letter, one, (old, redriven) in zip(letters, ids, came_from, strict=True)
        ]
        work.many(statement("insert_letter", dialect), rows)
        work.many(statement("insert_content", dialect), rows)
        work.many(dialect.insert_text, rows)
        self._group(letters, ids, now)
        books.book(
            work,
            self._act,
            [Moved(one, letter.queue, "", "captured") for letter, one in zip(letters, ids, strict=True)],
        )
        return ids

    def _came_from(self, letter: NewLetter) -> tuple[int, int]:
        """The letter that came back as this one, and how often it was redriven."""
        if not letter.redrive_id:
            return 0, 0
        books, work = self._books, self._work
        rows = books.run(work, "find_came_from", redrive_id=letter.redrive_id)
        if not rows:
            return 0, 0
        number, _, state, count = rows[0]
        if state in RETURNING:
            act = LedgerAct(actor=self._act.actor, action="letters.came_back", detail=letter.redrive_id)
            books.move(work, act, rows, LetterState.CAME_BACK.value)
        return number, count + (state == LetterState.REDRIVING.value)

    def _group(self, letters: Sequence[NewLetter], ids: Sequence[int], now: int) -> None:
        counts = Counter(letter.group for letter in letters)
        newest = {letter.group: (letter, one) for letter, one in zip(letters, ids, strict=True)}
        for key, (letter, one) in newest.items():
            self._books.run(
                self._work,
                "put_group",
                key=key,
                title=letter.group_title,
                count=counts[key],
                now=now,
                sample=one,
            )


def _row(letter: NewLetter, number: int, *, now: int, came_from: int, redriven: int) -> dict[str, Any]:
    death = letter.death
    return {
        "id": number,
        "queue": letter.queue,
        "origin": letter.origin,
        "message_id": letter.message_id,
        "type": letter.type,
        "exchange": letter.exchange,
        "routing_key": letter.routing_key,
        "source_queue": death.queue,
        "reason": death.reason,
        "death_count": death.count,
        "first_died_at": death.first_at_us,
        "died_at": death.last_at_us,
        "error_type": death.error_type,
        "error_message": death.error_message,
        "error_stack": death.error_stack,
        "grp": letter.group,
        "redrive_id": letter.redrive_id,
        "redriven_count": max(letter.redriven_count, redriven),  # an item of an embedded queue carries no count
        "now": now,
        "body_bytes": letter.body_bytes or len(letter.body),
        "digest": letter.digest,
        "came_from": came_from,
        "properties": letter.properties,
        "blob": letter.blob,
        "headers": _encode(letter.headers).decode(),
        "shown": _encode(letter.shown).decode(),
        "body": b"" if letter.blob else letter.body,
        "text": searched_text(letter),
    }
