"""Everything that is in custody: letters, groups, redrives, the ledger and tokens, over any `Database`.

Each change is one commit with its row in the ledger. Whatever changes something returns after the commit. If it raises
StorageFailed, nothing is acknowledged: the change is there with its row or it is not, and the same call may be
repeated; only `Letters.put` then makes a second letter, unless the broker delivers the message again as redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from holdfast.ports.clock import Clock
from holdfast.ports.database import Database
from holdfast.stores.ledger import Groups, Ledger, LedgerWriter, Tokens
from holdfast.stores.letters import Letters, UnclaimedBlobs
from holdfast.stores.recoveries import RecoveryStore
from holdfast.stores.redrives import RedriveStore
from holdfast.stores.seals import Seals


class Vault:
    """All parts of one vault. `key` is the ledger's: whoever has it can forge the chain. Without one, look only."""

    def __init__(self, database: Database, *, key: bytes = b"", clock: Clock) -> None:
        self._database = database
        writer = LedgerWriter(database, key=key, clock=clock)
        self.letters = Letters(writer)
        self.groups = Groups(writer)
        self.redrives = RedriveStore(writer)
        self.recoveries = RecoveryStore(writer)
        self.ledger = Ledger(writer)
        self.tokens = Tokens(writer)
        self.seals = Seals(writer)
        self.unclaimed = UnclaimedBlobs(writer)
        #: How many letters this process has moved, by queue, source and target; "" is outside, and a source "unknown"
        #: is *redriving* of a task that was cancelled.
        self.moves: Mapping[tuple[str, str, str], int] = writer.moves

    async def open(self) -> None:
        """Raises CannotStart."""
        await asyncio.to_thread(self._database.open)

    async def close(self) -> None:
        """Let go of it."""
        await asyncio.to_thread(self._database.close)


OpenVault = Callable[[], AbstractAsyncContextManager[Vault]]
