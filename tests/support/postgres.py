"""A private PostgreSQL cluster for the tests: in a temporary folder, on a socket and a free loopback port.

It is made once per run and ended by its process id. fsync stays on: a test that kills the server must not
pass because nothing was at stake, and has data on the disk. Those of the run's own, which nobody kills, are in memory.
As root it runs as `postgres` or `nobody`, since PostgreSQL refuses root.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from pwd import getpwall
from tempfile import mkdtemp
from typing import Any

import psycopg
from psycopg import sql

from holdfast.engines.postgres.database import SCHEMA
from tests.support.ports import free_port
from tests.support.servers import Server, fail_without, run_tool

VERSION_MIN = 15
INSTALL = "sudo apt-get install postgresql"
FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin", "/usr/local/bin", "/usr/bin")

CONFIGURATION = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = '{folder}'
max_connections = 200
shared_buffers = 64MB
max_wal_size = 256MB
fsync = on
full_page_writes = on
synchronous_commit = on
timezone = 'UTC'
log_min_messages = warning
"""


class Cluster(Server):
    """One server with its databases. On the disk, unless it is told where in memory."""

    STOP = signal.SIGINT

    def __init__(self, *, memory: Path | None = None) -> None:
        self._binaries = find_binaries()
        self._account = _account()
        self.port = free_port()
        super().__init__(Path(mkdtemp(prefix="holdfast-pg-", dir=memory)))

    def __str__(self) -> str:
        return "PostgreSQL"

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """The address over TCP. `port` is for a proxy in front of it."""
        return f"postgresql://holdfast@127.0.0.1:{port or self.port}/{database}"

    def socket_url(self) -> str:
        """The address over the Unix socket."""
        return f"postgresql://holdfast@/postgres?host={self.folder}&port={self.port}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """A blocking connection in autocommit, for looking at things from outside."""
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=10)

    def launch(self) -> None:
        data = self.folder / "data"
        if not data.exists():
            self._initialise(data)
        self._run([self._binaries / "postgres", "-D", data], **self._account)

    def is_ready(self) -> bool:
        self.connect().close()
        return True

    def create_database(self, name: str) -> str:
        """A new, empty database; returns its address."""
        with self.connect() as connection:
            connection.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop it, and cut off whoever is still connected."""
        with self.connect() as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _initialise(self, data: Path) -> None:
        if self._account:
            os.chown(self.folder, self._account["user"], self._account["group"])
        argv = (
            *(self._binaries / "initdb", "--pgdata", data, "--username", "holdfast", "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-instructions"),
        )
        run_tool(argv, cwd=self.folder, **self._account)
        with (data / "postgresql.conf").open("a") as file:
            file.write(CONFIGURATION.format(port=self.port, folder=self.folder))


def emptied(url: str) -> str:
    """The address of this database, in which nothing of ours is left."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"DROP SCHEMA IF EXISTS holdfast, {SCHEMA} CASCADE")
    return url


def find_binaries() -> Path:
    """The folder with `initdb` and `postgres`, newest version first; fails the test when there is none."""
    given = os.environ.get("HOLDFAST_TEST_POSTGRES_BIN")
    folders = [Path(given)] if given else [p for f in FOLDERS for p in Path("/").glob(f.lstrip("/"))]
    versions = {_version(folder): folder for folder in reversed(folders) if (folder / "initdb").exists()}
    if max(versions, default=0) < VERSION_MIN:
        fail_without("postgres", f"PostgreSQL server, version {VERSION_MIN} or newer", INSTALL)
    return versions[max(versions)]


def _version(folder: Path) -> int:
    server = folder / "postgres"
    text = run_tool([server, "--version"]) if server.exists() else ""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def _account() -> dict[str, Any]:
    """Whom to run as, for Popen: ourselves, or `postgres` or `nobody` when we are root."""
    if os.geteuid() != 0:
        return {}
    users = {user.pw_name: user for user in getpwall()}
    if found := users.get("postgres") or users.get("nobody"):
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a postgres nor a nobody user")
