"""What whoever has no token can do to the real server: little."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.faults.serving import Serving
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

HELD_BYTES_MAX = 60_000_000
SENT_BYTES = 150_000_000
HEAD = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
ENDLESS = {
    "header lines": (HEAD, b"x: a\r\n" * 10_000),
    "a header value": (HEAD + b"x: ", b"a" * 60_000),
    "a URL": (b"GET /", b"a" * 60_000),
    "a body": (b"PUT /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n", b"a" * 60_000),
    "the body of a verb": (
        b"POST /v1/queue.produce HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n",
        b"a" * 60_000,
    ),
    "an edit of a letter": (
        b"POST /admin/letters/1/revisions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
        b"ffff\r\n" + b"a" * 0xFFFF + b"\r\n",
    ),
}


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize(("first", "more"), ENDLESS.values(), ids=ENDLESS)
async def test_what_one_connection_sends_without_end_makes_no_memory(tmp_path: Path, first: bytes, more: bytes) -> None:
    async with Serving("memory://", tmp_path) as server:
        pid = (await server.start()).pid
        before = peak_bytes(pid)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(first)
        try:
            for _ in range(SENT_BYTES // len(more)):
                writer.write(more)
                await writer.drain()
        except ConnectionError:
            pass  # it is told, and ended
        else:
            pytest.fail("it was let send all of it")
        finally:
            writer.close()
        assert peak_bytes(pid) - before < HELD_BYTES_MAX
        assert server.answer("GET", "/health").status_code == 200


async def test_idle_connections_leave_room_below_the_limit_of_open_files(tmp_path: Path) -> None:
    async with Serving("memory://", tmp_path) as server, server.client() as client:
        child = await server.start(prefix=("prlimit", "--nofile=256:256"), HOLDFAST_OPEN_FILES_MAX="20")
        await client.queues_create("orders")
        crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(400)]
        assert server.answer("GET", "/health").status_code == 200
        assert [one.queue_name for one in await client.queues_list()] == ["orders"]
        await eventually(lambda: "idle connections were ended to make room; 132 is the maximum" in child.stderr.tail)
        page = server.answer("GET", "/metrics").text
        (line,) = [line for line in page.splitlines() if 'event="server.crowded"' in line]
        assert int(line.rpartition(" ")[2]) >= 1
        for _, writer in crowd:
            writer.close()


async def test_idle_connections_are_ended_in_time(tmp_path: Path) -> None:
    async with Serving("memory://", tmp_path) as server:
        await server.start(HOLDFAST_FIRST_BYTE_TIMEOUT="1s")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
