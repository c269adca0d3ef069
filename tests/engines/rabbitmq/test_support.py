"""The private nodes: a missing broker fails and says what to do; nothing of a node is left behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support import rabbitmq
from tests.support.rabbitmq import REQUIRED, Node, check_installed, required, versions


def test_a_missing_broker_fails_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq, "BINARIES", "/nowhere")
    with pytest.raises(pytest.fail.Exception, match="sudo apt-get install rabbitmq-server openssl"):
        check_installed("3.10")


@pytest.mark.rabbitmq
def test_a_missing_version_is_skipped_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"scripts/rabbitmq\.sh trixie"):
        check_installed("4.0")
    monkeypatch.setenv(REQUIRED, "4.0")
    with pytest.raises(pytest.fail.Exception, match=r"scripts/rabbitmq\.sh trixie"):
        check_installed("4.0")


def test_the_versions_are_those_of_every_day_and_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "")
    assert versions() == ["3.10", "4.0"]
    monkeypatch.setenv(REQUIRED, "4.3, 3.10")
    assert versions() == ["3.10", "4.0", "4.3"]
    monkeypatch.setenv(REQUIRED, "5.0")
    with pytest.raises(pytest.UsageError, match=r"no such version: 5\.0"):
        required()


@pytest.mark.rabbitmq
def test_nothing_of_a_node_is_left_behind_and_it_listens_on_loopback_only(node: Node) -> None:
    assert node.pid is not None
    process = psutil.Process(node.pid)
    listening = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    other = Node("3.10")
    other.start()
    pid, folder = other.pid, other.folder
    assert pid is not None
    other.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not folder.exists()
