"""Letters: taken in, moved between states, edited, deleted by retention, and found: the filter becomes SQL once, so
that pages, counts and actions agree; and the blobs that no letter has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, astuple

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import Content, DeathStory, JsonValue, Letter, NewLetter, clip, searched_text
from holdfast.core.moments import microseconds, moment
from holdfast.core.requests.vault import FailedView, RevisionView
from holdfast.core.selection import ID_MAX, WALK_COUNT_MAX, Selection, check_selection, words
from holdfast.core.states import LETTER_MOVES, LetterState
from holdfast.errors import Conflict, Invalid, StorageFailed
from holdfast.ports.database import Dialect, Row, Tx
from holdfast.proof import crash_point
from holdfast.stores import SQL, later, reader, run, run_many, within
from holdfast.stores.ledger import LedgerWriter, VaultPart, one_commit, one_look

TEXT_CHARACTERS_MAX = 1_000
CAN_COME_BACK = ("redriving", "redriven", "resolved")  #: states in which a letter can come back

#: What the statements call the fields of a death.
DEATH_COLUMNS = tuple(f"death_{name}" for name in DeathStory.__struct_fields__)
#: How many columns of `select_letter` are the letter's own; the others tell how it died.
OWN_COLUMNS = 20
COUNT_MAX = 10_000
#: Columns whose values are told to those who look for letters.
VALUED = ("type", "reason", "source_queue", "error_type", "grp")
#: What the seal of a revision is of, as `insert_revision` names it, in the order of `next_revision`.
REVISION_COLUMNS = ("number", "letter", "headers", "dropped", "now", "actor", "note", "body")
#: What the seal of a letter is of, as `insert_letter` and `insert_content` name it, in the order of `select_sealed`.
_sealed = itemgetter(
    *("id", "queue", "origin", "message_id", "type", "exchange", "routing_key", *DEATH_COLUMNS, "group", "redrive_id"),
    *("now", "body_bytes", "digest", "came_from", "properties", "blob", "headers", "shown", "body"),
)

_encode = msgspec.json.Encoder().encode
_headers = msgspec.json.Decoder(dict[str, Any]).decode
_names = msgspec.json.Decoder(tuple[str, ...]).decode
_own = reader(Letter, state=LetterState, acked=bool, digest=bytes, headers=_headers, shown=_headers)
_failed = reader(FailedView, at=moment, body=bytes, properties=bytes)


class Page(Struct, frozen=True):
    """Some letters. `after` is where the next page begins, 0 at the end; `stopped` says that the search gave up there
    before the page was full."""

    letters: Sequence[Letter]
    after: int = 0
    stopped: bool = False


class Count(Struct, frozen=True):
    """How many. `exact` is false when counting stopped: then there are at least so many."""

    count: int
    exact: bool = True


class Stored(Struct, frozen=True):
    """Where a delivery is now. `matched` says that it was there already and that its un-acked row is used up."""

    letter: int
    matched: bool


class Letters(VaultPart):
    """The letters themselves. Finding them raises Invalid for a selection that no vault can answer."""

    # --- taken in, moved, edited, deleted ---------------------------------------------------------------------

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
        key = self.writer.key
        seal = key.seal("failed", (number, queue, reason, now, properties, body))
        values = {"queue": queue, "reason": reason, "properties": properties, "body": body, "seal": seal}
        run(tx, "insert_failed_import", id=number, now=now, **values)
        self.writer.append(tx, act, outcome="failed", queue=queue, count=1, folded=key.fold("failed", [seal]))

    @one_look
    def failed(self, tx: Tx, *, after: int, count_max: int) -> list[FailedView]:
        """What could not be a letter, oldest first."""
        return [_failed(row) for row in run(tx, "select_failed_imports", after=after, count_max=count_max)]

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
        number, now, note = int(newest) + 1, self.writer.now_us(), clip(act.reason, TEXT_CHARACTERS_MAX)
        headers, dropped = _encode(put).decode(), _encode(list(drop)).decode()
        key, edit = self.writer.key, (number, letter, headers, dropped, now, act.actor, note, body)
        seal = key.seal("revision", edit)
        run(tx, "insert_revision", **dict(zip(REVISION_COLUMNS, edit, strict=True)), seal=seal)
        run(tx, "set_revision", letter=letter, number=number, now=now)
        self.writer.append(tx, act, queue=queue, ids=[letter], folded=key.fold("revision", [seal]))
        return number

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
        folded = 0
        for kind, seal in run(tx, "select_seals", ids=ids):
            folded ^= self.writer.key.fold(kind, [bytes(seal)])
        blobs = run(tx, "select_blobs", ids=ids)
        for name in ("delete_revisions", "delete_contents", "delete_letters"):
            run(tx, name, ids=ids)
        for (blob,) in blobs:  # those that another letter has stay
            run(tx, "free_blob", blob=blob, due_at=0)
        self.writer.record_moves(tx, act, rows, LetterState.DELETED.value, folded=folded)
        return len(rows)

    @one_look
    def count_expired(self, tx: Tx, state: LetterState, *, before: datetime) -> int:
        """How many `expire` would delete."""
        return int(run(tx, "count_expired", state=state.value, before=microseconds(before))[0][0])

    # --- found and read ---------------------------------------------------------------------------------------

    @one_look
    def find(self, tx: Tx, selection: Selection, *, before: int = 0, count_max: int) -> Page:
        """Newest first, those with a smaller id than `before`."""
        top = before or _newest(tx) + 1
        floor = max(0, top - WALK_COUNT_MAX) if selection.walks else 0
        where, values = _condition(selection, tx.dialect)
        sql, key = _source(SQL["select_letter"], selection, tx.dialect)
        rows = tx.rows(
            f"{sql} WHERE {key} < :top AND {key} >= :floor {where} ORDER BY {key} DESC LIMIT :count_max",
            **values,
            top=top,
            floor=floor,
            count_max=count_max,
        )
        letters = [_letter(row) for row in rows]
        if len(letters) == count_max:
            return Page(letters, after=letters[-1].id)
        if floor > 1:
            return Page(letters, after=floor, stopped=True)
        return Page(letters)

    async def ids(self, selection: Selection, *, count_max: int) -> list[int]:
        """The ids of all of them, oldest first. Raises Invalid when there are more than `count_max`."""
        found = await self.oldest_ids(selection, count_max=count_max + 1)
        if len(found) > count_max:
            raise Invalid(f"selection is too large; more than {count_max} letters fit, narrow it")
        return found

    @one_look
    def oldest_ids(self, tx: Tx, selection: Selection, *, count_max: int) -> list[int]:
        """The ids of the oldest ones."""
        where, values = _condition(selection, tx.dialect)
        sql, key = _from("l.id", selection, tx.dialect)
        rows = tx.rows(f"{sql} WHERE 1 = 1 {where} ORDER BY {key} LIMIT :count_max", **values, count_max=count_max)
        return [row[0] for row in rows]

    @one_look
    def count(self, tx: Tx, selection: Selection, *, count_max: int = 0) -> Count:
        """How many there are. Without a limit for it, counting stops where a search would."""
        where, values = _condition(selection, tx.dialect)
        if selection.is_plain:
            state = selection.state.value if selection.state else ""
            return Count(
                sum(
                    row[2]
                    for row in run(tx, "select_tallies")
                    if row[1] != "deleted" and selection.queue in ("", row[0]) and state in ("", row[1])
                )
            )
        floor = max(0, _newest(tx) + 1 - WALK_COUNT_MAX) if selection.walks and not count_max else 0
        count_max = count_max or COUNT_MAX
        sql, key = _from("1 AS one", selection, tx.dialect)
        ((found,),) = tx.rows(
            f"SELECT count(*) FROM ({sql} WHERE {key} >= :floor {where} LIMIT :count_max) found",  # noqa: S608
            **values,
            floor=floor,
            count_max=count_max + 1,
        )
        return Count(min(found, count_max), exact=found <= count_max and floor <= 1)

    @one_look
    def values(
        self, tx: Tx, queue: str, *, count_max: int, headers_count_max: int
    ) -> tuple[dict[str, Counter[str]], dict[str, str], int]:
        """What stands in the newest letters, of a queue or of all, how often; what each group of theirs died of; and
        how many were looked at."""
        where, values = _condition(Selection(queue=queue), tx.dialect)
        newest = f"{where} ORDER BY l.id DESC LIMIT :count_max"
        columns = ", ".join(f"l.{name}" for name in VALUED)
        rows = tx.rows(f"SELECT {columns} FROM letters l WHERE 1 = 1 {newest}", **values, count_max=count_max)  # noqa: S608
        found = {name: Counter(row[place] for row in rows if row[place]) for place, name in enumerate(VALUED)}
        found["group"] = found.pop("grp")
        groups = {group: f"{error or reason} {kind}".strip() for kind, reason, _, error, group in reversed(rows)}
        sql = "SELECT c.headers FROM letters l JOIN contents c ON c.letter = l.id WHERE 1 = 1"
        told = tx.rows(f"{sql} {newest}", **values, count_max=headers_count_max)
        found["header"] = Counter(name for (headers,) in told for name in _headers(headers))
        return found, groups, len(rows)

    @one_look
    def came_back_as(self, tx: Tx, letter: int) -> list[tuple[int, str]]:
        """The letters that this one is again, with the queue of each, oldest first."""
        return [(row[0], row[1]) for row in run(tx, "select_came_back_as", letter=letter)]

    @one_look
    def oldest(self, tx: Tx, selection: Selection) -> Letter | None:
        """The one with the smallest id."""
        where, values = _condition(selection, tx.dialect)
        sql, key = _source(SQL["select_letter"], selection, tx.dialect)
        rows = tx.rows(f"{sql} WHERE 1 = 1 {where} ORDER BY {key} LIMIT 1", **values)
        return _letter(rows[0]) if rows else None

    @one_look
    def oldest_deaths(self, tx: Tx, queues: Sequence[str]) -> dict[str, datetime]:
        """When the oldest captured letter of each queue died, or was captured where nothing tells; of those that have
        one."""
        asked = [(queue, later(tx, "oldest_death", queue=queue)) for queue in queues]
        found = [(queue, rows()) for queue, rows in asked]
        return {queue: moment(died_at or captured_at) for queue, rows in found for died_at, captured_at in rows}

    @one_look
    def get(self, tx: Tx, letter: int) -> Letter | None:
        """One letter."""
        rows = tx.rows(f"{SQL['select_letter']} WHERE l.id = :letter", letter=letter)
        return _letter(rows[0]) if rows else None

    @one_look
    def content(self, tx: Tx, letter: int, *, revision: int | None = None) -> Content | None:
        """What would be published of it: its newest revision, or the given one; 0 is the original."""
        rows = run(tx, "select_contents", ids=tx.dialect.ids([letter]))
        return content_of(tx, rows[0], revision) if rows else None

    @one_look
    def revisions(self, tx: Tx, letter: int) -> list[RevisionView]:
        """All edits of a letter, oldest first."""
        return _revisions(tx, letter)


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
            if letter.blob and not run(tx, "claim_blob", blob=letter.blob):
                text = f"storage failed; the blob {letter.blob} was not claimed in time and is deleted, put it again"
                raise StorageFailed(text)
            # An item of an embedded queue carries no count.
            count = max(letter.redriven_count, redriven)
            row = _row(letter, id=number, now=now, came_from=came_from, redriven_count=count)
            elsewhere = writer.key.body_seal(letter.body).digest() if letter.blob else b""
            row["seal"] = writer.key.seal("letter", _sealed(row), elsewhere)
            rows.append(row)
        run_many(tx, "insert_letter", rows)
        run_many(tx, "insert_content", rows)
        tx.many(tx.dialect.insert_text, rows)
        newest = {letter.group: (letter.group_title, number) for letter, number in zip(letters, ids, strict=True)}
        for key, count in Counter(letter.group for letter in letters).items():
            title, sample = newest[key]
            run(tx, "put_group", key=key, title=title, count=count, now=now, sample=sample)
            run(tx, "add_group_hour", key=key, hour=writer.hour, count=count)
        arrived = [(number, letter.queue, "") for letter, number in zip(letters, ids, strict=True)]
        folded = writer.key.fold("letter", [row["seal"] for row in rows])
        writer.record_moves(tx, self._act, arrived, LetterState.CAPTURED.value, folded=folded)
        return ids

    def _came_from(self, letter: NewLetter) -> tuple[int, int]:
        """The letter that came back as this one, and how often it was redriven."""
        rows = run(self._tx, "find_came_from", redrive_id=letter.redrive_id) if letter.redrive_id else []
        if not rows:
            return 0, 0
        number, _, state, count, redrive = rows[0]
        if state in CAN_COME_BACK:
            act = LedgerAct(actor=self._act.actor, action="letters.came_back", detail=letter.redrive_id)
            self._writer.move(self._tx, act, rows, LetterState.CAME_BACK.value)
            run(self._tx, "add_redrive_tally", redrive=redrive, status="came_back", count=1)
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


def _newest(tx: Tx) -> int:
    rows = run(tx, "find_counter", name="letters")
    return int(rows[0][0]) if rows else 0


def _from(columns: str, selection: Selection, dialect: Dialect) -> tuple[str, str]:
    contents = "JOIN contents c ON c.letter = l.id" if selection.header else ""
    return _source(f"SELECT {columns} FROM letters l {contents}", selection, dialect)  # noqa: S608


def _source(sql: str, selection: Selection, dialect: Dialect) -> tuple[str, str]:
    """A statement over the letters `l`, by their words where the selection has some, and the id to order by."""
    if not selection.text:
        return sql, "l.id"
    return sql.replace("FROM letters l", f"FROM {dialect.text_from}"), dialect.text_key


def _condition(selection: Selection, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """The SQL of a selection, beginning with AND, and its values. Raises Invalid."""
    check_selection(selection)
    parts: list[str] = []
    values: dict[str, Any] = {}

    def add(sql: str, **more: Any) -> None:
        parts.append(sql)
        values.update(more)

    if selection.ids:
        add(f"l.id {dialect.in_ids}", ids=dialect.ids([one for one in selection.ids if one <= ID_MAX]))
    for column in ("queue", "source_queue", "type", "reason", "grp"):
        if text := getattr(selection, "group" if column == "grp" else column):
            add(f"l.{column} = :{column}", **{column: text})
    if selection.state:
        add("l.state = :state", state=selection.state.value)
    if selection.error:
        add("lower(l.error_type || ': ' || l.error_message) LIKE :error ESCAPE '\\'", error=within(selection.error))
    if selection.header_value:
        add(dialect.header_equals, header=selection.header, header_value=selection.header_value)
    elif selection.header:
        add(dialect.header_exists, header=selection.header)
    if selection.text:
        add(dialect.text_matches, words=dialect.words(words(selection.text)))
    for field, sql in (
        ("captured_after_us", "l.captured_at >= :captured_after_us"),
        ("captured_before_us", "l.captured_at < :captured_before_us"),
        ("died_after_us", "l.died_at >= :died_after_us"),
        ("died_before_us", "l.died_at < :died_before_us"),
    ):
        if at_us := getattr(selection, field):
            add(sql, **{field: at_us})
    return "".join(f" AND {part}" for part in parts), values


def _letter(row: Row) -> Letter:
    """A row of `select_letter`."""
    return _own((*row[:OWN_COLUMNS], DeathStory(*row[OWN_COLUMNS:])))


def _revisions(tx: Tx, letter: int) -> list[RevisionView]:
    return [_revision(row) for row in run(tx, "select_revisions", letter=letter)]


_revision = reader(
    RevisionView, at=moment, body=lambda body: None if body is None else bytes(body), put=_headers, drop=_names
)


def content_of(tx: Tx, row: Row, revision: int | None) -> Content:
    """What would be published of a letter: its newest revision, or the given one; 0 is the original."""
    letter, body, properties, blob = row[0], bytes(row[1]), bytes(row[2]), row[3]
    put: dict[str, JsonValue] = {}
    drop: tuple[str, ...] = ()
    for edit in _revisions(tx, letter) if revision != 0 else ():
        if revision is not None and edit.number > revision:
            break
        put, drop = edit.put, tuple(edit.drop)
        if edit.body is not None:
            body, blob = edit.body, ""
    return Content(body=body, properties=properties, blob=blob, put=put, drop=drop)
