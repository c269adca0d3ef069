"""/admin/session: a browser opens a session with a token and is known by a cookie from then on."""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import Struct
from starlette.responses import Response

from holdfast.core.moments import moment
from holdfast.errors import Conflict, NotFound
from holdfast.faces.api.admin.desk import AdminContext, Endpoint
from holdfast.faces.api.admin.views import ActionReply
from holdfast.faces.api.authenticator import COOKIE, cookie_of
from holdfast.services.vault.access import SESSION_S, WebSession

_encode = msgspec.json.Encoder().encode


class SessionReply(Struct, frozen=True, kw_only=True):
    """Who the session belongs to. `csrf_token` goes into the header x-csrf-token of every change."""

    name: str
    role: str
    queues: list[str]
    csrf_token: str
    expires_at: datetime


async def open_session(desk: AdminContext) -> Response:
    token = desk.door.token_of(desk.request.scope)
    sessions = desk.door.sessions
    if not token or sessions is None:
        raise Conflict("session is not opened; it is opened with a token in the Authorization header")
    secret, session = sessions.open(token)
    await desk.vault.ledger.append(desk.act(), outcome="done")
    return Response(
        _encode(_reply(desk, session)), media_type="application/json", headers=_set_cookie(desk, secret, SESSION_S)
    )


async def show_session(desk: AdminContext) -> SessionReply:
    sessions = desk.door.sessions
    session = sessions.find(cookie_of(desk.request.scope)) if sessions else None
    if session is None:
        raise NotFound("session does not exist; open one with POST /admin/session")
    return _reply(desk, session)


async def close_session(desk: AdminContext) -> Response:
    sessions = desk.door.sessions
    closed = sessions is not None and sessions.close(cookie_of(desk.request.scope))
    if closed:
        await desk.vault.ledger.append(desk.act(), outcome="done")
    return Response(_encode(ActionReply(int(closed))), media_type="application/json", headers=_set_cookie(desk, "", 0))


def _reply(desk: AdminContext, session: WebSession) -> SessionReply:
    caller = desk.caller
    return SessionReply(
        name=caller.name,
        role=caller.role.word,
        queues=list(caller.queues),
        csrf_token=session.csrf,
        expires_at=moment(session.expires_at_us),
    )


def _set_cookie(desk: AdminContext, secret: str, age_s: int) -> dict[str, str]:
    """Never for a script to read, never sent along from another site, and over https alone where there is https."""
    secure = "; Secure" if desk.request.url.scheme == "https" else ""
    cookie = f"{COOKIE}={secret}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"
    return {"set-cookie": cookie, "cache-control": "no-store"}


ENDPOINTS = (
    Endpoint(
        "session.open",
        "POST",
        "/admin/session",
        open_session,
        SessionReply,
        "Open a session with a token: a cookie, and the token that every change by cookie needs",
        is_change=True,
    ),
    Endpoint("session.show", "GET", "/admin/session", show_session, SessionReply, "The session of this cookie"),
    Endpoint(
        "session.close",
        "DELETE",
        "/admin/session",
        close_session,
        ActionReply,
        "End the session of this cookie",
        is_change=True,
    ),
)
