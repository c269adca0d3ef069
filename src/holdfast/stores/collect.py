"""What the collector needs to survive a crash: which transactions there are, and which ordinals are stored.

A transaction has one owner at a time. Every write names the owner's fence: a number that rises with each change of
owner, so that a former owner who wakes up late changes nothing and gets LeaseLost. Such a write begins with an update
of the transaction's row under the fence, which also keeps two of them apart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from holdfast.core.collect import Header, Part, Range, SeriesState, Transaction
from holdfast.core.states import TransactionState
from holdfast.errors import LeaseLost
from holdfast.ports.database import Database, Row, Tx
from holdfast.stores import reader, run, run_many, statement

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode_series = msgspec.json.Decoder(tuple[str, ...]).decode


class LedgerLine(Struct, frozen=True):
    """What was done to a transaction, when and why."""

    at_us: int
    transaction: str
    action: str
    reason: str = ""
    detail: str = ""


class PartsStored(Struct, frozen=True, kw_only=True):
    """What became of parts: for each given one, in order, the part that counts; and how the series stand now."""

    winners: Sequence[Part]
    stand: Mapping[str, SeriesState]


class CollectStore:
    """State and index in one database. Every method raises StorageFailed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        """Raises CannotStart."""
        await asyncio.to_thread(self._database.open)

    async def close(self) -> None:
        """Let go of it."""
        await asyncio.to_thread(self._database.close)

    async def _read(self, name: str, **values: Any) -> list[Row]:
        return await self._database.read(lambda tx: run(tx, name, **values))

    async def _change(self, name: str, **values: Any) -> list[Row]:
        return await self._database.write(lambda tx: run(tx, name, **values))

    async def _write(self, transaction: str, fence: int, work: Callable[[Tx], T]) -> T:
        """One commit of the owner. Whether it still owns is asked first and answered along with the work."""

        def owned_by_us(tx: Tx) -> T:
            owned = tx.later(statement("collect_hold", tx.dialect), transaction=transaction, fence=fence)
            result = work(tx)
            if not owned():
                raise _lost(transaction)
            return result

        return await self._database.write(owned_by_us)

    # --- transactions: which there are, and where each stands ---------------------------------------------------

    async def create(self, transaction: Transaction, request: bytes, *, lease_us: int) -> Transaction:
        """Insert it with its owner and a first fence, or return the one that has this id already."""

        def work(tx: Tx) -> list[Row]:
            run(
                tx,
                "collect_insert",
                transaction=transaction.id,
                state=transaction.state.value,
                producer=transaction.producer,
                notify=transaction.notify,
                series=None if transaction.series is None else _encode(transaction.series).decode(),
                owner=transaction.owner,
                lease_us=lease_us,
                request=request,
            )
            return run(tx, "collect_find", transaction=transaction.id)

        return _transaction((await self._database.write(work))[0])

    async def find(self, transaction: str) -> Transaction | None:
        """One transaction."""
        rows = await self._read("collect_find", transaction=transaction)
        return _transaction(rows[0]) if rows else None

    async def request(self, transaction: str) -> bytes:
        """The body of its request; empty when it is gone."""
        rows = await self._read("collect_find_request", transaction=transaction)
        return bytes(rows[0][0]) if rows else b""

    async def page(self, *, after: str, unfinished: bool = False, count_max: int) -> Sequence[Transaction]:
        """Transactions by id, after the given one; only unfinished ones, which something is left to do for."""
        name = "collect_list_unfinished" if unfinished else "collect_list"
        return [_transaction(row) for row in await self._read(name, after=after, count_max=count_max)]

    async def take(self, *, owner: str, lease_us: int, count_max: int) -> Sequence[Transaction]:
        """Own some that are unfinished and that nobody owns, or whose owner is past its lease; the fence rises.

        Where the store is not shared, all others' leases count as run out: their process is gone.
        """
        given = {"owner": owner, "lease_us": lease_us, "count_max": count_max}
        rows = await self._database.write(lambda tx: run(tx, "collect_take", is_shared=int(tx.dialect.shared), **given))
        return [_transaction(row) for row in rows]

    async def seize(self, transaction: str, *, owner: str, lease_us: int) -> Transaction | None:
        """Own it whoever owns it; the fence rises."""
        rows = await self._change("collect_seize", transaction=transaction, owner=owner, lease_us=lease_us)
        return _transaction(rows[0]) if rows else None

    async def extend(self, fences: Mapping[str, int], *, lease_us: int) -> Sequence[str]:
        """Heartbeat: renew the leases; returns the ids that are still ours."""

        def is_ours(tx: Tx, name: str) -> bool:
            return bool(run(tx, "collect_extend", transaction=name, fence=fences[name], lease_us=lease_us))

        return await self._database.write(lambda tx: [name for name in fences if is_ours(tx, name)])

    async def give_back(self, transaction: str, *, fence: int) -> None:
        """End the lease, so that another may take it at once. Nothing happens when it is not ours."""
        await self._change("collect_give_back", transaction=transaction, fence=fence)

    async def move(
        self, transaction: str, *, fence: int, source: TransactionState, target: TransactionState, reason: str = ""
    ) -> Transaction:
        """One transition, durable when it returns. An end is also written to the ledger. Raises LeaseLost."""

        def work(tx: Tx) -> Transaction:
            given = {"transaction": transaction, "reason": reason}
            rows = run(tx, "collect_move", fence=fence, source=source.value, target=target.value, **given)
            if not rows:
                raise _lost(transaction)
            if target.is_end:
                run(tx, "collect_insert_ledger", action=target.value, detail=source.value, **given)
            return _transaction(rows[0])

        return await self._database.write(work)

    async def set_clean(self, transaction: str, *, fence: int) -> None:
        """Nothing is left to do for it. Raises LeaseLost."""
        if not await self._change("collect_set_clean", transaction=transaction, fence=fence, nothing=b""):
            raise _lost(transaction)

    async def idle(self, *, for_us: int, count_max: int) -> Sequence[str]:
        """Unfinished transactions without progress for so long."""
        return [row[0] for row in await self._read("collect_select_idle", for_us=for_us, count_max=count_max)]

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerLine]:
        """The ledger from its beginning, `after` lines left out."""
        return [LedgerLine(*row) for row in await self._read("collect_select_ledger", after=after, count_max=count_max)]

    # --- index: which ordinals are stored -----------------------------------------------------------------------

    async def put_parts(self, transaction: str, parts: Sequence[Part], *, fence: int) -> PartsStored:
        """Insert each part unless its ordinal is there: atomic, one commit. Counts and progress go along.

        The path of a part that lost to other bytes is noted for removal in the same commit. Raises LeaseLost.
        """

        def work(tx: Tx) -> tuple[Sequence[Part], Callable[[], list[Row]]]:
            given = [astuple(part) for part in parts]
            rows = run(tx, "collect_insert_parts", transaction=transaction, given=_encode(given).decode())
            new = {(row[0], row[1]): row[2] for row in rows}
            others = [part for part in parts if new.get((part.series, part.ordinal)) != part.path]
            known = _find_parts(tx, transaction, [(part.series, part.ordinal) for part in others]) if others else {}
            losers = [part for part in others if known[part.series, part.ordinal].path != part.path]
            _note_strays(tx, transaction, [part.path for part in losers])
            counts, sizes = Counter[str](), Counter[str]()
            for series, _, _, size_bytes in rows:
                counts[series] += 1
                sizes[series] += size_bytes
            for series, count in counts.items():
                _add_stored(tx, transaction, series, count, sizes[series])
            # How the series stand is answered along with the commit.
            return [known.get((part.series, part.ordinal), part) for part in parts], _series_rows(tx, transaction)

        winners, rows = await self._write(transaction, fence, work)
        return PartsStored(winners=winners, stand=_stand(rows()))

    async def put_header(self, transaction: str, header: Header, *, fence: int) -> Mapping[str, SeriesState]:
        """Keep a series' count; returns how the series stand now. Raises LeaseLost."""

        def work(tx: Tx) -> Callable[[], list[Row]]:
            given = {"series": header.series, "count": header.count, "series_count": header.series_count}
            run(tx, "collect_put_header", transaction=transaction, **given)
            return _series_rows(tx, transaction)

        return _stand((await self._write(transaction, fence, work))())

    async def find_parts(self, transaction: str, keys: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Part]:
        """Those of the ordinals that are there."""
        return await self._database.read(lambda tx: _find_parts(tx, transaction, keys))

    async def stand(self, transaction: str) -> Mapping[str, SeriesState]:
        """How every series stands that has a header or a part; as of the last commit."""
        return _stand(await self._read("collect_select_series", transaction=transaction))

    async def count(self, transaction: str) -> Mapping[str, tuple[int, int, int]]:
        """For each series the number of rows, their bytes, and the highest ordinal; counted row by row."""
        rows = await self._read("collect_count_parts", transaction=transaction)
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    async def parts(self, transaction: str, series: str, *, first: int, count_max: int) -> Sequence[Part]:
        """Parts by ordinal, from `first` on."""
        given = {"transaction": transaction, "series": series, "first": first, "count_max": count_max}
        return [Part(*row) for row in await self._read("collect_select_parts", **given)]

    async def stored(self, transaction: str, series: str, *, count_max: int) -> Sequence[Range]:
        """The ordinals that are there, as ranges in order; the first `count_max` of them."""
        rows = await self._read("collect_select_ranges", transaction=transaction, series=series, count_max=count_max)
        return [(row[0], row[1]) for row in rows]

    async def remove(self, transaction: str, parts: Sequence[Part], *, fence: int) -> None:
        """Take parts out again and note their paths for removal. Raises LeaseLost."""

        def work(tx: Tx) -> None:
            for part in parts:
                given = {"series": part.series, "ordinal": part.ordinal, "sha256": part.sha256}
                if run(tx, "collect_delete_part", transaction=transaction, **given):
                    _add_stored(tx, transaction, part.series, -1, -part.size_bytes)
            _note_strays(tx, transaction, [part.path for part in parts])
            for series in {part.series for part in parts}:
                run(tx, "collect_drop_series", transaction=transaction, series=series)

        await self._write(transaction, fence, work)

    async def remove_header(self, transaction: str, series: str, *, fence: int) -> None:
        """Take a series' count out again. Raises LeaseLost."""

        def work(tx: Tx) -> None:
            run(tx, "collect_remove_header", transaction=transaction, series=series)
            run(tx, "collect_drop_series", transaction=transaction, series=series)

        await self._write(transaction, fence, work)

    async def note_stray(self, transaction: str, paths: Sequence[str], *, fence: int) -> None:
        """Note blobs for removal. Raises LeaseLost."""
        await self._write(transaction, fence, lambda tx: _note_strays(tx, transaction, paths))

    async def strays(self, transaction: str) -> Sequence[str]:
        """The noted blobs that no row of the index names."""
        return [row[0] for row in await self._read("collect_select_strays", transaction=transaction)]

    async def forget(self, transaction: str, *, fence: int, count_max: int) -> int:
        """Delete rows of the index and notes; returns how many, 0 when none is left. Raises LeaseLost."""

        def work(tx: Tx) -> int:
            count = len(run(tx, "collect_delete_parts", transaction=transaction, count_max=count_max))
            if not count:
                run(tx, "collect_delete_all_series", transaction=transaction)
                run(tx, "collect_delete_strays", transaction=transaction)
            return count

        return await self._write(transaction, fence, work)


def _lost(transaction: str) -> LeaseLost:
    return LeaseLost(f"transaction is not ours; '{transaction}' has another owner or state, nothing was written")


def _find_parts(tx: Tx, transaction: str, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Part]:
    rows = run(tx, "collect_find_parts", transaction=transaction, given=_encode(keys).decode())
    return {(row[0], row[1]): Part(*row) for row in rows if row[2] is not None}


def _series_rows(tx: Tx, transaction: str) -> Callable[[], list[Row]]:
    return tx.later(statement("collect_select_series", tx.dialect), transaction=transaction)


def _stand(rows: Sequence[Row]) -> dict[str, SeriesState]:
    return {row[0]: SeriesState(*row) for row in rows}


def _add_stored(tx: Tx, transaction: str, series: str, count: int, size_bytes: int) -> None:
    run(tx, "collect_add_stored", transaction=transaction, series=series, count=count, size_bytes=size_bytes)


def _note_strays(tx: Tx, transaction: str, paths: Sequence[str]) -> None:
    if paths:
        run_many(tx, "collect_insert_stray", [{"transaction": transaction, "path": path} for path in paths])


_transaction = reader(
    Transaction, state=TransactionState, series=lambda text: text and _decode_series(text), is_clean=bool
)
