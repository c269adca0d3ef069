"""Sign in and sign out: a token, or a link that was made with one, opens a session, which the browser is known by from
then on."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.core.requests.vault import CloseSession, OpenSession
from holdfast.errors import HoldfastError, Unauthorized
from holdfast.faces.api.authenticator import cookie_of
from holdfast.faces.web.console import SIGN_IN, Visit, page
from holdfast.services.vault.access import SESSION_S
from holdfast.services.vault.admin import act_of

TOKEN_CHARACTERS_MAX = 500


@page(f"GET {SIGN_IN}", is_open=True)
async def sign_in_page(visit: Visit) -> Response:
    """Asks for a token."""
    where = _inside(visit.query.get("next", "/"))
    if visit.is_signed_in:
        return visit.redirect(where)
    return visit.page("sign_in.html", title="Sign in", next=where, wrong="")


@page(f"POST {SIGN_IN}", is_open=True)
async def sign_in(visit: Visit) -> Response:
    """Opens a session with the token that was given."""
    console, scope = visit.console, visit.http.scope
    where = _inside(visit.form.get("next", "/"))
    token = visit.form.get("token", "").strip()
    try:
        if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isascii() or not token.isprintable():
            raise Unauthorized
        # As a program that shows the token in a header.
        shown = {**scope, "headers": [(b"authorization", f"Bearer {token}".encode())]}
        caller = console.authenticator.caller(shown)
        opened_with = console.authenticator.token_of(shown)
    except HoldfastError as error:
        await console.authenticator.slow_down({**scope, "headers": [(b"authorization", b"Bearer -")]}, error)
        visit.status = 401
        return visit.page(
            "sign_in.html", title="Sign in", next=where, wrong="That token is not known here, or it has ended."
        )
    sessions = console.authenticator.sessions
    if sessions is None or not opened_with:
        return visit.redirect(where)
    secret, _ = sessions.open(opened_with)
    await console.vault_app.vault.ledger.append(act_of(OpenSession(), caller), outcome="done")
    response = visit.redirect(where)
    response.headers.append("set-cookie", console.authenticator.cookie(scope, secret, SESSION_S))
    return response


@page("GET /sign-in/link", is_open=True)
async def link_page(visit: Visit) -> Response:
    """Asks whoever opened a link to go on: what opens it by itself, to preview it, uses up nothing."""
    authenticator = visit.console.authenticator
    if not authenticator.needs_token:
        return visit.redirect("/")
    authenticator.check_link(visit.http.scope)
    return _link_page(visit, visit.query.get("secret", ""))


@page("POST /sign-in/link", is_open=True)
async def follow_link(visit: Visit) -> Response:
    """Opens a session with the link, and uses it up."""
    console, scope = visit.console, visit.http.scope
    try:
        secret, caller = console.authenticator.open_by_link(scope, visit.form.get("secret", ""))
    except Unauthorized as error:
        await console.authenticator.slow_down({**scope, "headers": [(b"authorization", b"Bearer -")]}, error)
        visit.status = 401
        return _link_page(visit, "")
    act = act_of(OpenSession(), caller, detail="by a link")
    await console.vault_app.vault.ledger.append(act, outcome="done")
    response = visit.redirect("/")
    response.headers.append("set-cookie", console.authenticator.cookie(scope, secret, SESSION_S))
    return response


def _link_page(visit: Visit, secret: str) -> Response:
    response = visit.page("link.html", title="Sign in", secret=secret)
    response.headers["referrer-policy"] = "no-referrer"  # its address holds the secret
    return response


@page("POST /sign-out")
async def sign_out(visit: Visit) -> Response:
    """Ends the session."""
    console, scope = visit.console, visit.http.scope
    if console.authenticator.sessions is not None and console.authenticator.sessions.close(cookie_of(scope)):
        await console.vault_app.vault.ledger.append(act_of(CloseSession(), visit.caller), outcome="done")
    response = visit.redirect(SIGN_IN, "You are signed out.")
    response.headers.append("set-cookie", console.authenticator.cookie(scope, "", 0))
    return response


def _inside(path: str) -> str:
    """A path of this server; anything else would lead the visitor away."""
    is_inside = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_inside else "/"
