"""Settings: API tokens with their roles, and what the server was started with; for admins."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from holdfast.core.requests.declare import Role
from holdfast.core.requests.vault import CreateToken, ListTokens, ReadSettings, RevokeToken, TokenView
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.web.console import Visit, page

ROLES = tuple(role.word for role in Role)


@page("GET /settings", bar="Settings", needs=ListTokens)
async def settings(visit: Visit) -> Response:
    """All tokens, and every setting with its source."""
    return await _page(visit)


async def _page(visit: Visit, made: str = "") -> Response:
    """`made` is a token that was made just now: it is shown this once."""
    now = visit.console.vault_app.now_us
    tokens = await visit.ask(ListTokens())
    return visit.page(
        "settings.html",
        title="Settings",
        made=made,
        tokens=sorted(tokens, key=lambda one: (_state(one, now) != "valid", one.name)),
        states={one.name: _state(one, now) for one in tokens},
        roles=ROLES,
        settings=await visit.ask(ReadSettings()) if visit.may(ReadSettings) else [],
    )


def _state(token: TokenView, now_us: int) -> str:
    if token.revoked_at is not None:
        return "revoked"
    is_over = token.expires_at is not None and token.expires_at.timestamp() * 1_000_000 <= now_us
    return "expired" if is_over else "valid"


@page("POST /settings")
async def change_tokens(visit: Visit) -> Response:
    """Make a token, or revoke one."""
    try:
        match visit.form.get("do", ""):
            case "create":
                return await _page(visit, await _create(visit))
            case "revoke":
                name = visit.form.get("name", "")
                await visit.ask(RevokeToken(name=name))
                return visit.redirect("/settings", f"The token {name} is revoked: it lets nobody in any more.")
        raise Invalid("form is invalid; it does not say what is to be done")
    except HoldfastError as error:
        visit.refuse(error)
        return await _page(visit)


async def _create(visit: Visit) -> str:
    given: dict[str, object] = {name: visit.form.get(name, "").strip() for name in ("name", "role", "expires_in")}
    given["queues"] = visit.form.get("queues", "").replace(",", " ").split()
    try:
        wanted = msgspec.convert(given, CreateToken)
    except msgspec.ValidationError as error:
        raise Invalid(f"token is invalid; {error}") from error
    return (await visit.ask(wanted)).token
