"""`holdfast serve` as a process of its own, spoken to over HTTP alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.support.ports import free_port
from tests.support.servers import wait_until

TIMEOUT_S = 60.0


class Server:
    """A running one, and a client with its token."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self.token = ""
        self.http = httpx2.Client(base_url=address, timeout=60, trust_env=False)
        self._log = log

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer, which must be a good one."""
        return self._document(self.http.get(path, params=query))

    def post(self, path: str, body: object = None) -> Any:
        """The JSON of an answer, which must be a good one."""
        return self._document(self.http.post(path, json={} if body is None else body))

    def _document(self, answer: httpx2.Response) -> Any:
        told = f"{answer.request.url}: {answer.status_code} {answer.text}\n{self._log.read_text()}"
        assert answer.status_code == 200, told
        return answer.json()


def wait_for(fact: Callable[[], object], *, log: Path | None = None) -> None:
    """Until it is so; a server that is not there yet is no answer. What the log says is told in the end."""
    wait_until(fact, "what was waited for", timeout_s=TIMEOUT_S, log=log.read_text if log else str)


@contextmanager
def serving(url: str, folder: Path, *, token: str = "", env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server over the storage at `url`, with `folder` as its data folder; SIGTERM at the end.

    Without a token it is the one in the data folder, which a first start makes.
    """
    listen = f"127.0.0.1:{free_port()}"
    argv = [sys.executable, "-m", "holdfast", "serve", "--url", url, "--listen", listen, "--data-folder", str(folder)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    own = {"HOLDFAST_ADMIN_TOKEN": token} if token else {}
    log, given = folder.parent / f"{folder.name}.log", {**clean, **own, **(env or {})}
    with (
        log.open("wb") as file,
        subprocess.Popen(argv, cwd=folder.parent, env=given, stdout=subprocess.DEVNULL, stderr=file) as process,
    ):
        server = Server(f"http://{listen}", log)
        try:
            wait_for(lambda: server.http.get("/health").is_success, log=log)
            server.token = token or (folder / "admin-token").read_text().strip()
            server.http.headers["authorization"] = f"Bearer {server.token}"
            yield server
            process.terminate()
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            server.http.close()
