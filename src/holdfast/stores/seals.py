"""What the ledger vouches for, looked at: the chain, and the seals of letters, revisions, tokens and failed imports.

A letter's queue and state follow from the rows that moved it. So a letter that was removed, added, or changed in any
way that goes by no row is found, whoever did it in the database; but for one who has the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from holdfast.core.ledger import (
    FIRST,
    OLD,
    SEAL_BYTES,
    ChainBreak,
    LedgerAct,
    LedgerKey,
    Link,
    expand,
    is_anchor,
    verify,
)
from holdfast.core.requests.vault import Verified
from holdfast.errors import BlobMissing, Invalid
from holdfast.ports.blobs import Blobs
from holdfast.ports.database import Look, Row, Tx
from holdfast.stores import run, run_many
from holdfast.stores.ledger import VaultPart, head_of, links, one_commit, one_look
from holdfast.telemetry.events import emit

ROWS_COUNT_MAX = 1_000
LETTERS_COUNT_MAX = 1_000
LETTERS_BYTES_MAX = 16 * 1024 * 1024
FOUND_COUNT_MAX = 100
#: In so many ranges of ids the states are folded: the one that differs is looked at letter by letter.
RANGES_BITS = 12
#: What else is sealed: by which statements one comes after the other, and gets its seal; and what comes before all.
OTHERS = (("token", "next_token", "seal_token", ""), ("failed", "next_failed", "seal_failed", 0))
UPGRADE = LedgerAct(actor="holdfast", action="ledger.sealed", reason="from here on letters, revisions and tokens, too")
CUT_OFF = "whether the newest rows were cut off together with all they did; a head that was noted elsewhere tells"


class Seals(VaultPart):
    """All that the ledger vouches for."""

    async def upgrade(self) -> None:
        """Seal what an older program left, page by page; at the end one row vouches for all of it. A crash between only
        makes the next start begin anew."""
        if not await self._is_old():
            return
        emit("ledger.upgrading")
        folded, after = 0, 0
        while page := await self._seal_letters(after):
            after, seals = page
            folded ^= seals
        for kind, next_one, put, before_all in OTHERS:
            key: object = before_all
            while one := await self._seal_next(kind, next_one, put, key):
                key, seals = one
                folded ^= seals
        await self._vouch(folded)

    async def verify(self, *, anchor: str = "", blobs: Blobs | None = None) -> Verified:
        """Look at everything, as of one moment. `anchor` is a head that was noted before: it must still be there.

        Raises Invalid for a text that is no head: that is a slip of the pen, not a chain that was tampered with.
        """
        if anchor and not is_anchor(anchor):
            raise Invalid("anchor is invalid; it is not NUMBER:HASH as the head is")
        async with self.writer.look() as look:
            return await _Verification(self.writer.key, look, anchor, blobs, self._is_there).run()

    @one_look
    def _is_old(self, tx: Tx) -> bool:
        return _is_old(tx)

    @one_commit
    def _seal_letters(self, tx: Tx, after: int) -> tuple[int, int] | None:
        """The next letters, with their revisions: the id of the last one, and their fold. None at the end, and when
        another process was faster: there may be letters then that it has not left to us."""
        page = _letters(tx, after) if _is_old(tx) else []
        if not page:
            return None
        key, last = self.writer.key, page[-1][0]
        sealed = [{"id": row[0], "seal": key.seal("letter", row[:-3])} for row in page]
        run_many(tx, "seal_letter", sealed)
        folded = key.fold("letter", [one["seal"] for one in sealed])
        for letter, *_ in run(tx, "select_revised", after=after, last=last):
            for row in _each(tx, "next_revision", 0, letter=letter):
                seal = key.seal("revision", row[:-1])
                run(tx, "seal_revision", letter=letter, number=row[0], seal=seal)
                folded ^= key.fold("revision", [seal])
        return last, folded

    @one_commit
    def _seal_next(self, tx: Tx, kind: str, next_one: str, put: str, after: object) -> tuple[object, int] | None:
        rows = run(tx, next_one, after=after) if _is_old(tx) else []
        if not rows:
            return None
        seal = self.writer.key.seal(kind, rows[0][:-1])
        run(tx, put, key=rows[0][0], seal=seal)
        return rows[0][0], self.writer.key.fold(kind, [seal])

    @one_commit
    def _vouch(self, tx: Tx, folded: int) -> None:
        if _is_old(tx):
            self.writer.append(tx, UPGRADE, folded=folded)

    @one_look
    def _is_there(self, tx: Tx, letter: int) -> bool:
        return bool(run(tx, "select_states", ids=tx.dialect.ids([letter])))


class _Verification:
    """One look at everything, in pages: what it keeps of them does not grow with them."""

    def __init__(
        self,
        key: LedgerKey,
        look: Look,
        anchor: str,
        blobs: Blobs | None,
        is_there: Callable[[int], Awaitable[bool]],
    ) -> None:
        """`is_there` says whether a letter is there still, at another moment."""
        self._key = key
        self._look = look
        self._anchor = anchor
        self._blobs = blobs
        self._is_there = is_there
        self._number, self._previous = 0, FIRST
        self._sealed_from = self._newest_letter = self._letters = self._unread = 0
        self._anchored, self._is_exact = False, True
        self._folded = 0  #: of all rows, and of all that is there: nothing when they agree
        self._states: Counter[int] = Counter()  #: the same of the states of letters, by ranges of their ids
        self._shift = 0
        self._found: list[ChainBreak] = []

    async def run(self) -> Verified:
        counter = await self._look(_counter)
        self._shift = max(0, counter.bit_length() - RANGES_BITS)
        while await self._look(self._rows):
            pass
        chain_holds = not self._found
        after = 0
        while page := await self._look(partial(self._page, after)):
            after, bodies = page
            for body in bodies:
                await self._elsewhere(*body)
        for kind, next_one, _, before_all in OTHERS:
            key: object = before_all
            while (key := await self._look(partial(self._other, kind, next_one, key))) is not None:
                pass
        if chain_holds:
            await self._compare(counter)
        return self._verified()

    # The chain.

    def _rows(self, tx: Tx) -> bool:
        """The next rows; false at the end, or where the chain breaks."""
        found = links(tx, after=self._number, count_max=ROWS_COUNT_MAX)
        if broken := verify(self._key, found, previous=self._previous, number=self._number):
            self._found.append(broken)
            return False
        for link in found:
            self._read(link)
        return bool(found)

    def _read(self, link: Link) -> None:
        row, key = link.row, self._key
        self._number, self._previous = row.number, row.mac
        self._anchored = self._anchored or head_of(row.number, row.mac) == self._anchor
        self._folded ^= key.unfolded(row.number, link.digest)
        if link.digest != OLD:
            self._sealed_from = self._sealed_from or row.number
        if row.to_state and not row.from_state:
            self._newest_letter = max(self._newest_letter, link.last_letter)
        for letter in self._moved(link):
            change = key.state(letter, row.queue, row.from_state) ^ key.state(letter, row.queue, row.to_state)
            self._states[letter >> self._shift] ^= change

    def _moved(self, link: Link) -> list[int]:
        """The letters that a row moved. An older program named a range where there were too many to name."""
        row = link.row
        if not row.to_state:
            return []
        if "," not in row.letters and link.last_letter - link.first_letter + 1 != row.count:
            self._is_exact = False
            return []
        return expand(row.letters)

    # What is there.

    def _page(self, after: int, tx: Tx) -> tuple[int, list[tuple[int, str, bytes]]] | None:
        """The next letters: the id of the last one, and the bodies that are elsewhere. None when there are no more."""
        page = _letters(tx, after)
        if not page:
            return None
        last = page[-1][0]
        revised = {letter: told for letter, *told in run(tx, "select_revised", after=after, last=last)}
        bodies: list[tuple[int, str, bytes]] = []
        for *values, state, revision, seal in page:
            letter, queue, blob = values[0], values[1], values[22]
            self._letters += 1
            self._states[letter >> self._shift] ^= self._key.state(letter, queue, state)
            self._check(tx, f"letter {letter}", "letter", values, bytes(seal), letter)
            if blob:
                bodies.append((letter, blob, bytes(seal)[:-SEAL_BYTES]))
            if revised.get(letter, [0, 0]) != [revision, revision]:
                self._add(tx, letter, f"letter {letter} has lost a revision, or has one too many")
        for letter in revised:
            for row in _each(tx, "next_revision", 0, letter=letter):
                self._check(tx, f"revision {row[0]} of letter {letter}", "revision", row[:-1], bytes(row[-1]), letter)
        return last, bodies

    async def _elsewhere(self, letter: int, blob: str, seal: bytes) -> None:
        """A body that is a blob, with its part of the letter's seal."""
        if self._blobs is None or not seal:
            self._unread += 1
            return
        made = self._key.body_seal()
        try:
            async for chunk in self._blobs.get(blob):
                made.update(chunk)
        except BlobMissing:
            if not await self._is_there(letter):
                return  # retention has deleted it meanwhile
        if made.digest() != seal:
            why = f"the body of letter {letter} was changed, or is gone"
            await self._look(lambda tx: self._add(tx, letter, why))

    def _other(self, kind: str, next_one: str, after: object, tx: Tx) -> object:
        """The next token or failed import: by what the one behind it is found."""
        for row in run(tx, next_one, after=after):
            what = f"token '{row[0]}'" if kind == "token" else f"failed import {row[0]}"
            self._check(tx, what, kind, row[:-1], bytes(row[-1]))
            return row[0]
        return None

    def _check(self, tx: Tx, what: str, kind: str, values: Sequence[object], seal: bytes, letter: int = 0) -> None:
        self._folded ^= self._key.fold(kind, [seal])
        if self._key.seal(kind, values, seal[:-SEAL_BYTES]) != seal:
            self._add(tx, letter, f"{what} was changed")

    # What follows from both.

    async def _compare(self, counter: int) -> None:
        if not self._number and (counter or self._folded or self._letters):
            self._found.append(ChainBreak(1, "the ledger is empty and the vault is not: its rows were deleted"))
            return
        if counter != self._newest_letter:
            why = f"letters up to {counter} were captured, and by the ledger up to {self._newest_letter}"
            self._found.append(ChainBreak(self._number + 1, f"{why}: rows were cut off"))
        differing = [index for index, folded in sorted(self._states.items()) if folded]
        if differing and self._is_exact:
            await self._name(differing[0])
        if self._folded and not self._found:
            why = "a letter, a revision, a token or a failed import was removed, added, or put back as it was before"
            self._found.append(ChainBreak(self._number, why))
        if self._anchor and not self._anchored:
            self._found.append(ChainBreak(self._number + 1, "the anchor is not in the chain: its tail was cut off"))

    async def _name(self, index: int) -> None:
        """Which letters of a range are not as the ledger says."""
        first, last = index << self._shift, ((index + 1) << self._shift) - 1
        told: dict[int, str] = {}
        number = 0
        while page := await self._look(partial(links, after=number, count_max=ROWS_COUNT_MAX)):
            number = page[-1].row.number
            for link in page:
                if link.first_letter <= last and link.last_letter >= first:
                    is_gone = link.row.to_state == "deleted"
                    state = "not there" if is_gone else f"{link.row.to_state} in '{link.row.queue}'"
                    told |= {letter: state for letter in self._moved(link) if first <= letter <= last}
        await self._look(partial(self._differences, told, first - 1, last))

    def _differences(self, told: dict[int, str], after: int, last: int, tx: Tx) -> None:
        rows = run(tx, "select_states_between", after=after, last=last)
        there = {letter: f"{state} in '{queue}'" for letter, queue, state in rows}
        for letter in sorted({*told, *there}):
            by_ledger = told.get(letter, "not there")
            if there.get(letter, "not there") != by_ledger:
                is_now = there.get(letter, "not there")
                self._add(tx, letter, f"letter {letter} is {is_now}, by the ledger it is {by_ledger}")

    def _add(self, tx: Tx, letter: int, why: str) -> None:
        """Something is not as the ledger has it: the row that vouched for it, and why."""
        if len(self._found) < FOUND_COUNT_MAX:
            ((number,),) = run(tx, "find_first_of_letter", letter=letter)
            self._found.append(ChainBreak(number or self._number, why))

    def _verified(self) -> Verified:
        unknown = [] if self._anchor else [CUT_OFF]
        if self._sealed_from > 1:
            unknown.append(f"what became of bodies, revisions and tokens before row {self._sealed_from}, which vouches")
        if self._unread:
            unknown.append(
                f"the bodies of {self._unread} letters: they are blobs that were not vouched for, or not here"
            )
        if not self._is_exact:
            unknown.append("the states of letters: an old row names more than it moved")
        first = self._found[0] if self._found else ChainBreak(0, "")
        return Verified(
            rows=self._number,
            head=head_of(self._number, self._previous),
            broken_at=first.number,
            why=first.why,
            broken=self._found,
            sealed_from=self._sealed_from,
            letters=self._letters,
            unknown=unknown,
        )


def _is_old(tx: Tx) -> bool:
    """Whether an older program was the last one to write."""
    return any(digest == OLD for _, _, digest in run(tx, "newest_ledger"))


def _counter(tx: Tx) -> int:
    return next((int(row[0]) for row in run(tx, "find_counter", name="letters")), 0)


def _letters(tx: Tx, after: int) -> list[Row]:
    """The next letters with their bodies, at least one and no more bytes than fit; none at the end."""
    last = room = 0
    for letter, size in run(tx, "select_sizes", after=after, count_max=LETTERS_COUNT_MAX):
        room += size
        if last and room > LETTERS_BYTES_MAX:
            break
        last = letter
    return run(tx, "select_sealed", after=after, last=last) if last else []


def _each(tx: Tx, name: str, after: Any, **values: object) -> Iterator[Row]:
    """The rows of a statement that gives the one behind another, by its first column: they have bodies."""
    while rows := run(tx, name, after=after, **values):
        yield rows[0]
        after = rows[0][0]
