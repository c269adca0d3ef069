"""The collector as a process of its own: requester, producer and receiver in one, so that a kill ends all of it.

It starts the transaction, answers the request itself if it comes, collects, and ends when nothing is left to do.
Started again with the same folder it goes on where it was. Every upload is noted in a file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import holdfast
from tests.collect.producing import NOTIFY, PRODUCER, answer, make_queues

TRANSACTION = "t-1"
SHAPE = {"rows": 30, "lines": 7, "none": 0}
LEASE_TIMEOUT = "500ms"


async def play(folder: Path) -> None:
    """One life of the process."""
    url = f"sqlite:///{folder}/data"
    with noting_uploads(folder):
        await play_on(url, folder)


async def play_on(url: str, folder: Path) -> None:
    async with holdfast.open(url) as queues:
        await make_queues(queues)
        async with holdfast.Collector(url, queues=queues, uploads_max=4, lease_timeout=LEASE_TIMEOUT) as collector:
            answering = asyncio.create_task(produce_once(queues, folder))
            await collector.start(
                b"all of it", producer=PRODUCER, notify=NOTIFY, transaction_id=TRANSACTION, series=list(SHAPE)
            )
            await collector.service.wait_clean(TRANSACTION, timeout_s=60)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


async def produce_once(queues: holdfast.Queues, folder: Path) -> None:
    """The producer: it knows a repeated request by its id and does not answer it twice."""
    async for lease in queues.consume(PRODUCER):
        done = folder / "answered"
        if not done.exists():
            await answer(queues, TRANSACTION, SHAPE)
            done.touch()
        await lease.complete()


@contextmanager
def noting_uploads(folder: Path) -> Iterator[None]:
    """One line per blob that is put, so that re-uploads can be counted after the process is gone."""
    from holdfast.engines.folder.blobs import FolderBlobs
    from holdfast.engines.objects.blobs import ObjectBlobs

    def note(path: str) -> None:
        file = os.open(folder / "uploads", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, path.encode() + b"\n")
        os.close(file)

    real_folder, real_objects = FolderBlobs.put_all, ObjectBlobs.put

    async def put_all(self: Any, blobs: Any) -> Any:
        for blob in blobs:
            note(blob.path)
        return await real_folder(self, blobs)

    async def put(self: Any, path: str, content: Any, **more: Any) -> Any:
        note(path)
        return await real_objects(self, path, content, **more)

    with patch.object(FolderBlobs, "put_all", put_all), patch.object(ObjectBlobs, "put", put):
        yield


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1])))
