"""A row of the ledger and the keyed hash that chains it to the row before. Pure: no clock, no store.

Whoever changes, removes or inserts a row without the key breaks the chain there. A cut-off tail breaks nothing: only
the anchor (`head`), noted elsewhere, tells of it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec import Struct, json
from msgspec.structs import astuple

from holdfast.core.moments import microseconds

FIRST = bytes(32)
TEXT_CHARACTERS_MAX = 2_000

_ANCHOR = re.compile(r"\d{1,19}:[0-9a-f]{64}")


def is_anchor(text: str) -> bool:
    """Whether it has the form of a head: a row's number and its hash."""
    return _ANCHOR.fullmatch(text) is not None


class LedgerAct(Struct, frozen=True, kw_only=True):
    """Who does what, from where, and why: what every change of the vault is told."""

    actor: str
    action: str
    origin: str = ""  #: the address or the program that it came from
    reason: str = ""
    detail: str = ""


class LedgerRow(Struct, frozen=True, kw_only=True):
    """One thing that was done or denied."""

    number: int
    at: datetime
    actor: str
    action: str
    origin: str = ""
    outcome: str = "done"
    queue: str = ""
    from_state: str = ""
    to_state: str = ""
    count: int = 0
    letters: str = ""  #: ids as ranges: `1-500,503`
    reason: str = ""
    detail: str = ""
    mac: bytes = b""


class ChainBreak(Struct, frozen=True):
    """Where the chain does not hold, and why."""

    number: int
    why: str


def mac_of(key: bytes, previous: bytes, row: LedgerRow) -> bytes:
    """The keyed hash of a row over the hash of the row before."""
    number, at, *rest = astuple(row)[:-1]  # all but the hash itself
    return hmac.digest(key, previous + json.encode((number, microseconds(at), *rest)), "sha256")


def verify(key: bytes, rows: Iterable[LedgerRow], *, previous: bytes = FIRST, number: int = 0) -> ChainBreak | None:
    """The first row that does not follow from the one before; none when the chain holds."""
    for row in rows:
        if row.number != number + 1:
            return ChainBreak(number + 1, f"row {number + 1} is missing, the next one is {row.number}")
        if not hmac.compare_digest(mac_of(key, previous, row), row.mac):
            return ChainBreak(row.number, f"row {row.number} was changed, or the key is another one")
        previous, number = row.mac, row.number
    return None


def ranges(ids: Sequence[int]) -> str:
    """Ids as ranges, sorted: `1-500,503`."""
    parts: list[tuple[int, int]] = []
    for one in sorted(ids):
        if parts and parts[-1][1] + 1 >= one:
            parts[-1] = (parts[-1][0], one)
        else:
            parts.append((one, one))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def expand(text: str) -> list[int]:
    """The ids of the ranges, in order."""
    ids: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


def covers(text: str, number: int) -> bool:
    """Whether an id is among the ranges."""
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if int(first) <= number <= int(last or first):
            return True
    return False
