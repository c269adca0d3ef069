"""A small page for whoever watches a consumer process: `GET /health` (200 or 503) and `GET /metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec

from holdfast.errors import CannotStart
from holdfast.services.consume import Health
from holdfast.settings import ListenAddress
from holdfast.telemetry.metrics import QueueGauge, Requests, render

REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 8 * 1024

Page = tuple[HTTPStatus, str, bytes]


def page(path: str, consumers: list[Health]) -> Page:
    """What is shown. Red when any consumer is in trouble, or when none runs."""
    if path == "/health":
        is_well = bool(consumers) and all(health.is_well and health.state == "consuming" for health in consumers)
        body = msgspec.json.encode({"status": "ok" if is_well else "trouble", "consumers": consumers})
        return HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body
    if path == "/metrics":
        gauges = [QueueGauge(health.queue, "running", health.running) for health in consumers]
        return HTTPStatus.OK, "text/plain; version=0.0.4", render(Requests(), gauges).encode()
    return HTTPStatus.NOT_FOUND, "text/plain", b"there are /health and /metrics\n"


@asynccontextmanager
async def serving_health(address: ListenAddress, consumers: Callable[[], list[Health]]) -> AsyncIterator[ListenAddress]:
    """Answer until the block ends; gives the address, with the port that was taken. Raises CannotStart."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(b" ", 2)
                path = words[1].decode("ascii", "replace").partition("?")[0] if len(words) == 3 else ""
                status, kind, body = page(path, consumers())
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                    + (b"" if words[0] == b"HEAD" else body)
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or did not speak HTTP
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, address.host, address.port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        raise CannotStart(f"health address cannot be used; {address}: {error.strerror}, choose another") from error
    async with server:
        yield ListenAddress(address.host, server.sockets[0].getsockname()[1])
