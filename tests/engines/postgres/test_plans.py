"""A statement's plan is made once per connection and kept, whatever becomes of the tables: it must not depend on them.

So every statement is planned twice, over tables that look empty and over tables that look full: the same plan, in
which nothing is found by reading a whole table or a whole index.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import psycopg
import pytest

from holdfast.engines.postgres import connection as schema
from holdfast.engines.postgres.connection import SESSION
from holdfast.engines.postgres.connection import SQL as ALL_SQL

pytestmark = pytest.mark.postgres

#: Those of the queue: the collector has tables of its own.
SQL = {name: text for name, text in ALL_SQL.items() if not name.startswith("collect_")}
#: As large as the number of queues, and read whole on purpose or by choice.
SMALL = ("queues", "dropped", "catalog")
WITHOUT_A_PLAN = ("begin", "commit", "rollback")
FILL = (
    "ALTER TABLE holdfast.items ALTER kind SET DEFAULT '', ALTER encoding SET DEFAULT ''",
    "ALTER TABLE holdfast.items ALTER reference SET DEFAULT '', ALTER payload SET DEFAULT 'x'",
    "INSERT INTO holdfast.items (id, queue, partition) SELECT n, n % 50, 0 FROM generate_series(1, 60000) AS n",
    "INSERT INTO holdfast.ready SELECT n, 1, 1, n % 50, 0, 0 FROM generate_series(1, 40000) AS n",
    "INSERT INTO holdfast.leases SELECT n, 1, 1, 1, n, n % 50, 0, 1 FROM generate_series(40001, 60000) AS n",
    "INSERT INTO holdfast.queues SELECT n, n::text, '', 0, '' FROM generate_series(1, 50) AS n",
)

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module")
def connection(postgres_url: str) -> Iterator[Connection]:
    """A connection that is set as those of the storage are."""
    asyncio.run(schema.migrate(postgres_url))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(SESSION)
        for name, text in SQL.items():
            result = connection.pgconn.prepare(name.encode(), text)
            assert not result.error_message, f"{name}: {result.error_message!r}"
        yield connection


def plans(connection: Connection) -> dict[str, list[str]]:
    """The plan of every statement, by name, without costs."""
    connection.execute("VACUUM ANALYZE")
    found = {}
    for name in SQL.keys() - set(WITHOUT_A_PLAN):
        count = connection.pgconn.describe_prepared(name.encode()).nparams
        values = f"({', '.join(['NULL'] * count)})" if count else ""
        rows = connection.execute(f'EXPLAIN (COSTS OFF) EXECUTE "{name}"{values}'.encode()).fetchall()
        found[name] = [str(line) for (line,) in rows]
    return found


def test_plans_do_not_depend_on_what_the_tables_look_like(connection: Connection) -> None:
    empty = plans(connection)
    for statement in FILL:
        connection.execute(statement.encode())
    full = plans(connection)
    for name in empty.keys() - {"catalog_select_sources"}:
        assert empty[name] == full[name], name


def test_nothing_is_found_by_reading_a_whole_table_or_index(connection: Connection) -> None:
    for name, lines in plans(connection).items():
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            scanned = re.search(r"(Seq Scan|Index (?:Only )?Scan using \w+) on (\w+)", line)
            if scanned is None or scanned[2] in SMALL:
                continue
            assert "Seq" not in scanned[1], f"{name}: {line}"
            assert "Index Cond" in following, f"{name}: {line}"


def test_rows_known_by_their_id_are_not_looked_for(connection: Connection) -> None:
    for name, lines in plans(connection).items():
        filters = [line for line in lines if "Filter:" in line and re.search(r"\b(id|dedupe_key|source_id) =", line)]
        assert not filters, f"{name}: {filters}"
        assert not [line for line in lines if "Join Filter" in line], name
