"""Who may come in: the admin token, tokens with a role, or on loopback, when the settings say so, everybody here.

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

from holdfast.core.roles import ELSEWHERE, NEEDS, Caller, Role
from holdfast.errors import Forbidden, Unauthorized
from holdfast.services.tokens import TokenBook

Scope = MutableMapping[str, Any]
#: How the ledger calls whoever needs no token.
NAME_HERE = "anybody here"


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


class Door:
    """Lets a request in, or raises Unauthorized or Forbidden."""

    def __init__(
        self, admin_token_hash: str | None, *, tokens: TokenBook | None = None, name_here: str = NAME_HERE
    ) -> None:
        self._hash = admin_token_hash
        self._name_here = name_here
        self._tokens = tokens

    def check(self, scope: Scope, need: str = "") -> Caller:
        """Check one request; `need` is its line in the table of roles. Without one it takes an admin."""
        caller = self.caller(scope)
        role = NEEDS.get(need, ELSEWHERE)
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
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
                if self._is_admin(token.strip()):
                    return Caller(name="admin", role=Role.ADMIN, origin=origin)
                if self._tokens is not None and (found := self._tokens.caller(token.strip())) is not None:
                    return replace(found, origin=origin)
        raise Unauthorized

    def check_page(self, scope: Scope) -> None:
        """Check a request for a page that needs no token."""
        if self._hash is None:
            _check_local(scope["headers"])

    def _is_admin(self, token: bytes) -> bool:
        digest = hashlib.sha256(token).hexdigest()
        return self._hash is not None and hmac.compare_digest(digest, self._hash)


def _check_local(headers: list[tuple[bytes, bytes]]) -> None:
    host = ""
    for name, value in headers:
        if name == b"host":
            host = urlsplit(f"//{value.decode('latin-1')}").hostname or ""
        elif name == b"origin" and not is_loopback(urlsplit(value.decode("latin-1")).hostname or ""):
            raise Forbidden("forbidden; this server takes no requests from other web pages")
    if not is_loopback(host):
        raise Forbidden("forbidden; without tokens this server answers only to a loopback host name")
