"""Letters, found: the filter becomes SQL once, so that pages, counts and actions agree."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.letter import Content, DeathStory, JsonValue, Letter
from holdfast.core.selection import ID_MAX, WALK_COUNT_MAX, Selection, check_selection, words
from holdfast.core.states import LetterState
from holdfast.errors import Invalid
from holdfast.ports.database import Dialect, Row, Tx
from holdfast.ports.vault import Count, Page
from holdfast.stores import SQL
from holdfast.stores.ledger import LedgerWriter

COUNT_MAX = 10_000

_headers = msgspec.json.Decoder(dict[str, Any]).decode


class LetterReading:
    """What only looks at letters."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    def _run(self, work: Tx, name: str, /, **values: Any) -> list[Row]:
        return self._books.run(work, name, **values)

    async def find(self, selection: Selection, *, before: int = 0, count_max: int) -> Page:
        check_selection(selection)

        def work(work: Tx) -> Page:
            top = before or self._top(work) + 1
            floor = max(0, top - WALK_COUNT_MAX) if selection.walks else 0
            where, values = condition(selection, work.dialect)
            sql, key = _source(SQL["select_letter"], selection, work.dialect)
            rows = work.rows(
                f"{sql} WHERE {key} < :top AND {key} >= :floor {where} ORDER BY {key} DESC LIMIT :count_max",
                **values,
                top=top,
                floor=floor,
                count_max=count_max,
            )
            letters = [letter_of(row) for row in rows]
            if len(letters) == count_max:
                return Page(letters, after=letters[-1].id)
            if floor > 1:
                return Page(letters, after=floor, stopped=True)
            return Page(letters)

        return await self._books.database.read(work)

    async def ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        found = await self.oldest_ids(selection, count_max=count_max + 1)
        if len(found) > count_max:
            raise Invalid(f"selection is too large; more than {count_max} letters fit, narrow it")
        return found

    async def oldest_ids(self, selection: Selection, *, count_max: int) -> list[tuple[int, int]]:
        check_selection(selection)

        def work(work: Tx) -> list[tuple[int, int]]:
            where, values = condition(selection, work.dialect)
            sql, key = _from("l.id, l.revision", selection, work.dialect)
            rows = work.rows(
                f"{sql} WHERE 1 = 1 {where} ORDER BY {key} LIMIT :count_max", **values, count_max=count_max
            )
            return [(row[0], row[1]) for row in rows]

        return await self._books.database.read(work)

    async def count(self, selection: Selection) -> Count:
        check_selection(selection)

        def work(work: Tx) -> Count:
            if selection.is_plain:
                state = selection.state.value if selection.state else ""
                return Count(
                    sum(
                        row[2]
                        for row in self._run(work, "select_tallies")
                        if row[1] != "deleted" and selection.queue in ("", row[0]) and state in ("", row[1])
                    )
                )
            floor = max(0, self._top(work) + 1 - WALK_COUNT_MAX) if selection.walks else 0
            where, values = condition(selection, work.dialect)
            sql, key = _from("1 AS one", selection, work.dialect)
            ((count,),) = work.rows(
                f"SELECT count(*) FROM ({sql} WHERE {key} >= :floor {where} LIMIT :count_max) found",  # noqa: S608
                **values,
                floor=floor,
                count_max=COUNT_MAX + 1,
            )
            return Count(min(count, COUNT_MAX), exact=count <= COUNT_MAX and floor <= 1)

        return await self._books.database.read(work)

    async def oldest(self, selection: Selection) -> Letter | None:
        check_selection(selection)

        def work(work: Tx) -> list[Row]:
            where, values = condition(selection, work.dialect)
            sql, key = _source(SQL["select_letter"], selection, work.dialect)
            return work.rows(f"{sql} WHERE 1 = 1 {where} ORDER BY {key} LIMIT 1", **values)

        rows = await self._books.database.read(work)
        return letter_of(rows[0]) if rows else None

    async def get(self, letter: int) -> Letter | None:
        rows = await self._books.database.read(
            lambda work: work.rows(f"{SQL['select_letter']} WHERE l.id = :letter", letter=letter)
        )
        return letter_of(rows[0]) if rows else None

    def _top(self, work: Tx) -> int:
        rows = self._run(work, "find_counter", name="letters")
        return int(rows[0][0]) if rows else 0


def _from(columns: str, selection: Selection, dialect: Dialect) -> tuple[str, str]:
    contents = "JOIN contents c ON c.letter = l.id" if selection.header else ""
    return _source(f"SELECT {columns} FROM letters l {contents}", selection, dialect)  # noqa: S608


def _source(sql: str, selection: Selection, dialect: Dialect) -> tuple[str, str]:
    """A statement over the letters `l`, by their words where the selection has some, and the id to order by."""
    if not selection.text:
        return sql, "l.id"
    return sql.replace("FROM letters l", f"FROM {dialect.text_from}"), dialect.text_key


def condition(selection: Selection, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """The SQL of a selection, beginning with AND, and its values."""
    parts: list[str] = []
    values: dict[str, Any] = {}

    def add(sql: str, **more: Any) -> None:
        parts.append(sql)
        values.update(more)

    if selection.ids:
        add(f"l.id {dialect.in_ids}", ids=dialect.ids([one for one in selection.ids if one <= ID_MAX]))
    for field, column in (
        ("queue", "queue"),
        ("source_queue", "source_queue"),
        ("type", "type"),
        ("reason", "reason"),
        ("group", "grp"),
    ):
        if text := getattr(selection, field):
            add(f"l.{column} = :{column}", **{column: text})
    if selection.state:
        add("l.state = :state", state=selection.state.value)
    if selection.error:
        # A plain part of the text: what would be a pattern to LIKE is escaped.
        pattern = selection.error.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        add("lower(l.error_type || ': ' || l.error_message) LIKE :error ESCAPE '\\'", error=f"%{pattern}%")
    if selection.header:
        add(
            dialect.header_equals if selection.header_value else dialect.header_exists,
            header=selection.header,
            **({"header_value": selection.header_value} if selection.header_value else {}),
        )
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


def letter_of(row: Row) -> Letter:
    """A row of `select_letter`."""
    return Letter(
        id=row[0],
        queue=row[1],
        origin=row[2],
        state=LetterState(row[3]),
        message_id=row[4],
        type=row[5],
        exchange=row[6],
        routing_key=row[7],
        death=DeathStory(
            queue=row[8],
            reason=row[9],
            count=row[10],
            first_at_us=row[11],
            last_at_us=row[12],
            error_type=row[13],
            error_message=row[14],
            error_stack=row[27],
        ),
        group=row[15],
        redrive_id=row[16],
        redriven_count=row[17],
        revision=row[18],
        acked=bool(row[19]),
        captured_at_us=row[20],
        changed_at_us=row[21],
        body_bytes=row[22],
        digest=bytes(row[23]),
        came_from=row[24],
        headers=_headers(row[25]),
        shown=_headers(row[26]),
    )


def content_of(books: LedgerWriter, work: Tx, row: Row, revision: int | None) -> Content:
    """What would be published of a letter: its newest revision, or the given one; 0 is the original."""
    letter, body, properties, blob = row[0], bytes(row[1]), bytes(row[2]), row[3]
    put: dict[str, JsonValue] = {}
    drop: tuple[str, ...] = ()
    for number, changed, headers, dropped, *_ in (
        books.run(work, "select_revisions", letter=letter) if revision != 0 else ()
    ):
        if revision is not None and number > revision:
            break
        put, drop = _headers(headers), tuple(msgspec.json.decode(dropped))
        if changed is not None:
            body, blob = bytes(changed), ""
    return Content(body=body, properties=properties, blob=blob, put=put, drop=drop)
