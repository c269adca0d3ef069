"""A queue service for the tests: frozen clock, storages that can fail, one face in front, and a restart.

Every test of this folder is written against the methods of `Queues`; the installation decides which store is behind
them and whether the calls go through the process or through real HTTP.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx2
import pytest

from holdfast import Client, HoldfastError, Item, Queues
from holdfast.core.requests.queue import LeaseReply, PartitionStats
from holdfast.errors import NothingToLease
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.listener import HttpServer
from holdfast.faces.api.server import make_server
from holdfast.ports.queue_store import LedgerEntry, Storage
from holdfast.services.queue.manager import QueueManager
from holdfast.services.queue.service import QueueService
from holdfast.testing import FrozenClock
from tests.support.eventually import eventually
from tests.support.flaky import Faults, flaky

T = TypeVar("T")
MakeStorage = Callable[[str, FrozenClock], Storage]  # by the storage's name; the same name is the same data
TOKEN = "a-token-for-tests"
LEDGER_COUNT_MAX = 100_000


class Installation:
    """One service behind one face. `queues` and `service` are new after a restart; the clock goes on."""

    def __init__(self, make_storage: MakeStorage, face: str, *, storages: Sequence[str] = ("default",)) -> None:
        self.clock = FrozenClock()
        self.faults = Faults()
        self.affinities = dict.fromkeys(storages, 1.0)
        self.queues: Queues
        self.service: QueueService
        self.url = ""
        self._make_storage = make_storage
        self._face = face
        self._storages = tuple(storages)
        self._open = AsyncExitStack()

    async def open(self) -> None:
        """Open the storages and the face."""
        engines = {name: flaky(self._make_storage(name, self.clock), self.faults, name=name) for name in self._storages}
        manager = QueueManager(engines, clock=self.clock)
        await manager.open()
        self._open.push_async_callback(manager.close)
        await self._open.enter_async_context(manager.keep_up())
        self.service = QueueService(manager, affinities=self.affinities)
        self.queues = await self._open.enter_async_context(self._through_face())

    @asynccontextmanager
    async def _through_face(self) -> AsyncIterator[Queues]:
        if self._face == "in process":
            yield Queues(self.service)
            return
        async with (
            serving(self.service) as self.url,
            Client(self.url, TOKEN, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)) as client,
        ):
            yield client
            self.service.manager.stop()  # what SIGTERM does: nobody waits any more when the connections close

    async def close(self) -> None:
        """Stop as a server stops."""
        await self._open.aclose()

    async def restart(self) -> None:
        """Stop and start again on the same storages."""
        await self.close()
        await self.open()

    def place_on(self, *storages: str) -> None:
        """Queues created from now on live in these storages only."""
        self.affinities.clear()
        self.affinities.update(dict.fromkeys(storages, 1.0))

    # --- time -------------------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Wait until no commit runs and none begins."""
        await self.faults.rest()

    async def advance(self, seconds: float) -> None:
        """Move the clock and let everything happen that follows from it."""
        await self.rest()
        await self.clock.advance(seconds)
        await self.rest()

    # --- what tests ask ---------------------------------------------------------------------------------------

    async def stats(self, queue_name: str, partition: int = 0) -> PartitionStats:
        """The counts of one partition."""
        (logical,) = (await self.queues.queue_stats(queue_name)).logical_queues
        return next(stats for stats in logical.partitions if stats.partition == partition)

    async def items(self, queue_name: str) -> list[Item]:
        """Queued and leased items of all partitions."""
        info = await self.queues.queues_info(queue_name)
        return [
            item
            for place in info.partitions
            for item in await self.queues.storage_items_list(queue_name, partition=place.partition)
        ]

    async def payloads(self, queue_name: str) -> list[bytes]:
        """What is queued or leased, in order."""
        return [item.payload for item in await self.items(queue_name)]

    async def waiting_leases(self, queue_name: str, count: int) -> None:
        """Wait until so many lease requests wait."""

        async def there() -> bool:
            (logical,) = (await self.queues.queue_stats(queue_name)).logical_queues
            return logical.lease_waiting == count

        await eventually(there)

    @asynccontextmanager
    async def waiting(self, queue_name: str, *, batch_size: int = 1) -> AsyncIterator[asyncio.Task[LeaseReply]]:
        """A lease request that waits; cancelled at the end when nobody has answered it."""
        before = len(self.service.manager.get(queue_name).waiting.leases)
        task = asyncio.create_task(self.queues.queue_lease(queue_name, batch_size=batch_size, request_timeout="15m"))
        try:
            await self.waiting_leases(queue_name, before + 1)
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def gives_nothing(self, queue_name: str) -> None:
        """A lease request waits in vain for ten milliseconds of the frozen clock."""
        task = asyncio.create_task(self.queues.queue_lease(queue_name, request_timeout="10ms"))
        await self.waiting_leases(queue_name, 1)
        await self.advance(0.01)
        with pytest.raises(NothingToLease):
            await answered(task)

    async def ledger(self, queue_name: str) -> list[LedgerEntry]:
        """The ledger of a queue, over its storages."""
        await self.rest()
        queue = self.service.manager.get(queue_name)
        return [
            entry for share in queue.shares for entry in await share.store.ledger(after=0, count_max=LEDGER_COUNT_MAX)
        ]

    async def noted(self, queue_name: str) -> list[tuple[str, str, str, int]]:
        """The ledger of a queue as (action, item, reason, count)."""
        return [(e.action, e.item_id, e.reason, e.count) for e in await self.ledger(queue_name)]


async def answered(task: Awaitable[T]) -> T:
    """The answer of a request that must not hang."""
    async with asyncio.timeout(60):
        return await task


@contextmanager
def refused(text: str, *, code: int = 400, ids: Sequence[str] = ()) -> Iterator[None]:
    """The request inside is refused with exactly this text and code, and names exactly these ids."""
    with pytest.raises(HoldfastError) as caught:
        yield
    assert (caught.value.code, caught.value.message) == (code, text)
    assert list(caught.value.ids) == list(ids)


@asynccontextmanager
async def serving(service: QueueService, *, token: str = TOKEN) -> AsyncIterator[str]:
    """The service over HTTP on a free loopback port, in this event loop: the frozen clock holds there too."""
    server = make_server(service, admin_token_hash=token_hash(token) if token else None, version="test")
    async with listening(server) as url:
        yield url


@asynccontextmanager
async def listening(server: HttpServer) -> AsyncIterator[str]:
    """A server on a free loopback port; its address."""
    # The protocol said aloud: only then does asyncio switch Nagle's algorithm off, which costs 40 ms an answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        async with server.serving(listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


CODE_TEXTS = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
CODE_TEXTS |= {453: "Request Failed", 454: "Retry Request", 455: "Client Content Error"}
CODE_TEXTS |= {500: "Internal Error", 501: "Not Implemented"}


def plain_client(installation: Installation, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
    """A client with the token, or with these headers instead."""
    if headers is None:
        headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx2.AsyncClient(base_url=installation.url, headers=headers, trust_env=False, timeout=30)


async def post(http: httpx2.AsyncClient, verb: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON of a reply; `body` is bytes, or becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await http.post(f"/v1/{verb}", content=content)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


async def error(http: httpx2.AsyncClient, verb: str, body: Any, code: int) -> str:
    """The message of a refusal, whose body is as the contract says."""
    status, reply = await post(http, verb, body)
    assert status == reply["code"] == code
    assert reply["code_text"] == CODE_TEXTS[code]
    assert set(reply) <= {"code", "code_text", "message", "details"}
    return str(reply["message"])
