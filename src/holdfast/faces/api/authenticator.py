"""Who may come in: the admin token, tokens with a role, sessions that one of them opened, or on loopback, when the
settings say so, everybody here.

Without a token a web page could reach the server through its visitor's browser: then only requests that name a loopback
host and come from no foreign page are let in.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from holdfast.core.requests.declare import Caller, Role
from holdfast.errors import Forbidden, Unauthorized
from holdfast.services.vault.access import Sessions, WebSession, is_csrf
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import ListenAddress

Scope = MutableMapping[str, Any]
#: How the ledger calls whoever needs no token.
NAME_HERE = "anybody here"
COOKIE = "holdfast_session"
CSRF_HEADER = "x-csrf-token"
READS = frozenset({"GET", "HEAD", "OPTIONS"})


def token_hash(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Authenticator:
    """Lets a request in, or raises Unauthorized or Forbidden."""

    def __init__(self, admin_token_hash: str | None, vault_app: VaultApp | None = None) -> None:
        self._hash = admin_token_hash
        self._tokens = vault_app.tokens if vault_app is not None else None
        self.sessions = Sessions(clock=vault_app.custody.clock) if vault_app is not None else None
        self.redrive_role = vault_app.redrive_role if vault_app is not None else Role.OPERATOR

    def check(self, scope: Scope, role: Role) -> Caller:
        """Check one request, for which it takes this role."""
        caller = self.caller(scope)
        self.check_page_of_session(scope)
        if caller.role < role:
            raise Forbidden(f"forbidden; this needs the role {role.word}, you are {caller.role.word}")
        return caller

    def caller(self, scope: Scope) -> Caller:
        """Who asks. Raises Unauthorized, or Forbidden for a foreign page where no token is needed."""
        headers = scope["headers"]
        origin = str((scope.get("client") or ("",))[0])
        if self._hash is None:
            _check_local(headers)
            return Caller(name=NAME_HERE, role=Role.ADMIN, origin=origin)
        session = self._session(scope)
        digest = session.token if session else self.token_of(scope)
        if digest and hmac.compare_digest(digest, self._hash):
            return Caller(name="admin", role=Role.ADMIN, origin=origin)
        if digest and self._tokens is not None and (found := self._tokens.caller_by_hash(digest)) is not None:
            return replace(found, origin=origin)
        raise Unauthorized

    def token_of(self, scope: Scope) -> str:
        """The hash of the token that a request carries in its header; empty without one."""
        if self._hash is None:
            return ""
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return hashlib.sha256(token.strip()).hexdigest() if scheme.lower() == b"bearer" else ""

    def check_page_of_session(self, scope: Scope) -> None:
        """A change by cookie has to come from the session's own page. Raises Forbidden."""
        session = self._session(scope)
        if session is None or scope["method"] in READS:
            return
        if not is_csrf(session, _header(scope, CSRF_HEADER.encode()).decode("latin-1")):
            raise Forbidden(f"forbidden; a change by session cookie needs the session's token in {CSRF_HEADER}")

    def _session(self, scope: Scope) -> WebSession | None:
        """The session of a request that carries no token itself."""
        if self.sessions is None or self._hash is None or _header(scope, b"authorization"):
            return None
        return self.sessions.find(cookie_of(scope))

    def check_page(self, scope: Scope) -> None:
        """Check a request for a page that needs no token."""
        if self._hash is None:
            _check_local(scope["headers"])


def cookie_of(scope: Scope) -> str:
    """The secret of the session cookie; empty without one."""
    for part in _header(scope, b"cookie").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _header(scope: Scope, wanted: bytes) -> bytes:
    """The first header of a name; empty without one."""
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def _check_local(headers: list[tuple[bytes, bytes]]) -> None:
    is_here = False
    for name, value in headers:
        if name == b"host":
            is_here = _is_here(f"//{value.decode('latin-1')}")
        elif name == b"origin" and not _is_here(value.decode("latin-1")):
            raise Forbidden("forbidden; this server takes no requests from other web pages")
    if not is_here:
        raise Forbidden("forbidden; without tokens this server answers only to a loopback host name")


def _is_here(url: str) -> bool:
    """Whether the host of a URL is this machine itself."""
    return ListenAddress(urlsplit(url).hostname or "", 0).is_loopback
