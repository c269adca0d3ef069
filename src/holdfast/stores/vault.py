"""The vault over any SQL database that `Database` describes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from holdfast.ports.clock import Clock
from holdfast.ports.database import Database
from holdfast.ports.vault import Groups, Ledger, Letters, RedriveStore, Tokens, UnclaimedBlobs
from holdfast.stores.ledger import LedgerWriter, SqlGroups, SqlLedger, SqlTokens
from holdfast.stores.letters import SqlLetters, SqlUnclaimedBlobs
from holdfast.stores.redrives import SqlRedrives


class SqlVault:
    """All parts of one vault. `key` is the ledger's: whoever has it can forge the chain."""

    letters: Letters
    groups: Groups
    redrives: RedriveStore
    ledger: Ledger
    tokens: Tokens
    loose: UnclaimedBlobs
    moves: Mapping[tuple[str, str, str], int]

    def __init__(self, database: Database, *, key: bytes, clock: Clock) -> None:
        self._database = database
        books = LedgerWriter(database, key=key, clock=clock)
        self.letters = SqlLetters(books)
        self.groups = SqlGroups(books)
        self.redrives = SqlRedrives(books)
        self.ledger = SqlLedger(books)
        self.tokens = SqlTokens(books)
        self.loose = SqlUnclaimedBlobs(books)
        self.moves = books.database.moves

    async def open(self) -> None:
        await asyncio.to_thread(self._database.open)

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)
