"""`holdfast recover … | head`: a run whose reader goes away in the middle goes on, quietly, to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.recover.world import World, letter
from tests.support.command import PROGRAM
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

COUNT = 3_000
READER_GONE, PARTLY_DONE = 141, 3


def start(world: World, other: Path, stream: str, writer: int) -> subprocess.Popen[bytes]:
    """With one stream to a pipe, and the other to a file."""
    arguments = ("recover", world.url, world.dlq, "--routes", str(world.routes), "--rate", "1500/s")
    with other.open("wb") as file:
        streams = {"stdout": file.fileno(), "stderr": file.fileno(), stream: writer}
        return subprocess.Popen(
            [str(PROGRAM), *arguments],
            cwd=world.folder,
            env=world.command().environment(),
            stdin=subprocess.DEVNULL,
            stdout=streams["stdout"],
            stderr=streams["stderr"],
        )


@pytest.mark.parametrize(("stream", "code"), [("stdout", READER_GONE), ("stderr", PARTLY_DONE)])
async def test_it_goes_on_to_its_end(world: World, stream: str, code: int) -> None:
    await world.fill(letter(n, kind="Refused" if n % 10 == 0 else "CollectionScan") for n in range(COUNT))
    reader, writer = os.pipe()
    other = world.folder / "other"
    process = start(world, other, stream, writer)
    os.close(writer)
    with process:
        try:
            await eventually(lambda: world.admin.count("collection.scan"))
            os.close(reader)
            assert await asyncio.to_thread(process.wait, 30.0) == code, other.read_text()
        finally:
            process.kill()
    assert "Traceback" not in other.read_text()
    assert await world.admin.count("collection.scan") == COUNT * 9 // 10
    await world.check()
