"""State and ordinal index of collected results in PostgreSQL, shared by several collectors.

Leases and moments are by the database's clock, so that collectors whose clocks differ agree on who owns what.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from holdfast.core.collect import Header, Part, Range, SeriesState, Transaction
from holdfast.core.states import TransactionState
from holdfast.engines.postgres.connection import Pool, Rows, bigints, migrate, place_of, texts
from holdfast.engines.postgres.transaction import PipelineTransaction as Commit
from holdfast.engines.postgres.transaction import read
from holdfast.engines.postgres.transaction import transaction as one_commit
from holdfast.ports.collect import LeaseLost, LedgerLine, PartsStored

CONNECTIONS_COUNT_MAX = 4


class PostgresCollectStore:
    """See `holdfast.ports.collect`."""

    shared = True

    def __init__(self, url: str, *, connections_max: int = CONNECTIONS_COUNT_MAX) -> None:
        self._url = url
        self._pool = Pool(url, place=place_of(url), connections_max=connections_max)

    async def open(self) -> None:
        await migrate(self._url, kind="collect")
        self._pool.open()

    async def close(self) -> None:
        await self._pool.close()

    async def _read(self, statement: str, *values: int | str | bytes | None) -> Rows:
        return await read(self._pool, statement, *values)

    async def _write(self, statement: str, *values: int | str | bytes | None) -> Rows:
        async with one_commit(self._pool, now_us=None) as work:
            place = work.put(statement, *values)
        return work.rows(place)

    @asynccontextmanager
    async def _held(self, transaction: str, fence: int) -> AsyncIterator[Commit]:
        """One commit under the fence. The row of the transaction is locked until its end."""
        async with one_commit(self._pool, now_us=None) as work:
            held = work.put("collect_hold", transaction, fence)
            yield work
            await work.flush()
            if not work.rows(held):
                raise _lost(transaction)

    # --- transactions -----------------------------------------------------------------------------------------

    async def create(self, transaction: Transaction, request: bytes, *, lease_us: int) -> Transaction:
        series = None if transaction.series is None else msgspec.json.encode(transaction.series).decode()
        given = (transaction.id, transaction.state.value, transaction.producer, transaction.notify, series)
        async with one_commit(self._pool, now_us=None) as work:
            work.put("collect_insert", *given, transaction.owner, lease_us, request)
            found = work.put("collect_find", transaction.id)
        return _transaction(work.rows(found)[0])

    async def find(self, transaction: str) -> Transaction | None:
        rows = await self._read("collect_find", transaction)
        return _transaction(rows[0]) if rows else None

    async def request(self, transaction: str) -> bytes:
        rows = await self._read("collect_find_request", transaction)
        return bytes(rows[0][0]) if rows else b""

    async def page(self, *, after: str, count_max: int) -> Sequence[Transaction]:
        return [_transaction(row) for row in await self._read("collect_list", after, count_max)]

    async def take(self, *, owner: str, lease_us: int, count_max: int) -> Sequence[Transaction]:
        return [_transaction(row) for row in await self._write("collect_take", owner, lease_us, count_max)]

    async def seize(self, transaction: str, *, owner: str, lease_us: int) -> Transaction | None:
        rows = await self._write("collect_seize", transaction, owner, lease_us)
        return _transaction(rows[0]) if rows else None

    async def extend(self, fences: Mapping[str, int], *, lease_us: int) -> Sequence[str]:
        rows = await self._write("collect_extend", texts(list(fences)), bigints(list(fences.values())), lease_us)
        return [row[0] for row in rows]

    async def give_back(self, transaction: str, *, fence: int) -> None:
        await self._write("collect_give_back", transaction, fence)

    async def move(
        self, transaction: str, *, fence: int, source: TransactionState, target: TransactionState, reason: str = ""
    ) -> Transaction:
        async with one_commit(self._pool, now_us=None) as work:
            rows = await work.ask("collect_move", transaction, fence, source.value, target.value, reason)
            if not rows:
                raise _lost(transaction)
            if target.is_end:
                work.put("collect_insert_ledger", transaction, target.value, reason, source.value)
        return _transaction(rows[0])

    async def set_clean(self, transaction: str, *, fence: int) -> None:
        if not await self._write("collect_set_clean", transaction, fence):
            raise _lost(transaction)

    async def idle(self, *, for_us: int, count_max: int) -> Sequence[str]:
        return [row[0] for row in await self._read("collect_select_idle", for_us, count_max)]

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerLine]:
        return [
            LedgerLine(at_us=row[0], transaction=row[1], action=row[2], reason=row[3], detail=row[4])
            for row in await self._read("collect_select_ledger", after, count_max)
        ]

    # --- index ------------------------------------------------------------------------------------------------

    async def put_parts(self, transaction: str, parts: Sequence[Part], *, fence: int) -> PartsStored:
        series, ordinals = texts([part.series for part in parts]), bigints([part.ordinal for part in parts])
        async with self._held(transaction, fence) as work:
            work.put(
                "collect_insert_parts",
                *(transaction, series, ordinals, texts([part.path for part in parts])),
                *(bigints([part.size_bytes for part in parts]), texts([part.sha256 for part in parts])),
            )
            found = work.put("collect_find_parts", transaction, series, ordinals)
            stand = work.put("collect_select_series", transaction)
            await work.flush()
            winners = {(row[0], row[1]): _part(row) for row in work.rows(found)}
            chosen = [winners.get((part.series, part.ordinal), part) for part in parts]
            losers = [part.path for part, winner in zip(parts, chosen, strict=True) if winner.path != part.path]
            if losers:
                work.put("collect_insert_strays", transaction, texts(losers))
        return PartsStored(winners=chosen, stand=_stand(work.rows(stand)))

    async def put_header(self, transaction: str, header: Header, *, fence: int) -> Mapping[str, SeriesState]:
        async with self._held(transaction, fence) as work:
            work.put("collect_put_header", transaction, header.series, header.count, header.series_count)
            stand = work.put("collect_select_series", transaction)
        return _stand(work.rows(stand))

    async def find_parts(self, transaction: str, keys: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Part]:
        series, ordinals = texts([key[0] for key in keys]), bigints([key[1] for key in keys])
        rows = await self._read("collect_find_parts", transaction, series, ordinals)
        return {(row[0], row[1]): _part(row) for row in rows}

    async def stand(self, transaction: str) -> Mapping[str, SeriesState]:
        return _stand(await self._read("collect_select_series", transaction))

    async def count(self, transaction: str) -> Mapping[str, tuple[int, int, int]]:
        rows = await self._read("collect_count_parts", transaction)
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    async def parts(self, transaction: str, series: str, *, first: int, count_max: int) -> Sequence[Part]:
        return [_part(row) for row in await self._read("collect_select_parts", transaction, series, first, count_max)]

    async def stored(self, transaction: str, series: str, *, count_max: int) -> Sequence[Range]:
        return [(row[0], row[1]) for row in await self._read("collect_select_ranges", transaction, series, count_max)]

    async def remove(self, transaction: str, parts: Sequence[Part], *, fence: int) -> None:
        async with self._held(transaction, fence) as work:
            for part in parts:
                work.put("collect_delete_part", transaction, part.series, part.ordinal, part.sha256)
            work.put("collect_insert_strays", transaction, texts([part.path for part in parts]))
            work.put("collect_drop_series", transaction, texts([part.series for part in parts]))

    async def remove_header(self, transaction: str, series: str, *, fence: int) -> None:
        async with self._held(transaction, fence) as work:
            work.put("collect_remove_header", transaction, series)
            work.put("collect_drop_series", transaction, texts([series]))

    async def note_stray(self, transaction: str, paths: Sequence[str], *, fence: int) -> None:
        async with self._held(transaction, fence) as work:
            work.put("collect_insert_strays", transaction, texts(list(paths)))

    async def strays(self, transaction: str) -> Sequence[str]:
        return [row[0] for row in await self._read("collect_select_strays", transaction)]

    async def forget(self, transaction: str, *, fence: int, count_max: int) -> int:
        async with self._held(transaction, fence) as work:
            count = len(await work.ask("collect_delete_parts", transaction, count_max))
            if not count:
                work.put("collect_delete_all_series", transaction)
                work.put("collect_delete_strays", transaction)
        return count


def _lost(transaction: str) -> LeaseLost:
    return LeaseLost(f"transaction is not ours; '{transaction}' has another owner or state, nothing was written")


def _transaction(row: tuple[Any, ...]) -> Transaction:
    return Transaction(
        id=row[0],
        state=TransactionState(row[1]),
        producer=row[2],
        notify=row[3],
        series=None if row[4] is None else tuple(msgspec.json.decode(row[4])),
        reason=row[5],
        created_at_us=row[6],
        updated_at_us=row[7],
        progress_at_us=row[8],
        owner=row[9],
        fence=row[10],
        is_clean=bool(row[11]),
    )


def _part(row: tuple[Any, ...]) -> Part:
    return Part(series=row[0], ordinal=row[1], path=row[2], size_bytes=row[3], sha256=row[4])


def _stand(rows: Rows) -> dict[str, SeriesState]:
    return {
        row[0]: SeriesState(series=row[0], count=row[1], series_count=row[2], stored_count=row[3], stored_bytes=row[4])
        for row in rows
    }
