"""HTTP/1.1 over raw sockets: what is a request and what is not, where it ends, and what a client may take.

h11 is the referee: what it refuses is refused here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from holdfast.faces.api import connection as connections
from holdfast.faces.api import listener as listeners
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.head import (
    HEADERS_BYTES_MAX,
    HEADERS_COUNT_MAX,
    TARGET_BYTES_MAX,
    ChunkedBody,
    RequestHead,
    RequestRefused,
    read_head,
)
from holdfast.faces.api.listener import HttpLimits, HttpServer
from holdfast.faces.api.server import make_server
from tests.queue.installation import TOKEN, Installation, MakeStorage, listening
from tests.support.certificate import make_certificate
from tests.support.eventually import eventually
from tests.support.flaky import LastingMemory

HOST = b"host: localhost\r\n"
MINE = HOST + b"authorization: Bearer " + TOKEN.encode() + b"\r\n"
INFO = b'{"queue_name":"orders"}'


@pytest.fixture
def make_storage() -> MakeStorage:
    return cache(lambda name, clock: LastingMemory(clock))


@pytest.fixture
def face() -> str:
    return "in process"


Open = Callable[..., Any]


class RawClient:
    """A socket, and what comes out of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        """Without waiting."""
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One answer: its code, headers and body."""
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split()[1]), headers, body

    async def code(self) -> int:
        """The code of an answer."""
        return (await self.answer())[0]

    def begins(self, data: bytes) -> bool:
        """Whether what has come and was not read begins so."""
        buffer: bytearray = self.reader._buffer  # type: ignore[attr-defined]
        return buffer.startswith(data)

    async def is_ended(self) -> bool:
        """Wait until the server has ended it."""
        async with asyncio.timeout(30):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


class RawServer:
    """A server in this loop, and raw clients of it."""

    def __init__(self, server: HttpServer, url: str) -> None:
        self.server = server
        self.port = int(url.rpartition(":")[2])
        self.clients: list[RawClient] = []

    async def client(self, data: bytes = b"", *, deaf: bool = False) -> RawClient:
        """A new one, that sends this first. A deaf one takes next to nothing of what it is answered."""
        made = socket.socket()
        if deaf:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self.port))
        client = RawClient(*await asyncio.open_connection(sock=made, limit=4096 if deaf else 2**16))
        self.clients.append(client)
        client.send(data)
        return client

    def close(self) -> None:
        """All of them."""
        for client in self.clients:
            client.writer.close()


@pytest.fixture
async def opened(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Opens a door with these limits."""
    monkeypatch.setattr(listeners, "LOOK_S", 0.02)
    await installation.queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
    async with AsyncExitStack() as stack:

        async def open_door(**limits: Any) -> RawServer:
            return await stack.enter_async_context(_door(installation, limits))

        yield open_door


@asynccontextmanager
async def _door(installation: Installation, limits: dict[str, Any]) -> AsyncIterator[RawServer]:
    server = make_server(
        installation.service, admin_token_hash=token_hash(TOKEN), version="test", limits=HttpLimits(**limits)
    )
    async with listening(server) as url:
        door = RawServer(server, url)
        yield door
        installation.service.manager.stop()
        door.close()


@pytest.fixture
async def door(opened: Open) -> RawServer:
    found: RawServer = await opened()
    return found


def post(verb: str, body: bytes, more: bytes = b"", *, version: bytes = b"1.1") -> bytes:
    """A request with a token."""
    head = b"POST /v1/%b HTTP/%b\r\n%b%bcontent-length: %d\r\n\r\n" % (verb.encode(), version, MINE, more, len(body))
    return head + body


def chunked(verb: str, *chunks: bytes) -> bytes:
    """The same in chunks, as they are given."""
    return b"POST /v1/%b HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\n" % (verb.encode(), MINE) + b"".join(chunks)


# --- requests -------------------------------------------------------------------------------------------------


async def test_requests_one_after_the_other_on_one_connection(door: RawServer) -> None:
    client = await door.client()
    for _ in range(3):
        client.send(post("queues.info", INFO))
        code, headers, body = await client.answer()
        assert (code, headers["content-type"], json.loads(body)["queue_name"]) == (200, "application/json", "orders")
        assert "connection" not in headers


async def test_a_request_that_comes_byte_by_byte(door: RawServer) -> None:
    client = await door.client()
    for byte in post("queues.info", INFO):
        client.send(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert await client.code() == 200


async def test_requests_behind_each_other_are_answered_in_their_order(door: RawServer) -> None:
    names = [b"queues.info", b"unknown", b"queues.list", b"queue.stats"] * 50
    client = await door.client(b"".join(post(name.decode(), INFO) for name in names))
    codes = [await client.code() for _ in names]
    assert codes == [200, 501, 400, 200] * 50  # a list has no queue_name


async def test_pages_of_the_application_and_verbs_share_a_connection(door: RawServer) -> None:
    page = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    client = await door.client(page + post("queues.info", INFO) + page)
    assert [await client.code() for _ in range(3)] == [200, 200, 200]


async def test_a_body_in_chunks_with_extensions_and_trailers(door: RawServer) -> None:
    body = chunked("queues.info", b"5;a=b\r\n", INFO[:5], b"\r\n0F\r\n", INFO[5:20], b"\r\n%x\r\n" % (len(INFO) - 20))
    client = await door.client(body)
    client.send(INFO[20:] + b"\r\n0\r\nx-checked: yes\r\n\r\n" + post("queues.info", INFO))
    assert [await client.code() for _ in range(2)] == [200, 200]


async def test_a_million_tiny_chunks_are_no_work_for_minutes(door: RawServer) -> None:
    many = b"1\r\n \r\n" * 400_000
    client = await door.client(chunked("queues.info", many, b"%x\r\n%b\r\n0\r\n\r\n" % (len(INFO), INFO)))
    assert await client.code() == 200


async def test_a_client_that_expects_a_word_before_its_body_gets_one(door: RawServer) -> None:
    client = await door.client(post("queues.info", INFO, b"expect: 100-continue\r\n").removesuffix(INFO))
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(INFO)
    assert await client.code() == 200


async def test_a_client_without_a_token_is_told_before_it_sends_its_body(door: RawServer) -> None:
    head = b"POST /v1/queues.info HTTP/1.1\r\n%bcontent-length: 9\r\nexpect: 100-continue\r\n\r\n" % HOST
    client = await door.client(head)
    assert await client.code() == 401
    assert await client.is_ended()


async def test_head_has_no_body_and_says_how_long_it_were(door: RawServer) -> None:
    for path in (b"/health", b"/v1/queues.info"):
        client = await door.client(b"HEAD %b HTTP/1.1\r\n%bconnection: close\r\n\r\n" % (path, MINE))
        async with asyncio.timeout(30):
            head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert (int(re.findall(rb"content-length: (\d+)", head)[0]) > 0, body) == (True, b"")


async def test_http_1_0_and_close_are_the_last_request(door: RawServer) -> None:
    for request in (post("queues.info", INFO, version=b"1.0"), post("queues.info", INFO, b"connection: Close\r\n")):
        client = await door.client(request)
        code, headers, _ = await client.answer()
        assert (code, headers["connection"]) == (200, "close")
        assert await client.is_ended()


async def test_an_upgrade_is_not_made_and_its_body_is_read(door: RawServer) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    client = await door.client(post("queues.info", INFO, upgrade) + post("queues.info", INFO))
    assert [await client.code() for _ in range(2)] == [200, 200]


async def test_a_target_may_be_a_url(door: RawServer) -> None:
    client = await door.client(b"GET http://other:1/health?a=b HTTP/1.1\r\n" + HOST + b"\r\n")
    assert await client.code() == 200


# --- what is refused ------------------------------------------------------------------------------------------

FIRST = b"POST /v1/queues.info HTTP/1.1\r\n"
SMUGGLED = {
    "length and coding": FIRST + HOST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": FIRST + HOST + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
    "the same length twice": FIRST + HOST + b"content-length: 4\r\ncontent-length: 4\r\n\r\nabcd",
    "lengths in a list": FIRST + HOST + b"content-length: 4, 4\r\n\r\nabcd",
    "a negative length": FIRST + HOST + b"content-length: -1\r\n\r\n",
    "a signed length": FIRST + HOST + b"content-length: +4\r\n\r\nabcd",
    "a length in hex": FIRST + HOST + b"content-length: 0x4\r\n\r\nabcd",
    "a length with an underscore": FIRST + HOST + b"content-length: 1_0\r\n\r\nabcd",
    "an endless length": FIRST + HOST + b"content-length: 99999999999999999999\r\n\r\n",
    "an empty length": FIRST + HOST + b"content-length:\r\n\r\n",
    "no host": FIRST + b"\r\n",
    "two hosts": FIRST + HOST + HOST + b"\r\n",
    "a folded header": FIRST + HOST + b"x: a\r\n b\r\n\r\n",
    "a header that begins folded": FIRST + b" x: a\r\n" + HOST + b"\r\n",
    "a space before the colon": FIRST + HOST + b"content-length : 4\r\n\r\nabcd",
    "a header without a colon": FIRST + HOST + b"content-length\r\n\r\n",
    "a header without a name": FIRST + HOST + b": a\r\n\r\n",
    "a name with a space": FIRST + HOST + b"x y: a\r\n\r\n",
    "a name with a letter of Latin-1": FIRST + HOST + b"x\xe9: a\r\n\r\n",
    "a bare LF": FIRST + HOST + b"x: a\ny: b\r\n\r\n",
    "bare LFs alone": FIRST.replace(b"\r", b"") + HOST.replace(b"\r", b"") + b"\n",
    "a bare CR": FIRST + HOST + b"x: a\ry: b\r\n\r\n",
    "a NUL": FIRST + HOST + b"x: a\0b\r\n\r\n",
    "a control character": FIRST + HOST + b"x: a\x01b\r\n\r\n",
    "an empty line first": b"\r\n" + FIRST + HOST + b"\r\n",
    "a space first": b" " + FIRST + HOST + b"\r\n",
    "two spaces": FIRST.replace(b" HTTP", b"  HTTP") + HOST + b"\r\n",
    "a tab": FIRST.replace(b" HTTP", b"\tHTTP") + HOST + b"\r\n",
    "a target with a space": FIRST.replace(b"info", b"in fo") + HOST + b"\r\n",
    "a target with Latin-1": FIRST.replace(b"info", b"inf\xf6") + HOST + b"\r\n",
    "a target with a fragment": FIRST.replace(b"info", b"info#x") + HOST + b"\r\n",
    "no target": b"POST HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target that is no path": FIRST.replace(b"/v1/", b"v1/") + HOST + b"\r\n",
    "a tunnel": b"CONNECT other:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method in small letters": FIRST.replace(b"POST", b"post") + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no number of a version": FIRST.replace(b"1.1", b"one") + HOST + b"\r\n",
    "two digits of a version": FIRST.replace(b"1.1", b"1.10") + HOST + b"\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "chunks in HTTP/1.0": FIRST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
}
UNKNOWN = {
    "gzip": b"transfer-encoding: gzip, chunked\r\n",
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n",
    "chunked in two headers": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "identity": b"transfer-encoding: identity\r\n",
    "not quite": b"transfer-encoding: xchunked\r\n",
    "a hidden one": b"transfer-encoding: \x0bchunked\r\n",
    "chunked in quotes": b'transfer-encoding: "chunked"\r\n',
}
CHUNKS = {
    "no size": b"\r\nabc",
    "a size that is none": b"g\r\nabc",
    "a signed size": b"+3\r\nabc",
    "a size in 0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a space before the size": b" 3\r\nabc",
    "a chunk that is longer than it says": b"3\r\nabcd\r\n",
    "LF behind a size": b"3\nabc\r\n0\r\n\r\n",
    "LF behind a chunk": b"3\r\nabc\n0\r\n\r\n",
    "LF in an extension": b"3;a\nb\r\nabc\r\n",
    "a size with an endless extension": b"3;" + b"a" * 5000,
    "endless extensions": (b"1;" + b"a" * 1000 + b"\r\nb\r\n") * 100,
    "a size of many digits": b"0" * 30 + b"3\r\nabc\r\n0\r\n\r\n",
    "a trailer that is no header": b"0\r\nno header\r\n\r\n",
    "a trailer with a space": b"0\r\nx : a\r\n\r\n",
    "endless trailers": b"0\r\n" + b"x: a\r\n" * 5000,
}


@pytest.mark.parametrize("request_", SMUGGLED.values(), ids=SMUGGLED)
async def test_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection(
    door: RawServer, request_: bytes
) -> None:
    client = await door.client(request_ + b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
    code, headers, body = await client.answer()
    assert (code in (400, 505), headers["connection"], json.loads(body)["code"]) == (True, "close", code)
    assert await client.is_ended()


@pytest.mark.parametrize("coding", UNKNOWN.values(), ids=UNKNOWN)
async def test_an_unknown_transfer_coding_is_refused(door: RawServer, coding: bytes) -> None:
    client = await door.client(FIRST + HOST + coding + b"\r\n0\r\n\r\n")
    assert await client.code() in (400, 501)
    assert await client.is_ended()


@pytest.mark.parametrize("body", CHUNKS.values(), ids=CHUNKS)
async def test_a_malformed_chunk_is_refused(door: RawServer, body: bytes) -> None:
    client = await door.client(chunked("queues.info", body))
    assert await client.code() == 400
    assert await client.is_ended()


async def test_another_expectation_is_417(door: RawServer) -> None:
    client = await door.client(post("queues.info", INFO, b"expect: a miracle\r\n"))
    assert await client.code() == 417


# --- bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET /" + b"a" * 200_000, 414),
        (b"GET /" + b"a" * TARGET_BYTES_MAX + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 300_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a" * 300_000, 431),
        (b"GET / HTTP/1.1\r\n%bx: %b\r\n\r\n" % (HOST, b"a" * HEADERS_BYTES_MAX), 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\r\n" * HEADERS_COUNT_MAX + b"\r\n", 431),
    ],
    ids=["endless URL", "long URL", "endless lines", "endless value", "endless name", "long value", "many headers"],
)
@pytest.mark.parametrize("step", [1 << 20, 1000])
async def test_a_head_beyond_its_bounds_is_refused_and_ends_the_connection(
    door: RawServer, data: bytes, code: int, step: int
) -> None:
    client = await door.client()
    for at in range(0, len(data), step):
        client.send(data[at : at + step])
        await asyncio.sleep(0)
    assert await client.code() == code
    assert await client.is_ended()


async def test_a_head_within_its_bounds_is_served(door: RawServer) -> None:
    path = b"/health?" + b"a" * (TARGET_BYTES_MAX - 100)
    lines = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 600) for number in range(HEADERS_COUNT_MAX - 2))
    client = await door.client(b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path, HOST, lines))
    assert await client.code() == 200


async def test_endless_heads_and_bodies_of_strangers_hold_little(opened: Open) -> None:
    door = await opened(bodies_bytes_max=1_000_000)
    head = b"POST /admin/letters/1/revisions HTTP/1.1\r\n%bcontent-length: 90000000\r\n\r\n" % HOST
    for _ in range(40):
        await door.client(head + b"a" * 60_000)
        await door.client(b"GET / HTTP/1.1\r\nx: " + b"a" * 60_000)

    await eventually(lambda: any(client.begins(b"HTTP/1.1 503") for client in door.clients))
    assert door.server.held_bytes <= 1_000_000
    refused = next(client for client in door.clients if client.begins(b"HTTP/1.1 503"))
    assert (await refused.answer())[1]["retry-after"] == "1"
    door.close()
    await eventually(lambda: door.server.held_bytes == 0)


async def test_a_body_beyond_the_budget_of_all_is_503_and_its_connection_goes_on(opened: Open) -> None:
    door = await opened(bodies_bytes_max=200_000)
    body = INFO + b" " * 150_000
    holding = await door.client(post("queues.info", body).removesuffix(b" "))
    await eventually(lambda: door.server.held_bytes >= 150_000)
    refused = await door.client(post("queues.info", body))
    code, headers, _ = await refused.answer()
    assert (code, headers["retry-after"]) == (503, "1")
    refused.send(post("queues.info", INFO))
    assert await refused.code() == 200
    holding.send(b" ")
    assert await holding.code() == 200
    refused.send(post("queues.info", body))
    assert await refused.code() == 200
    alone = await door.client(post("queues.info", INFO + b" " * 400_000))
    assert await alone.code() == 200  # one alone may be larger than all together
    assert door.server.held_bytes == 0


async def test_the_body_of_a_stranger_is_not_kept(door: RawServer) -> None:
    head = b"POST /v1/storage/items.import HTTP/1.1\r\n%bcontent-length: 200000\r\n\r\n" % HOST
    client = await door.client(head + b"a" * 200_000)
    assert await client.code() == 401
    endless = await door.client(head.replace(b"200000", b"99999999") + b"a" * 3_000_000)
    assert await endless.code() == 401
    assert await endless.is_ended()


async def test_a_body_beyond_its_limit_is_read_to_its_end_and_refused(door: RawServer) -> None:
    client = await door.client(post("queues.info", b"a" * 3_000_000) + post("queues.info", INFO))
    assert [await client.code() for _ in range(2)] == [400, 200]


# --- deadlines ------------------------------------------------------------------------------------------------


async def test_a_client_that_sends_nothing_is_ended(opened: Open) -> None:
    client = await (await opened(first_byte_timeout_s=0.1)).client()
    assert await client.is_ended()


@pytest.mark.parametrize("begin", [b"G", b"GET / HTTP/1.1\r\nhost: "])
async def test_headers_that_do_not_come_to_an_end_are_408(opened: Open, begin: bytes) -> None:
    client = await (await opened(headers_timeout_s=0.1)).client(begin)
    assert await client.code() == 408
    assert await client.is_ended()


async def test_headers_that_trickle_are_408_too(opened: Open) -> None:
    client = await (await opened(headers_timeout_s=0.2)).client(b"GET / HTTP/1.1\r\n")

    async def trickle() -> None:
        while True:
            client.send(b"x: a\r\n")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert await client.code() == 408
    trickling.cancel()


async def test_a_body_slower_than_the_least_rate_is_408(opened: Open) -> None:
    door = await opened(body_timeout_s=0.1, body_bytes_per_s_min=1_000_000_000)
    client = await door.client(post("queues.info", INFO).removesuffix(b"}"))
    assert await client.code() == 408
    assert await client.is_ended()


async def test_a_large_body_has_more_time(opened: Open) -> None:
    door = await opened(body_timeout_s=0.05, body_bytes_per_s_min=10)
    client = await door.client(post("queues.info", INFO + b" " * 100).removesuffix(b" "))
    looks = door.server.now_s
    await eventually(lambda: door.server.now_s > looks + 0.2)
    client.send(b" ")
    assert await client.code() == 200


async def test_a_connection_is_kept_for_a_while_after_an_answer(opened: Open) -> None:
    client = await (await opened(idle_timeout_s=0.1)).client(post("queues.info", INFO))
    assert await client.code() == 200
    assert await client.is_ended()


async def test_a_client_that_does_not_read_its_answers_is_begun_nothing_for_and_ended(
    opened: Open, installation: Installation
) -> None:
    await installation.queues.queue_produce("orders", [bytes(60_000)] * 10)
    door = await opened(body_timeout_s=0.3)
    body = b'{"queue_name":"orders","partition":0,"limit":10}'
    client = await door.client()
    client.reader._transport.pause_reading()
    client.send(post("storage/items.list", body) * 300 + post("queues.info", INFO) * 100_000)  # 240 MB of answers
    (connection,) = await _connections(door)
    await eventually(lambda: connection.transport.get_write_buffer_size() > 0)
    assert connection.transport.get_write_buffer_size() < 2_000_000
    assert len(connection._pending) < 1_000_000
    await eventually(lambda: not door.server._connections)


async def _connections(door: RawServer) -> list[connections.HttpConnection]:
    await eventually(lambda: bool(door.server._connections))
    return list(door.server._connections)


async def test_a_waiting_lease_has_no_deadline(opened: Open, installation: Installation) -> None:
    door = await opened(first_byte_timeout_s=0.05, headers_timeout_s=0.05, body_timeout_s=0.05, idle_timeout_s=0.05)
    body = b'{"queue_name":"orders","client_id":"me","batch_size":1,"request_timeout":"1m"}'
    client = await door.client(post("queue.lease", body))
    await installation.waiting_leases("orders", 1)
    looks = door.server.now_s
    await eventually(lambda: door.server.now_s > looks + 0.2)
    await installation.queues.queue_produce("orders", [b"a"])
    assert await client.code() == 200


# --- how many there may be ------------------------------------------------------------------------------------


async def test_idle_strangers_make_room_for_each_other_and_leave_some_to_tokens(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    door = await opened(connections_max=40)
    friends = [await door.client(post("queues.info", INFO)) for _ in range(10)]
    assert [await friend.code() for friend in friends] == [200] * 10
    crowd = [await door.client() for _ in range(100)]
    await eventually(lambda: len(door.server.strangers) == 30)
    assert await crowd[0].is_ended()
    for friend in friends:
        friend.send(post("queues.info", INFO))
        assert await friend.code() == 200
    newcomer = await door.client(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
    assert await newcomer.code() == 200
    assert [record.message for record in caplog.records] == [
        "1 idle connections were ended to make room; 40 is the maximum"
    ]


async def test_idle_clients_with_tokens_make_room_for_newcomers(opened: Open) -> None:
    door = await opened(connections_max=40)
    friends = []
    for _ in range(60):
        friends.append(await door.client(post("queues.info", INFO)))
        assert await friends[-1].code() == 200
    assert await friends[0].is_ended()
    assert len(door.server.idle) <= 40


async def test_where_all_are_busy_health_is_still_told(opened: Open, installation: Installation) -> None:
    door = await opened(connections_max=16)
    body = b'{"queue_name":"orders","client_id":"%d","batch_size":1,"request_timeout":"1m"}'
    for number in range(16):
        await door.client(post("queue.lease", body % number))
    await installation.waiting_leases("orders", 16)
    for _ in range(30):
        client = await door.client(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await client.code() == 200
        other = await door.client(post("queues.info", INFO))
        code, headers, _ = await other.answer()
        assert (code, headers["retry-after"]) == (503, "1")
    await installation.waiting_leases("orders", 16)


# --- TLS ------------------------------------------------------------------------------------------------------


async def test_a_client_that_never_begins_tls_is_ended_and_makes_room(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "LOOK_S", 0.02)
    certificate, key = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    limits = HttpLimits(connections_max=40, headers_timeout_s=1.0)
    server = make_server(installation.service, admin_token_hash=None, version="test", limits=limits, tls=tls)
    async with listening(server) as url:
        door = RawServer(server, url)
        for _ in range(60):
            await door.client()
        await eventually(lambda: len(server.strangers) == 30)
        trusting = ssl.create_default_context(cafile=str(certificate))
        secure = RawClient(*await asyncio.open_connection("127.0.0.1", door.port, ssl=trusting))
        secure.send(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await secure.code() == 200
        garbled = await door.client(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        async with asyncio.timeout(30):
            await garbled.reader.read()  # an alert of TLS, and the end
        await eventually(lambda: not server.strangers)  # they took too long
        assert len(server.idle) == 1  # who has been answered: without tokens nobody is a stranger
        secure.writer.close()
        door.close()


# --- what strangers cost --------------------------------------------------------------------------------------


def stranger(body: bytes, length: int | None = None, more: bytes = b"") -> bytes:
    """A produce of somebody without a token."""
    head = b"POST /v1/queue.produce HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n"
    return head % (HOST, more, len(body) if length is None else length) + body


async def test_a_stranger_leaves_no_memory_behind(door: RawServer) -> None:
    """Also where the garbage collector looks seldom: nothing that is refused is held by a cycle."""
    client = await door.client(stranger(bytes(1)))
    assert await client.code() == 401
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(50):
            client.send(stranger(bytes(60_000)))
            assert await client.code() == 401
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < 1_000_000, "fifty bodies are three times as much"
    assert door.server.held_bytes == 0


async def test_strangers_leave_room_for_the_bodies_of_those_with_a_token(opened: Open) -> None:
    door = await opened(bodies_bytes_max=200_000)
    for _ in range(8):
        await door.client(stranger(bytes(60_000), 60_001))
        await door.client(b"POST /admin/letters HTTP/1.1\r\n" + HOST + b"x: " + bytes(b"a" * 40_000))
    await eventually(lambda: len(door.server._connections) == 16)
    client = await door.client()
    for _ in range(3):
        client.send(post("queues.info", INFO + b" " * 50_000))
        assert await client.code() == 200


OPENAPI = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"


async def test_answers_that_strangers_do_not_take_are_bounded(opened: Open) -> None:
    door = await opened(bodies_bytes_max=1_000_000)
    for _ in range(20):
        await door.client(OPENAPI * 30, deaf=True)
    await eventually(lambda: any(client.begins(b"HTTP/1.1 503") for client in door.clients))
    for _ in range(3):
        code, headers, _ = await (refused := await door.client(OPENAPI)).answer()
        assert (code, headers["retry-after"]) == (503, "1")
        refused.send(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await refused.code() == 200
    unsent = [one.transport.get_write_buffer_size() for one in door.server._connections]
    assert 100_000 < sum(unsent) < 500_000
    known = await door.client(OPENAPI.replace(HOST, MINE))
    assert await known.code() == 200  # half of it is for those with a token
    door.close()
    await eventually(lambda: door.server.held_bytes == 0)


async def test_answers_that_are_not_taken_leave_room_for_what_cannot_be_asked_again(
    opened: Open, installation: Installation
) -> None:
    await installation.queues.queue_produce("orders", [bytes(60_000)] * 40)
    door = await opened(bodies_bytes_max=5_000_000)
    listed = b'{"queue_name":"orders","partition":0,"limit":40}'
    for _ in range(3):
        await door.client(post("storage/items.list", listed), deaf=True)
    await eventually(lambda: door.server.held_bytes > 2_000_000)
    client = await door.client(post("storage/items.list", listed))
    assert await client.code() == 503
    client.send(post("queue.lease", b'{"queue_name":"orders","client_id":"me","batch_size":40,"request_timeout":"1s"}'))
    code, _, body = await client.answer()
    assert (code, len(json.loads(body)["items"])) == (200, 40)


async def test_who_is_served_without_a_token_stays_a_stranger(opened: Open) -> None:
    door = await opened()
    client = await door.client(OPENAPI)
    assert await client.code() == 200
    assert (len(door.server.strangers), len(door.server.idle)) == (1, 0)
    client.send(OPENAPI.replace(HOST, MINE))
    assert await client.code() == 200
    assert (len(door.server.strangers), len(door.server.idle)) == (0, 1)


@pytest.mark.parametrize("path", [b"/v1/queues.info", b"/health", b"/openapi.json"])
@pytest.mark.parametrize("method", [b"PROPFIND", b"QUERY", b"A-WORD"])
async def test_a_method_that_nobody_knows_is_405(door: RawServer, method: bytes, path: bytes) -> None:
    client = await door.client(b"%b %b HTTP/1.1\r\n%b\r\n" % (method, path, MINE) + OPENAPI)
    code, headers, _ = await client.answer()
    assert (code, "allow" in headers) == (405, True)
    assert await client.code() == 200


async def test_what_a_client_sent_before_it_went_away_is_given_up(opened: Open) -> None:
    door = await opened()
    wrong = b"authorization: Bearer a-wrong-one\r\n"
    for _ in range(12):
        client = await door.client(stranger(bytes(60_000), more=wrong))
        await eventually(lambda: bool(door.server._connections))
        client.writer.close()
    await eventually(lambda: not door.server._connections and door.server.held_bytes == 0)


async def test_strangers_that_are_being_answered_make_room_too(opened: Open) -> None:
    door = await opened(connections_max=64)
    known = await door.client(post("queues.info", INFO))
    assert await known.code() == 200
    wrong = stranger(b"{}", more=b"authorization: Bearer a-wrong-one\r\n")
    for _ in range(100):
        await door.client(wrong)
    for _ in range(10):
        newcomer = await door.client(post("queues.info", INFO))
        assert await newcomer.code() == 200
    known.send(post("queues.info", INFO))
    assert await known.code() == 200


async def test_an_unauthorized_answer_says_how_to_be_let_in(door: RawServer) -> None:
    client = await door.client(stranger(b"{}"))
    code, headers, _ = await client.answer()
    assert (code, headers["www-authenticate"]) == (401, "Bearer")


# --- the end --------------------------------------------------------------------------------------------------


async def test_a_server_that_stops_answers_who_waits_and_closes(installation: Installation) -> None:
    await installation.queues.queues_create("orders", lease_timeout="1m", expire_timeout="1h")
    body = b'{"queue_name":"orders","client_id":"me","batch_size":1,"request_timeout":"1m"}'
    async with _door(installation, {}) as door:
        waiting = await door.client(post("queue.lease", body))
        idle = await door.client(post("queues.info", INFO))
        await installation.waiting_leases("orders", 1)
        assert await idle.code() == 200
        door.clients.clear()
    code, headers, _ = await waiting.answer()
    assert (code, headers["connection"]) == (453, "close")
    for client in (waiting, idle):
        assert await client.is_ended()
        client.writer.close()


# --- the referee ----------------------------------------------------------------------------------------------


def ours(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The method, the target and the body by our reading; None for what is refused or not whole."""
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    try:
        head = read_head(data[:end], {})
        body = bytearray()
        if head.length is None:
            if ChunkedBody().take(data[end:], body) is None:
                return None
        elif len(data) - end < head.length:
            return None
        else:
            body += data[end : end + head.length]
    except RequestRefused:
        return None
    return head.method.encode(), _shown(head), bytes(body)


def _shown(head: RequestHead) -> bytes:
    query: bytes = head.scope["query_string"]
    raw: bytes = head.scope["raw_path"]
    return raw + (b"?" + query if query else b"")


def referees(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The same by h11."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    method = target = b""
    body = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, target = event.method, event.target
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return method, target.removesuffix(b"?"), body
            else:
                return None
    except h11.RemoteProtocolError:
        return None


STRANGE = st.sampled_from(
    [
        b" ",
        b"\t",
        b"\r",
        b"\n",
        b"\r\n",
        b"\0",
        b"\x0b",
        b"\x0c",
        b"\x7f",
        b"\x80",
        b"\xff",
        b":",
        b",",
        b";",
        b"0",
        b"5",
    ]
)
LINES = st.lists(
    st.sampled_from(
        [
            b"host: a",
            b"Host: b",
            b"content-length: 5",
            b"Content-Length: 3",
            b"content-length:5 ",
            b"content-length: 0",
            b"transfer-encoding: chunked",
            b"Transfer-Encoding: Chunked",
            b"transfer-encoding: gzip",
            b"connection: close",
            b"connection: upgrade",
            b"upgrade: h2c",
            b"expect: 100-continue",
            b"x: a b",
            b"x:",
            b" folded",
            b"x : a",
        ]
    ),
    max_size=5,
)
BODIES = st.sampled_from(
    [b"", b"abcde", b"abc", b"0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", b"3;x\r\nabc\r\n0\r\nx: a\r\n\r\n"]
)
FIRSTS = st.sampled_from(
    [b"GET / HTTP/1.1", b"WORD / HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"POST / HTTP/1.0", b"PUT  / HTTP/1.1", b"GET /"]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is nearly right."""
    data = b"\r\n".join([draw(FIRSTS), b"host: a", *draw(LINES), b"", draw(BODIES)])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        if draw(st.booleans()):
            data = data[:at] + draw(STRANGE) + data[at:]
        else:
            data = data[:at] + data[at + draw(st.integers(1, 3)) :]
    return data


@pytest.mark.slow
@given(data=requests())
@example(data=b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nabcde")
@examples(max_examples=4_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_h11_refuses_is_refused_and_what_both_take_they_read_alike(data: bytes) -> None:
    found = ours(data)
    if found is not None:
        assert found == referees(data)


def test_the_referee_and_we_take_most_good_requests() -> None:
    good = [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /a?b HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc",
        b"WORD /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ]
    assert all(ours(data) == referees(data) is not None for data in good)


@given(data=st.binary(max_size=200), steps=st.lists(st.integers(1, 7), min_size=1, max_size=100))
@examples(max_examples=200, deadline=None)
def test_chunks_are_read_alike_however_they_arrive(data: bytes, steps: list[int]) -> None:
    whole = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:50], data[50:]) if part) + b"0\r\n\r\nnext"
    body, chunks, at = bytearray(), ChunkedBody(), 0
    for number in range(len(whole)):
        piece = whole[at : at + steps[number % len(steps)]]
        end = chunks.take(piece, body)
        if end is not None:
            assert (bytes(body), whole[at + end :]) == (data, b"next")
            return
        at += len(piece)
    pytest.fail("it does not end")
