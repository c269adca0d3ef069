"""The ledger: who did what, found by who, what, queue, letter and time; whether its chain holds; and the balance, for
which letters are counted twice.

What is looked for stands in the address. Nothing is verified or counted before somebody asks for it: both look at all
there is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starlette.responses import Response

from holdfast.core.requests.vault import (
    BalanceRow,
    ExportLedger,
    ReadBalance,
    ReadHead,
    ReadLedger,
    Verified,
    VerifyLedger,
)
from holdfast.errors import HoldfastError
from holdfast.faces.web.console import Visit, page
from holdfast.faces.web.rendering import query

PAGE_COUNT = 50
#: What a row can be found by, in the order of its form.
FIELDS = ("actor", "action", "outcome", "queue", "letter", "done_after", "done_before")
MOMENTS = ("done_after", "done_before")
MINUTE = re.compile(r"\d{4,}-\d\d-\d\dT\d\d:\d\d", re.ASCII)
#: What is looked for often: a redrive writes two rows of every letter, between which the others are not seen.
OFTEN = (
    ("action", "redrives.start", "redrives started"),
    ("action", "redrives.stopped", "redrives stopped"),
    ("action", "letters.edit", "edits"),
    ("action", "letters.discard", "discards"),
    ("action", "groups.change", "groups and their notes"),
    ("action", "tokens.create", "tokens made"),
    ("outcome", "denied", "what was denied"),
)
OUTCOMES = ("done", "refused", "denied", "failed")


class BalanceLine(NamedTuple):
    """Letters of a queue in one state, counted from the ledger and from the vault."""

    queue: str
    state: str
    ledger: int
    vault: int


@page("GET /ledger", bar="Ledger", needs=ReadBalance)
async def ledger(visit: Visit) -> Response:
    """Rows of the ledger, newest first."""
    if not visit.may(ReadLedger):
        return visit.redirect("/ledger/balance")  # of the ledger that is what everybody may see
    fields = {name: visit.query[name] for name in FIELDS if name in visit.query}
    for name in MOMENTS:
        if MINUTE.fullmatch(fields.get(name, "")):
            fields[name] += ":00"  # a browser leaves out seconds that are zero
    asked = visit.read(ReadLedger, newest_first="true", limit=PAGE_COUNT, **fields)
    found = await visit.ask(asked)
    return visit.page(
        "ledger.html",
        title="Ledger",
        tab="rows",
        fields=fields,
        found=found,
        outcomes=OUTCOMES,
        often=OFTEN,
        export=f"{ExportLedger.declared.path}?{query(fields)}" if fields else ExportLedger.declared.path,
        cursor=visit.query.get("cursor", ""),
    )


@page("GET /ledger/verify", needs=VerifyLedger)
async def verify(visit: Visit) -> Response:
    """Whether the chain holds; looked at when the button is pressed."""
    found: Verified | None = None
    anchor, is_asked = visit.query.get("anchor", "").strip(), "verify" in visit.query
    if not is_asked and not visit.may(VerifyLedger):
        return visit.redirect("/ledger/balance")
    if is_asked:
        try:
            found = await visit.ask(VerifyLedger(anchor=anchor))
        except HoldfastError as error:
            visit.refuse(error)
    head = found.head if found else (await visit.ask(ReadHead())).head
    return visit.page("ledger_verify.html", title="Ledger", tab="verify", found=found, anchor=anchor, head=head)


@page("GET /ledger/balance", needs=ReadBalance)
async def balance(visit: Visit) -> Response:
    """Letters by queue and state, from two sides."""
    rows = await visit.ask(ReadBalance())
    return visit.page(
        "balance.html",
        title="Balance",
        tab="balance",
        rows=rows,
        lines={row.queue: _lines(row) for row in rows},
        differing=[row for row in rows if not row.agrees],
        may_read=visit.may(ReadLedger),
    )


def _lines(row: BalanceRow) -> Sequence[BalanceLine]:
    states: Mapping[str, None] = dict.fromkeys([*row.vault, *row.ledger])
    return [BalanceLine(row.queue, state, row.ledger.get(state, 0), row.vault.get(state, 0)) for state in states]
