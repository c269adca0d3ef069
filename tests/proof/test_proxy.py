"""The proxy over real sockets: faithful until told otherwise, and then as bad as asked."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdfast.proof.proxy import Proxy, Trip, Way
from tests.support.eventually import eventually

BOTH: tuple[Way, Way] = ("up", "down")


class Server:
    """Keeps every connection that it accepts, for the tests to read from and write to."""

    def __init__(self) -> None:
        self.ends: list[StreamEnd] = []
        self.port = 0

    async def newest(self, count: int = 1) -> StreamEnd:
        await eventually(lambda: len(self.ends) >= count)
        return self.ends[-1]


class StreamEnd:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readexactly(count)

    async def rest(self) -> bytes:
        """Everything until the polite end."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    async def reset(self) -> bytes:
        """What still arrives before the reset; fails when the end is a polite one."""
        got = b""
        async with asyncio.timeout(60):
            try:
                while data := await self.reader.read(1000):
                    got += data
            except ConnectionResetError:
                return got
        raise AssertionError(f"ended politely after {got!r}")

    async def close(self) -> None:
        self.writer.transport.abort()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


@asynccontextmanager
async def listening() -> AsyncIterator[Server]:
    made = Server()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.ends.append(StreamEnd(reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        try:
            yield made
        finally:
            for end in made.ends:
                await end.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[StreamEnd]:
    end = StreamEnd(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield end
    finally:
        await end.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, Server]]:
    async with listening() as server, Proxy("127.0.0.1", server.port) as proxy:
        yield proxy, server


@asynccontextmanager
async def through() -> AsyncIterator[tuple[Proxy, StreamEnd, StreamEnd]]:
    """A proxy, and the two ends of one connection through it: client, server."""
    async with proxied() as (proxy, server), connected(proxy.port) as client:
        yield proxy, client, await server.newest()


def sides(way: Way, client: StreamEnd, server: StreamEnd) -> tuple[StreamEnd, StreamEnd]:
    """Sender and receiver."""
    return (client, server) if way == "up" else (server, client)


@pytest.mark.parametrize("way", BOTH)
async def test_bytes_pass_unchanged_and_the_end_is_passed_on(way: Way) -> None:
    data = os.urandom(1_000_000)
    async with through() as (proxy, client, server):
        sender, receiver = sides(way, client, server)
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.send(data))
            assert await receiver.read(len(data)) == data
        sender.writer.write_eof()
        assert await receiver.rest() == b""
        await receiver.send(b"still open the other way")
        assert await sender.read(24) == b"still open the other way"
        receiver.writer.write_eof()
        assert await sender.rest() == b""
        await eventually(lambda: proxy.connected_count == 0)


async def test_cut_resets_both_ends_and_a_new_connection_works() -> None:
    async with proxied() as (proxy, server):
        async with connected(proxy.port) as first:
            first_server = await server.newest()
            assert await proxy.cut() == 1
            assert await first.reset() == b""
            assert await first_server.reset() == b""
            assert proxy.connected_count == 0
        async with connected(proxy.port) as second:
            await second.send(b"again")
            assert await (await server.newest(2)).read(5) == b"again"
        assert proxy.accepted_count == 2


async def test_a_connection_that_is_accepted_in_the_same_moment_is_cut_too() -> None:
    async with proxied() as (proxy, _), connected(proxy.port) as client:
        while not proxy.accepted_count:  # noqa: ASYNC110 - the moment itself, not a wait for it, is what is tested
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await proxy.cut() == 1
        assert await client.reset() == b""


async def test_a_reset_by_one_end_reaches_the_other_as_a_reset() -> None:
    async with through() as (proxy, client, server):
        linger_for_nothing = struct.pack("ii", 1, 0)
        connection = server.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
        server.writer.transport.abort()
        assert await client.reset() == b""
        await eventually(lambda: proxy.connected_count == 0)


@pytest.mark.parametrize("way", BOTH)
async def test_pause_holds_one_direction_until_it_is_resumed(way: Way) -> None:
    async with through() as (proxy, client, server):
        sender, receiver = sides(way, client, server)
        proxy.pause(way)
        await sender.send(b"held")
        await receiver.send(b"passes")
        assert await sender.read(6) == b"passes"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.reader.read(1), 0.05)
        proxy.resume(way)
        assert await receiver.read(4) == b"held"


async def test_pause_without_a_direction_is_a_black_hole_with_bounded_buffers() -> None:
    async with through() as (proxy, client, _):
        proxy.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.send(b"x" * 50_000_000), 0.5)


async def test_a_paused_connection_can_be_cut() -> None:
    async with through() as (proxy, client, server):
        proxy.pause()
        await client.send(b"never arrives")
        await proxy.cut()
        assert await server.reset() == b""
        await client.reset()


async def test_refuse_is_a_server_that_is_down_and_accept_brings_it_back_on_the_same_port() -> None:
    async with proxied() as (proxy, server), connected(proxy.port) as client:
        end = await server.newest()
        await proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(proxy.host, proxy.port)
        await client.send(b"goes on")
        assert await end.read(7) == b"goes on"
        proxy.accept()
        proxy.accept()
        async with connected(proxy.port) as again:
            await again.send(b"back")
            assert await (await server.newest(2)).read(4) == b"back"


async def test_a_server_that_refuses_is_seen_as_a_reset(unused_tcp_port: int) -> None:
    async with Proxy("127.0.0.1", unused_tcp_port) as proxy, connected(proxy.port) as client:
        await client.reset()
        await eventually(lambda: proxy.connected_count == 0)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("count", [0, 1, 150_000])
async def test_cut_after_lets_exactly_so_many_bytes_through(way: Way, count: int) -> None:
    async with through() as (proxy, client, server):
        sender, receiver = sides(way, client, server)
        trip = proxy.cut_after(way, count)
        await receiver.send(b"other way")
        assert await sender.read(9) == b"other way"
        async with asyncio.TaskGroup() as group:
            group.create_task(send_until_cut(sender, b"x" * 200_000))
            assert len(await receiver.reset()) == count
        assert trip.fired.is_set()


async def send_until_cut(end: StreamEnd, data: bytes) -> None:
    try:
        await end.send(data)
    except ConnectionError:
        pass


@pytest.mark.parametrize(("deliver", "arrives"), [(False, b""), (True, b"COMMIT")])
async def test_cut_when_loses_the_request_or_only_the_answer(deliver: bool, arrives: bytes) -> None:
    async with through() as (proxy, client, server):
        trip = proxy.cut_when("up", lambda data: b"COMMIT" in data, deliver=deliver)
        await client.send(b"BEGIN")
        assert await server.read(5) == b"BEGIN"
        assert not trip.fired.is_set()
        await client.send(b"COMMIT")
        assert await server.reset() == arrives
        await client.reset()


async def test_cut_when_sees_bytes_that_came_in_pieces() -> None:
    async with through() as (proxy, client, server):
        proxy.cut_when("up", lambda data: b"COMMIT" in data)
        await client.send(b"COM")
        assert await server.read(3) == b"COM"
        await client.send(b"MIT")
        assert await server.reset() == b""


async def test_a_trip_fires_once() -> None:
    async with proxied() as (proxy, server):
        proxy.cut_when("up", lambda data: b"x" in data)
        async with connected(proxy.port) as first:
            await first.send(b"x")
            await first.reset()
        async with connected(proxy.port) as second:
            await second.send(b"x")
            assert await (await server.newest(2)).read(1) == b"x"


async def test_a_trip_counts_over_chunks() -> None:
    trip = Trip("up", bytes_left=10)
    assert trip.inspect("down", b"", b"x" * 100) is None
    assert trip.inspect("up", b"", b"x" * 9) is None
    assert trip.inspect("up", b"", b"x" * 9) == 1
    assert trip.inspect("up", b"", b"x" * 9) is None
