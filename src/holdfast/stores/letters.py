"""Letters: taken in, found, moved between states, edited, deleted by retention; and the blobs that no letter has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content, JsonValue, Letter, NewLetter, Revision, clip, searched_text
from holdfast.core.moments import microseconds, moment
from holdfast.core.selection import Selection, check_selection
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict, Invalid, StorageFailed
from holdfast.ports.database import Tx
from holdfast.proof import crash_point
from holdfast.stores import letter_search, run, statement
from holdfast.stores.ledger import LedgerWriter, Moved
from holdfast.stores.letter_search import Count, Page, content_of

TEXT_CHARACTERS_MAX = 1_000
RETURNING = ("redriving", "redriven", "resolved")  #: states in which a letter can come back

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class Stored(Struct, frozen=True):
    """Where a delivery is now. `matched` says that it was there already and that its un-acked row is used up."""

    letter: int
    matched: bool


class FailedImport(Struct, frozen=True, kw_only=True):
    """What the vault itself could not take; its body is kept."""

    id: int
    queue: str
    reason: str
    body: bytes
    properties: bytes
    at: datetime


class Letters:
    """The letters themselves."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def put(self, letters: Sequence[NewLetter], act: LedgerAct) -> list[Stored]:
        """Store deliveries, un-acked, in one commit; in the same order.

        A delivery is taken for one that is stored only if it is redelivered and an un-acked row of its queue has its
        digest; each row is used up once. A blob must have been announced, and is claimed. A letter that carries the
        redrive id of another makes that one *came_back*.
        """

        def work(tx: Tx) -> list[Stored]:
            return _NewLetters(self._writer, tx, act).take(letters)

        stored = await self._writer.write(work)
        crash_point("vault.after_put")
        return stored

    async def acking(self, ids: Sequence[int], *, sent: bool = True) -> None:
        """The acks of these are about to be sent: from now on no delivery is taken for one of them. Not `sent`: they
        were not, for certain, and the messages come again."""
        await self._writer.write(lambda tx: run(tx, "ack_letters", ids=tx.dialect.ids(ids), acked=int(sent)))

    async def put_failed(self, queue: str, *, body: bytes, properties: bytes, reason: str, act: LedgerAct) -> int:
        """Keep what cannot be a letter."""

        def work(tx: Tx) -> int:
            number = self._writer.number(tx, "failed_imports")
            run(
                tx,
                "insert_failed_import",
                id=number,
                queue=clip(queue, TEXT_CHARACTERS_MAX),
                reason=clip(reason, TEXT_CHARACTERS_MAX),
                now=self._writer.now_us(),
                properties=properties,
                body=body,
            )
            self._writer.append(tx, act, outcome="failed", queue=clip(queue, TEXT_CHARACTERS_MAX), count=1)
            return number

        return await self._writer.write(work)

    async def failed(self, *, after: int, count_max: int) -> list[FailedImport]:
        """What could not be a letter, oldest first."""
        rows = await self._writer.read(lambda tx: run(tx, "select_failed_imports", after=after, count_max=count_max))
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

    async def find(self, selection: Selection, *, before: int = 0, count_max: int) -> Page:
        """Newest first, those with a smaller id than `before`."""
        check_selection(selection)
        return await self._writer.read(lambda tx: letter_search.find(tx, selection, before=before, count_max=count_max))

    async def ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        """Id and revision of all of them, oldest first. Raises Invalid when there are more than `count_max`."""
        found = await self.oldest_ids(selection, count_max=count_max + 1)
        if len(found) > count_max:
            raise Invalid(f"selection is too large; more than {count_max} letters fit, narrow it")
        return found

    async def oldest_ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        """Id and revision of the oldest ones."""
        check_selection(selection)
        return await self._writer.read(lambda tx: letter_search.oldest_ids(tx, selection, count_max=count_max))

    async def count(self, selection: Selection) -> Count:
        """How many there are."""
        check_selection(selection)
        return await self._writer.read(lambda tx: letter_search.count(tx, selection))

    async def oldest(self, selection: Selection) -> Letter | None:
        """The one with the smallest id."""
        check_selection(selection)
        return await self._writer.read(lambda tx: letter_search.oldest(tx, selection))

    async def get(self, letter: int) -> Letter | None:
        """One letter."""
        found = await self._writer.read(lambda tx: letter_search.load(tx, [letter]))
        return found[0] if found else None

    async def move(
        self, ids: Sequence[int], *, source: LetterState, target: LetterState, act: LedgerAct, expected: int
    ) -> int:
        """Bring all of them from one state into another, or none. Raises Invalid when not exactly `expected` are in
        the source state."""
        if (source, target) not in LETTER_MOVES:
            raise Invalid(f"state is invalid; a letter cannot go from {source.value} to {target.value}")

        def work(tx: Tx) -> int:
            rows = run(tx, "select_states", ids=tx.dialect.ids(ids))
            fit = [row for row in rows if row[2] == source.value]
            if len(fit) != expected or len(rows) != expected:
                other = next((row for row in rows if row[2] != source.value), None)
                why = f"letter {other[0]} is {other[2]}" if other else f"{len(rows)} of {len(ids)} letters exist"
                raise Conflict(
                    f"letters have changed; {expected} in state '{source.value}' were expected and {len(fit)} are, "
                    f"{why}; nothing was done, look again"
                )
            self._writer.move(tx, act, fit, target.value)
            return len(fit)

        return await self._writer.write(work)

    async def content(self, letter: int, *, revision: int | None = None) -> Content | None:
        """What would be published of it: its newest revision, or the given one; 0 is the original."""

        def work(tx: Tx) -> Content | None:
            rows = run(tx, "select_contents", ids=tx.dialect.ids([letter]))
            return content_of(tx, rows[0], revision) if rows else None

        return await self._writer.read(work)

    async def load(self, ids: Sequence[int]) -> list[tuple[Letter, Content]]:
        """Letters with what would be published of each."""

        def work(tx: Tx) -> list[tuple[Letter, Content]]:
            contents = {row[0]: row for row in run(tx, "select_contents", ids=tx.dialect.ids(ids))}
            letters = letter_search.load(tx, ids)
            return [(one, content_of(tx, contents[one.id], None if one.revision else 0)) for one in letters]

        return await self._writer.read(work)

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
        """Add a revision after `revision`, the one that the caller saw. Raises Invalid when it is not the newest or
        the letter is not *captured*."""

        def work(tx: Tx) -> int:
            rows = run(tx, "select_revision_number", letter=letter)
            if not rows:
                raise Invalid(f"letter does not exist; there is no letter {letter}")
            newest, state, queue = rows[0]
            if state != LetterState.CAPTURED.value:
                raise Conflict(f"letter cannot be edited; letter {letter} is {state}, only a captured one can be")
            if newest != revision:
                raise Conflict(f"letter has changed; its newest revision is {newest}, not {revision}, look again")
            run(
                tx,
                "insert_revision",
                letter=letter,
                number=newest + 1,
                headers=_encode(put).decode(),
                dropped=_encode(list(drop)).decode(),
                now=self._writer.now_us(),
                actor=act.actor,
                note=clip(act.reason, TEXT_CHARACTERS_MAX),
                body=body,
            )
            run(tx, "set_revision", letter=letter, number=newest + 1, now=self._writer.now_us())
            self._writer.append(tx, act, queue=queue, ids=[letter])
            return int(newest) + 1

        return await self._writer.write(work)

    async def revisions(self, letter: int) -> list[Revision]:
        """All of them, oldest first."""
        rows = await self._writer.read(lambda tx: run(tx, "select_revisions", letter=letter))
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
        """*redriven* becomes *resolved* for those that were redriven before a moment."""

        def work(tx: Tx) -> int:
            due = run(tx, "select_resolved_due", before=microseconds(before), count_max=count_max)
            rows = run(tx, "select_states", ids=tx.dialect.ids([row[0] for row in due]))
            self._writer.move(tx, act, rows, LetterState.RESOLVED.value)
            return len(rows)

        return await self._writer.write(work)

    async def expire(self, state: LetterState, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        """Delete letters of a state that have been in it since before a moment; they are counted and in the ledger."""
        if (state, LetterState.DELETED) not in LETTER_MOVES:
            raise Invalid(f"retention is invalid; letters that are {state.value} are never deleted")

        def work(tx: Tx) -> int:
            found = run(tx, "select_expired", state=state.value, before=microseconds(before), count_max=count_max)
            ids = tx.dialect.ids([row[0] for row in found])
            rows = run(tx, "select_states", ids=ids)
            if not rows:
                return 0
            for key, count in run(tx, "select_group_counts", ids=ids):
                run(tx, "shrink_group", key=key, count=count)
            tx.rows(tx.dialect.delete_text, ids=ids)
            blobs = [row[0] for row in run(tx, "select_blobs", ids=ids)]
            for name in ("delete_revisions", "delete_contents", "delete_letters"):
                run(tx, name, ids=ids)
            free(tx, blobs)
            deleted = LetterState.DELETED.value
            self._writer.record_moves(tx, act, [Moved(row[0], row[1], row[2], deleted) for row in rows])
            return len(rows)

        return await self._writer.write(work)


class UnclaimedBlobs:
    """Blobs that no letter has: one is announced before it is put, and `Letters.put` claims it in the letter's own
    commit. What is not claimed in time, or is left behind by retention, is deleted once: a claim and a deletion exclude
    each other by the row."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    async def announce(self, blobs: Sequence[str], *, for_s: float) -> None:
        """These are about to be put; whatever is not claimed within that time is deleted."""
        due_at = self._writer.now_us() + round(for_s * 1_000_000)
        values = [{"blob": blob, "due_at": due_at} for blob in blobs]
        await self._writer.write(lambda tx: tx.many(statement("announce_blob", tx.dialect), values))

    async def delete_later(self, *, count_max: int) -> list[str]:
        """The ones whose time has come. From now on nobody can claim them: delete them, then `forget` them."""
        values = {"now": self._writer.now_us(), "count_max": count_max}
        rows = await self._writer.write(lambda tx: run(tx, "delete_blobs_later", **values))
        return [row[0] for row in rows]

    async def forget(self, blobs: Sequence[str]) -> None:
        """They are deleted."""
        values = [{"blob": blob} for blob in blobs]
        await self._writer.write(lambda tx: tx.many(statement("delete_blob", tx.dialect), values))


def claim(tx: Tx, blob: str) -> None:
    """A letter has it now. Raises StorageFailed when it took too long: it is being deleted, or is."""
    if not run(tx, "claim_blob", blob=blob):
        raise StorageFailed(f"storage failed; the blob {blob} was not claimed in time and is deleted, put it again")


def free(tx: Tx, blobs: Sequence[str]) -> None:
    """The letters that had them are gone; those that another letter has stay."""
    for blob in blobs:
        run(tx, "free_blob", blob=blob, due_at=0)


class _NewLetters:
    """One batch of deliveries on its way into the vault."""

    def __init__(self, writer: LedgerWriter, tx: Tx, act: LedgerAct) -> None:
        self._writer = writer
        self._tx = tx
        self._act = act

    def take(self, letters: Sequence[NewLetter]) -> list[Stored]:
        writer, tx = self._writer, self._tx
        used: list[int] = []
        stored: list[Stored | None] = []
        for letter in letters:
            rows = run(tx, "find_unacked", queue=letter.queue, digest=letter.digest) if letter.redelivered else []
            if rows:
                # At once: of two equal deliveries in one batch, each needs a row of its own.
                used.append(rows[0][0])
                run(tx, "ack_letters", ids=tx.dialect.ids([rows[0][0]]), acked=1)
                stored.append(Stored(rows[0][0], matched=True))
            else:
                stored.append(None)
        new = [letter for letter, found in zip(letters, stored, strict=True) if found is None]
        if used:
            writer.append(tx, LedgerAct(actor=self._act.actor, action="capture.matched"), ids=used)
        ids = iter(self._insert(new))
        return [found or Stored(next(ids), matched=False) for found in stored]

    def _insert(self, letters: Sequence[NewLetter]) -> list[int]:
        if not letters:
            return []
        writer, tx, dialect = self._writer, self._tx, self._tx.dialect
        first = writer.number(tx, "letters", len(letters))
        ids = list(range(first, first + len(letters)))
        came_from = [self._came_from(letter) for letter in letters]
        for letter in letters:
            if letter.blob:
                claim(tx, letter.blob)
        now = writer.now_us()
        rows = [
            _row(letter, one, now=now, came_from=old, redriven=redriven)
            for letter, one, (old, redriven) in zip(letters, ids, came_from, strict=True)
        ]
        tx.many(statement("insert_letter", dialect), rows)
        tx.many(statement("insert_content", dialect), rows)
        tx.many(dialect.insert_text, rows)
        self._group(letters, ids, now)
        writer.record_moves(
            tx,
            self._act,
            [Moved(one, letter.queue, "", "captured") for letter, one in zip(letters, ids, strict=True)],
        )
        return ids

    def _came_from(self, letter: NewLetter) -> tuple[int, int]:
        """The letter that came back as this one, and how often it was redriven."""
        if not letter.redrive_id:
            return 0, 0
        writer, tx = self._writer, self._tx
        rows = run(tx, "find_came_from", redrive_id=letter.redrive_id)
        if not rows:
            return 0, 0
        number, _, state, count = rows[0]
        if state in RETURNING:
            act = LedgerAct(actor=self._act.actor, action="letters.came_back", detail=letter.redrive_id)
            writer.move(tx, act, rows, LetterState.CAME_BACK.value)
        return number, count + (state == LetterState.REDRIVING.value)

    def _group(self, letters: Sequence[NewLetter], ids: Sequence[int], now: int) -> None:
        counts = Counter(letter.group for letter in letters)
        newest = {letter.group: (letter, one) for letter, one in zip(letters, ids, strict=True)}
        for key, (letter, one) in newest.items():
            run(
                self._tx,
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
