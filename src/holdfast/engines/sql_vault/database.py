"""What the vault needs of a database: statements in one transaction, run off the event loop.

The vault's tables and statements are the same in every SQL engine; where the engines differ (lists of ids, words in
texts, values in JSON) the `Dialect` says how. There is one writer at a time: the ledger is a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.engines.sql_files import statements

T = TypeVar("T")
Row = tuple[Any, ...]
Values = Mapping[str, Any]

SQL = statements("holdfast.engines.sql_vault")


class Dialect(Protocol):
    """Where SQL engines differ."""

    in_ids: str  #: a condition on the column before it: it is one of `:ids`
    text_from: str  #: the letters `l` with their words
    text_matches: str  #: a condition: the words match `:words`
    text_key: str  #: the id of a letter among them
    insert_text: str  #: stores the searched `:text` of the letter `:id`
    delete_text: str
    header_equals: str  #: a condition: the header `:header` is `:header_value`; of the contents `c`
    header_exists: str

    def ids(self, ids: Sequence[int]) -> object:
        """The value of `:ids`."""

    def words(self, words: Sequence[str]) -> str:
        """The value of `:words`: all of them must be there."""


class Tx(Protocol):
    """A transaction that is under way."""

    dialect: Dialect
    moved: list[Any]  #: the letters that changed their state in it

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """Run a statement and take all of its rows."""

    def many(self, sql: str, values: Sequence[Values]) -> None:
        """Run a statement once for each set of values."""


class Database(Protocol):
    """One database."""

    dialect: Dialect

    def open(self) -> None:
        """Bring it to today's schema. Raises CannotStart or StorageFailed."""

    def close(self) -> None:
        """Let go of it."""

    async def write(self, work: Callable[[Tx], T]) -> T:
        """One transaction, alone: all of it or nothing. Raises StorageFailed."""

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Read what is committed. Raises StorageFailed."""


def statement(name: str, dialect: Dialect) -> str:
    """A statement of `sql/` in a dialect."""
    return SQL[name].replace("IN_IDS", dialect.in_ids)
