"""The collector as a process of its own, which ends when nothing is left to do.

On an embedded queue it is requester, producer and receiver in one, so that a kill ends all of it: it answers the
request itself if it comes. Started again at the same place it goes on where it was. Every upload is noted in a file.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

import holdfast
from holdfast.proof.process import python_argv
from tests.collect.producing import NOTIFY, PRODUCER, answer, cleaned, make_queues
from tests.support.forking import note

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
        return len((Path(self.folder) / "uploads").read_text().splitlines()) - TOTAL


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
        await cleaned(collector, place.transaction)


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
    """One line per part that is put, so that re-uploads can be counted after the process is gone."""
    from holdfast.engines.folder import FolderBlobs
    from holdfast.engines.objects import ObjectBlobs

    with ExitStack() as stack:
        for kind in (FolderBlobs, ObjectBlobs):

            async def put_all(self: Any, blobs: Any, real: Any = kind.put_all) -> Any:
                for blob in blobs:
                    note(folder / "uploads", blob.path.encode())
                return await real(self, blobs)

            stack.enter_context(patch.object(kind, "put_all", put_all))
        yield


if __name__ == "__main__":
    asyncio.run(play(msgspec.json.decode(sys.argv[1], type=Place)))
