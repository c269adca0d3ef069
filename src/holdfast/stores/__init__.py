"""What we keep, written once: over a `Database` that any SQL engine can be, or in files."""

from __future__ import annotations

from functools import cache
from typing import Any

from holdfast.ports.database import Dialect, Row, Tx, statements

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
