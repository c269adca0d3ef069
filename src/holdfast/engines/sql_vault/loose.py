"""Blobs that no letter has: put and not yet claimed, or left behind by retention. Each is deleted once, and never one
that a letter has: a claim and a deletion exclude each other by the row.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engines.sql_vault.books import LedgerWriter
from holdfast.engines.sql_vault.database import Tx, statement
from holdfast.errors import StorageFailed


class SqlUnclaimedBlobs:
    """Loose blobs in a SQL database."""

    def __init__(self, books: LedgerWriter) -> None:
        self._books = books

    async def announce(self, blobs: Sequence[str], *, for_s: float) -> None:
        due_at = self._books.now_us() + round(for_s * 1_000_000)
        values = [{"blob": blob, "due_at": due_at} for blob in blobs]
        await self._books.database.write(lambda work: work.many(statement("insert_loose_blob", work.dialect), values))

    async def doom(self, *, count_max: int) -> list[str]:
        values = {"now": self._books.now_us(), "count_max": count_max}
        rows = await self._books.database.write(lambda work: self._books.run(work, "doom_loose_blobs", **values))
        return [row[0] for row in rows]

    async def forget(self, blobs: Sequence[str]) -> None:
        values = [{"blob": blob} for blob in blobs]
        await self._books.database.write(lambda work: work.many(statement("delete_loose_blob", work.dialect), values))


def claim(books: LedgerWriter, work: Tx, blob: str) -> None:
    """A letter has it now. Raises StorageFailed when it took too long: it is being deleted, or is."""
    if not books.run(work, "claim_loose_blob", blob=blob):
        raise StorageFailed(f"storage failed; the blob {blob} was not claimed in time and is deleted, put it again")


def free(books: LedgerWriter, work: Tx, blobs: Sequence[str]) -> None:
    """The letters that had them are gone; those that another letter has stay."""
    for blob in blobs:
        books.run(work, "free_blob", blob=blob, due_at=0)
