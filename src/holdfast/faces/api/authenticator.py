"""Who may come in: the admin token, tokens with a role, sessions that one of them opened, or on loopback, when the
settings say so, everybody here.

Without a token a web page could reach the server through its visitor's browser: then only requests that name a loopback
host and come from no foreign page are let in.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from holdfast.core.requests.declare import Caller, Declared, Role
from holdfast.errors import Forbidden, Unauthorized
from holdfast.services.vault.access import Sessions, TokenService, WebSession, is_csrf

Scope = MutableMapping[str, Any]
#: How the ledger calls whoever needs no token.
NAME_HERE = "anybody here"
COOKIE = "holdfast_session"
CSRF_HEADER = "x-csrf-token"
READS = frozenset({"GET", "HEAD", "OPTIONS"})


def token_hash(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Authenticator:
    """Lets a request in, or raises Unauthorized or Forbidden."""

    def __init__(
        self,
        admin_token_hash: str | None,
        *,
        tokens: TokenService | None = None,
        sessions: Sessions | None = None,
        redrive_role: Role = Role.OPERATOR,
        name_here: str = NAME_HERE,
    ) -> None:
        self._hash = admin_token_hash
        self._name_here = name_here
        self._tokens = tokens
        self._redrive_role = redrive_role
        self.sessions = sessions

    def check(self, scope: Scope, declared: Declared | None) -> Caller:
        """Check one request; what nobody has declared takes an admin."""
        caller = self.caller(scope)
        self.check_page_of_session(scope)
        role = declared.needs(self._redrive_role) if declared is not None else Role.ADMIN
        if caller.role < role:
            raise Forbidden(f"forbidden; this needs the role {role.word}, you are {caller.role.word}")
        return caller

    def caller(self, scope: Scope) -> Caller:
        """Who asks. Raises Unauthorized, or Forbidden for a foreign page where no token is needed."""
        headers = scope["headers"]
        origin = str((scope.get("client") or ("",))[0])
        if self._hash is None:
            _check_local(headers)
            return Caller(name=self._name_here, role=Role.ADMIN, origin=origin)
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
    host = ""
    for name, value in headers:
        if name == b"host":
            host = urlsplit(f"//{value.decode('latin-1')}").hostname or ""
        elif name == b"origin" and not is_loopback(urlsplit(value.decode("latin-1")).hostname or ""):
            raise Forbidden("forbidden; this server takes no requests from other web pages")
    if not is_loopback(host):
        raise Forbidden("forbidden; without tokens this server answers only to a loopback host name")
