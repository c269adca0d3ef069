"""Who may come in: one admin token, or on loopback, when the settings say so, everybody on this machine.

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

from holdfast.errors import Forbidden, Unauthorized

Scope = MutableMapping[str, Any]


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

    def __init__(self, admin_token_hash: str | None) -> None:
        self._hash = admin_token_hash

    def check(self, scope: Scope) -> None:
        """Check one request."""
        headers = scope["headers"]
        if self._hash is None:
            _check_local(headers)
            return
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                if scheme.lower() == b"bearer" and self._is_admin(token.strip()):
                    return
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
