"""Who may come in: the admin token, tokens with a role, sessions that one of them opened, or on loopback, when the
settings say so, everybody here.

Without a token a web page could reach the server through its visitor's browser: then only requests that name a loopback
host and come from no foreign page are let in.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from ipaddress import IPv6Address, ip_address
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from holdfast.core.moments import Backoff
from holdfast.core.requests.declare import Caller, Role
from holdfast.errors import Forbidden, HoldfastError, Invalid, Unauthorized
from holdfast.services.vault.access import SessionLinks, Sessions, WebSession, is_own_page
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import ListenAddress, networks
from holdfast.telemetry.events import emit

Scope = MutableMapping[str, Any]
#: How the ledger calls whoever needs no token.
NAME_HERE = "anybody here"
NAME_ADMIN = "admin"
COOKIE = "holdfast_session"
CSRF_HEADER = "x-csrf-token"
#: Event streams of one token: each has a connection for itself, and there are others who need some.
ENDLESS_COUNT_MAX = 200
#: How often requests that wait are looked at again, for tokens and sessions that end by time.
LOOK_S = 1.0
#: What an address that comes with wrong tokens waits for its answers, after a few; and when that is forgotten.
WAITS = Backoff(first_s=0.05, delay_s_max=2.0)
WRONG_COUNT_FREE = 5
FORGET_S = 60.0
ADDRESSES_COUNT_MAX = 10_000
READS = frozenset({"GET", "HEAD", "OPTIONS"})
#: What a browser says of where a request comes from, when it is our own page or its user.
OWN_SITES = frozenset({b"same-origin", b"none"})
PORTS = {"https": 443}
#: By these a proxy tells that it stands between a browser and us.
FORWARDED = frozenset({b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"})
FORWARDED_PREFIX = b"x-forwarded"
#: So many proxies in a row are believed; who forges a thousand is not looked up in all of them.
HOPS_COUNT_MAX = 20
#: What ends a host in a URL, or is in none.
NO_HOST = frozenset(b" \t/?#@\\")


def link_path(secret: str) -> str:
    """The page that a sign-in link leads to. A query is in no log of ours, as a path may be; and no page that is opened
    with it sends it on, nor uses it up: that takes its button."""
    return f"/sign-in/link?secret={secret}"


def token_hash(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Authenticator:
    """Lets a request in, or raises Unauthorized or Forbidden."""

    def __init__(
        self,
        admin_token_hash: str | None,
        vault_app: VaultApp | None = None,
        *,
        trusted_proxy: str | None = None,
        links: SessionLinks | None = None,
    ) -> None:
        """`links` are for a server that others cannot reach; without them none is made."""
        self._hash = admin_token_hash
        self._links = links
        self._proxies = networks(trusted_proxy)
        self._tokens = vault_app.tokens if vault_app is not None else None
        self.sessions = Sessions(clock=vault_app.custody.clock) if vault_app is not None else None
        self.redrive_role = vault_app.redrive_role if vault_app is not None else Role.OPERATOR
        self._wrong: dict[str, tuple[int, float]] = {}  # by address: how many wrong tokens, and when the last one came
        self._waiting: dict[_OpenRequest, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        if self._tokens is not None:
            self._tokens.on_change = self.look_again

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
        origin = self._origin(scope)
        if self._hash is None:
            _check_local(headers)
            return Caller(name=NAME_HERE, role=Role.ADMIN, origin=origin)
        session = self.session(scope)
        return replace(self._known(session.token if session else self.token_of(scope)), origin=origin)

    def knows(self, scope: Scope) -> bool:
        """Whether a request shows who makes it."""
        try:
            self.caller(scope)
        except HoldfastError:
            return False
        return True

    def _known(self, digest: str) -> Caller:
        """Whose token has this hash. Raises Unauthorized."""
        if digest and self._hash is not None and hmac.compare_digest(digest, self._hash):
            return Caller(name=NAME_ADMIN, role=Role.ADMIN)
        if digest and self._tokens is not None and (found := self._tokens.caller_by_hash(digest)) is not None:
            return found
        raise Unauthorized

    async def slow_down(self, scope: Scope, error: HoldfastError) -> None:
        """Before a wrong token is told so: count it, and wait the longer, the more of them came from there."""
        if not isinstance(error, Unauthorized) or not (self.token_of(scope) or cookie_of(scope)):
            return
        address, now_s = self._origin(scope), time.monotonic()
        count, last_s = self._wrong.pop(address, (0, now_s))
        count = count + 1 if now_s - last_s < FORGET_S else 1
        self._wrong[address] = (count, now_s)
        if len(self._wrong) > ADDRESSES_COUNT_MAX:
            del self._wrong[next(iter(self._wrong))]  # the one that has been quiet for longest
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: not a line each
            emit("server.wrong_token", address=address, tries=count, count=count // 2 or 1)
        if count > WRONG_COUNT_FREE:
            await asyncio.sleep(WAITS.delay_s(count - WRONG_COUNT_FREE - 1, spread=1.0))

    def while_let_in(self, scope: Scope, caller: Caller, *, is_endless: bool = False) -> AbstractContextManager[None]:
        """A block that may wait: when its caller would not be let in any more it is cancelled, and Unauthorized. So is
        the oldest one that is endless when the same caller has too many of them."""
        if self._hash is None or (caller.name == NAME_ADMIN and _header(scope, b"authorization")):
            return nullcontext()  # this one does not end
        return _OpenRequest(self, scope, caller.name if is_endless else "")

    def add(self, waiting: _OpenRequest) -> None:
        """A block begins that may wait."""
        self._waiting[waiting] = None
        if waiting.endless_of:
            same = [one for one in self._waiting if one.endless_of == waiting.endless_of]
            if len(same) > ENDLESS_COUNT_MAX:
                same[0].end()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_times)

    def discard(self, waiting: _OpenRequest) -> None:
        """It has ended."""
        self._waiting.pop(waiting, None)

    def look_again(self) -> None:
        """Some token has changed: end what waits and would not be let in any more."""
        for waiting in list(self._waiting):
            waiting.look()

    def _look_at_times(self) -> None:
        self._timer = None
        self.look_again()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_times)

    def token_of(self, scope: Scope) -> str:
        """The hash of the token that a request carries in its header; empty without one."""
        if self._hash is None:
            return ""
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return hashlib.sha256(token.strip()).hexdigest() if scheme.lower() == b"bearer" else ""

    def check_page_of_session(self, scope: Scope, given: str | None = None) -> None:
        """A change by cookie has to come from the session's own page, which gives the session's token in a header, or
        in a field of its form. Raises Forbidden."""
        session = self.session(scope)
        if session is None or scope["method"] in READS:
            return
        if not is_own_page(session, given or _header(scope, CSRF_HEADER.encode()).decode("latin-1")):
            raise Forbidden(f"forbidden; a change by session cookie needs the session's token in {CSRF_HEADER}")

    def check_form(self, scope: Scope) -> None:
        """A form comes from a page of this server, as far as the browser says; also one that needs no session yet.
        Raises Forbidden."""
        hosts = _list(scope, b"host").lower()
        for name, value in scope["headers"]:
            is_own = name != b"sec-fetch-site" or value in OWN_SITES
            if name == b"origin":
                is_own = value.lower().partition(b"://")[2] == hosts
                # What a page without referrers says of its own forms.
                is_own = is_own or (value == b"null" and _header(scope, b"sec-fetch-site") == b"same-origin")
            if not is_own:
                raise Forbidden("forbidden; this form came from another web page")

    def cookie(self, scope: Scope, secret: str, age_s: int) -> str:
        """Never for a script to read, never sent along from another site, and over https alone where there is https."""
        secure = "; Secure" if self.is_https(scope) else ""
        return f"{COOKIE}={secret}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"

    def session(self, scope: Scope) -> WebSession | None:
        """The session of a request that carries no token itself."""
        if self.sessions is None or self._hash is None or _header(scope, b"authorization"):
            return None
        return self.sessions.find(cookie_of(scope))

    @property
    def needs_token(self) -> bool:
        """Whether nobody is let in without one."""
        return self._hash is not None

    def check_link(self, scope: Scope) -> SessionLinks:
        """The links, for a request from this machine itself, through nobody. Raises Forbidden, Invalid."""
        forwarded = [name for name, _ in scope["headers"] if name in FORWARDED or name.startswith(FORWARDED_PREFIX)]
        if self._links is None or forwarded:
            why = f"this came with {forwarded[0].decode('latin-1')}" if forwarded else "others can reach this one"
            raise Forbidden(
                f"forbidden; a sign-in link is for a server that is reached from its own machine alone, and {why}: "
                "sign in with a token"
            )
        _check_host(scope["headers"], "for a sign-in link")
        return self._links

    def open_by_link(self, scope: Scope, secret: str) -> tuple[str, Caller]:
        """A session of the token that the link was made for: its secret, and whose it is. Raises Unauthorized."""
        token = self.check_link(scope).use(secret)
        if token is None or self.sessions is None:
            raise Unauthorized
        caller = replace(self._known(token), origin=self._origin(scope))
        return self.sessions.open(token)[0], caller

    def viewer(self, scope: Scope) -> Caller | None:
        """Who looks at a page that needs no token; None without one. Raises as `caller` for a wrong one."""
        if self._hash is not None and not self.token_of(scope) and self.session(scope) is None:
            return None
        return self.caller(scope)

    def is_https(self, scope: Scope) -> bool:
        """Whether the browser came by https, as far as we or a proxy that is trusted can tell."""
        is_told = self._is_proxy(_peer(scope)) and _last(scope, b"x-forwarded-proto").lower() == b"https"
        return is_told or scope.get("scheme") == "https"

    def _origin(self, scope: Scope) -> str:
        """The address that a request came from: before the proxies that are trusted, if there are any."""
        address = _peer(scope)
        hops = _list(scope, b"x-forwarded-for").decode("latin-1").split(",")[-HOPS_COUNT_MAX:]
        for hop in reversed(hops):
            if not self._is_proxy(address) or not hop.strip():
                break
            address = hop.strip()
        return address

    def _is_proxy(self, address: str) -> bool:
        if not self._proxies:
            return False
        try:
            found = ip_address(address)
        except ValueError:
            return False
        # A server on [::] sees clients of IPv4 by an address of IPv6.
        mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
        return any((mapped or found) in network for network in self._proxies)


class _OpenRequest:
    """One request that may wait, for as long as its caller would be let in."""

    def __init__(self, authenticator: Authenticator, scope: Scope, endless_of: str) -> None:
        """`endless_of` is whose it is if it never ends by itself; else empty."""
        self._authenticator = authenticator
        self._scope = scope
        self.endless_of = endless_of
        self._task = asyncio.current_task()
        self._has_ended = False

    def __enter__(self) -> None:
        self._authenticator.add(self)

    def look(self) -> None:
        """Cancel it if its caller would not be let in."""
        try:
            self._authenticator.caller(self._scope)
        except Unauthorized:
            self.end()

    def end(self) -> None:
        """Cancel it, once."""
        if self._task is not None and not self._has_ended:
            self._has_ended = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._authenticator.discard(self)
        if self._has_ended and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise Unauthorized from error


def cookie_of(scope: Scope) -> str:
    """The secret of the session cookie; empty without one."""
    for part in _header(scope, b"cookie").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _peer(scope: Scope) -> str:
    """The address at the other end of the connection."""
    return str((scope.get("client") or ("",))[0])


def _header(scope: Scope, wanted: bytes) -> bytes:
    """The first header of a name; empty without one."""
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def _list(scope: Scope, wanted: bytes) -> bytes:
    """All that stands in headers of a name, in order: a proxy may add a line of its own to those of its client."""
    return b",".join(value for name, value in scope["headers"] if name == wanted)


def _last(scope: Scope, wanted: bytes) -> bytes:
    """The last of them."""
    return _list(scope, wanted).rpartition(b",")[2].strip()


def _check_host(headers: list[tuple[bytes, bytes]], when: str) -> ListenAddress:
    """The host that a request is for. Raises Invalid for one that is none, Forbidden for another one's."""
    hosts = [value for name, value in headers if name == b"host"]
    host = _server_of(b"//" + hosts[0]) if len(hosts) == 1 and not NO_HOST & {*hosts[0]} else None
    if host is None or not host.host:
        raise Invalid(f"host is invalid; {when} a request names one host, the one that it is for")
    if not host.is_loopback:
        raise Forbidden(f"forbidden; {when} this server answers only to a loopback host name")
    return host


def _check_local(headers: list[tuple[bytes, bytes]]) -> None:
    """Raises Invalid for a host that is none, Forbidden for another one's, and for what another page asks."""
    host = _check_host(headers, "without tokens")
    for name, value in headers:
        if name == b"origin":
            page = _server_of(value)
            is_own = page is not None and page.is_loopback and page.port == host.port
        else:
            is_own = name != b"sec-fetch-site" or value in OWN_SITES
        if not is_own:
            raise Forbidden("forbidden; this server takes no requests from other web pages")


def _server_of(url: bytes) -> ListenAddress | None:
    """The host and the port of a URL; None when it has none that can be read."""
    try:
        parts = urlsplit(url.decode("ascii"))
        return ListenAddress(parts.hostname or "", parts.port or PORTS.get(parts.scheme, 80))
    except (ValueError, UnicodeDecodeError):
        return None
