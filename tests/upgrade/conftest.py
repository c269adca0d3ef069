"""The installations of before, each test with a copy of its own."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.amqp import Admin
from tests.support.command import Ended, Inside
from tests.support.postgres import Cluster
from tests.support.rabbitmq import Node
from tests.upgrade import story

#: So long after they were made they are opened: every short lease has run out.
LATER_S = 600


def unpack(name: str, folder: Path) -> None:
    """An archive of the fixtures, in a folder."""
    raw = gzip.decompress((story.FIXTURES / f"{name}.tar.gz").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        archive.extractall(folder, filter="data")


def clock_offset(made_at: float) -> str:
    """For HOLDFAST_CLOCK_OFFSET_S: a little after the fixture was made, whenever the test runs."""
    return str(round(made_at + LATER_S - time.time()))


@dataclass(frozen=True)
class OldInstallation:
    """Data that an older program left, and what that program said of them."""

    url: str
    folder: Path  #: its data folder
    blobs: str | None  #: where collected results are, when not beside the queues
    told: dict[str, Any]

    @property
    def env(self) -> dict[str, str]:
        """What every process on it has to see. Queues in PostgreSQL go by its own clock: there nothing hangs on it."""
        offset = clock_offset(self.told["made_at"])
        return {"HOLDFAST_CLOCK_OFFSET_S": offset, "HOLDFAST_DATA_FOLDER": str(self.folder)}

    def run(self, *arguments: str) -> Ended:
        """A command on it."""
        return Inside(self.folder.parent, self.url)(*arguments, stdin=b"", **self.env)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def installation(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OldInstallation:
    """One of each storage; also what a test opens in this process sees what it has to see."""
    unpack(request.param, tmp_path)
    url, blobs = f"sqlite:///{tmp_path}/data", None
    if request.param == "postgres":
        url, blobs = request.getfixturevalue("restored"), str(tmp_path / "collected")
    made = OldInstallation(url, tmp_path / "data", blobs, story.told_of(request.param))
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(scope="session")
def database(postgres: Cluster) -> str:
    """The address of a database; a new one for each test would take longer than the test."""
    return postgres.create_database("upgrade")


@pytest.fixture
def restored(database: str) -> str:
    """The same with what the dump has, and nothing else."""
    with psycopg.connect(database) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute("DROP SCHEMA IF EXISTS holdfast, holdfast_vault CASCADE")
        connection.execute(gzip.decompress((story.FIXTURES / "postgres.sql.gz").read_bytes()))
    return database


@pytest.fixture
async def broker(node: Node) -> AsyncIterator[Admin]:
    """The virtual host, empty: its name is in journals and starts."""
    async with Admin.open(node, story.VHOST) as admin:
        yield admin
