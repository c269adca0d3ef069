"""The ledger for people: is the chain whole, what is its head, and do the books agree with the vault; and its key."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path

from holdfast.core.ledger import FIRST, ChainBreak, LedgerRow, is_anchor, verify
from holdfast.core.requests.vault import BalanceRow, Verified
from holdfast.errors import CannotStart, Invalid
from holdfast.stores.vault import Vault

PAGE_COUNT = 5_000
KEY_BYTES = 32


async def unlock(vault: Vault, *, given: str | None, file: Path | None) -> None:
    """Have it use the key of its chain: the given one, or that in a file, made once; without a file, one for now.

    Raises CannotStart when the chain was begun with another one: it would break at the next row. The first row tells,
    whatever happened to the others.
    """
    first = await vault.ledger.rows(after=0, count_max=1)
    if given is not None:
        vault.use_key(given.encode())
    elif file is None:
        vault.use_key(secrets.token_bytes(KEY_BYTES))
    elif first and not await asyncio.to_thread(file.exists):
        # A new one would only be in the way of the right one.
        raise CannotStart(
            f"key of the ledger is missing; the vault's chain was begun with a key and {file} is not there, bring back "
            "the file ledger-key or set HOLDFAST_LEDGER_KEY"
        )
    else:
        try:
            vault.use_key(await asyncio.to_thread(_made_once, file))
        except OSError as error:
            raise CannotStart(
                f"key of the ledger cannot be kept; {file}: {error.strerror}, set HOLDFAST_LEDGER_KEY"
            ) from error
    if first and verify(vault.key, first, previous=FIRST) is not None and first[0].number == 1:
        raise CannotStart(
            "key of the ledger is another one; the vault's chain was begun with another key, or its first row was "
            "changed, bring back the file ledger-key or set HOLDFAST_LEDGER_KEY"
        )


def _made_once(path: Path) -> bytes:
    """The secret in a file that only we read, which is made now if it is not there. Raises OSError."""
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return path.read_bytes().strip()


class LedgerService:
    """Reads the ledger; what is written to it is written with the change that it tells of."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def verify(self, *, anchor: str = "") -> Verified:
        """Walk the whole chain. `anchor` is a head that was noted before: it must still be in it.

        Raises Invalid for a text that is no head: that is a slip of the pen, not a chain that was tampered with.
        """
        if anchor and not is_anchor(anchor):
            raise Invalid("anchor is invalid; it is not NUMBER:HASH as the head is")
        previous, number, anchored = FIRST, 0, not anchor
        while rows := await self._vault.ledger.rows(after=number, count_max=PAGE_COUNT):
            if (found := verify(self._vault.key, rows, previous=previous, number=number)) is not None:
                return _broken(number, previous, found)
            previous, number = rows[-1].mac, rows[-1].number
            anchored = anchored or any(head_of(row) == anchor for row in rows)
        if not anchored:
            return _broken(
                number, previous, ChainBreak(number + 1, "the anchor is not in the chain: its tail was cut off")
            )
        return Verified(rows=number, head=f"{number}:{previous.hex()}")

    async def head(self) -> str:
        """The anchor: noted elsewhere, it makes a tail that was cut off visible."""
        newest = await self._vault.ledger.newest()
        return head_of(newest) if newest else f"0:{FIRST.hex()}"

    async def balance(self) -> list[BalanceRow]:
        """For each queue, captured ever is the sum over all states, from two sides; both as of one moment, so that
        letters which arrive meanwhile make no difference."""
        newest, tallies = await self._vault.ledger.counted()
        counted: dict[str, dict[str, int]] = {}
        for tally in tallies:
            counted.setdefault(tally.queue, {})[tally.state] = tally.count
        told: dict[str, Counter[str]] = {}
        ever: Counter[str] = Counter()
        number = 0
        while number < newest and (rows := await self._vault.ledger.rows(after=number, count_max=PAGE_COUNT)):
            number = rows[-1].number
            for row in rows:
                if row.number <= newest and row.to_state:
                    _tell(row, told.setdefault(row.queue, Counter()), ever)
        return [
            BalanceRow(
                queue=queue,
                captured_ever=ever[queue],
                ledger={state: count for state, count in sorted(told.get(queue, Counter()).items()) if count},
                vault=dict(sorted(counted.get(queue, {}).items())),
            )
            for queue in sorted({*told, *counted})
        ]


def _tell(row: LedgerRow, counts: Counter[str], ever: Counter[str]) -> None:
    counts[row.to_state] += row.count
    if row.from_state:
        counts[row.from_state] -= row.count
    else:
        ever[row.queue] += row.count


def head_of(row: LedgerRow) -> str:
    """A row's number and hash, as they are noted elsewhere."""
    return f"{row.number}:{row.mac.hex()}"


def _broken(rows: int, previous: bytes, found: ChainBreak) -> Verified:
    return Verified(rows=rows, head=f"{rows}:{previous.hex()}", broken_at=found.number, why=found.why)
