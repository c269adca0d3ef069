"""A private PostgreSQL cluster for the tests: in a temporary folder, on a socket and a free loopback port.

It is made once per run and ended by its process id. fsync stays on: a test that kills the server must not
pass because nothing was at stake, and has data on the disk. Those of the run's own, which nobody kills, are in memory.
As root it runs as `postgres` or `nobody`, since PostgreSQL refuses root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pwd import getpwnam, struct_passwd
from tempfile import mkdtemp

import psutil
import psycopg
import pytest
from psycopg import sql

from tests.support.ports import free_port
from tests.support.servers import Guard

VERSION_MIN = 15
READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
STEP_S = 0.02
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


class Cluster:
    """One server with its data. `stop`, `kill` and `start` again are for fault tests; `close` is final."""

    def __init__(self, *, binaries: Path, folder: Path, port: int, account: struct_passwd | None) -> None:
        self.folder = folder
        self.port = port
        self._binaries = binaries
        self._user = account.pw_uid if account else None
        self._group = account.pw_gid if account else None
        self._extra_groups: list[int] | None = [] if account else None
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    @classmethod
    def create(cls, *, memory: Path | None = None) -> Cluster:
        """Make a cluster and start it. Without a server it fails the test and says what to install."""
        binaries = find_binaries()
        account = _account()
        folder = Path(mkdtemp(prefix="holdfast-pg-", dir=memory))
        if account:
            os.chown(folder, account.pw_uid, account.pw_gid)
        cluster = cls(binaries=binaries, folder=folder, port=free_port(), account=account)
        try:
            cluster._initialise()
            cluster.start()
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None when it is down."""
        return self._server.pid if self._server and self._server.poll() is None else None

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """The address over TCP. `port` is for a proxy in front of it."""
        return f"postgresql://holdfast@127.0.0.1:{port or self.port}/{database}"

    def socket_url(self, database: str = "postgres") -> str:
        """The address over the Unix socket."""
        return f"postgresql://holdfast@/{database}?host={self.folder}&port={self.port}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """A blocking connection in autocommit, for looking at things from outside."""
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=10)

    def start(self) -> None:
        """Start the server (again) and wait until it answers. Nothing happens when it runs."""
        if self.pid:
            return
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.folder / "data"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=self._user,
                group=self._group,
                extra_groups=self._extra_groups,
            )
        self._guard = Guard(self.folder, self._server.pid)
        self._wait_ready()

    def stop(self) -> None:
        """An orderly end that cuts the clients off (what an administrator's restart does)."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the server and all its processes: what a crash does. The data stay, for `start`."""
        children = self.pause()
        for pid in children:
            _send(pid, signal.SIGKILL)
        self._end(signal.SIGKILL)
        # A child that lives on holds the shared memory, and the next start would be refused.
        _wait_gone(children)

    def pause(self) -> list[int]:
        """SIGSTOP to all its processes: it holds its connections and answers nothing, until `resume`."""
        if self.pid is None:
            return []
        # The first one first: a stopped server makes no more processes.
        _send(self.pid, signal.SIGSTOP)
        children = _children(self.pid)
        for pid in children:
            _send(pid, signal.SIGSTOP)
        return children

    def resume(self) -> None:
        """SIGCONT."""
        if self.pid is not None:
            for pid in [*_children(self.pid), self.pid]:
                _send(pid, signal.SIGCONT)

    def create_database(self, name: str) -> str:
        """A new, empty database; returns its address."""
        with self.connect() as connection:
            connection.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop it, and cut off whoever is still connected."""
        with self.connect() as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def close(self) -> None:
        """End the server and remove the data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The end of the server's log, for an error's text."""
        file = self.folder / "log"
        return file.read_text("utf-8", "replace")[-4000:] if file.exists() else ""

    def _initialise(self) -> None:
        done = subprocess.run(
            [
                self._binaries / "initdb",
                *("--pgdata", self.folder / "data", "--username", "holdfast", "--auth", "trust"),
                *("--encoding", "UTF8", "--locale", "C", "--no-instructions"),
            ],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            user=self._user,
            group=self._group,
            extra_groups=self._extra_groups,
        )
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed with {done.returncode}\n{done.stdout}\n{done.stderr}")
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.write(CONFIGURATION.format(port=self.port, folder=self.folder))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.pid:
                raise RuntimeError(f"PostgreSQL ended at its start\n{self.log()}")
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                time.sleep(STEP_S)
        raise RuntimeError(f"PostgreSQL was not ready after {READY_TIMEOUT_S} s\n{self.log()}")

    def _end(self, number: signal.Signals) -> None:
        if self._server is None:
            return
        _send(self._server.pid, number)
        self._server.wait(END_TIMEOUT_S)
        self._server = None
        if self._guard is not None:
            self._guard.close()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    """The server's processes; each leads a session of its own, so no group signal reaches them."""
    return [child.pid for child in psutil.Process(pid).children()]


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(_lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of PostgreSQL outlived SIGKILL: {pids}")
        time.sleep(STEP_S)


def _lives(pid: int) -> bool:
    """A zombie does not live: nobody may be there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def find_binaries() -> Path:
    """The folder with `initdb` and `postgres`, newest version first; fails the test when there is none."""
    given = os.environ.get("HOLDFAST_TEST_POSTGRES_BIN")
    folders = [Path(given)] if given else [p for f in FOLDERS for p in Path("/").glob(f.lstrip("/"))]
    versions = {folder: _version(folder) for folder in folders if (folder / "initdb").exists()}
    newest = max(versions, key=lambda folder: versions[folder], default=None)
    if newest is None or versions[newest] < VERSION_MIN:
        pytest.fail(
            f"these tests need a PostgreSQL server, version {VERSION_MIN} or newer. Install it:  {INSTALL}\n"
            "or leave them out:  HOLDFAST_TEST_WITHOUT=postgres",
            pytrace=False,
        )
    return newest


def _version(folder: Path) -> int:
    server = folder / "postgres"
    if not server.exists():
        return 0
    text = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def _account() -> struct_passwd | None:
    """Whom to run as: ourselves, or `postgres` or `nobody` when we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a postgres nor a nobody user")


@contextmanager
def running_cluster(*, memory: Path | None = None) -> Iterator[Cluster]:
    """A cluster of one's own, for a test that stops or kills it; on the disk, unless it is told where in memory."""
    cluster = Cluster.create(memory=memory)
    try:
        yield cluster
    finally:
        cluster.close()
