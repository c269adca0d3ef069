"""RabbitMQ's management API, for what AMQP cannot tell: lists of queues with their policies, bindings, versions.

It only reads, but for the import of definitions. Everything but discovery and effective policies works without it, so
a broker without the plugin is said (`BrokerUnreachable`, `NotABroker`) and is never a reason to stop moving messages.
Its counts are up to five seconds old and may be missing; they are for people, never a proof that a queue is empty.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

import httpx2
import msgspec

from holdfast.core.checks import unclear_url
from holdfast.core.topology.model import ALTERNATE, Binding, Exchange, Policy, Queue, effective
from holdfast.errors import BadAddress, BrokerRefused, BrokerUnreachable, NotABroker

TIMEOUT_S = 30.0
PAGE_ROWS = 500
PAGES_MAX = 1000
#: Bindings come in one piece: this is half a million of them.
ANSWER_BYTES_MAX = 128 * 2**20

T = TypeVar("T")
#: Not packed.
PLAIN = "identity"


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Which broker this is."""

    rabbitmq_version: str
    cluster_name: str = ""


class ManagedQueue(Queue, frozen=True, kw_only=True):
    """A queue as it was declared, and what policies make of it."""

    vhost: str
    exclusive: bool = False
    policy: str | None = None
    effective_policy_definition: dict[str, Any] | list[Any] | None = None
    messages: int | None = None
    messages_ready: int | None = None
    messages_unacknowledged: int | None = None
    messages_dlx: int | None = None  #: dead letters of an at-least-once queue that have not arrived yet
    consumers: int | None = None

    @property
    def effective_policy(self) -> dict[str, Any]:
        """What the policies set, merged by the broker; empty when none applies (3.10 then says `[]`)."""
        return self.effective_policy_definition if isinstance(self.effective_policy_definition, dict) else {}

    @property
    def in_force(self) -> ManagedQueue:
        """The same with the arguments that hold for it."""
        return msgspec.structs.replace(self, arguments=effective(self.arguments, self.effective_policy))


class ManagedExchange(Exchange, frozen=True, kw_only=True):
    """An exchange, and the policy that holds for it."""

    policy: str | None = None

    def effective(self, policies: Mapping[str, Policy]) -> Exchange:
        """With the alternate exchange that its policy sets; one of its own comes first."""
        policy = policies.get(self.policy or "")
        added = {ALTERNATE: policy.definition[ALTERNATE]} if policy and ALTERNATE in policy.definition else {}
        own = {name: getattr(self, name) for name in Exchange.__struct_fields__}
        return Exchange(**own | {"arguments": added | self.arguments})


class ManagedPermission(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may do in a virtual host: expressions over names; an empty one fits none."""

    user: str
    vhost: str
    configure: str = ""
    write: str = ""
    read: str = ""


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    items: list[msgspec.Raw]
    page_count: int = 1


class Management:
    """`async with Management("http://user:password@host:15672") as management:`."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, ca_file: str | None = None) -> None:
        if why := unclear_url(url):
            raise BadAddress(f"management address is invalid; {why}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadAddress("management address is invalid; expected http://user:password@host:15672")
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.address = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"
        self._user = unquote(parts.username or "guest")
        login = httpx2.BasicAuth(self._user, unquote(parts.password or ("" if parts.username else "guest")))
        # Nobody to trust without TLS: to read all authorities takes 90 ms and 3 MB.
        verify = parts.scheme == "https" and (ca_file is None or ssl.create_default_context(cafile=ca_file))
        self._client = httpx2.AsyncClient(
            base_url=f"{self.address}/api",
            auth=login,
            timeout=timeout_s,
            verify=verify,
            headers={"Accept-Encoding": PLAIN},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def overview(self) -> Overview:
        """Which broker this is. Raises BrokerUnreachable, BrokerRefused or NotABroker, as all of these do."""
        return await self._read("/overview", Overview)

    async def queues(self, vhost: str) -> list[ManagedQueue]:
        """All queues of a virtual host."""
        return await self._pages(f"/queues/{quote(vhost, safe='')}", ManagedQueue)

    async def queue(self, vhost: str, name: str) -> ManagedQueue:
        """One queue. Raises BrokerRefused with 404 when it is not there."""
        return await self._read(f"/queues/{quote(vhost, safe='')}/{quote(name, safe='')}", ManagedQueue)

    async def exchanges(self, vhost: str) -> list[ManagedExchange]:
        """All exchanges of a virtual host, the default one and the broker's own included."""
        return await self._pages(f"/exchanges/{quote(vhost, safe='')}", ManagedExchange)

    async def bindings(self, vhost: str) -> list[Binding]:
        """All bindings of a virtual host, those of the default exchange (its name is empty) included."""
        return await self._read(f"/bindings/{quote(vhost, safe='')}", list[Binding])

    async def policies(self, vhost: str) -> list[Policy]:
        """All policies of a virtual host."""
        return await self._read(f"/policies/{quote(vhost, safe='')}", list[Policy])

    async def permission(self, vhost: str, user: str) -> ManagedPermission:
        """What a user may do. Raises BrokerRefused with 401 or 403 for whoever is no administrator, 404 for nothing."""
        return await self._read(f"/permissions/{quote(vhost, safe='')}/{quote(user, safe='')}", ManagedPermission)

    async def alarms(self) -> str | None:
        """Why the broker takes no publishes now (memory, disk); None when it does."""
        answer = await self._send("/health/checks/alarms")
        if answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE:
            return answer.text[:500]
        self._check(answer)
        return None

    async def import_definitions(self, vhost: str, definitions: dict[str, object]) -> None:
        """Add what is missing. Raises BrokerRefused with the broker's reason, or BrokerUnreachable."""
        answer = await self._send(f"/definitions/{quote(vhost, safe='')}", json=definitions)
        if answer.status_code == httpx2.codes.BAD_REQUEST:
            raise BrokerRefused(f"definitions were refused; {answer.text[:500]}", reply_code=answer.status_code)
        if not answer.is_success:
            self._check(answer)

    async def _pages(self, path: str, kind: type[T]) -> list[T]:
        rows: list[T] = []
        for number in range(1, PAGES_MAX + 1):
            page = await self._read(path, _Page, page=number, page_size=PAGE_ROWS)
            rows += [_decode(bytes(row), kind, self.address) for row in page.items]
            if number >= page.page_count:
                return rows
        raise NotABroker(f"management API makes no sense; {self.address} has more than {PAGES_MAX} pages of {path}")

    async def _read(self, path: str, kind: type[T], **query: int) -> T:
        answer = await self._send(path, params=query)
        self._check(answer)
        return _decode(answer.content, kind, self.address)

    async def _send(self, path: str, **content: Any) -> httpx2.Response:
        body = bytearray()
        try:
            async with self._client.stream("POST" if "json" in content else "GET", path, **content) as answer:
                # Packed, a small answer can be of any size.
                if answer.headers.get("Content-Encoding", PLAIN) != PLAIN:
                    raise NotABroker(f"management API makes no sense; {self.address} sends an answer that is packed")
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        text = f"{self.address} sends an answer of more than {ANSWER_BYTES_MAX} bytes"
                        raise NotABroker(f"management API makes no sense; {text}")
                return httpx2.Response(answer.status_code, content=bytes(body), request=answer.request)
        except httpx2.HTTPError as error:
            text = str(error) or type(error).__name__
            raise BrokerUnreachable(f"management API cannot be reached; {self.address}: {text}") from error

    def _check(self, answer: httpx2.Response) -> None:
        code = answer.status_code
        if code == httpx2.codes.OK:
            return
        if code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            text = f"management API refused; {self.address}: {code} for user '{self._user}'"
            raise BrokerRefused(text, reply_code=code)
        if code == httpx2.codes.NOT_FOUND:
            text = f"management API has no such thing; {self.address}{answer.request.url.path}"
            raise BrokerRefused(text, reply_code=code)
        raise BrokerUnreachable(f"management API failed; {self.address}: {code}")


def _decode(data: bytes, kind: type[T], address: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotABroker(f"management API makes no sense; {address}: {error}") from error
