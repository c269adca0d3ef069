"""The ledger for people: is the chain whole, what is its head, and do the books agree with the vault."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from holdfast.core.ledger import FIRST, Break, LedgerRow, verify
from holdfast.ports.vault import Vault

PAGE_COUNT = 5_000


class Verified(Struct, frozen=True, kw_only=True):
    """What a look at the whole chain found."""

    rows: int
    head: str
    broken_at: int = 0
    why: str = ""


class BalanceRow(Struct, frozen=True, kw_only=True):
    """Letters of one queue by state: as the ledger tells it, and as the vault counts them."""

    queue: str
    captured_ever: int
    ledger: dict[str, int]
    vault: dict[str, int]

    @property
    def agrees(self) -> bool:
        return self.ledger == self.vault and self.captured_ever == sum(self.vault.values())


class Ledgers:
    """Reads the ledger; what is written to it is written with the change that it tells of."""

    def __init__(self, vault: Vault, *, key: bytes) -> None:
        self._vault = vault
        self._key = key

    async def verify(self, *, anchor: str = "") -> Verified:
        """Walk the whole chain. `anchor` is a head that was noted before: it must still be in it."""
        previous, number, anchored = FIRST, 0, not anchor
        while rows := await self._vault.ledger.rows(after=number, count_max=PAGE_COUNT):
            if (found := verify(self._key, rows, previous=previous, number=number)) is not None:
                return _broken(number, previous, found)
            previous, number = rows[-1].mac, rows[-1].number
            anchored = anchored or any(head_of(row) == anchor for row in rows)
        if not anchored:
            return _broken(number, previous, Break(number + 1, "the anchor is not in the chain: its tail was cut off"))
        return Verified(rows=number, head=f"{number}:{previous.hex()}")

    async def head(self) -> str:
        """The anchor: noted elsewhere, it makes a tail that was cut off visible."""
        newest = await self._vault.ledger.newest()
        return head_of(newest) if newest else f"0:{FIRST.hex()}"

    async def balance(self) -> list[BalanceRow]:
        """For each queue, captured ever is the sum over all states, from two sides."""
        told: dict[str, Counter[str]] = {}
        ever: Counter[str] = Counter()
        number = 0
        while rows := await self._vault.ledger.rows(after=number, count_max=PAGE_COUNT):
            number = rows[-1].number
            for row in rows:
                if not row.to_state:
                    continue
                counts = told.setdefault(row.queue, Counter())
                counts[row.to_state] += row.count
                if row.from_state:
                    counts[row.from_state] -= row.count
                else:
                    ever[row.queue] += row.count
        counted: dict[str, dict[str, int]] = {}
        for tally in await self._vault.ledger.tallies(counted=True):
            counted.setdefault(tally.queue, {})[tally.state] = tally.count
        return [
            BalanceRow(
                queue=queue,
                captured_ever=ever[queue],
                ledger={state: count for state, count in sorted(told.get(queue, Counter()).items()) if count},
                vault=dict(sorted(counted.get(queue, {}).items())),
            )
            for queue in sorted({*told, *counted})
        ]


def head_of(row: LedgerRow) -> str:
    """A row's number and hash, as they are noted elsewhere."""
    return f"{row.number}:{row.mac.hex()}"


def _broken(rows: int, previous: bytes, found: Break) -> Verified:
    return Verified(rows=rows, head=f"{rows}:{previous.hex()}", broken_at=found.number, why=found.why)
