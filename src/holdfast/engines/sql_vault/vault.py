"""The vault over any SQL database that `Database` describes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from holdfast.engines.sql_vault.books import Books
from holdfast.engines.sql_vault.database import Database
from holdfast.engines.sql_vault.letters import SqlLetters
from holdfast.engines.sql_vault.loose import SqlLooseBlobs
from holdfast.engines.sql_vault.others import SqlGroups, SqlLedger, SqlTokens
from holdfast.engines.sql_vault.redrives import SqlRedrives
from holdfast.ports.clock import Clock
from holdfast.ports.vault import Groups, Ledger, Letters, LooseBlobs, Redrives, Tokens


class SqlVault:
    """All parts of one vault. `key` is the ledger's: whoever has it can forge the chain."""

    letters: Letters
    groups: Groups
    redrives: Redrives
    ledger: Ledger
    tokens: Tokens
    loose: LooseBlobs
    moves: Mapping[tuple[str, str, str], int]

    def __init__(self, database: Database, *, key: bytes, clock: Clock) -> None:
        self._database = database
        books = Books(database, key=key, clock=clock)
        self.letters = SqlLetters(books)
        self.groups = SqlGroups(books)
        self.redrives = SqlRedrives(books)
        self.ledger = SqlLedger(books)
        self.tokens = SqlTokens(books)
        self.loose = SqlLooseBlobs(books)
        self.moves = books.database.moves

    async def open(self) -> None:
        await asyncio.to_thread(self._database.open)

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)
