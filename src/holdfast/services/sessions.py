"""Sessions of browsers: opened with a token, known by a cookie, ended by hand, by time, or when the token is revoked.

They are in this process alone: after a restart whoever had one opens another. A change by cookie needs the session's
CSRF token in a header as well, which no other page can read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from msgspec import Struct

from holdfast.ports.clock import Clock

SESSION_S = 12 * 3600
SESSIONS_COUNT_MAX = 1_000


class WebSession(Struct, frozen=True, kw_only=True):
    """One browser. `token` is the hash of the token that opened it: what that may not do, the session may not."""

    token: str
    csrf: str
    expires_at_us: int


class Sessions:
    """All sessions of this process; the oldest ends when there are too many."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._by_hash: dict[str, WebSession] = {}

    def open(self, token: str) -> tuple[str, WebSession]:
        """A new session: its secret, told this once, and what is kept of it."""
        now_us = self._clock.now_us()
        self._by_hash = {key: one for key, one in self._by_hash.items() if one.expires_at_us > now_us}
        while len(self._by_hash) >= SESSIONS_COUNT_MAX:
            del self._by_hash[next(iter(self._by_hash))]
        secret = secrets.token_urlsafe(32)
        session = WebSession(token=token, csrf=secrets.token_urlsafe(32), expires_at_us=now_us + SESSION_S * 1_000_000)
        self._by_hash[_hash(secret)] = session
        return secret, session

    def find(self, secret: str) -> WebSession | None:
        """The session of a cookie; none when it is unknown or past its time."""
        session = self._by_hash.get(_hash(secret))
        return session if session is not None and session.expires_at_us > self._clock.now_us() else None

    def close(self, secret: str) -> bool:
        """End one; false when there was none."""
        return self._by_hash.pop(_hash(secret), None) is not None

    def __len__(self) -> int:
        return len(self._by_hash)


def is_csrf(session: WebSession, given: str) -> bool:
    """Whether a request with this header comes from the session's own page."""
    return hmac.compare_digest(session.csrf.encode(), given.encode("utf-8", "replace"))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
