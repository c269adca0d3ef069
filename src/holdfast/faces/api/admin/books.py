"""/admin/ledger, /admin/balance, /admin/tokens and /admin/events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from msgspec import Struct
from starlette.responses import Response, StreamingResponse

from holdfast.core.requests.roles import Role
from holdfast.core.selection import decode_cursor, encode_cursor
from holdfast.faces.api.admin.desk import AdminContext, Endpoint
from holdfast.faces.api.admin.views import (
    ActionReply,
    HeadReply,
    LedgerReply,
    PageQuery,
    TokenReply,
    TokenRequest,
    TokenView,
)
from holdfast.services.vault.custody import check_all_queues
from holdfast.services.vault.ledgers import BalanceRow, Verified

EVENTS_STEP_S = 1.0
EVENTS_COUNT_MAX = 3_600
EVENT_REDRIVES_COUNT_MAX = 20

_encode = msgspec.json.Encoder().encode


class VerifyQuery(Struct, frozen=True, kw_only=True):
    """A head that was noted before."""

    anchor: str = ""


async def ledger(desk: AdminContext) -> LedgerReply:
    query = desk.query(PageQuery)
    check_all_queues(desk.caller)
    after = decode_cursor("ledger", query.cursor) if query.cursor else 0
    rows = await desk.vault.ledger.rows(after=after, count_max=query.limit)
    return LedgerReply(rows=rows, next=encode_cursor("ledger", rows[-1].number) if len(rows) == query.limit else "")


async def head(desk: AdminContext) -> HeadReply:
    return HeadReply(await desk.office.ledgers.head())


async def verify(desk: AdminContext) -> Verified:
    return await desk.office.ledgers.verify(anchor=desk.query(VerifyQuery).anchor)


async def balance(desk: AdminContext) -> list[BalanceRow]:
    return [row for row in await desk.office.ledgers.balance() if desk.caller.may_touch(row.queue)]


async def tokens(desk: AdminContext) -> list[TokenView]:
    check_all_queues(desk.caller)
    return [
        TokenView(
            name=one.name,
            role=one.role.word,
            made_at=one.made_at,
            made_by=one.made_by,
            expires_at=one.expires_at,
            revoked_at=one.revoked_at,
            queues=list(one.queues),
        )
        for one in await desk.office.tokens.all()
    ]


async def create_token(desk: AdminContext) -> TokenReply:
    wanted = desk.body(TokenRequest)
    check_all_queues(desk.caller)
    secret = await desk.office.tokens.create(
        wanted.name,
        Role[wanted.role.upper()],
        desk.act(detail=f"{wanted.role} token '{wanted.name[:200]}'"),
        expires_at=wanted.expires_at(desk.now_us),
        queues=wanted.queues,
    )
    return TokenReply(secret)


async def revoke_token(desk: AdminContext) -> ActionReply:
    check_all_queues(desk.caller)
    name = desk.text("name").replace("\x00", "")
    await desk.office.tokens.revoke(name, desk.act(detail=f"token '{name[:200]}'"))
    return ActionReply(1)


async def events(desk: AdminContext) -> Response:
    check_all_queues(desk.caller)
    return StreamingResponse(_stream(desk), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _stream(desk: AdminContext) -> AsyncGenerator[bytes, None]:
    """Arrivals (the tallies) and progress (the newest tasks), whenever they have changed; ends after an hour."""
    last: dict[str, bytes] = {}
    for _ in range(EVENTS_COUNT_MAX):
        found = {
            "tallies": _encode(await desk.vault.ledger.tallies()),
            "redrives": _encode(await desk.vault.redrives.page(before=2**62, count_max=EVENT_REDRIVES_COUNT_MAX)),
        }
        for name, data in found.items():
            if last.get(name) != data:
                yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
        last = found
        await asyncio.sleep(EVENTS_STEP_S)


ENDPOINTS = (
    Endpoint(
        "ledger.read", "GET", "/admin/ledger", ledger, LedgerReply, "Who did what, oldest first", query=(PageQuery,)
    ),
    Endpoint("ledger.head", "GET", "/admin/ledger/head", head, HeadReply, "The anchor of the chain"),
    Endpoint(
        "ledger.verify",
        "GET",
        "/admin/ledger/verify",
        verify,
        Verified,
        "Whether the chain holds",
        query=(VerifyQuery,),
    ),
    Endpoint(
        "balance.read", "GET", "/admin/balance", balance, list[BalanceRow], "Letters by queue and state, from two sides"
    ),
    Endpoint("tokens.list", "GET", "/admin/tokens", tokens, list[TokenView], "API tokens"),
    Endpoint(
        "tokens.create",
        "POST",
        "/admin/tokens",
        create_token,
        TokenReply,
        "Make a token; it is shown this once",
        request=TokenRequest,
        is_change=True,
    ),
    Endpoint(
        "tokens.revoke", "DELETE", "/admin/tokens/{name}", revoke_token, ActionReply, "Revoke a token", is_change=True
    ),
    Endpoint(
        "events.watch",
        "GET",
        "/admin/events",
        events,
        bytes,
        "Progress and arrivals as server-sent events",
        media="text/event-stream",
    ),
)
