"""The real server as a process of its own: `python -m holdfast serve`, started, killed and started again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2

import holdfast
from holdfast.proof.process import Child, python_argv
from tests.support.forking import start_forked
from tests.support.ports import free_port

TOKEN = "a-token-for-the-fault-tests"


class Serving(AbstractAsyncContextManager["Serving"]):
    """One server on one address over one storage; at most one process at a time.

    At the end of an `async with` it is killed, if it still runs; at its beginning it is not started yet.
    """

    def __init__(self, url: str, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.folder = folder
        self.port = free_port()
        self.token = TOKEN
        self.env = dict(env or {})
        self._child: Child | None = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def child(self) -> Child:
        assert self._child is not None, "the server was not started"
        return self._child

    async def launch(self, *, prefix: Sequence[str] = (), **env: str) -> Child:
        """Start it, ready or not."""
        await self.close()
        listen = ("--listen", f"127.0.0.1:{self.port}", "--log-level", "warning")
        argv = python_argv("holdfast", "serve", "--url", self.url, *listen)
        clean = {name: "" for name in os.environ if name.startswith("HOLDFAST_CRASH")}
        own = {"HOLDFAST_ADMIN_TOKEN": TOKEN, "XDG_STATE_HOME": str(self.folder / "state")}
        given = {**clean, **own, **self.env, **env}
        if prefix:
            self._child = await Child.start([*prefix, *argv], cwd=self.folder, env=given)
        else:
            self._child = await start_forked(argv, cwd=self.folder, env=given)
        return self._child

    async def start(self, *, prefix: Sequence[str] = (), **env: str) -> Child:
        """Start it and wait until it is ready."""
        child = await self.launch(prefix=prefix, **env)
        await child.wait_http(f"{self.address}/health")
        return child

    def client(self) -> holdfast.Client:
        """A client of this server, whichever process it is."""
        return holdfast.Client(self.address, self.token)

    def answer(self, method: str, path: str, *, token: str = "", **how: Any) -> httpx2.Response:
        """What it says to a plain request. The test waits meanwhile, with all that runs in its own process."""
        headers = {"authorization": f"Bearer {token or self.token}"}
        return httpx2.request(method, self.address + path, headers=headers, timeout=60, trust_env=False, **how)

    def ask(self, path: str, body: object = None, **query: Any) -> Any:
        """The JSON of an answer, which must be a good one; with a body it is a POST."""
        method, how = ("GET", {"params": query}) if body is None else ("POST", {"json": body})
        answer = self.answer(method, path, **how)
        assert answer.status_code == 200, f"{answer.url}: {answer.text}\n{self.child.stderr.tail}"
        return answer.json()

    async def close(self) -> None:
        """Kill what runs."""
        if self._child is not None:
            await self._child.close()
            self._child = None
