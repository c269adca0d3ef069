"""What we keep, written once: over a `Database` that any SQL engine can be, or in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct

from holdfast.ports.database import Dialect, Row, Tx, Values, statements

S = TypeVar("S", bound=Struct)
SQL = statements("holdfast.stores")


@cache
def statement(name: str, dialect: Dialect) -> str:
    """A statement of `sql/` in a dialect."""
    text = SQL[name]
    for word, meaning in (
        ("IN_IDS", dialect.in_ids),
        ("GIVEN_ROWS", dialect.given),
        ("SKIP_LOCKED", dialect.skip_locked),
        ("IS_FALSE", dialect.is_false),
        ("collect_", dialect.collect_prefix),
    ):
        text = text.replace(word, meaning)
    return text


def run(tx: Tx, name: str, /, **values: Any) -> list[Row]:
    """The rows of a statement of `sql/`."""
    return tx.rows(statement(name, tx.dialect), **values)


def later(tx: Tx, name: str, /, **values: Any) -> Callable[[], list[Row]]:
    """The same, but the rows are waited for when they are asked for."""
    return tx.later(statement(name, tx.dialect), **values)


def run_many(tx: Tx, name: str, values: Sequence[Values]) -> None:
    """A statement of `sql/`, once for each set of values."""
    tx.many(statement(name, tx.dialect), values)


def within(text: str) -> str:
    """What LIKE finds a plain part of a text by, in small letters: what would be a pattern is escaped."""
    escaped = text.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def reader(kind: type[S], **reads: Callable[[Any], Any]) -> Callable[[Sequence[Any]], S]:
    """Reads rows whose columns are the fields of a struct, in their order; `reads` says how some of them are read."""
    indexes = [(kind.__struct_fields__.index(name), read) for name, read in reads.items()]

    def read_row(row: Sequence[Any]) -> S:
        values = list(row)
        for index, read in indexes:
            values[index] = read(values[index])
        return kind(*values)

    return read_row
