"""`holdfast recover … | head`: a run whose reader goes away in the middle goes on, quietly, to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.recover.dead_letter_queue import DeadLetterQueue, letter
from tests.support.command import PROGRAM
from tests.support.eventually import eventually

pytestmark = pytest.mark.rabbitmq

COUNT = 3_000
READER_GONE, PARTLY_DONE = 141, 3


def start(dlq: DeadLetterQueue, other: Path, stream: str, writer: int) -> subprocess.Popen[bytes]:
    """With one stream to a pipe, and the other to a file."""
    arguments = ("recover", dlq.url, dlq.name, "--routes", str(dlq.routes), "--rate", "1500/s")
    with other.open("wb") as file:
        streams = {"stdout": file.fileno(), "stderr": file.fileno(), stream: writer}
        return subprocess.Popen(
            [str(PROGRAM), *arguments],
            cwd=dlq.folder,
            env=dlq.command().environment(),
            stdin=subprocess.DEVNULL,
            stdout=streams["stdout"],
            stderr=streams["stderr"],
        )


@pytest.mark.parametrize(("stream", "code"), [("stdout", READER_GONE), ("stderr", PARTLY_DONE)])
async def test_it_goes_on_to_its_end(dlq: DeadLetterQueue, stream: str, code: int) -> None:
    await dlq.fill(letter(n, kind="Refused" if n % 10 == 0 else "CollectionScan") for n in range(COUNT))
    reader, writer = os.pipe()
    other = dlq.folder / "other"
    process = start(dlq, other, stream, writer)
    os.close(writer)
    with process:
        try:
            await eventually(lambda: dlq.admin.count("collection.scan"))
            os.close(reader)
            assert await asyncio.to_thread(process.wait, 30.0) == code, other.read_text()
        finally:
            process.kill()
    assert "Traceback" not in other.read_text()
    assert await dlq.admin.count("collection.scan") == COUNT * 9 // 10
    await dlq.check()
