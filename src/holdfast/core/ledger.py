"""A row of the ledger, the keyed hash that chains it to the row before, and the seals of what it vouches for. Pure: no
clock, no store.

Whoever changes, removes or inserts a row without the key breaks the chain there. A cut-off tail breaks nothing: only
the anchor (`head`), noted elsewhere, tells of it.

A letter, a revision, a token and a failed import carry a seal: a keyed hash of what never changes in them. The row of
a change has the fold of the seals that it put there and took away: those of all rows together are the fold of all that
is there now. It is hidden by a pad of its own: who has no key finds no others with the same fold.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import reduce
from hashlib import blake2b
from operator import xor

from msgspec import Struct, json, msgpack
from msgspec.structs import astuple

from holdfast.core.moments import microseconds

FIRST = bytes(32)
#: In the place of a digest: the row is from before there were any, and its hash covers what it did then.
OLD = b"\0"
SEAL_BYTES = 16
TEXT_CHARACTERS_MAX = 2_000

_packed = msgpack.Encoder().encode
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


class LedgerRow(Struct, frozen=True):
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


class Link(Struct, frozen=True):
    """A row as it is kept, with what is not shown of it: the ends of `letters`, and what it vouches for."""

    row: LedgerRow
    first_letter: int
    last_letter: int
    digest: bytes


class ChainBreak(Struct, frozen=True):
    """Where the chain does not hold, and why."""

    number: int
    why: str


class LedgerKey:
    """Chains rows, and seals what they vouch for. Whoever has it can forge both."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seal_key = hmac.digest(key, b"seals", "sha256")

    def mac_of(self, previous: bytes, link: Link) -> bytes:
        """The keyed hash of a row over the hash of the row before."""
        number, at, *rest = astuple(link.row)[:-1]  # all but the hash itself
        told = (number, microseconds(at), *rest)
        if link.digest != OLD:
            told += (link.first_letter, link.last_letter, link.digest)
        return hmac.digest(self._key, previous + json.encode(told), "sha256")

    def seal(self, kind: str, values: Sequence[object], elsewhere: bytes = b"") -> bytes:
        """Of something with these values, its body among them; in front of it the seal of a body that is elsewhere."""
        made = blake2b(_packed((kind, *values, elsewhere)), key=self._seal_key, digest_size=SEAL_BYTES, person=b"seal")
        return elsewhere + made.digest()

    def body_seal(self, body: bytes = b"") -> blake2b:
        """That of a body; more of it can be added."""
        return blake2b(body, key=self._seal_key, digest_size=SEAL_BYTES, person=b"body")

    def fold(self, kind: str, seals: Iterable[bytes]) -> int:
        """What stands for all of these, in any order; the same one twice is nothing.

        Which letters there are is known by their states: their seals are folded as they are.
        """
        marks = (seal[-SEAL_BYTES:] if kind == "letter" else self._mark(b"fold", seal) for seal in seals)
        return reduce(xor, map(_number, marks), 0)

    def state(self, letter: int, queue: str, state: str) -> int:
        """What stands for a letter in a state, to be folded; 0 for one that is outside, or deleted."""
        if state in ("", "deleted"):
            return 0
        return _number(self._mark(b"state", f"{letter} {state} {queue}".encode()))

    def digest(self, number: int, folded: int) -> bytes:
        """What a row keeps of a fold."""
        return (folded ^ self._pad(number)).to_bytes(SEAL_BYTES, "big") if folded else b""

    def unfolded(self, number: int, digest: bytes) -> int:
        """The fold that a row keeps."""
        return _number(digest) ^ self._pad(number) if len(digest) == SEAL_BYTES else 0

    def _pad(self, number: int) -> int:
        return _number(self._mark(b"row", b"%d" % number))

    def _mark(self, use: bytes, data: bytes) -> bytes:
        return blake2b(data, key=self._seal_key, digest_size=SEAL_BYTES, person=use).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


def verify(key: LedgerKey, links: Iterable[Link], *, previous: bytes = FIRST, number: int = 0) -> ChainBreak | None:
    """The first row that does not follow from the one before; none when the chain holds."""
    for link in links:
        row = link.row
        if row.number != number + 1:
            return ChainBreak(number + 1, f"row {number + 1} is missing, the next one is {row.number}")
        if not hmac.compare_digest(key.mac_of(previous, link), row.mac):
            return ChainBreak(row.number, f"row {row.number} was changed, or the key is another one")
        if (link.first_letter, link.last_letter) != ends(row):  # an old row's hash does not cover them
            return ChainBreak(row.number, f"row {row.number} was changed: it is not found by the letters it names")
        previous, number = row.mac, row.number
    return None


def ends(row: LedgerRow) -> tuple[int, int]:
    """The first and the last of the letters that a row counts."""
    if not row.count or not row.letters:
        return 0, 0
    first, last = row.letters.partition(",")[0], row.letters.rpartition(",")[2]
    return int(first.partition("-")[0]), int(last.rpartition("-")[2])


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
