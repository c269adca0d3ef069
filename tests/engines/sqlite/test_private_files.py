"""Files that hold bodies are for their owner alone, in a folder that others may read, under any umask."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.engines.sqlite.connection import open_writer
from holdfast.engines.sqlite.database import SqliteDatabase
from holdfast.wiring import SystemClock


@pytest.fixture(params=[0o022, 0o000, 0o277])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder that its owner made before, readable for all."""
    made = tmp_path / "data"
    made.mkdir()
    made.chmod(0o755)
    (made / "queues").mkdir()  # a umask that takes the owner's write away is for the files alone
    before = os.umask(request.param)
    yield made
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_a_storage_is_private(folder: Path) -> None:
    async def use() -> dict[str, int]:
        async with holdfast.open(f"sqlite:///{folder}") as queues:
            await queues.queues_create("orders")
            await queues.queue_produce("orders", [b"secret"])
            return modes(folder)

    at_work = asyncio.run(use())
    assert {"catalog.db", "catalog.db-wal", "catalog.db-shm"} <= at_work.keys()
    assert sum(name.startswith("queues/") for name in at_work) >= 3
    readable = {name: oct(mode) for name, mode in at_work.items() if mode & 0o177}
    assert not readable


def test_the_vault_and_every_other_kind_of_file_is_private(folder: Path) -> None:
    database = SqliteDatabase(folder / "vault.db", kind="vault", clock=SystemClock())
    database.open()
    others = [open_writer(folder / f"{kind}.db", kind=kind, create=True) for kind in ("starts", "collect")]
    at_work = modes(folder)
    database.close()
    for connection in others:
        connection.close()
    files = {f"{kind}.db{end}" for kind in ("vault", "starts", "collect") for end in ("", "-wal", "-shm")}
    assert files <= at_work.keys()
    assert set(at_work.values()) == {0o600}


def test_a_file_that_is_there_keeps_the_mode_that_its_owner_gave_it(folder: Path) -> None:
    path = folder / "starts.db"
    open_writer(path, kind="starts", create=True).close()
    path.chmod(0o640)
    open_writer(path, kind="starts", create=True).close()
    assert path.stat().st_mode & 0o777 == 0o640
