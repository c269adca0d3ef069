"""The last recoveries that ended, by whoever ran them over this vault: what was asked for, and what each did."""

from __future__ import annotations

import msgspec

from holdfast.core.ledger import LedgerAct
from holdfast.core.requests.recover import RecoveryRow, RecoveryView
from holdfast.ports.database import Tx
from holdfast.stores import run
from holdfast.stores.ledger import VaultPart, one_commit, one_look

#: Older ones are in the ledger alone.
KEPT_COUNT_MAX = 500

_encode = msgspec.json.Encoder().encode
_line = msgspec.json.Decoder(RecoveryRow).decode
_document = msgspec.json.Decoder(RecoveryView).decode


class RecoveryStore(VaultPart):
    """What is kept of recoveries."""

    @one_commit
    def keep(self, tx: Tx, view: RecoveryView, act: LedgerAct) -> None:
        """One that ended, with its row in the ledger. The oldest goes when there are too many."""
        row = view.recovery
        number = self.writer.number(tx, "recoveries")
        line, document = (_encode(one).decode() for one in (row, view))
        run(tx, "insert_recovery", id=number, run=row.run, line=line, document=document)
        run(tx, "delete_recoveries", last=number - KEPT_COUNT_MAX)
        self.writer.append(tx, act, outcome=row.state, queue=row.queue, count=row.recovered)

    @one_look
    def page(self, tx: Tx, *, before: int, count_max: int) -> list[tuple[int, RecoveryRow]]:
        """Newest first, each with the number that the next page begins behind."""
        return [
            (number, _line(line)) for number, line in run(tx, "select_recoveries", before=before, count_max=count_max)
        ]

    @one_look
    def find(self, tx: Tx, name: str) -> RecoveryView | None:
        """One by the name of its run."""
        rows = run(tx, "find_recovery", run=name)
        return _document(rows[0][0]) if rows else None
