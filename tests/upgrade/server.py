"""`holdfast serve` as a process of its own, spoken to over HTTP alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

READY_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
STEP_S = 0.02


class Server:
    """A running one."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, token: str, log: Path) -> None:
        self.process = process
        self.address = address
        self._log = log
        self.http = httpx2.Client(base_url=address, timeout=60, trust_env=False)
        self.token = ""
        if token:
            self.use(token)

    def use(self, token: str) -> None:
        """Speak with this token from now on."""
        self.token = token
        self.http.headers["authorization"] = f"Bearer {token}"

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer, which must be a good one."""
        return self._document(self.http.get(path, params=query))

    def post(self, path: str, body: object = None) -> Any:
        """The JSON of an answer, which must be a good one."""
        return self._document(self.http.post(path, json={} if body is None else body))

    def wait_ready(self) -> None:
        """Until it answers. Raises RuntimeError with its log when it does not."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx2.HTTPError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(STEP_S)
        raise RuntimeError(f"the server did not start\n{self.log()}")

    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text()

    def wait_killed(self) -> None:
        """It ends by a SIGKILL at the point that it was told of."""
        code = self.process.wait(END_TIMEOUT_S)
        assert code == -signal.SIGKILL, f"it ended with {code}\n{self.log()}"

    def _document(self, answer: httpx2.Response) -> Any:
        assert answer.status_code == 200, f"{answer.request.url}: {answer.status_code} {answer.text}\n{self.log()}"
        return answer.json()


def free_address() -> str:
    """HOST:PORT that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def serving(url: str, folder: Path, *, token: str = "", env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server over the storage at `url`, with `folder` as its data folder; SIGTERM at the end, if it still runs.

    Without a token it is the one in the data folder, which a first start makes.
    """
    listen = free_address()
    argv = [sys.executable, "-m", "holdfast", "serve", "--url", url, "--listen", listen, "--data-folder", str(folder)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    own = {"HOLDFAST_ADMIN_TOKEN": token} if token else {}
    log = folder.parent / f"{folder.name}.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            argv, cwd=folder.parent, env={**clean, **own, **(env or {})}, stdout=subprocess.DEVNULL, stderr=file
        ) as process,
    ):
        server = Server(process, f"http://{listen}", token, log)
        try:
            server.wait_ready()
            if not token:
                server.use((folder / "admin-token").read_text().strip())
            yield server
            process.terminate()
            process.wait(END_TIMEOUT_S)
        finally:
            process.kill()
            server.http.close()
