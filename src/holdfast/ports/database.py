"""What our stores need of a database: statements in one transaction, run off the event loop.

The tables and statements of a store are the same in every SQL engine; where the engines differ (lists of ids, words in
texts, values in JSON) the `Dialect` says how. A database of the vault has one writer at a time, whatever it is in: the
ledger is a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from importlib.resources import files
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]
Values = Mapping[str, Any]


class Dialect(Protocol):
    """Where SQL engines differ."""

    shared: bool  #: other processes may use the same database
    in_ids: str  #: a condition on the column before it: it is one of `:ids`
    given: str  #: the rows `given`: each `value` is an element of the JSON array `:given`
    is_false: str  #: a condition on the column before it, which holds what is true or false
    skip_locked: str  #: rows that another transaction is changing are left to it, the others are ours
    collect_prefix: str  #: what the names of the collector's tables begin with
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

    def __hash__(self) -> int:
        """A statement is translated once for each dialect."""


class Tx(Protocol):
    """A transaction that is under way."""

    @property
    def dialect(self) -> Dialect:
        """How its database says it."""

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """Run a statement and take all of its rows. One that has none to give may fail as late as at the commit."""

    def later(self, sql: str, **values: Any) -> Callable[[], list[Row]]:
        """The same, but its rows are waited for when they are asked for: until then more may go the same way."""

    def many(self, sql: str, values: Sequence[Values]) -> None:
        """Run a statement once for each set of values."""


class Look(Protocol):
    """Reads of one and the same moment."""

    async def __call__(self, work: Callable[[Tx], T], /) -> T:
        """See `Database.read`."""


class Database(Protocol):
    """One database."""

    def open(self) -> None:
        """Bring it to today's schema. Raises CannotStart or StorageFailed."""

    def close(self) -> None:
        """Let go of it."""

    async def write(self, work: Callable[[Tx], T]) -> T:
        """One transaction: all of it or nothing. Raises StorageFailed."""

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Read what is committed. Raises StorageFailed."""

    def look(self) -> AbstractAsyncContextManager[Look]:
        """Read in many steps what is committed now, in nobody's way."""


@contextmanager
def closing_soon(thread: ThreadPoolExecutor, close: Callable[[], None]) -> Iterator[ThreadPoolExecutor]:
    """A thread that works alone with a connection, which it closes after what it has in hand: nobody waits for that."""
    try:
        yield thread
    finally:
        thread.submit(close)
        thread.shutdown(wait=False)


# SQL lives in files, one per subject, each statement under its name; migrations are numbered.


def statements(package: str) -> dict[str, str]:
    """Every statement of a package's `sql/*.sql`, by name: a file has those of one subject, each under `-- name:`."""
    found: dict[str, str] = {}
    for entry in (files(package) / "sql").iterdir():
        if entry.name.endswith(".sql"):
            for part in entry.read_text("utf-8").split("-- name: ")[1:]:
                name, _, text = part.partition("\n")
                found[name.strip()] = text.strip()
    return found


def migrations(package: str) -> dict[str, dict[int, str]]:
    """By kind of file or schema every `migrations/<kind>/NNNN.sql` of an engine's package, by number, in order."""
    found: dict[str, dict[int, str]] = {}
    for folder in (files(package) / "migrations").iterdir():
        if folder.is_dir():
            steps = [entry for entry in folder.iterdir() if entry.name.endswith(".sql")]
            numbered = {int(entry.name.removesuffix(".sql")): entry.read_text("utf-8") for entry in steps}
            found[folder.name] = dict(sorted(numbered.items()))
    return found
