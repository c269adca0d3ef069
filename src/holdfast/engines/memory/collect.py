"""State and ordinal index of collected results in memory: for tests, and for what may be forgotten."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from holdfast.core.collect import Header, Part, Range, SeriesState, Transaction
from holdfast.core.states import TransactionState
from holdfast.ports.clock import Clock
from holdfast.ports.collect import LeaseLost, LedgerLine, PartsStored


class _Books:
    """What is known of one transaction."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: dict[str, dict[int, Part]] = {}
        self.ordinals: dict[str, list[int]] = {}
        self.series: dict[str, SeriesState] = {}
        self.strays: set[str] = set()


class MemoryCollectStore:
    """See `holdfast.ports.collect`. Nothing here waits, so every method is atomic by itself."""

    shared = False

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, Transaction] = {}
        self._books: dict[str, _Books] = {}
        self._ledger: list[LedgerLine] = []

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing to close."""

    # --- transactions -----------------------------------------------------------------------------------------

    async def create(self, transaction: Transaction, request: bytes, *, lease_us: int) -> Transaction:
        if transaction.id not in self._known:
            now_us = self._clock.now_us()
            self._known[transaction.id] = replace(
                transaction, created_at_us=now_us, updated_at_us=now_us, progress_at_us=now_us, fence=1
            )
            self._books[transaction.id] = _Books(request)
        return self._known[transaction.id]

    async def find(self, transaction: str) -> Transaction | None:
        return self._known.get(transaction)

    async def request(self, transaction: str) -> bytes:
        books = self._books.get(transaction)
        return books.request if books else b""

    async def page(self, *, after: str, count_max: int) -> Sequence[Transaction]:
        return [self._known[name] for name in sorted(self._known) if name > after][:count_max]

    async def take(self, *, owner: str, lease_us: int, count_max: int) -> Sequence[Transaction]:
        free = [each for _, each in sorted(self._known.items()) if not each.is_clean and each.owner != owner]
        return [self._own(each, owner) for each in free[:count_max]]

    async def seize(self, transaction: str, *, owner: str, lease_us: int) -> Transaction | None:
        known = self._known.get(transaction)
        return None if known is None else self._own(known, owner)

    async def extend(self, fences: Mapping[str, int], *, lease_us: int) -> Sequence[str]:
        return [name for name, fence in fences.items() if name in self._known and self._known[name].fence == fence]

    async def give_back(self, transaction: str, *, fence: int) -> None:
        known = self._known.get(transaction)
        if known is not None and known.fence == fence:
            self._own(known, "")

    async def move(
        self, transaction: str, *, fence: int, source: TransactionState, target: TransactionState, reason: str = ""
    ) -> Transaction:
        known = self._ours(transaction, fence)
        if known.state is not source:
            raise _lost(transaction)
        now_us = self._clock.now_us()
        moved = replace(known, state=target, reason=reason, updated_at_us=now_us, progress_at_us=now_us)
        self._known[transaction] = moved
        if target.is_end:
            line = LedgerLine(
                at_us=now_us, transaction=transaction, action=target.value, reason=reason, detail=source.value
            )
            self._ledger.append(line)
        return moved

    async def set_clean(self, transaction: str, *, fence: int) -> None:
        known = self._ours(transaction, fence)
        now_us = self._clock.now_us()
        self._known[transaction] = replace(known, is_clean=True, owner="", fence=fence + 1, updated_at_us=now_us)
        self._books[transaction].request = b""

    async def idle(self, *, for_us: int, count_max: int) -> Sequence[str]:
        before = self._clock.now_us() - for_us
        return [
            name
            for name, each in sorted(self._known.items())
            if not each.is_clean and not each.state.is_end and each.progress_at_us <= before
        ][:count_max]

    async def ledger(self, *, after: int, count_max: int) -> Sequence[LedgerLine]:
        return self._ledger[after : after + count_max]

    # --- index ------------------------------------------------------------------------------------------------

    async def put_parts(self, transaction: str, parts: Sequence[Part], *, fence: int) -> PartsStored:
        books = self._progress(transaction, fence)
        winners = []
        for part in parts:
            rows = books.parts.setdefault(part.series, {})
            is_new = part.ordinal not in rows
            winner = rows.setdefault(part.ordinal, part)
            winners.append(winner)
            if is_new:
                insort(books.ordinals.setdefault(part.series, []), part.ordinal)
                _add(books, part.series, 1, part.size_bytes)
            elif winner.path != part.path:
                books.strays.add(part.path)
        return PartsStored(winners=winners, stand=dict(books.series))

    async def put_header(self, transaction: str, header: Header, *, fence: int) -> Mapping[str, SeriesState]:
        books = self._progress(transaction, fence)
        known = books.series.get(header.series) or SeriesState(series=header.series)
        total = header.series_count if header.series_count is not None else known.series_count
        books.series[header.series] = replace(known, count=header.count, series_count=total)
        return dict(books.series)

    async def find_parts(self, transaction: str, keys: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Part]:
        parts = self._books[transaction].parts
        found = {key: parts.get(key[0], {}).get(key[1]) for key in keys}
        return {key: part for key, part in found.items() if part is not None}

    async def stand(self, transaction: str) -> Mapping[str, SeriesState]:
        books = self._books.get(transaction)
        return dict(sorted(books.series.items())) if books else {}

    async def count(self, transaction: str) -> Mapping[str, tuple[int, int, int]]:
        return {
            name: (len(rows), sum(part.size_bytes for part in rows.values()), max(rows))
            for name, rows in self._books[transaction].parts.items()
            if rows
        }

    async def parts(self, transaction: str, series: str, *, first: int, count_max: int) -> Sequence[Part]:
        books = self._books[transaction]
        ordinals = books.ordinals.get(series, [])
        start = bisect_left(ordinals, first)
        return [books.parts[series][ordinal] for ordinal in ordinals[start : start + count_max]]

    async def stored(self, transaction: str, series: str, *, count_max: int) -> Sequence[Range]:
        found: list[Range] = []
        for ordinal in self._books[transaction].ordinals.get(series, []):
            if found and found[-1][1] == ordinal - 1:
                found[-1] = (found[-1][0], ordinal)
            elif len(found) == count_max:
                break
            else:
                found.append((ordinal, ordinal))
        return found

    async def remove(self, transaction: str, parts: Sequence[Part], *, fence: int) -> None:
        books = self._progress(transaction, fence)
        for part in parts:
            rows = books.parts.get(part.series, {})
            if rows.get(part.ordinal) == part:
                del rows[part.ordinal]
                books.ordinals[part.series].remove(part.ordinal)
                _add(books, part.series, -1, -part.size_bytes)
            books.strays.add(part.path)
            _drop_empty(books, part.series)

    async def remove_header(self, transaction: str, series: str, *, fence: int) -> None:
        books = self._progress(transaction, fence)
        if series in books.series:
            books.series[series] = replace(books.series[series], count=None, series_count=None)
            _drop_empty(books, series)

    async def note_stray(self, transaction: str, paths: Sequence[str], *, fence: int) -> None:
        self._progress(transaction, fence).strays.update(paths)

    async def strays(self, transaction: str) -> Sequence[str]:
        return sorted(self._books[transaction].strays)

    async def forget(self, transaction: str, *, fence: int, count_max: int) -> int:
        books = self._progress(transaction, fence)
        count = sum(len(rows) for rows in books.parts.values())
        self._books[transaction] = _Books(books.request)
        return count

    # --- inside -----------------------------------------------------------------------------------------------

    def _own(self, known: Transaction, owner: str) -> Transaction:
        self._known[known.id] = replace(known, owner=owner, fence=known.fence + 1)
        return self._known[known.id]

    def _ours(self, transaction: str, fence: int) -> Transaction:
        known = self._known.get(transaction)
        if known is None or known.fence != fence:
            raise _lost(transaction)
        return known

    def _progress(self, transaction: str, fence: int) -> _Books:
        known = self._ours(transaction, fence)
        self._known[transaction] = replace(known, progress_at_us=self._clock.now_us())
        return self._books[transaction]


def _lost(transaction: str) -> LeaseLost:
    return LeaseLost(f"transaction is not ours; '{transaction}' has another owner or state, nothing was written")


def _add(books: _Books, series: str, count: int, size_bytes: int) -> None:
    known = books.series.get(series) or SeriesState(series=series)
    books.series[series] = replace(
        known, stored_count=known.stored_count + count, stored_bytes=known.stored_bytes + size_bytes
    )


def _drop_empty(books: _Books, series: str) -> None:
    known = books.series.get(series)
    if known is not None and known.count is None and not known.stored_count:
        del books.series[series]
