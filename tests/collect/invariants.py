"""What must be true of a collected result, whatever was killed on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import apsw
import msgspec

import holdfast
from holdfast.core.states import TransactionState
from tests.collect.producing import body_of, notices, parked
from tests.collect.worker import SHAPE, TRANSACTION


async def check_folder(folder: Path, *, kills: int, uploads_max: int = 4, parked_max: int = 0) -> int:
    """Every blob right, one row per ordinal, few re-uploads, at least one notice and all equal; returns re-uploads."""
    url = f"sqlite:///{folder}/data"
    total = sum(SHAPE.values())
    async with holdfast.open(url) as queues:
        bodies = await notices(queues)
        assert len(bodies) >= 1
        assert len(set(bodies)) == 1, "notices differ"
        assert len(await parked(queues)) <= parked_max
        names = {queue.queue_name for queue in await queues.queues_list()}
        assert names == {"collector.dlq", "producer", "notify"}
        async with holdfast.Collector(url, queues=queues) as collector:
            found = await collector.find(TRANSACTION)
            assert (found.state, found.is_clean) == (TransactionState.COMPLETED, True)
            for name, count in SHAPE.items():
                got = [part.body async for part in collector.parts(TRANSACTION, name)]
                assert got == [body_of(name, ordinal) for ordinal in range(count)]
    notice = msgspec.json.decode(bodies[0])
    assert notice["parts_count"] == total == len(notice["parts"])
    manifest = (folder / "data/blobs" / notice["manifest"]["path"]).read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == notice["manifest"]["sha256"]
    rows = apsw.Connection(f"{folder}/data/collect/collect.db").execute("SELECT count(*) FROM parts").fetchall()
    assert rows == [(total,)], "one row per ordinal"
    files = [file for file in (folder / "data/blobs" / TRANSACTION).rglob("*") if file.is_file()]
    assert len(files) == total + 1, "nothing beside the parts and the manifest"
    uploads = [line for line in (folder / "uploads").read_text().splitlines() if "manifest-" not in line]
    again = len(uploads) - total
    assert 0 <= again <= uploads_max * kills, f"{again} re-uploads after {kills} kills"
    return again
