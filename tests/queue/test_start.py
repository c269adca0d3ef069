"""Starting: what is wrong is said in one clear sentence, and nothing is held by a start that failed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import apsw
import pytest

from holdfast import CannotStart, Queues
from holdfast.testing import FrozenClock
from holdfast.wiring import open_queues, open_service


def urls(folder: Path, *names: str) -> dict[str, str]:
    return {name: f"sqlite:///{folder / name}" for name in names}


async def test_a_storage_that_is_not_configured_any_more_is_named(tmp_path: Path) -> None:
    async with open_service(urls(tmp_path, "here", "there"), clock=FrozenClock()) as service:
        await Queues(service).queues_create("wide", requested_partitions=2)
    with pytest.raises(CannotStart) as caught:
        async with open_service(urls(tmp_path, "here"), clock=FrozenClock()):
            pass
    assert str(caught.value) == (
        "storage is not configured; queue 'wide' has partition 1 in storage 'there', name it in the settings"
    )
    async with open_service(urls(tmp_path, "here", "there"), clock=FrozenClock()) as service:
        assert len((await Queues(service).queues_info("wide")).partitions) == 2


async def test_a_folder_in_use_names_its_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'data'}"
    async with open_queues(url):
        with pytest.raises(CannotStart, match=re.escape(f"locked by process {os.getpid()}, ")):
            async with open_queues(url):
                pass
    async with open_queues(url) as queues:
        assert await queues.queues_list() == []


async def test_a_start_that_failed_holds_no_other_storage(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file, where a folder should be")
    with pytest.raises(CannotStart, match=r"^data folder cannot be used; "):
        async with open_service(urls(tmp_path, "here", "there")):
            pass
    async with open_service(urls(tmp_path, "here")) as service:
        assert await Queues(service).queues_list() == []


async def test_files_of_a_newer_program_are_left_alone(tmp_path: Path) -> None:
    async with open_queues(f"sqlite:///{tmp_path / 'data'}"):
        pass
    connection = apsw.Connection(str(tmp_path / "data" / "catalog.db"))
    connection.pragma("user_version", 999)
    connection.close()
    with pytest.raises(CannotStart, match=r"schema is too new; catalog\.db has version 999"):
        async with open_queues(f"sqlite:///{tmp_path / 'data'}"):
            pass


@pytest.mark.parametrize("url", ["", "redis://x", "sqlite://host/x", "sqlite:///", "sqlite:", "data"])
async def test_a_url_that_names_no_storage_is_refused(url: str) -> None:
    with pytest.raises(CannotStart, match=r"^storage URL is invalid; "):
        async with open_queues(url):
            pass


async def test_a_relative_folder_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_queues("sqlite:///work") as queues:
        await queues.queues_create("orders")
    assert (tmp_path / "work" / "catalog.db").exists()
