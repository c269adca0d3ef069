"""The private cluster: durable settings, a database per module, and a crash that is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from holdfast.proof.process import child_process
from tests.support.eventually import eventually
from tests.support.forking import ROOT
from tests.support.postgres import Cluster, find_binaries
from tests.support.servers import SERVERS, VARIABLE, named

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster that these tests may kill."""
    with Cluster() as cluster:
        yield cluster


def value(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
def test_nothing_that_makes_it_durable_is_off(postgres: Cluster, setting: str) -> None:
    assert value(postgres.url(), f"show {setting}") == "on"


def test_it_does_not_run_as_root(postgres: Cluster) -> None:
    assert postgres.pid is not None
    assert Path(f"/proc/{postgres.pid}").stat().st_uid != 0


def test_each_module_has_a_fresh_database(postgres_url: str) -> None:
    assert value(postgres_url, "select current_database()") == "test_tests_support_test_postgres"
    assert value(postgres_url, "select count(*) from pg_tables where schemaname = 'public'") == 0


def test_the_socket_leads_to_the_same_server(postgres: Cluster) -> None:
    query = "select system_identifier::text from pg_control_system()"
    assert value(postgres.socket_url(), query) == value(postgres.url(), query)


def test_what_was_committed_is_there_after_a_kill(own: Cluster) -> None:
    with own.connect() as connection:
        connection.execute("create table kept (n int)")
        connection.execute("insert into kept values (7)")
        before = own.pid
        own.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    own.start()
    assert own.pid not in (None, before)
    assert value(own.url(), "select n from kept") == 7


def test_it_can_be_stopped_in_order_and_started_again(own: Cluster) -> None:
    own.stop()
    with pytest.raises(psycopg.OperationalError):
        own.connect()
    own.start()
    own.start()
    assert value(own.url(), "select 1") == 1


def test_a_paused_server_answers_again_when_it_is_resumed(own: Cluster) -> None:
    with own.connect() as connection:
        own.pause()
        with pytest.raises(psycopg.OperationalError, match="timeout"):
            psycopg.connect(own.url(), connect_timeout=2)
        own.resume()
        assert connection.execute("select 1").fetchone() == (1,)


def test_closing_leaves_no_process_and_no_file() -> None:
    with Cluster() as cluster:
        pid, folder = cluster.pid, cluster.folder
        assert pid is not None
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_it_does_not_outlive_whoever_started_it() -> None:
    script = "from tests.support.postgres import Cluster; c = Cluster(); c.start(); print(c.pid, c.folder, flush=True)"
    script += "; input()"
    async with child_process([sys.executable, "-c", script], cwd=ROOT) as child:
        pid, folder = (await child.wait_line(r"(\d+) (\S+)")).groups()
        await child.kill()
        await eventually(lambda: not psutil.pid_exists(int(pid)) and not Path(folder).exists())


def test_a_missing_server_fails_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_POSTGRES_BIN", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="sudo apt-get install postgresql"):
        find_binaries()


def test_only_known_servers_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert named(VARIABLE, SERVERS, "server") == frozenset()
    monkeypatch.setenv(VARIABLE, "postgres, rabbitmq")
    assert named(VARIABLE, SERVERS, "server") == {"postgres", "rabbitmq"}
    monkeypatch.setenv(VARIABLE, "postgresql")
    with pytest.raises(pytest.UsageError, match="no such server: postgresql"):
        named(VARIABLE, SERVERS, "server")
