"""Letters, found: the filter becomes SQL once, so that pages, counts and actions agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core.letter import Content, DeathStory, JsonValue, Letter
from holdfast.core.moments import moment
from holdfast.core.requests.vault import RevisionView
from holdfast.core.selection import ID_MAX, WALK_COUNT_MAX, Selection, check_selection, words
from holdfast.core.states import LetterState
from holdfast.errors import Invalid
from holdfast.ports.database import Dialect, Row, Tx
from holdfast.stores import SQL, record, run
from holdfast.stores.ledger import VaultPart, one_look

COUNT_MAX = 10_000
#: How many columns of `select_letter` are the letter's own; the others tell how it died.
OWN_COLUMNS = 20

_headers = msgspec.json.Decoder(dict[str, Any]).decode
_names = msgspec.json.Decoder(tuple[str, ...]).decode


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


class LetterSearch(VaultPart):
    """Letters, as they are found and read. Raises Invalid for a selection that no vault can answer."""

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
    def count(self, tx: Tx, selection: Selection) -> Count:
        """How many there are."""
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
        floor = max(0, _newest(tx) + 1 - WALK_COUNT_MAX) if selection.walks else 0
        sql, key = _from("1 AS one", selection, tx.dialect)
        ((found,),) = tx.rows(
            f"SELECT count(*) FROM ({sql} WHERE {key} >= :floor {where} LIMIT :count_max) found",  # noqa: S608
            **values,
            floor=floor,
            count_max=COUNT_MAX + 1,
        )
        return Count(min(found, COUNT_MAX), exact=found <= COUNT_MAX and floor <= 1)

    @one_look
    def oldest(self, tx: Tx, selection: Selection) -> Letter | None:
        """The one with the smallest id."""
        where, values = _condition(selection, tx.dialect)
        sql, key = _source(SQL["select_letter"], selection, tx.dialect)
        rows = tx.rows(f"{sql} WHERE 1 = 1 {where} ORDER BY {key} LIMIT 1", **values)
        return _letter(rows[0]) if rows else None

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
        # A plain part of the text: what would be a pattern to LIKE is escaped.
        pattern = selection.error.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        add("lower(l.error_type || ': ' || l.error_message) LIKE :error ESCAPE '\\'", error=f"%{pattern}%")
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
    death = record(DeathStory, row[OWN_COLUMNS:])
    own = (*row[:OWN_COLUMNS], death)
    return record(Letter, own, state=LetterState, acked=bool, digest=bytes, headers=_headers, shown=_headers)


def _revisions(tx: Tx, letter: int) -> list[RevisionView]:
    rows = run(tx, "select_revisions", letter=letter)
    return [record(RevisionView, row, at=moment, body=_bytes_or_none, put=_headers, drop=_names) for row in rows]


def _bytes_or_none(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


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
