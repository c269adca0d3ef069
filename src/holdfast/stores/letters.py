"""Letters: taken in, moved between states, edited, deleted by retention; and the blobs that no letter has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, astuple

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import DeathStory, JsonValue, NewLetter, clip, searched_text
from holdfast.core.moments import microseconds, moment
from holdfast.core.requests.vault import FailedView
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict, Invalid, StorageFailed
from holdfast.ports.database import Tx
from holdfast.proof import crash_point
from holdfast.stores import record, run, run_many
from holdfast.stores.ledger import LedgerWriter, VaultPart, one_commit, one_look
from holdfast.stores.letter_search import LetterSearch

TEXT_CHARACTERS_MAX = 1_000
RETURNING = ("redriving", "redriven", "resolved")  #: states in which a letter can come back

#: What the statements call the fields of a death.
DEATH_COLUMNS = tuple(f"death_{name}" for name in DeathStory.__struct_fields__)

_encode = msgspec.json.Encoder().encode


class Stored(Struct, frozen=True):
    """Where a delivery is now. `matched` says that it was there already and that its un-acked row is used up."""

    letter: int
    matched: bool


class Letters(LetterSearch):
    """The letters themselves."""

    async def put(self, letters: Sequence[NewLetter], act: LedgerAct) -> list[Stored]:
        """Store deliveries, un-acked, in one commit; in the same order.

        A delivery is taken for one that is stored only if it is redelivered and an un-acked row of its queue has its
        digest; each row is used up once. A blob must have been announced, and is claimed. A letter that carries the
        redrive id of another makes that one *came_back*.
        """
        stored = await self.writer.write(lambda tx: _NewLetters(self.writer, tx, act).take(letters))
        crash_point("vault.after_put")
        return stored

    @one_commit
    def acking(self, tx: Tx, ids: Sequence[int], *, sent: bool = True) -> None:
        """The acks of these are about to be sent: from now on no delivery is taken for one of them. Not `sent`: they
        were not, for certain, and the messages come again."""
        run(tx, "ack_letters", ids=tx.dialect.ids(ids), acked=int(sent))

    @one_commit
    def put_failed(self, tx: Tx, queue: str, *, body: bytes, properties: bytes, reason: str, act: LedgerAct) -> None:
        """Keep what cannot be a letter."""
        queue, reason = clip(queue, TEXT_CHARACTERS_MAX), clip(reason, TEXT_CHARACTERS_MAX)
        number, now = self.writer.number(tx, "failed_imports"), self.writer.now_us()
        values = {"queue": queue, "reason": reason, "properties": properties, "body": body}
        run(tx, "insert_failed_import", id=number, now=now, **values)
        self.writer.append(tx, act, outcome="failed", queue=queue, count=1)

    @one_look
    def failed(self, tx: Tx, *, after: int, count_max: int) -> list[FailedView]:
        """What could not be a letter, oldest first."""
        rows = run(tx, "select_failed_imports", after=after, count_max=count_max)
        return [record(FailedView, row, at=moment, body=bytes, properties=bytes) for row in rows]

    @one_commit
    def move(
        self, tx: Tx, ids: Sequence[int], *, source: LetterState, target: LetterState, act: LedgerAct, expected: int
    ) -> int:
        """Bring all of them from one state into another, or none. Raises Invalid when not exactly `expected` are in
        the source state."""
        if (source, target) not in LETTER_MOVES:
            raise Invalid(f"state is invalid; a letter cannot go from {source.value} to {target.value}")
        rows = run(tx, "select_states", ids=tx.dialect.ids(ids))
        fit = [row for row in rows if row[2] == source.value]
        if len(fit) != expected or len(rows) != expected:
            other = next((row for row in rows if row[2] != source.value), None)
            why = f"letter {other[0]} is {other[2]}" if other else f"{len(rows)} of {len(ids)} letters exist"
            raise Conflict(
                f"letters have changed; {expected} in state '{source.value}' were expected and {len(fit)} are, "
                f"{why}; nothing was done, look again"
            )
        self.writer.move(tx, act, fit, target.value)
        return len(fit)

    @one_commit
    def revise(
        self,
        tx: Tx,
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
        rows = run(tx, "select_revision_number", letter=letter)
        if not rows:
            raise Invalid(f"letter does not exist; there is no letter {letter}")
        newest, state, queue = rows[0]
        if state != LetterState.CAPTURED.value:
            raise Conflict(f"letter cannot be edited; letter {letter} is {state}, only a captured one can be")
        if newest != revision:
            raise Conflict(f"letter has changed; its newest revision is {newest}, not {revision}, look again")
        edit = {"letter": letter, "number": int(newest) + 1, "now": self.writer.now_us()}
        headers = {"headers": _encode(put).decode(), "dropped": _encode(list(drop)).decode()}
        note = clip(act.reason, TEXT_CHARACTERS_MAX)
        run(tx, "insert_revision", **edit, **headers, actor=act.actor, note=note, body=body)
        run(tx, "set_revision", **edit)
        self.writer.append(tx, act, queue=queue, ids=[letter])
        return edit["number"]

    @one_commit
    def resolve_due(self, tx: Tx, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        """*redriven* becomes *resolved* for those that were redriven before a moment."""
        rows = run(tx, "select_resolved_due", before=microseconds(before), count_max=count_max)
        self.writer.move(tx, act, rows, LetterState.RESOLVED.value)
        return len(rows)

    @one_commit
    def expire(self, tx: Tx, state: LetterState, *, before: datetime, count_max: int, act: LedgerAct) -> int:
        """Delete letters of a state that have been in it since before a moment; they are counted and in the ledger."""
        if (state, LetterState.DELETED) not in LETTER_MOVES:
            raise Invalid(f"retention is invalid; letters that are {state.value} are never deleted")
        rows = run(tx, "select_expired", state=state.value, before=microseconds(before), count_max=count_max)
        ids = tx.dialect.ids([row[0] for row in rows])
        for key, count in run(tx, "select_group_counts", ids=ids):
            run(tx, "shrink_group", key=key, count=count)
        tx.rows(tx.dialect.delete_text, ids=ids)
        blobs = run(tx, "select_blobs", ids=ids)
        for name in ("delete_revisions", "delete_contents", "delete_letters"):
            run(tx, name, ids=ids)
        for (blob,) in blobs:  # those that another letter has stay
            run(tx, "free_blob", blob=blob, due_at=0)
        self.writer.record_moves(tx, act, rows, LetterState.DELETED.value)
        return len(rows)


class UnclaimedBlobs(VaultPart):
    """Blobs that no letter has: one is announced before it is put, and `Letters.put` claims it in the letter's own
    commit. What is not claimed in time, or is left behind by retention, is deleted once: a claim and a deletion exclude
    each other by the row."""

    @one_commit
    def announce(self, tx: Tx, blobs: Sequence[str], *, for_s: float) -> None:
        """These are about to be put; whatever is not claimed within that time is deleted."""
        due_at = self.writer.now_us() + round(for_s * 1_000_000)
        run_many(tx, "announce_blob", [{"blob": blob, "due_at": due_at} for blob in blobs])

    @one_commit
    def delete_later(self, tx: Tx, *, count_max: int) -> list[str]:
        """The ones whose time has come. From now on nobody can claim them: delete them, then `forget` them."""
        return [row[0] for row in run(tx, "delete_blobs_later", now=self.writer.now_us(), count_max=count_max)]

    @one_commit
    def forget(self, tx: Tx, blobs: Sequence[str]) -> None:
        """They are deleted."""
        run_many(tx, "delete_blob", [{"blob": blob} for blob in blobs])


class _NewLetters:
    """One batch of deliveries on its way into the vault."""

    def __init__(self, writer: LedgerWriter, tx: Tx, act: LedgerAct) -> None:
        self._writer = writer
        self._tx = tx
        self._act = act

    def take(self, letters: Sequence[NewLetter]) -> list[Stored]:
        tx = self._tx
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
            self._writer.append(tx, LedgerAct(actor=self._act.actor, action="capture.matched"), ids=used)
        ids = iter(self._insert(new))
        return [found or Stored(next(ids), matched=False) for found in stored]

    def _insert(self, letters: Sequence[NewLetter]) -> list[int]:
        if not letters:
            return []
        writer, tx = self._writer, self._tx
        first, now = writer.number(tx, "letters", len(letters)), writer.now_us()
        ids = list(range(first, first + len(letters)))
        rows = []
        for letter, number in zip(letters, ids, strict=True):
            came_from, redriven = self._came_from(letter)
            if letter.blob:
                self._claim(letter.blob)
            # An item of an embedded queue carries no count.
            count = max(letter.redriven_count, redriven)
            rows.append(_row(letter, id=number, now=now, came_from=came_from, redriven_count=count))
        run_many(tx, "insert_letter", rows)
        run_many(tx, "insert_content", rows)
        tx.many(tx.dialect.insert_text, rows)
        newest = {letter.group: (letter.group_title, number) for letter, number in zip(letters, ids, strict=True)}
        for key, count in Counter(letter.group for letter in letters).items():
            title, sample = newest[key]
            run(tx, "put_group", key=key, title=title, count=count, now=now, sample=sample)
        arrived = [(number, letter.queue, "") for letter, number in zip(letters, ids, strict=True)]
        writer.record_moves(tx, self._act, arrived, LetterState.CAPTURED.value)
        return ids

    def _claim(self, blob: str) -> None:
        """A letter has it now. Raises StorageFailed when it took too long: it is being deleted, or is."""
        if not run(self._tx, "claim_blob", blob=blob):
            raise StorageFailed(f"storage failed; the blob {blob} was not claimed in time and is deleted, put it again")

    def _came_from(self, letter: NewLetter) -> tuple[int, int]:
        """The letter that came back as this one, and how often it was redriven."""
        rows = run(self._tx, "find_came_from", redrive_id=letter.redrive_id) if letter.redrive_id else []
        if not rows:
            return 0, 0
        number, _, state, count = rows[0]
        if state in RETURNING:
            act = LedgerAct(actor=self._act.actor, action="letters.came_back", detail=letter.redrive_id)
            self._writer.move(self._tx, act, rows, LetterState.CAME_BACK.value)
        return number, count + (state == LetterState.REDRIVING.value)


def _row(letter: NewLetter, **more: int) -> dict[str, Any]:
    """The fields of a letter and of its death, as the statements name them."""
    return {
        **asdict(letter),
        **dict(zip(DEATH_COLUMNS, astuple(letter.death), strict=True)),
        "body_bytes": letter.body_bytes or len(letter.body),
        "headers": _encode(letter.headers).decode(),
        "shown": _encode(letter.shown).decode(),
        "body": b"" if letter.blob else letter.body,
        "text": searched_text(letter),
        **more,
    }
