"""What is there to read: parts in order with their digests verified, gaps, progress."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from msgspec import Struct

from holdfast.core.collect import Part, Range, SeriesState, Transaction, digest, known_set, ranges
from holdfast.errors import StorageFailed
from holdfast.ports.blobs import Blobs
from holdfast.stores.collect import CollectStore

PAGE_COUNT_MAX = 500
RANGES_COUNT_MAX = 1_000


class StoredPart(Struct, frozen=True, kw_only=True):
    """One ordinal with its bytes."""

    series: str
    ordinal: int
    sha256: str
    body: bytes


class Gaps(Struct, frozen=True, kw_only=True):
    """What a series lacks; `is_open` while its count is not known: more may follow the last one stored."""

    series: str
    count: int | None
    stored_count: int
    missing: Sequence[Range]
    is_open: bool


async def read_part(blobs: Blobs, part: Part) -> bytes:
    """The bytes of a part. Raises StorageFailed when they are not those of the index."""
    async with aclosing(blobs.get(part.path)) as chunks:
        body = b"".join([chunk async for chunk in chunks])
    if digest(body) != part.sha256:
        raise StorageFailed(f"blob is damaged; '{part.path}' is not what was stored, restore it from a backup")
    return body


async def parts_in_order(index: CollectStore, blobs: Blobs, transaction: str, series: str) -> AsyncIterator[StoredPart]:
    """From ordinal 0 up to the first gap."""
    wanted = 0
    while page := await index.parts(transaction, series, first=wanted, count_max=PAGE_COUNT_MAX):
        for part in page:
            if part.ordinal != wanted:
                return
            body = await read_part(blobs, part)
            yield StoredPart(series=series, ordinal=wanted, sha256=part.sha256, body=body)
            wanted += 1


async def gaps_of(index: CollectStore, transaction: Transaction) -> list[Gaps]:
    """For each series of the set, and each that has come, what is missing."""
    stand = await index.stand(transaction.id)
    known = known_set(transaction.series, stand)
    found = []
    for name in sorted({*stand, *(known or ())}):
        series = stand.get(name) or SeriesState(series=name)
        stored: Sequence[Range] = ()
        if series.stored_count and not series.is_complete:
            stored = await index.stored(transaction.id, name, count_max=RANGES_COUNT_MAX)
        highest = stored[-1][1] + 1 if stored else 0
        missing: list[Range] = []
        if not series.is_complete:
            # Past the last range that was read nothing is known, unless all of them were.
            is_cut = len(stored) == RANGES_COUNT_MAX
            missing = ranges(stored, count=highest if is_cut or series.count is None else series.count)
        found.append(
            Gaps(
                series=name,
                count=series.count,
                stored_count=series.stored_count,
                missing=missing,
                is_open=series.count is None,
            )
        )
    return found
