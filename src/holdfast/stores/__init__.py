"""What we keep, written once: over a `Database` that any SQL engine can be, or in files."""

from __future__ import annotations

from holdfast.ports.database import Dialect, statements

SQL = statements("holdfast.stores")


def statement(name: str, dialect: Dialect) -> str:
    """A statement of `sql/` in a dialect."""
    return SQL[name].replace("IN_IDS", dialect.in_ids)
