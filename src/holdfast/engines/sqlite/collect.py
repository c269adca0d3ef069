"""State and ordinal index of collected results in one SQLite file, of this process alone (an OS lock on its folder)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from holdfast.core.collect import Header, Part, Range, SeriesState, Transaction
from holdfast.core.states import TransactionState
from holdfast.engines.sqlite.connection import SQL, fetch_all, fetch_one, open_writer, translated
from holdfast.engines.sqlite.connection import transaction as one_commit
from holdfast.engines.sqlite.storage import FolderLock
from holdfast.errors import CannotStart, HoldfastError, StorageFailed
from holdfast.ports.clock import Clock
from holdfast.ports.collect import LeaseLost, LedgerLine, PartsStored

T = TypeVar("T")

#: Ordinals come nearly in order and are written once: more would only grow with the result.
CACHE_KIB = 1_024


class SqliteCollectStore:
    """See `holdfast.ports.collect`. One thread writes; a batch is one commit."""

    shared = False

    def __init__(self, folder: Path, *, clock: Clock) -> None:
        self._path = folder / "collect.db"
        self._folder = FolderLock(folder)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._lock = threading.Lock()
        self._db: apsw.Connection | None = None

    async def open(self) -> None:
        self._folder.take()
        try:
            self._db = open_writer(self._path, kind="collect", create=not self._path.exists())
            self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}").fetchall()
        except HoldfastError as error:
            self._folder.let_go()
            raise CannotStart(f"collector cannot be opened; '{self._path}': {error.message}") from error

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._db is not None:
            self._db.close()
            self._db = None
        self._folder.let_go()

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        def run() -> T:
            with self._lock, translated(self._path):
                if self._db is None:
                    raise StorageFailed("storage failed; the collector is closed")
                return work(self._db)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def _write(self, work: Callable[[apsw.Connection], T]) -> T:
        def run(db: apsw.Connection) -> T:
            with one_commit(db):
                return work(db)

        return await self._read(run)

    # --- transactions -----------------------------------------------------------------------------------------

    async def create(self, transaction: Transaction, request: bytes, *, lease_us: int) -> Transaction:
        def work(db: apsw.Connection) -> Transaction:
            now_us = self._clock.now_us()
            series = None if transaction.series is None else msgspec.json.encode(transaction.series).decode()
            given = (transaction.id, transaction.state.value, transaction.producer, transaction.notify, series, now_us)
            db.execute(SQL["collect_insert"], (*given, transaction.owner, now_us + lease_us, request))
            return _transaction(fetch_one(db, "collect_find", (transaction.id,)))

        return await self._write(work)

    async def find(self, transaction: str) -> Transaction | None:
        row = await self._read(lambda db: fetch_one(db, "collect_find", (transaction,)))
        return _transaction(row) if row else None

    async def request(self, transaction: str) -> bytes:
        row = await self._read(lambda db: fetch_one(db, "collect_find_request", (transaction,)))
        return bytes(row[0]) if row else b""

    async def page(self, *, after: str, count_max: int) -> Sequence[Transaction]:
        rows = await self._read(lambda db: fetch_all(db, "collect_list", (after, count_max)))
        return [_transaction(row) for row in rows]

    async def take(self, *, owner: str, lease_us: int, count_max: int) -> Sequence[Transaction]:
        deadline = self._clock.now_us() + lease_us
        rows = await self._write(lambda db: fetch_all(db, "collect_take", (owner, deadline, count_max)))
        return [_transaction(row) for row in rows]

    async def seize(self, transaction: str, *, owner: str, lease_us: int) -> Transaction | None:
        deadline = self._clock.now_us() + lease_us
        rows = await self._write(lambda db: fetch_all(db, "collect_seize", (transaction, owner, deadline)))
        return _transaction(rows[0]) if rows else None

    async def extend(self, fences: Mapping[str, int], *, lease_us: int) -> Sequence[str]:
        deadline = self._clock.now_us() + lease_us

        def work(db: apsw.Connection) -> Sequence[str]:
            return [name for name, fence in fences.items() if fetch_all(db, "collect_extend", (name, fence, deadline))]

        return await self._write(work)

    async def give_back(self, transaction: str, *, fence: int) -> None:
        await self._write(lambda db: db.execute(SQL["collect_give_back"], (transaction, fence)).fetchall())

    async def move(
        self, transaction: str, *, fence: int, source: TransactionState, target: TransactionState, reason: str = ""
    ) -> Transaction:
        def work(db: apsw.Connection) -> Transaction:
            now_us = self._clock.now_us()
            rows = fetch_all(db, "collect_move", (transaction, fence, source.value, target.value, reason, now_us))
            if not rows:
                raise _lost(transaction)
            if target.is_end:
                db.execute(SQL["collect_insert_ledger"], (now_us, transaction, target.value, reason, source.value))
            return _transaction(rows[0])

        return await self._write(work)

    async def set_clean(self, transaction: str, *, fence: int) -> None:
        now_us = self._clock.now_us()
        if not await self._write(lambda db: fetch_all(db, "collect_set_clean", (transaction, fence, now_us))):
            raise _lost(transaction)

    async def idle(self, *, for_us: int, count_max: int) -> Sequence[str]:
        before = self._clock.now_us() - for_us
        rows = await self._read(lambda db: fetch_all(db, "collect_select_idle", (before, count_max)))
        return [row[0] for row in rows]

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerLine]:
        rows = await self._read(lambda db: fetch_all(db, "collect_select_ledger", (after, count_max)))
        return [
            LedgerLine(at_us=row[0], transaction=row[1], action=row[2], reason=row[3], detail=row[4]) for row in rows
        ]

    # --- index ------------------------------------------------------------------------------------------------

    async def put_parts(self, transaction: str, parts: Sequence[Part], *, fence: int) -> PartsStored:
        def work(db: apsw.Connection) -> PartsStored:
            self._hold(db, transaction, fence)
            winners, counts, sizes = [], Counter[str](), Counter[str]()
            for part in parts:
                row = (transaction, part.series, part.ordinal, part.path, part.size_bytes, part.sha256)
                db.execute(SQL["collect_insert_part"], row)
                if db.changes():
                    winners.append(part)
                    counts[part.series] += 1
                    sizes[part.series] += part.size_bytes
                    continue
                winner = _part(fetch_one(db, "collect_find_part", (transaction, part.series, part.ordinal)))
                winners.append(winner)
                if winner.path != part.path:
                    db.execute(SQL["collect_insert_stray"], (transaction, part.path))
            for name, count in counts.items():
                db.execute(SQL["collect_add_stored"], (transaction, name, count, sizes[name]))
            return PartsStored(winners=winners, stand=_stand(db, transaction))

        return await self._write(work)

    async def put_header(self, transaction: str, header: Header, *, fence: int) -> Mapping[str, SeriesState]:
        def work(db: apsw.Connection) -> Mapping[str, SeriesState]:
            self._hold(db, transaction, fence)
            db.execute(SQL["collect_put_header"], (transaction, header.series, header.count, header.series_count))
            return _stand(db, transaction)

        return await self._write(work)

    async def find_parts(self, transaction: str, keys: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Part]:
        def work(db: apsw.Connection) -> dict[tuple[str, int], Part]:
            rows = [fetch_one(db, "collect_find_part", (transaction, *key)) for key in keys]
            return {(row[0], row[1]): _part(row) for row in rows if row}

        return await self._read(work)

    async def stand(self, transaction: str) -> Mapping[str, SeriesState]:
        return await self._read(lambda db: _stand(db, transaction))

    async def count(self, transaction: str) -> Mapping[str, tuple[int, int, int]]:
        rows = await self._read(lambda db: fetch_all(db, "collect_count_parts", (transaction,)))
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    async def parts(self, transaction: str, series: str, *, first: int, count_max: int) -> Sequence[Part]:
        given = (transaction, series, first, count_max)
        return [_part(row) for row in await self._read(lambda db: fetch_all(db, "collect_select_parts", given))]

    async def stored(self, transaction: str, series: str, *, count_max: int) -> Sequence[Range]:
        given = (transaction, series, count_max)
        return [(row[0], row[1]) for row in await self._read(lambda db: fetch_all(db, "collect_select_ranges", given))]

    async def remove(self, transaction: str, parts: Sequence[Part], *, fence: int) -> None:
        def work(db: apsw.Connection) -> None:
            self._hold(db, transaction, fence)
            for part in parts:
                db.execute(SQL["collect_delete_part"], (transaction, part.series, part.ordinal, part.sha256))
                if db.changes():
                    db.execute(SQL["collect_add_stored"], (transaction, part.series, -1, -part.size_bytes))
                db.execute(SQL["collect_insert_stray"], (transaction, part.path))
                db.execute(SQL["collect_drop_series"], (transaction, part.series))

        await self._write(work)

    async def remove_header(self, transaction: str, series: str, *, fence: int) -> None:
        def work(db: apsw.Connection) -> None:
            self._hold(db, transaction, fence)
            db.execute(SQL["collect_remove_header"], (transaction, series))
            db.execute(SQL["collect_drop_series"], (transaction, series))

        await self._write(work)

    async def note_stray(self, transaction: str, paths: Sequence[str], *, fence: int) -> None:
        def work(db: apsw.Connection) -> None:
            self._hold(db, transaction, fence)
            for path in paths:
                db.execute(SQL["collect_insert_stray"], (transaction, path))

        await self._write(work)

    async def strays(self, transaction: str) -> Sequence[str]:
        def work(db: apsw.Connection) -> Sequence[str]:
            return [row[0] for row in fetch_all(db, "collect_select_strays", (transaction,))]

        return await self._read(work)

    async def forget(self, transaction: str, *, fence: int, count_max: int) -> int:
        def work(db: apsw.Connection) -> int:
            self._hold(db, transaction, fence)
            db.execute(SQL["collect_delete_parts"], (transaction, count_max))
            count = db.changes()
            if count == 0:
                db.execute(SQL["collect_delete_all_series"], (transaction,))
                db.execute(SQL["collect_delete_strays"], (transaction,))
            return count

        return await self._write(work)

    def _hold(self, db: apsw.Connection, transaction: str, fence: int) -> None:
        if not fetch_all(db, "collect_hold", (transaction, fence, self._clock.now_us())):
            raise _lost(transaction)


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


def _stand(db: apsw.Connection, transaction: str) -> dict[str, SeriesState]:
    rows = fetch_all(db, "collect_select_series", (transaction,))
    return {
        row[0]: SeriesState(series=row[0], count=row[1], series_count=row[2], stored_count=row[3], stored_bytes=row[4])
        for row in rows
    }
