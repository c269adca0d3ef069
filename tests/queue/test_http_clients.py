"""The server and other people's clients: curl, Go's and Java's, where they are installed."""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.queue.installation import TOKEN, Installation, MakeStorage
from tests.support.flaky import LastingMemory

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).with_name("clients")
EACH = "fixed 200 chunks 200 expect 200"
BODY = '{"queue_name":"orders"}'
CURL = [
    "curl", "--silent", "--output", os.devnull, "--write-out", "%{http_code} %{num_connects} ",
    "--header", f"Authorization: Bearer {TOKEN}", "--data", BODY,
]  # fmt: skip


@pytest.fixture
def make_storage() -> MakeStorage:
    return cache(lambda name, clock: LastingMemory(clock))


@pytest.fixture
def face() -> str:
    return "http"


async def told(tool: str, *arguments: str) -> str:
    """What a program prints, on one line."""
    found = shutil.which(tool) or f"/usr/local/go/bin/{tool}"
    if not Path(found).exists():
        pytest.skip(f"{tool} is not installed")
    env = {"GOFLAGS": "-mod=mod", **os.environ}
    process = await asyncio.create_subprocess_exec(found, *arguments, stdout=asyncio.subprocess.PIPE, env=env)
    async with asyncio.timeout(300):
        output, _ = await process.communicate()
    return " ".join(output.decode().split())


async def test_go(installation: Installation) -> None:
    await installation.queues.queues_create("orders")
    shown = await told("go", "run", str(CLIENTS / "client.go"), installation.url, TOKEN)
    assert shown == f"{EACH} many 320"


async def test_java_with_and_without_the_offer_of_http_2(installation: Installation) -> None:
    await installation.queues.queues_create("orders")
    assert await told("java", str(CLIENTS / "Client.java"), installation.url, TOKEN) == f"{EACH} {EACH}"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "200 1 200 0"),
        (["--http1.0"], "200 1 200 1"),
        (["--http2"], "200 1 200 0"),
        (["--header", "Transfer-Encoding: chunked"], "200 1 200 0"),
        (["--header", "Expect: 100-continue"], "200 1 200 0"),
    ],
    ids=["plain", "HTTP/1.0", "an offer of HTTP/2", "chunks", "expect"],
)
async def test_curl(installation: Installation, options: list[str], shown: str) -> None:
    await installation.queues.queues_create("orders")
    url = f"{installation.url}/v1/queues.info"
    assert await told(*CURL, *options, url, "--output", os.devnull, url) == shown
