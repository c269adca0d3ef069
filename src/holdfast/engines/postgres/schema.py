"""Brings a database to today's schema, and says clearly when it cannot. Two servers may start at once."""

from __future__ import annotations

import psycopg

from holdfast.engines.postgres.errors import failed, place_of
from holdfast.engines.postgres.link import PACKAGE, connect
from holdfast.engines.sql_files import migrations
from holdfast.errors import CannotStart

MIGRATIONS = migrations(PACKAGE, kind="queue")
SERVER_VERSION_MIN = 15

_LOCK = "SELECT pg_advisory_xact_lock(1212106564, -2)"
_BEGINNING = (
    "CREATE SCHEMA IF NOT EXISTS holdfast; CREATE TABLE IF NOT EXISTS holdfast.{table} (version integer NOT NULL)"
)


async def migrate(url: str, *, kind: str = "queue") -> None:
    """Make or upgrade the tables of a kind. Raises CannotStart with what to do."""
    place = place_of(url)
    try:
        connection = await connect(url)
    except (psycopg.Error, OSError) as error:
        detail = failed(error, place).message.removeprefix("storage failed; ").removesuffix(", try again")
        raise CannotStart(f"storage cannot be reached; {detail}, check that it runs and the URL") from error
    try:
        if connection.info.server_version < SERVER_VERSION_MIN * 10_000:
            raise CannotStart(
                f"PostgreSQL is too old; {place} has version {connection.info.server_version // 10_000} "
                f"and {SERVER_VERSION_MIN} is needed, upgrade it"
            )
        async with connection.transaction():
            await connection.execute(_LOCK)
            await _upgrade(connection, place, kind)
    except psycopg.errors.InsufficientPrivilege as error:
        raise CannotStart(
            f"storage cannot be prepared; {place}: {error.diag.message_primary}, let the user create a schema "
            "in the database"
        ) from error
    except psycopg.Error as error:
        detail = failed(error, place).message.removeprefix("storage failed; ")
        raise CannotStart(f"storage cannot be prepared; {detail}") from error
    finally:
        await connection.close()


async def _upgrade(connection: psycopg.AsyncConnection[tuple[object, ...]], place: str, kind: str) -> None:
    steps = MIGRATIONS if kind == "queue" else migrations(PACKAGE, kind=kind)
    table = "schema_version" if kind == "queue" else f"{kind}_schema_version"
    exists = await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"holdfast.{table}",))
    row = await exists.fetchone()
    if row is None or not row[0]:
        await connection.execute(_BEGINNING.format(table=table).encode())
    found = await (await connection.execute(f"SELECT version FROM holdfast.{table}".encode())).fetchone()  # noqa: S608 - our own name
    version = int(str(found[0])) if found else 0
    newest = max(steps)
    if version > newest:
        raise CannotStart(
            f"schema is too new; {place} has version {version} and this program knows {newest}, use a newer Holdfast"
        )
    for number, step in steps.items():
        if number > version:
            await connection.execute(step.encode())
    if version == 0:
        await connection.execute(f"INSERT INTO holdfast.{table} VALUES (%s)".encode(), (newest,))  # noqa: S608
    elif version < newest:
        await connection.execute(f"UPDATE holdfast.{table} SET version = %s".encode(), (newest,))  # noqa: S608
