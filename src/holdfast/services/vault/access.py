"""API tokens, the sessions that browsers open with one, and the links that open a session once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.ledger import LedgerAct
from holdfast.core.letter import NAME_CHARACTERS_MAX
from holdfast.core.moments import moment
from holdfast.core.requests.declare import Caller, Role, Token
from holdfast.core.requests.vault import CreateToken
from holdfast.errors import Conflict, Invalid, NotFound
from holdfast.ports.clock import Clock
from holdfast.stores.vault import Vault

SESSION_S = 12 * 3600
#: Of one token: the oldest of the same one ends when there are more.
SESSIONS_COUNT_MAX = 20
LINK_S = 300
#: Of one token: the oldest of the same one ends when there are more.
LINKS_COUNT_MAX = 5
#: So many refused calls of a caller are a row of the ledger each, until they are summed up; the others are in the sum.
REFUSED_ROWS_COUNT_MAX = 3
PREFIX = "hft_"
PATTERNS_COUNT_MAX = 100


class WebSession(Struct, frozen=True, kw_only=True):
    """One browser. `token` is the hash of the token that opened it: what that may not do, the session may not."""

    token: str
    csrf: str
    expires_at_us: int


class Sessions:
    """All sessions of this process; a token's oldest ends when it has too many.

    One is opened with a token, known by a cookie, ended by hand, by time, or when the token is revoked. They are in
    this process alone: after a restart whoever had one opens another. A change by cookie needs the session's CSRF token
    in a header as well, which no other page can read.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._by_hash: dict[str, WebSession] = {}

    def open(self, token: str) -> tuple[str, WebSession]:
        """A new session: its secret, told this once, and what is kept of it."""
        now_us = self._clock.now_us()
        self._by_hash = {key: one for key, one in self._by_hash.items() if one.expires_at_us > now_us}
        same = [key for key, one in self._by_hash.items() if one.token == token]
        for key in same[: max(0, len(same) - SESSIONS_COUNT_MAX + 1)]:
            del self._by_hash[key]
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


class SessionLinks:
    """What opens a session without its token being typed: each works once, within five minutes, in this process.

    The secret is in the hands of whoever asked with a token; here is its hash alone.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._by_hash: dict[str, tuple[str, int]] = {}  # of which token, and until when

    def make(self, token: str) -> tuple[str, int]:
        """A new one for the token of this hash: its secret, told this once, and until when it works (µs)."""
        now_us = self._clock.now_us()
        self._by_hash = {key: one for key, one in self._by_hash.items() if one[1] > now_us}
        same = [key for key, one in self._by_hash.items() if one[0] == token]
        for key in same[: max(0, len(same) - LINKS_COUNT_MAX + 1)]:
            del self._by_hash[key]
        secret, expires_at_us = secrets.token_urlsafe(32), now_us + LINK_S * 1_000_000
        self._by_hash[_hash(secret)] = token, expires_at_us
        return secret, expires_at_us

    def use(self, secret: str) -> str | None:
        """The hash of the token that it was made for, this once; none when it is unknown, used or past its time."""
        token, expires_at_us = self._by_hash.pop(_hash(secret), ("", 0))
        return token if expires_at_us > self._clock.now_us() else None

    def __len__(self) -> int:
        return len(self._by_hash)


class RefusedCalls:
    """The calls that were refused since the last sum, of each caller: who is refused all the time fills no ledger."""

    def __init__(self) -> None:
        self._by_caller: dict[tuple[str, str], Counter[str]] = {}

    def add(self, caller: Caller, action: str) -> bool:
        """Count one; whether it gets a row of its own."""
        refused = self._by_caller.setdefault((caller.name, caller.origin), Counter())
        refused[action] += 1
        return refused.total() <= REFUSED_ROWS_COUNT_MAX

    def sum_up(self) -> list[LedgerAct]:
        """What got no row of its own, one act for each caller; then counting begins anew."""
        found, self._by_caller = self._by_caller, {}
        return [
            LedgerAct(actor=name, action=refused.most_common(1)[0][0], origin=origin, detail=_told(refused))
            for (name, origin), refused in found.items()
            if refused.total() > REFUSED_ROWS_COUNT_MAX
        ]


def _told(refused: Counter[str]) -> str:
    actions = ", ".join(f"{count} {action}" for action, count in refused.most_common())
    return f"{refused.total()} calls were refused, the first {REFUSED_ROWS_COUNT_MAX} have rows of their own: {actions}"


def is_own_page(session: WebSession, given: str) -> bool:
    """Whether a request with this header comes from the session's own page."""
    return hmac.compare_digest(session.csrf.encode(), given.encode("utf-8", "replace"))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class TokenService:
    """All tokens, in memory for every request and in the vault for ever.

    One is made, shown once, kept as a hash, told apart by role, expiry and queues.
    """

    def __init__(self, vault: Vault, *, clock: Clock) -> None:
        self._vault = vault
        self._clock = clock
        self._by_hash: dict[str, Token] = {}
        #: Called when tokens were read: some may have ended.
        self.on_change: Callable[[], None] = lambda: None

    async def load(self) -> None:
        """Read them (again): another server may have changed them."""
        self._by_hash = {token.hash: token for token in await self._vault.tokens.all()}
        self.on_change()

    def caller_by_hash(self, digest: str) -> Caller | None:
        """Whose token has this hash; None for one that is unknown, revoked or past its time."""
        found = self._by_hash.get(digest)
        if found is None or not hmac.compare_digest(found.hash, digest) or found.revoked_at is not None:
            return None
        if found.expires_at is not None and found.expires_at <= moment(self._clock.now_us()):
            return None
        return Caller(name=f"token:{found.name}", role=found.role, queues=found.queues)

    async def create(self, wanted: CreateToken, act: LedgerAct) -> str:
        """A new token, told this once. Raises Invalid, or Conflict when the name is taken."""
        now_us, name, queues = self._clock.now_us(), wanted.name, wanted.queues
        expires_at = wanted.expires_at(now_us)
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            raise Invalid("token name is invalid; use 1 to 512 printable characters")
        if len(queues) > PATTERNS_COUNT_MAX or any(not one or len(one) > NAME_CHARACTERS_MAX for one in queues):
            raise Invalid(f"token queues are invalid; at most {PATTERNS_COUNT_MAX} patterns of 1 to 512 characters")
        secret = PREFIX + secrets.token_urlsafe(32)
        token = Token(
            name=name,
            role=Role[wanted.role.upper()],
            hash=_hash(secret),
            made_at=moment(now_us),
            made_by=act.actor,
            expires_at=expires_at,
            queues=tuple(queues),
        )
        if not await self._vault.tokens.put(token, act):
            raise Conflict(f"token name is taken; there is or was a token '{name}', use another name")
        self._by_hash[token.hash] = token
        return secret

    async def all(self) -> list[Token]:
        """All of them, without their hashes."""
        await self.load()
        return [replace(token, hash="") for token in self._by_hash.values()]

    async def revoke(self, name: str, act: LedgerAct) -> None:
        """It is never let in again, from now on. Raises NotFound."""
        done = await self._vault.tokens.revoke(name, act)
        await self.load()
        if not done:
            raise NotFound(f"token does not exist; no valid token is named '{name}'")
