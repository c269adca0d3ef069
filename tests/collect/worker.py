"""The collector as a process of its own, which ends when nothing is left to do.

On an embedded queue it is requester, producer and receiver in one, so that a kill ends all of it: it answers the
request itself if it comes. Started again at the same place it goes on where it was. Every upload is noted in a file.
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

import msgspec

import holdfast
from holdfast.proof.process import python_argv
from tests.collect.producing import NOTIFY, PRODUCER, answer, make_queues

TRANSACTION = "t-1"
SHAPE = {"rows": 30, "lines": 7, "none": 0}
TOTAL = sum(SHAPE.values())
UPLOADS_MAX = 4
LEASE_TIMEOUT = "500ms"


class Place(msgspec.Struct, frozen=True):
    """Where one transaction happens. Without a broker it is an embedded queue, with its blobs beside it."""

    url: str
    blobs: str
    folder: str
    broker: str = ""
    transaction: str = TRANSACTION

    @classmethod
    def embedded(cls, folder: Path | str) -> Place:
        """All of it in a folder."""
        return cls(f"sqlite:///{folder}/data", f"{folder}/data/blobs", str(folder))

    @property
    def argv(self) -> list[str]:
        """Of a process that collects here."""
        return python_argv("tests.collect.worker", msgspec.json.encode(self).decode())

    @property
    def again(self) -> int:
        """How many parts were uploaded more than once, or too often."""
        uploads = (Path(self.folder) / "uploads").read_text().splitlines()
        return len([line for line in uploads if "manifest-" not in line]) - TOTAL


async def play(place: Place) -> None:
    """One life of the process."""
    with noting_uploads(Path(place.folder)):
        if place.broker:
            await collect(place, broker=place.broker)
            return
        async with holdfast.open(place.url) as queues:
            await make_queues(queues)
            answering = asyncio.create_task(produce_once(queues, Path(place.folder)))
            await collect(place, queues=queues)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


async def collect(place: Place, **how: Any) -> None:
    made = holdfast.Collector(place.url, blobs=place.blobs, uploads_max=UPLOADS_MAX, lease_timeout=LEASE_TIMEOUT, **how)
    async with made as collector:
        await collector.start(
            b"all of it", producer=PRODUCER, notify=NOTIFY, transaction_id=place.transaction, series=list(SHAPE)
        )
        await collector.service.wait_clean(place.transaction, timeout_s=60)


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
    asyncio.run(play(msgspec.json.decode(sys.argv[1], type=Place)))
