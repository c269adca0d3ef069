"""The server of `bench/http.py`: the real application over SQLite, or the same one that answers without storing."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, cast

import uvloop

from holdfast.core.item import PlacedItem
from holdfast.core.requests.declare import Caller
from holdfast.core.requests.queue import ProduceReply, ProduceRequest, QueueRequest
from holdfast.faces.api.authenticator import token_hash
from holdfast.faces.api.server import SWITCH_INTERVAL_S, make_server
from holdfast.faces.cli.context import collect_seldom
from holdfast.services.queue.service import QueueService
from holdfast.wiring import open_service

TOKEN = "the-token-of-the-bench"  # noqa: S105


class Blank:
    """Answers every produce as if it had been stored, and carries out every other verb."""

    def __init__(self, service: QueueService) -> None:
        self.manager = service.manager
        self._service = service

    async def call(self, request: QueueRequest[Any], *caller: Caller) -> Any:
        if not isinstance(request, ProduceRequest):
            return await self._service.call(request, *caller)
        return ProduceReply([PlacedItem("06605837189357-1-0", 0) for _ in request.items])


async def serve(url: str, *, storing: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    async with open_service({"default": url}) as service:
        shown = service if storing else cast(QueueService, Blank(service))
        server = make_server(shown, admin_token_hash=token_hash(TOKEN), version="bench")
        async with server.serving(listener):
            print(listener.getsockname()[1], flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_seldom()
    uvloop.run(serve(sys.argv[1], storing=sys.argv[2] == "store"))
