"""A put that is killed at any of its crash points leaves the blob whole or not at all, and can be repeated."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from holdfast.engines.folder import open_folder_blobs
from holdfast.proof import VARIABLE, crash_points
from holdfast.proof.process import child_process

CONTENT = bytes(range(256)) * 4096
POINTS = sorted(name for name in crash_points() if name.startswith("blobs."))

PUT = """
import asyncio, sys
from pathlib import Path
from holdfast.engines.folder import open_folder_blobs

async def stream(content):
    yield content

async def main():
    given = stream if sys.argv[2] == "stream" else bytes
    async with open_folder_blobs(Path(sys.argv[1])) as blobs:
        await blobs.put("before", given(b"kept"))
        print("before is safe", flush=True)
        await blobs.put("deep/path/blob", given(bytes(range(256)) * 4096))
        print("all is safe", flush=True)

asyncio.run(main())
"""


def test_the_points_are_those_that_were_promised() -> None:
    assert POINTS == ["blobs.after_fsync", "blobs.after_rename", "blobs.after_write"]


@pytest.mark.parametrize("given", ["whole", "stream"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_leaves_a_blob_whole_or_not_at_all(tmp_path: Path, point: str, given: str) -> None:
    argv = [sys.executable, "-c", PUT, str(tmp_path), given]
    async with child_process(argv, env={VARIABLE: f"{point}:2"}) as child:
        assert await child.wait() == -signal.SIGKILL, child.stderr.tail
        assert child.stdout.lines == ["before is safe"]
    assert (tmp_path / "before").read_bytes() == b"kept"
    leftovers = list((tmp_path / ".partial").iterdir()) if (tmp_path / ".partial").exists() else []
    assert len(leftovers) == (1 if given == "stream" else 0), "what came whole has no name before it is done"
    async with open_folder_blobs(tmp_path) as blobs:
        assert not any(leftover.exists() for leftover in leftovers)
        found = await blobs.stat("deep/path/blob")
        if point == "blobs.after_rename":
            assert found is not None
        else:
            assert found is None
        blob = await blobs.put("deep/path/blob", CONTENT)
        assert blob.created == (found is None)
        assert b"".join([chunk async for chunk in blobs.get("deep/path/blob")]) == CONTENT
